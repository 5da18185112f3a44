"""The hash of count sketches: which bucket and which sign every coordinate of the parameters has (KERNEL.md 7).

A function of the seed, the parameter's name, the layer and the coordinate's place within that layer's
parameter, by 32-bit arithmetic: no table is stored and no tiling enters.
"""

from __future__ import annotations

import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxrl.types import wide


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
    check_size(size)
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


def check_size(size: int) -> None:
    """``ValueError`` for a sketch without a number."""
    if not 1 <= size < 2**31:
        raise ValueError(f"size: expected at least 1 number a row (intervals narrow as one over its root), got {size}")
