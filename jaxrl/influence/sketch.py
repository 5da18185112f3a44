"""Count sketches of per-row gradients: kernels across steps and runs from a few numbers a row (KERNEL.md 7).

Every coordinate of the parameters has a bucket ``h`` and a sign ``s``; the sketch of a gradient is
``S_b = sum_{p: h(p) = b} s(p) g_p``. The product of two sketches made by one hash is an unbiased
estimate of the product of the gradients, with variance at most ``(K_ii K_jj + K_ij^2) / size``.

The hash is a function of the seed, the parameter's name, the layer and the coordinate's place within
that layer's parameter. No table is stored and no tiling enters, so blocks of gradients can be added
as they stream by, and sketches of other steps and runs of the same architecture fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxrl.influence.gradients import Logps, leaf_names, need_rows, row_gradients, row_weights
from jaxrl.mesh import to_host
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows, container, wide

SEED = 0  # the one hash of every run that names no other
MEMORY = 1 << 30  # bytes of per-row gradients held at once
NORMAL_95 = 1.959963984540054


@container
@dataclass(frozen=True)
class Sketch:
    """Sketches of N rows' gradients. ``sq_norms`` are exact; ``normalise`` is ``sum``, ``tok`` or ``weights``.

    ``parameters`` is the number of coordinates that were hashed.
    """

    values: Float[Array, "N size"]
    sq_norms: Float[Array, " N"]
    seed: int = field(metadata={"static": True})
    normalise: str = field(metadata={"static": True})
    parameters: int = field(metadata={"static": True})

    @property
    def size(self) -> int:
        """Numbers a row."""
        return self.values.shape[1]

    def attributes(self) -> dict[str, Any]:
        """What is stored beside ``values``, with JSON's own types."""
        return {
            "seed": self.seed,
            "size": self.size,
            "normalise": self.normalise,
            "parameters": self.parameters,
            "sq_norms": np.asarray(self.sq_norms).tolist(),
        }

    @classmethod
    def of(cls, values: Float[np.ndarray, "N size"], attributes: Mapping[str, Any]) -> Sketch:
        """A stored sketch; ``KeyError`` when an attribute is missing."""
        norms = np.asarray(attributes["sq_norms"], values.dtype)
        return cls(values, norms, *(attributes[name] for name in ("seed", "normalise", "parameters")))


