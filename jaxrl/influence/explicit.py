"""Kernels from gradients that exist as such, for any model that ``logps`` can score.

``reference``  all gradients by ``vmap(grad)``, flattened, one product: the definition.
``chunked``    the same in tiles of rows, parameter by parameter, so that never more gradients exist than
               the memory limit allows; rows of one side are passed again for every tile of the other.
``columns``    one gradient of a row in A, then one forward-mode pass along it over all rows in B.
               Holds a single gradient; dearer than ``chunked`` unless fewer than three gradients fit.
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

from jaxrl.influence.gradients import Logps, one_gradient, row_gradients, scores
from jaxrl.types import Rows, wide

HIGHEST = jax.lax.Precision.HIGHEST

# The names of the blocks, and for every leaf the block it adds to: one index, or one a layer.
Blocks = tuple[tuple[str, ...], tuple[int | tuple[int, ...], ...]]
Found = tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]  # [blocks, N, M] and the squared norms of both sides


@dataclass(frozen=True)
class Job:
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


def reference(job: Job) -> Found:
    """All gradients at once, each flattened, and one matrix product a block: the definition, for small models."""
    n, m = job.size
    if job.fits < (n if job.same else n + m):
        raise ValueError(
            f"method 'reference': {n} + {m} gradients exceed `memory`, where {job.fits} fit; raise it, or use "
            "method='streamed' (a decoder) or method='chunked'"
        )
    (rows_a, weights_a), (rows_b, weights_b) = job.sides
    grads_a = _gradients(job.model, rows_a, weights_a, job.logps[0])
    grads_b = grads_a if job.same else _gradients(job.model, rows_b, weights_b, job.logps[1])
    out = np.asarray(_flat_gram(grads_a, grads_b, job.diagonal, job.blocks[1], len(job.blocks[0])))
    norms = tuple(np.asarray(_sq_norms(g, job.diagonal)) for g in (grads_a, grads_b))
    return out, norms


def chunked(job: Job) -> Found:
    """Tiles of explicit gradients: ``tile_a + tile_b`` of them exist at once, contracted parameter by parameter."""
    n, m = job.size
    if job.fits < 2:
        raise ValueError("method 'chunked': two gradients exceed `memory`; raise it, or use method='columns'")
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


def columns(job: Job) -> Found:
    """One row of A at a time: its gradient, then a forward-mode pass over B for every block."""
    out, norms_a = column_values(job)
    if job.same:  # forward and reverse mode differ by what the passes round, which is much in bf16
        out = (out + out.transpose(0, 2, 1)) / 2
    (rows_b, weights_b), norms_b = job.sides[1], np.zeros(job.size[1])
    for j in range(len(norms_b)):
        norms_b[j] = (
            norms_a[j] if job.same else _row_sq_norm(job.model, rows_b[j], weights_b[j], job.diagonal, job.logps[1])
        )
    return out, (norms_a, norms_b)


def column_values(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """The blocks ``[K N M]`` by ``columns``, and the squared norms of A."""
    (rows_a, weights_a), (rows_b, weights_b) = job.sides
    n, m = job.size
    names, index = job.blocks
    out, norms = np.zeros((len(names), n, m)), np.zeros(n)
    for i in range(n):
        out[:, i], norms[i] = _column(
            job.model, rows_a[i], weights_a[i], rows_b, weights_b, job.diagonal, index, len(names), job.logps
        )
    return out, norms


def _tiles(job: Job, side: int, size: int) -> Iterator[tuple[slice, Any]]:
    """Slices of one side's rows with their gradients; the last tile is filled up with the last row."""
    (rows, weights), n = job.sides[side], job.size[side]
    for low in range(0, n, size):
        index = np.minimum(np.arange(low, low + size), n - 1)
        yield slice(low, min(low + size, n)), _gradients(job.model, rows[index], weights[index], job.logps[side])


@partial(jax.jit, static_argnames=("logps",))
def _gradients(model: Any, rows: Rows, weights: Array, logps: Logps) -> Any:
    return row_gradients(model, rows, weights, logps)


@partial(jax.jit, static_argnames=("index", "count"))
def _flat_gram(a: Any, b: Any, diagonal: Any, index: tuple, count: int) -> Float[Array, "K N M"]:
    """Every row's gradient as one vector a block, then matrix products."""
    a = a if diagonal is None else jax.tree.map(lambda x, d: x * d[None], a, diagonal)

    def vectors(tree: Any) -> list[Array]:
        parts: list[list[Array]] = [[] for _ in range(count)]
        for x, at in zip(jax.tree.leaves(tree), index, strict=True):
            if isinstance(at, int):
                parts[at].append(x.reshape(len(x), -1))
            else:
                for d, block in enumerate(at):
                    parts[block].append(x[:, d].reshape(len(x), -1))
        return [jnp.concatenate([x.astype(wide(x.dtype)) for x in p], axis=1) for p in parts]

    return jnp.stack([jnp.matmul(x, y.T, precision=HIGHEST) for x, y in zip(vectors(a), vectors(b), strict=True)])


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
