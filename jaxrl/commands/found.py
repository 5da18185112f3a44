"""What is shown of a kernel that ``kernel`` computed: a summary, cosines by label, shares of layers, pictures, a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.commands.compared import Side
from jaxrl.commands.steps import KERNEL, Step
from jaxrl.influence.labels import label_blocks
from jaxrl.influence.structure import effective_rank, structure
from jaxrl.report.kernels import heat_map, kernel_spectrum, layer_profile, layer_shares, predicted_steps, spectrum
from jaxrl.report.render import page
from jaxrl.report.sections import Section
from jaxrl.report.style import Picture
from jaxrl.report.tables import Table
from jaxrl.types import Kernel

ORDER = ("group", "label", "set", "correct", "mode", "difficulty", "prompt")  # the first that is known orders a picture
LAYERS = """Where the kernel comes from: the share of each block of parameters in Σ|K| over blocks, and in ΣK with its sign
over Σ|K|. A tied matrix stands once, under the embedding."""
PICTURES = ("cosines", "spectrum", "layers", "steps")


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
    """The shares of each block of parameters, {} of a kernel without blocks."""
    if not one.kernel.blocks:
        return {}
    shares = layer_shares(_layers(one.kernel), itself=one.itself)
    return {name: {m: float(v[i]) for m, v in shares.items()} for i, name in enumerate(one.kernel.blocks)}


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
            f"""Cosines between the gradients of {one.title}, rows with equal labels side by side: a small step on the one
            moves the other along where they are orange, and against it where they are purple.""",
            sides=(f"rows of {names[0]}", f"rows of {names[1]}"),
            itself=itself,
        ),
        spectrum(
            "spectrum",
            [("", kernel_spectrum(cosine, itself=itself))],
            f"""Spectrum of the cosines of {one.title}: the steeper it falls, the fewer directions the gradients share.""",
            unit=f"{'eigenvalue' if itself else 'singular value'} of the cosines",
        ),
    ]
    if one.kernel.blocks:
        shares = layer_shares(_layers(one.kernel), itself=itself)
        pictures.append(layer_profile("layers", list(one.kernel.blocks), shares, LAYERS))
    return pictures


def drawn_steps(steps: Sequence[Step]) -> Picture:
    """Predicted by the kernel against measured, a panel a step."""
    panels = [
        (f"{step.name}: median error {step.error(KERNEL):.2%}", step.predicted[KERNEL], step.measured) for step in steps
    ]
    return predicted_steps(
        "steps",
        panels,
        """Change of every row of B by one step on the rows of A, as the kernel predicts it (of AdamW in the metric of the
        step) and as measured; on the dashed line they are equal.""",
    )


def found_page(
    about: Mapping[str, Any], shown: Sequence[tuple[Found, Sequence[Picture]]], steps: Sequence[Step]
) -> str:
    """Everything that is known of the kernels, as one self-contained HTML page."""
    sections = [_section(one, pictures) for one, pictures in shown]
    if steps:
        rows = [(step.name, way, step.row(way)) for step in steps for way in step.predicted]
        table = Table(
            "steps",
            "What one step does to the rows of B (nats, errors relative to the measured change), predicted by the kernel, "
            "and by forward mode along the optimiser's update and along the change of the stored parameters.",
            ("step", "predicted by", *rows[0][2]),
            tuple((name, way, *row.values()) for name, way, row in rows),
        )
        sections.append(Section("steps", "Predicted against measured", items=[drawn_steps(steps), table]))
    said = ", ".join(f"{name} {value}" for name, value in about.items() if name != "model")
    return page("Gradient kernel", [(str(about["model"]), said)], sections)


def _section(one: Found, pictures: Sequence[Picture]) -> Section:
    """Pictures and tables of one kernel."""
    items: list[Any] = [*pictures, _table("summary", "How it was computed, and its shape.", summary(one))]
    if blocks := layer_table(one):
        columns = ("block", *next(iter(blocks.values())))
        rows = tuple((name, *shares.values()) for name, shares in blocks.items())
        items.append(Table("layers", "Shares of each block of parameters in the whole.", columns, rows))
    for name, tables in label_tables(one).items():
        columns = tuple(next(iter(tables.values())))
        rows = tuple((pair, *(found[column] for column in columns)) for pair, found in tables.items())
        items.append(Table(f"by-{name}", f"Cosines within and across: {name}.", (name, *columns), rows))
    return Section(f"kernel{one.stem}", one.title, items=items)


def _table(name: str, caption: str, values: Mapping[str, Any]) -> Table:
    return Table(name, caption, ("", "value"), tuple(values.items()))


def _ordering(side: Side) -> Sequence[Any]:
    """The labels that order a picture: the first kind that tells rows apart."""
    known = [name for name in ORDER if name in side.labels]
    return side.labels[next((name for name in known if len(set(side.labels[name])) > 1), known[0])]


def _layers(kernel: Kernel) -> np.ndarray:
    return np.stack([np.asarray(part) for part in (kernel.blocks or {}).values()])