def sketch_kernel(a: Sketch, b: Sketch) -> tuple[Float[Array, "N M"], Float[Array, "N M"], Float[Array, "N M"]]:
    """Estimates of ``K_ij = <grad phi_i, grad phi'_j>`` and the ends of their 95 % intervals.

    The intervals are normal, from the variance's upper bound with the estimate in the place of ``K_ij``;
    they are of single entries, and entries of one row err together. Raises ``ValueError`` naming what
    differs when the sketches were not made by the same hash of the same kind of score.
    """
    for name in ("seed", "size", "normalise", "parameters"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            raise ValueError(
                f"sketches differ in {name}, {one!r} and {other!r}; only those of one hash can be combined"
            )
    dtype = wide(a.values.dtype, b.values.dtype)
    (left, norms_a), (right, norms_b) = ((jnp.asarray(x, dtype) for x in (y.values, y.sq_norms)) for y in (a, b))
    values = jnp.matmul(left, right.T, precision=jax.lax.Precision.HIGHEST)
    norms = norms_a[:, None] * norms_b[None, :]
    margin = NORMAL_95 * jnp.sqrt((norms + jnp.minimum(values**2, norms)) / a.size)
    return values, values - margin, values + margin


def gradient_sketch(
    model: Any,
    rows: Rows,
    *,
    size: int,
    seed: int = SEED,
    normalise: str = "sum",
    weights: Array | None = None,
    memory: int = MEMORY,
    logps: Logps = token_logps,
) -> Sketch:
    """Sketches of the gradients of ``rows``, ``size`` numbers each in at least float32.

    ``memory`` bounds the bytes of gradients that exist at once, of one row at least; the other arguments are those of
    ``gradient_kernel``. Raises ``ValueError`` when there are no rows, one has no response, or ``size`` is below 1.
    """
    need_rows(rows, "rows", model, responses=True)
    _check_size(size)
    weight = row_weights(rows, normalise, weights)
    leaves = jax.tree.leaves(model)
    n, parameters = rows.start.shape[0], sum(x.size for x in leaves)
    tile = min(n, max(1, memory // (parameters * wide(*(x.dtype for x in leaves)).itemsize)))
    found = []
    for low in range(0, n, tile):
        index = np.minimum(np.arange(low, low + tile), n - 1)  # one program: the last tile is filled up with a row
        found.append(to_host(_tile(model, rows[index], weight[index], size, seed, logps)))
    values, norms = (np.concatenate(x)[:n] for x in zip(*found, strict=True))
    return Sketch(values, norms, seed, normalise if weights is None else "weights", parameters)


@partial(jax.jit, static_argnames=("size", "seed", "logps"))
def _tile(
    model: Any, rows: Rows, weights: Array, size: int, seed: int, logps: Logps
) -> tuple[Float[Array, "n size"], Float[Array, " n"]]:
    gradients = row_gradients(model, rows, weights, logps)
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    squares = (jnp.sum(jnp.square(x.astype(dtype)), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(gradients))
    return sketch_gradients(gradients, seed, size), sum(squares, jnp.zeros(rows.start.shape, dtype))


def sketch_gradients(gradients: Any, seed: int, size: int) -> Float[Array, "N size"]:
    """The sketch of whole per-row gradients, a pytree like the model with a leading axis N.

    Leaves under ``layers`` are stacked over their next axis.
    """
    leaves = jax.tree.leaves(gradients)
    n, dtype = leaves[0].shape[0], wide(*(x.dtype for x in leaves))
    total = jnp.zeros((n, size), dtype)
    for name, leaf in zip(leaf_names(gradients), leaves, strict=True):
        part = partial(sketch_block, leaf_seed=leaf_seed(seed, name), size=size)
        if not name.startswith("layers."):
            total = total + part(leaf.reshape(n, 1, -1)).astype(dtype)
            continue

        def body(total: Array, xs: tuple[Array, Array], part: Any = part) -> tuple[Array, None]:
            block, layer = xs
            return total + part(block.reshape(n, 1, -1), layer=layer).astype(dtype), None

        depth = leaf.shape[1]
        total, _ = jax.lax.scan(body, total, (jnp.moveaxis(leaf, 1, 0), jnp.arange(depth, dtype=jnp.int32)))
    return total


def sketch_block(
    block: Float[Array, "n r c"],
    *,
    leaf_seed: int | np.uint32 | UInt32[Array, ""],
    layer: int | Int[Array, ""] = 0,
    offset: int | Int[Array, ""] | Int[Array, " r"] = 0,
    strides: tuple[int, int] | None = None,
    size: int,
) -> Float[Array, "n size"]:
    """What ``r * c`` coordinates of one parameter add to the sketches of n rows, in at least float32.

    ``block[:, i, j]`` is the coordinate with flat index ``offset + i * strides[0] + j * strides[1]`` in the (layer's)
    parameter; ``strides`` default to ``(c, 1)``, whole rows of a matrix. An array ``offset [r]`` holds the index of
    every row's first coordinate instead. The parts of any tiling add up to the sketch of the whole. ``leaf_seed`` is
    ``leaf_seed(seed, name)``. A parameter's layer must hold fewer than 2**32 coordinates.
    """
    _check_size(size)
    keys, start = _key(leaf_seed, layer), _uint32(offset)
    return _block(block, keys, start, strides or (block.shape[2], 1), size)


@partial(jax.jit, static_argnames=("strides", "size"))
def _block(
    block: Array, keys: tuple[Array, Array], start: UInt32[Array, "*r"], strides: tuple[int, int], size: int
) -> Float[Array, "n size"]:
    n, r, c = block.shape
    if start.ndim == 0:
        start = start + jnp.arange(r, dtype=jnp.uint32) * jnp.uint32(strides[0])
    flat = start[:, None] + (jnp.arange(c, dtype=jnp.uint32) * jnp.uint32(strides[1]))[None, :]
    bucket, negative = _hash(flat.reshape(-1), keys, size)
    values = block.reshape(n, r * c).astype(wide(block.dtype))
    signed = jnp.where(negative[None], -values, values)
    # one scattered row of n numbers a coordinate is several times faster than n scattered numbers
    return jnp.zeros((size, n), signed.dtype).at[bucket].add(signed.T).T


def leaf_seed(seed: int, name: str) -> np.uint32:
    """32 bits for one parameter of one hash. ``name`` as by ``leaf_names``: ``embed``, ``layers.q``."""
    return np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "<u4")[0]


def _key(leaf_seed: int | np.uint32 | Array, layer: int | Array) -> tuple[Array, Array]:
    """One key for each of the two rounds."""
    key = _mix(_uint32(leaf_seed) + _uint32(layer) * jnp.uint32(0x9E3779B9))
    return key, _mix(key ^ jnp.uint32(0x85EBCA6B))


def _hash(flat: UInt32[Array, " p"], keys: tuple[Array, Array], size: int) -> tuple[Int[Array, " p"], Array]:
    """Bucket and sign (True: minus) of coordinates.

    One keyed round would give two parameters the same hash up to an exclusive-or of the index, so their
    coordinates would collide in pairs; the second key breaks that.
    """
    bits = _mix(_mix(flat ^ keys[0]) ^ keys[1])
    return ((bits >> 1) % jnp.uint32(size)).astype(jnp.int32), (bits & 1) == 1


def _mix(x: UInt32[Array, "*p"]) -> UInt32[Array, "*p"]:
    """A bijection of 32 bits in which every bit depends on all (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uint32(x: int | np.uint32 | Array) -> UInt32[Array, "*r"]:
    return x.astype(jnp.uint32) if isinstance(x, jax.Array) else jnp.asarray(x, jnp.uint32)


def _check_size(size: int) -> None:
    if not 1 <= size < 2**31:
        raise ValueError(f"size: expected at least 1 number a row (intervals narrow as one over its root), got {size}")
