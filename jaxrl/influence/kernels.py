"""The exact gradient kernel between two sets of rows (SCIENCE.md A.4, KERNEL.md 1).

``K_ij = <grad phi_i, grad phi'_j>`` over all parameters, tied ones counted once. Two methods:

``reference``  one gradient a row by ``vmap(grad)``, then dot products. Rows are worked through in
               tiles, so that never more gradients exist than the memory limit allows.
``columns``    one gradient of a row in A, then one forward-mode pass along it over all rows in B.
               Holds a single gradient; dearer than ``reference`` unless a tile is below three rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.errors import nearest
from jaxrl.influence.gradients import (
    Logps,
    fitted,
    leaf_names,
    need_rows,
    one_gradient,
    row_gradients,
    row_weights,
    scores,
)
from jaxrl.models.logps import token_logps
from jaxrl.types import Kernel, Rows, wide

METHODS = ("auto", "reference", "columns")
BLOCKS = ("total", "layer", "leaf")
MEMORY = 2 << 30  # bytes of per-row gradients held at once
HIGHEST = jax.lax.Precision.HIGHEST


def gradient_kernel(
    model: Any,
    rows_a: Rows,
    rows_b: Rows,
    *,
    normalise: str = "sum",
    weights: Array | tuple[Array | None, Array | None] | None = None,
    method: str = "auto",
    precondition: Any = None,
    blocks: str = "total",
    memory: int = MEMORY,
    logps: Logps | tuple[Logps, Logps] = token_logps,
) -> Kernel:
    """Gradient dot products between the scores of ``rows_a`` (N) and ``rows_b`` (M).

    ``normalise``: ``sum`` (sequence log-probability, nats) or ``tok`` (its mean over response
    tokens). ``weights``: per-token weights ``[N, L]`` of ``rows_a`` instead, or a pair for both
    sides. ``precondition``: a positive diagonal D, a pytree like the parameters, for
    ``g_i^T D g_j``; norms and cosines are then in that metric too. ``blocks``: ``layer`` or
    ``leaf`` also returns the parts that sum to ``values``. ``memory``: bytes of per-row gradients
    that may exist at once. ``logps(model, rows)`` scores tokens, for both sides or as a pair (a
    temperature on one side, say). ``Kernel.method`` says which method ran.

    Raises ``ValueError`` for an unknown name (with the nearest), for no rows, for rows without
    response tokens, for a wrong ``precondition``, or when not one gradient fits into ``memory``
    under ``reference``.
    """
    for name, value, known in (("method", method, METHODS), ("blocks", blocks, BLOCKS)):
        if value not in known:
            raise ValueError(f"{name}: {nearest(value, known)}, got {value!r}")
    need_rows(rows_a, "rows_a", model, responses=True)
    need_rows(rows_b, "rows_b", model, responses=True)
    pair = weights if isinstance(weights, tuple) else (weights, None)
    scorers = logps if isinstance(logps, tuple) else (logps, logps)
    size = sum(x.size for x in jax.tree.leaves(model))
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    job = _Job(
        model=model,
        sides=tuple((rows, row_weights(rows, normalise, w)) for rows, w in zip((rows_a, rows_b), pair, strict=True)),
        logps=scorers,
        diagonal=None if precondition is None else _checked_diagonal(model, precondition),
        blocks=_block_index(model, blocks),
        fits=memory // (size * dtype.itemsize),
        same=rows_a is rows_b and pair[0] is pair[1] and scorers[0] is scorers[1],
    )
    if method == "auto":
        method = "reference" if job.fits >= min(3, sum(job.size)) else "columns"
    parts, norms = (_reference if method == "reference" else _columns)(job)
    named = {name: jnp.asarray(part, dtype) for name, part in zip(job.blocks[0], parts, strict=True)}
    held = [f"weights of rows_{side}" for side, w in zip("ab", pair, strict=True) if w is not None]
    return Kernel(
        values=jnp.asarray(parts.sum(axis=0), dtype),
        method=method,
        dtype=dtype.name,
        normalise="weights" if held else normalise,
        sq_norms_a=jnp.asarray(norms[0], dtype),
        sq_norms_b=jnp.asarray(norms[1], dtype),
        blocks=None if blocks == "total" else named,
        held_fixed=tuple(held if precondition is None else [*held, "precondition"]),
    )


@dataclass(frozen=True)
class _Job:
    """One kernel to compute: both sides as (rows, weights), and how many gradients may exist at once."""

    model: Any
    sides: tuple[tuple[Rows, Array], ...]
    logps: tuple[Logps, Logps]
    diagonal: Any
    blocks: Blocks
    fits: int
    same: bool

    @property
    def size(self) -> tuple[int, int]:
        return self.sides[0][0].start.shape[0], self.sides[1][0].start.shape[0]


# The names of the blocks, and for every leaf the block it adds to: one index, or one a layer.
Blocks = tuple[tuple[str, ...], tuple[int | tuple[int, ...], ...]]


def _block_index(model: Any, blocks: str) -> Blocks:
    """Which block each leaf belongs to; leaves under ``layers`` are stacked over their first axis."""
    names: dict[str, int] = {}
    index: list[int | tuple[int, ...]] = []
    for leaf, value in zip(leaf_names(model), jax.tree.leaves(model), strict=True):
        if blocks == "layer" and leaf.startswith("layers."):
            index.append(tuple(names.setdefault(f"layers.{d}", len(names)) for d in range(value.shape[0])))
        else:
            index.append(names.setdefault("total" if blocks == "total" else leaf, len(names)))
    return tuple(names), tuple(index)


Found = tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]  # [blocks, N, M] and the squared norms of both sides


def _reference(job: _Job) -> Found:
    """Tiles of explicit gradients: ``tile_a + tile_b`` of them exist at once."""
    n, m = job.size
    if job.fits < 2:
        raise ValueError("method 'reference': two gradients exceed `memory`; raise it, or use method='columns'")
    tile_b = m if n + m <= job.fits else max(1, min(m, job.fits // 4))
    tile_a = min(n, job.fits - tile_b)
    names, index = job.blocks
    out, norms = np.zeros((len(names), n, m)), (np.zeros(n), np.zeros(m))
    for a, grads_a in _tiles(job, 0, tile_a):
        norms[0][a] = _sq_norms(grads_a, job.diagonal)[: a.stop - a.start]
        once = job.same and tile_a == n
        for b, grads_b in [(slice(0, m), grads_a)] if once else _tiles(job, 1, tile_b):
            gram = np.asarray(_gram(grads_a, grads_b, job.diagonal, index, len(names)))
            out[:, a, b] = gram[:, : a.stop - a.start, : b.stop - b.start]
            norms[1][b] = _sq_norms(grads_b, job.diagonal)[: b.stop - b.start]
            del grads_b  # before the next tile is computed
        del grads_a
    return out, norms


def _columns(job: _Job) -> Found:
    """One row of A at a time: its gradient, then a forward-mode pass over B for every block."""
    (rows_a, weights_a), (rows_b, weights_b) = job.sides
    n, m = job.size
    names, index = job.blocks
    out, norms = np.zeros((len(names), n, m)), (np.zeros(n), np.zeros(m))
    for i in range(n):
        out[:, i], norms[0][i] = _column(
            job.model, rows_a[i], weights_a[i], rows_b, weights_b, job.diagonal, index, len(names), job.logps
        )
    for j in range(m):
        norms[1][j] = (
            norms[0][j] if job.same else _row_sq_norm(job.model, rows_b[j], weights_b[j], job.diagonal, job.logps[1])
        )
    return out, norms


def _tiles(job: _Job, side: int, size: int) -> Iterator[tuple[slice, Any]]:
    """Slices of one side's rows with their gradients; the last tile is filled up with the last row."""
    (rows, weights), n = job.sides[side], job.size[side]
    for low in range(0, n, size):
        index = np.minimum(np.arange(low, low + size), n - 1)
        yield slice(low, min(low + size, n)), _gradients(job.model, rows[index], weights[index], job.logps[side])


