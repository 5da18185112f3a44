"""How the structure of the kernel changes over training (SCIENCE.md A.4, C13).

At each checkpoint the kernel of one fixed set of base solutions with itself, and of fresh samples of
the checkpoint: plain, as cosines, and in the metric of the optimiser's second moment. Growth of norms,
of alignment and loss of rank are different things; so are pairs of one prompt and of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.structure import (
    block_interval,
    cosines,
    erank_interval,
    label_pairs,
    null_erank,
    structure,
)
from jaxrl.rl.optimiser import Optimiser
from jaxrl.types import Rows

SPLIT = ("correct", "difficulty", "mode")  # labels that make blocks
MEMORY = 1 << 30  # bytes of gradients up to which explicit ones are the quickest


@dataclass(frozen=True)
class Labelled:
    """Rows with a response, their prompts, and what is known of each: label name -> one text a row ("": none).

    ``correct`` is ``correct`` or ``wrong``, ``difficulty`` ``easy`` or ``hard`` (of the prompt, for
    the base), ``mode`` and ``family`` the task's.
    """

    rows: Rows
    uid: Int[np.ndarray, " n"]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint: parameters, the diagonal ``D = 1 / (sqrt(v) + eps)`` if it has one, fresh samples if there are any."""

    step: int
    model: Any
    diagonal: Any = None
    fresh: Labelled | None = None


def saved_diagonal(spec: Optimiser, opt_state: Any) -> Any:
    """``D = 1 / (sqrt(v_hat) + eps)`` of a saved AdamW state; None for SGD and before the first update."""
    is_adam = lambda s: isinstance(s, optax.ScaleByAdamState)  # noqa: E731
    adam = next((s for s in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(s)), None)
    if adam is None or int(adam.count) == 0:
        return None
    left = 1 - spec.b2 ** int(adam.count)
    return jax.tree.map(lambda v: 1 / (jnp.sqrt(v / left) + spec.eps), adam.nu)


def structure_over_training(
    snapshots: Iterable[Snapshot], fixed: Labelled
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, np.ndarray]]:
    """C13: what ``check.json`` holds, the rows of T-C4, and the arrays of ``structure.npz``.

    Found: ``fixed`` and ``fresh``, each step -> ``kernel`` (A.4 of K), ``preconditioned`` (A.4 of
    ``g^T D g``), and the blocks' means are T-C4's. Arrays: ``step [S]``, ``fixed_cosine [S n n]``,
    ``fixed_spectrum [S n]`` (of the cosines, descending), ``fresh_step``, ``fresh_spectrum``, and the
    fixed rows' ``uid`` and labels. One snapshot is held at a time.
    """
    found: dict[str, Any] = {"fixed": {}, "fresh": {}}
    table: list[dict[str, Any]] = []
    kept: dict[str, list[Any]] = {"step": [], "fixed_cosine": [], "fresh_step": [], "fresh_spectrum": []}
    for snapshot in snapshots:
        for name, probe in (("fixed", fixed), ("fresh", snapshot.fresh)):
            if probe is None:
                continue
            plain, scaled = kernels(snapshot, probe.rows)
            found[name][str(snapshot.step)] = metrics(plain, scaled, probe.uid, _size(snapshot.model))
            where = {"probe": name, "step": snapshot.step}
            table += [where | row for row in block_rows(plain, scaled, probe)]
            if name == "fixed":
                kept["step"].append(snapshot.step)
                kept["fixed_cosine"].append(cosines(plain))
            else:
                kept["fresh_step"].append(snapshot.step)
                kept["fresh_spectrum"].append(spectrum(cosines(plain)))
    arrays = {name: np.array(value) for name, value in kept.items() if value and name != "fresh_spectrum"}
    if kept["fresh_spectrum"]:
        arrays["fresh_spectrum"] = padded(kept["fresh_spectrum"])
    arrays["fixed_spectrum"] = np.stack([spectrum(c) for c in kept["fixed_cosine"]])
    return found, table, arrays | {"uid": fixed.uid} | {k: np.asarray(v, str) for k, v in fixed.labels.items()}


def kernels(snapshot: Snapshot, rows: Rows) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "n n"] | None]:
    """The rows' kernel with themselves, plain and in the metric D (None without one)."""
    model = snapshot.model
    held = _size(model) * rows.start.shape[0] * jax.tree.leaves(model)[0].dtype.itemsize
    method = "reference" if held <= MEMORY else "auto"
    plain = np.asarray(gradient_kernel(model, rows, rows, method=method).values, np.float64)
    if snapshot.diagonal is None:
        return plain, None
    scaled = gradient_kernel(model, rows, rows, method=method, precondition=snapshot.diagonal)
    return plain, np.asarray(scaled.values, np.float64)


def metrics(
    plain: Float[np.ndarray, "n n"], scaled: Float[np.ndarray, "n n"] | None, uid: Int[np.ndarray, " n"], size: int
) -> dict[str, Any]:
    """A.4 of both kernels, the interval of ``erank_cos`` over prompts, and both eranks of random directions."""
    found: dict[str, Any] = {"rows": len(plain)}
    for name, kernel in (("kernel", plain), ("preconditioned", scaled)):
        if kernel is not None:
            interval = erank_interval(cosines(kernel), uid)
            ends = {"erank_cos/low": interval.low, "erank_cos/high": interval.high}
            found[name] = structure(kernel, uid=uid) | ends
    if size >= len(plain):
        found["random directions"] = null_erank(np.diag(plain), size)
    return found


def block_rows(
    plain: Float[np.ndarray, "n n"], scaled: Float[np.ndarray, "n n"] | None, probe: Labelled
) -> list[dict[str, Any]]:
    """Rows of T-C4: a block's pairs, its mean cosine with its interval over prompts, mean K, and mean cosine under D."""
    cosine = cosines(plain)
    under = None if scaled is None else cosines(scaled)
    rows = []
    for name, pick in prompt_blocks(probe).items():
        interval = block_interval(cosine, pick, probe.uid)
        rows.append(
            {
                "block": name,
                "pairs": int(pick.sum()) // 2,
                "cosine": interval.value,
                "low": interval.low,
                "high": interval.high,
                "K": float(plain[pick].mean()),
                "cosine under D": None if under is None else float(under[pick].mean()),
            }
        )
    return rows


def prompt_blocks(probe: Labelled) -> dict[str, Bool[np.ndarray, "n n"]]:
    """Masks of pairs: of one prompt and across prompts, alone and within every pair of labels (R3: never pooled)."""
    uid = np.asarray(probe.uid)
    same = uid[:, None] == uid[None, :]
    where = {"one prompt": same & ~np.eye(len(uid), dtype=bool), "two prompts": ~same}
    blocks = dict(where)
    for label in SPLIT:
        for name, pick in label_pairs(probe.labels[label]).items() if label in probe.labels else ():
            blocks |= {f"{name}, {place}": pick & mask for place, mask in where.items()}
    return {name: pick for name, pick in blocks.items() if pick.any()}


def spectrum(cosine: Float[np.ndarray, "n n"]) -> Float[np.ndarray, " n"]:
    """Eigenvalues, the largest first; they sum to the number of rows with a gradient."""
    return np.maximum(np.linalg.eigvalsh(cosine)[::-1], 0)


def padded(series: list[np.ndarray]) -> Float[np.ndarray, "S n"]:
    """Series of unequal length as one array, NaN behind the ends."""
    width = max(len(x) for x in series)
    return np.stack([np.pad(x, (0, width - len(x)), constant_values=np.nan) for x in series])


def _size(model: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(model))
