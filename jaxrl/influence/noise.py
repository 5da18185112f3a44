"""How far to trust a kernel's entries: some of them computed a second time (KERNEL.md 6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl.influence import explicit
from jaxrl.influence.explicit import Job
from jaxrl.models.decoder import Decoder, cast
from jaxrl.types import wide

NOISE_ROWS = 2  # rows of either side that are computed again


def noise_floor(
    job: Job, method: str, values: Float[np.ndarray, "N M"], norms: tuple[np.ndarray, np.ndarray], rows: int
) -> float:
    """The largest difference of an entry over its two norms between the kernel and a second computation.

    The second one takes ``rows`` rows of either side in float32 (or wider, where the parameters are), and
    another way: one gradient and one forward-mode pass a row (``columns``), or explicit gradients where the
    kernel itself was taken so. Two float32 computations differ by their order of summation; a bf16
    one differs from it by what bf16 passes do to gradients. At least the rounding of the sums' own dtype.
    """
    picks = [np.unique(np.linspace(0, n - 1, min(rows, n)).round().astype(int)) for n in job.size]
    again = dataclasses.replace(
        job,
        model=_single(job.model),
        sides=tuple((side[pick], weights[pick]) for (side, weights), pick in zip(job.sides, picks, strict=True)),
        diagonal=None if job.diagonal is None else _single(job.diagonal),
        blocks=(("total",), (0,) * len(job.blocks[1])),
        same=False,
    )
    if method == "columns" and again.fits >= 2:
        second = explicit.chunked(again)[0][0]
    else:
        second = explicit.column_values(again)[0][0]
    scale = np.sqrt(np.outer(norms[0][picks[0]], norms[1][picks[1]]))
    error = np.abs(values[np.ix_(*picks)] - second)
    least = float(jnp.finfo(wide(*(x.dtype for x in jax.tree.leaves(job.model)))).eps)
    return max(float(np.max(np.where(scale > 0, error / np.where(scale > 0, scale, 1), 0))), least)


def _single(tree: Any) -> Any:
    """Parameters and compute in float32 where they are narrower."""
    if not isinstance(tree, Decoder):
        return tree
    dtype = wide(tree.embed[...].dtype)
    return tree if tree.config.dtype == tree.embed[...].dtype == dtype else cast(tree, dtype)