@partial(jax.jit, static_argnames=("logps",))
def _gradients(model: Any, rows: Rows, weights: Array, logps: Logps) -> Any:
    return row_gradients(model, rows, weights, logps)


@partial(jax.jit, static_argnames=("index", "count"))
def _gram(a: Any, b: Any, diagonal: Any, index: tuple, count: int) -> Float[Array, "K N M"]:
    """Dot products of every pair, added up block by block; accumulated in at least float32."""
    a = a if diagonal is None else jax.tree.map(lambda x, d: x * d[None], a, diagonal)
    leaves = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), index, strict=True))
    n, m, dtype = leaves[0][0].shape[0], leaves[0][1].shape[0], wide(*(x.dtype for x, _, _ in leaves))
    out = jnp.zeros((count, n, m), dtype)
    for x, y, block in leaves:
        x, y = x.astype(dtype), y.astype(dtype)
        if isinstance(block, int):
            part = jnp.matmul(x.reshape(n, -1), y.reshape(m, -1).T, precision=HIGHEST)
            out = out.at[block].add(part)
        else:
            x, y = x.reshape(n, len(block), -1), y.reshape(m, len(block), -1)
            out = out.at[np.array(block)].add(jnp.einsum("ndp,mdp->dnm", x, y, precision=HIGHEST))
    return out


