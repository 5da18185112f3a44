"""One new token a row on a TPU: a kernel that reads only the filled tiles of a row's cache.

The cache is the fixed one of the other implementations, keys ``[B K e S]`` and values ``[B K S e]``, cut into tiles of
slots. Tiles that hold nothing to see are neither fetched (their index is that of the nearest tile that is, and a tile
that is already there is not fetched again) nor computed. The library's paged kernels keep head_dim last in the keys,
so that they would need a copy of the cache at every step, and give no log-sum-exp, without which parts cannot be merged.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

TILES = (512, 256, 128)  # slots of a tile, the largest that divides the cache
SUBLANES = 16  # query heads that share a key-value head are padded to whole registers of bfloat16
LANES = 128
LOW = float(jnp.finfo(jnp.float32).min)


def tile_of(slots: int) -> int | None:
    """Slots of a tile for a cache of ``slots``: all of a short one, else the largest that divides it; None: none does."""
    return slots if slots <= TILES[0] else next((tile for tile in TILES if slots % tile == 0), None)


def ragged_attention(
    q: Float[Array, "B h e"],
    k: Float[Array, "B K e S"],
    v: Float[Array, "B K S e"],
    length: Int[Array, " B"],
    first: Int[Array, " B"],
    *,
    interpret: bool,
    tile: int | None = None,
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """One query a row against slots ``first <= s < length``; output and log-sum-exp (nats) in float32.

    Slots that are not seen must hold finite numbers. Raises ``ValueError`` for float64, or a cache that no tile divides.
    """
    batch, heads, e = q.shape
    groups, slots = v.shape[1], v.shape[2]
    tile = tile_of(slots) if tile is None else tile
    if tile is None or slots % tile:
        raise ValueError(f"attention: a cache of {slots} slots is not cut by tiles of {tile or TILES[-1]}; round it up")
    if q.dtype == jnp.float64:
        raise ValueError("attention: pallas computes in float32; for float64 use attention 'xla'")
    repeat = heads // groups
    rows = -(-repeat // SUBLANES) * SUBLANES
    grouped = jnp.pad(q.reshape(batch, groups, repeat, e), ((0, 0), (0, 0), (0, rows - repeat), (0, 0)))
    whole = pl.BlockSpec((1, groups, rows, e), lambda b, j, *_: (b, 0, 0, 0))
    sums = pl.BlockSpec((1, groups, rows, LANES), lambda b, j, *_: (b, 0, 0, 0))

    def here(b: Any, j: Any, first: Any, length: Any) -> Any:
        return tile_at(j, first[b], length[b], tile)

    out, lse = pl.pallas_call(
        partial(_kernel, tile=tile, groups=groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, slots // tile),
            in_specs=[
                whole,
                pl.BlockSpec((1, groups, e, tile), lambda b, j, f, n: (b, 0, 0, here(b, j, f, n))),
                pl.BlockSpec((1, groups, tile, e), lambda b, j, f, n: (b, 0, here(b, j, f, n), 0)),
            ],
            out_specs=[whole, sums],
            scratch_shapes=[
                pltpu.VMEM((groups, rows, LANES), jnp.float32),
                pltpu.VMEM((groups, rows, LANES), jnp.float32),
                pltpu.VMEM((groups, rows, e), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, groups, rows, e), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="ragged_attention",
    )(first.astype(jnp.int32), length.astype(jnp.int32), grouped, k, v)
    return out[:, :, :repeat].reshape(batch, heads, e), lse[:, :, :repeat, 0].reshape(batch, heads)


def tile_at(j: Any, first: Any, length: Any, tile: int) -> Any:
    """The tile that step ``j`` of a row works on: ``j`` where it has something to see, else the nearest that has.

    Tile 0 where the row sees nothing.
    """
    # lax.div, not //: nothing here is negative, and the rule for signs asks the device what it is, also ahead of time
    low, high = (jax.lax.div(jnp.maximum(x, 0), jnp.int32(tile)) for x in (first, length - 1))
    return jnp.clip(j, jnp.minimum(low, high), high)


def _kernel(
    first: Any, length: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, top: Any, total: Any, sums: Any, *, tile: int,
    groups: int,
) -> None:  # fmt: skip
    b, j = pl.program_id(0), pl.program_id(1)
    low, high = first[b], length[b]

    @pl.when(j == 0)
    def _start() -> None:
        top[...] = jnp.full(top.shape, LOW, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when((j * tile < high) & ((j + 1) * tile > low))
    def _tile() -> None:
        for g in range(groups):
            _add(q[0, g], k[0, g], v[0, g], j * tile, low, high, top.at[g], total.at[g], sums.at[g])

    @pl.when(j == pl.num_programs(1) - 1)
    def _end() -> None:
        for g in range(groups):
            empty = total[g] == 0
            weight = jnp.where(empty, 1.0, total[g])
            out[0, g] = sums[g] / weight[:, :1]
            lse[0, g] = jnp.where(empty, -jnp.inf, top[g] + jnp.log(weight))


def _add(q: Array, k: Array, v: Array, at: Any, low: Any, high: Any, top: Any, total: Any, sums: Any) -> None:
    """One tile of one key-value head: the running maximum, sum of weights and weighted sum of values."""
    scores = jnp.dot(q, k, preferred_element_type=jnp.float32) * (1 / math.sqrt(q.shape[1]))
    slot = at + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = (slot >= low) & (slot < high)
    scores = jnp.where(seen, scores, LOW)
    before = top[:, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
    keep = jnp.exp(before - now)
    total[...] = jnp.broadcast_to(total[:, :1] * keep + jnp.sum(weights, axis=1, keepdims=True), total.shape)
    sums[...] = sums[...] * keep + jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    top[...] = jnp.broadcast_to(now, top.shape)
