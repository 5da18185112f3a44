"""What is shown of a kernel that ``kernel`` computed: a summary, cosines by label, shares of layers, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.commands.compared import Side
from jaxrl.influence.labels import label_blocks
from jaxrl.influence.structure import effective_rank, structure
from jaxrl.report.kernels import heat_map, kernel_spectrum, layer_profile, layer_shares, spectrum
from jaxrl.report.style import Picture
from jaxrl.types import Kernel

ORDER = ("group", "label", "set", "correct", "mode", "difficulty", "prompt")  # the first that is known orders a picture
PICTURES = ("cosines", "spectrum", "layers")


@dataclass(frozen=True, eq=False)
class Found:
    """One kernel, the rows that it is of, and what it, its array and its pictures are called."""

    kernel: Kernel
    sides: tuple[Side, Side]
    title: str
    array: str = "kernel"
    stem: str = ""

    @property
    def itself(self) -> bool:
        """Both sides are the same rows."""
        return self.sides[0] is self.sides[1]

    @property
    def cosine(self) -> np.ndarray:
        return np.asarray(self.kernel.cosine(), np.float64)


def summary(one: Found) -> dict[str, Any]:
    """How the kernel was computed, how far its signs can be trusted, and its shape (SCIENCE.md A.4)."""
    kernel, cosine = one.kernel, one.cosine
    fields = ("method", "why", "dtype", "compute", "precision", "normalise")
    about = {"rows": "{} x {}".format(*cosine.shape)} | {name: getattr(kernel, name) for name in fields}
    about["noise_floor"] = kernel.noise
    about["signs_below_noise"] = None if kernel.noise is None else int(np.asarray(kernel.unsure()).sum())
    if one.itself:
        return about | structure(np.asarray(kernel.values))
    norms = {f"median_norm_{side}": float(np.median(np.sqrt(squares))) for side, squares in _squares(kernel)}
    return (
        about
        | norms
        | {
            "mean_cos": float(cosine.mean()),
            "mean_abs_cos": float(np.abs(cosine).mean()),
            "negative": float(np.mean(cosine < 0)),
            "erank_cos": effective_rank(kernel_spectrum(cosine, itself=False) ** 2) / min(cosine.shape),
        }
    )


def _squares(kernel: Kernel) -> tuple[tuple[str, np.ndarray], ...]:
    return ("a", np.asarray(kernel.sq_norms_a, np.float64)), ("b", np.asarray(kernel.sq_norms_b, np.float64))


def label_tables(one: Found) -> dict[str, Any]:
    """Cosines within and across labels, by each kind of label that both sides have and that tells rows apart.

    Of kinds with few values also between each two of them, except of prompts, which are only numbers.
    """
    tables = {}
    for name in ORDER:
        a, b = (side.labels.get(name) for side in one.sides)
        values = {v for v in (*(a or ()), *(b or ())) if v is not None}
        if a is None or b is None or len(values) < 2:
            continue
        found = label_blocks(one.cosine, a, b, itself=one.itself)
        tables[name] = {k: v for k, v in found.items() if name != "prompt" or k in ("same", "cross")}
    return {name: found for name, found in tables.items() if found}


def layer_table(one: Found) -> dict[str, dict[str, float]]:
    """The shares of each block of parameters."""
    shares = layer_shares(_layers(one.kernel), itself=one.itself)
    return {name: {m: float(v[i]) for m, v in shares.items()} for i, name in enumerate(one.kernel.blocks or {})}


def drawn(one: Found) -> list[Picture]:
    """Heat map of cosines ordered by label, spectrum, and with blocks their shares."""
    cosine, itself = one.cosine, one.itself
    labels = tuple(_ordering(side) for side in one.sides)
    names = [text.strip() for text in one.title.split(" x ")]
    pictures = [
        heat_map(
            "cosines",
            cosine,
            (labels[0], labels[1]),
            f"Cosines of {one.title}.",
            sides=(f"rows of {names[0]}", f"rows of {names[1]}"),
            itself=itself,
        ),
        spectrum(
            "spectrum",
            [("", kernel_spectrum(cosine, itself=itself))],
            f"Spectrum of {one.title}.",
            unit=f"{'eigenvalue' if itself else 'singular value'} of the cosines",
        ),
    ]
    if one.kernel.blocks:
        shares = layer_shares(_layers(one.kernel), itself=itself)
        pictures.append(layer_profile("layers", list(one.kernel.blocks), shares, f"Layers of {one.title}."))
    return pictures


def _ordering(side: Side) -> Sequence[Any]:
    """The labels that order a picture: the first kind that tells rows apart."""
    known = [name for name in ORDER if name in side.labels]
    return side.labels[next((name for name in known if len(set(side.labels[name])) > 1), known[0])]


def _layers(kernel: Kernel) -> np.ndarray:
    return np.stack([np.asarray(part) for part in (kernel.blocks or {}).values()])