@partial(jax.jit, static_argnames=("index", "count", "logps"))
def _column(
    model: Any,
    row: Rows,
    weight: Array,
    rows_b: Rows,
    weights_b: Array,
    diagonal: Any,
    index: tuple,
    count: int,
    logps: tuple[Logps, Logps],
) -> tuple[Float[Array, "K M"], Float[Array, ""]]:
    gradient = one_gradient(model, row, weight, logps=logps[0])
    tangent = gradient if diagonal is None else jax.tree.map(jnp.multiply, gradient, diagonal)

    def along(block: Array) -> Array:
        leaves = [_only(x, ids, block) for x, ids in zip(jax.tree.leaves(tangent), index, strict=True)]
        part = jax.tree.unflatten(jax.tree.structure(model), leaves)
        return jax.jvp(lambda q: scores(q, rows_b, weights_b, logps[1]), (model,), (part,))[1]

    return jax.lax.map(along, jnp.arange(count)), _dot(gradient, tangent)


def _only(leaf: Array, ids: int | tuple[int, ...], block: Array) -> Array:
    """``leaf`` where it belongs to ``block``, 0 elsewhere."""
    keep = jnp.asarray(ids) == block
    return leaf * keep.astype(leaf.dtype).reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim))


def _dot(a: Any, b: Any) -> Float[Array, ""]:
    dtype = wide(*(x.dtype for x in jax.tree.leaves(a)))
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum((jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in pairs), jnp.zeros((), dtype))


@jax.jit
def _sq_norms(gradients: Any, diagonal: Any) -> Float[Array, " N"]:
    def one(g: Any) -> Array:
        return _dot(g, g if diagonal is None else jax.tree.map(jnp.multiply, g, diagonal))

    return jax.vmap(one)(gradients)


@partial(jax.jit, static_argnames=("logps",))
def _row_sq_norm(model: Any, row: Rows, weight: Array, diagonal: Any, logps: Logps) -> Float[Array, ""]:
    g = one_gradient(model, row, weight, logps=logps)
    return _dot(g, g if diagonal is None else jax.tree.map(jnp.multiply, g, diagonal))


def _checked_diagonal(model: Any, precondition: Any) -> Any:
    """``precondition`` in the model's structure and dtypes; every entry must be positive and finite."""
    diagonal = fitted(model, precondition, "precondition")
    for name, leaf in zip(leaf_names(diagonal), jax.tree.leaves(diagonal), strict=True):
        if not bool(jnp.all((leaf > 0) & jnp.isfinite(leaf))):
            raise ValueError(f"precondition: {name} has entries that are not positive and finite; a metric needs both")
    return jax.tree.map(lambda d, p: jnp.asarray(d).astype(p.dtype), diagonal, model)
