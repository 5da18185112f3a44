"""One new token a row on a TPU: a kernel that reads only the filled tiles of a row's cache.

The cache is the fixed one of the other implementations, keys ``[B K e S]`` and values ``[B K S e]``, or those of all
layers stacked, cut into tiles of slots. Tiles that hold nothing to see are neither fetched (their index is that of the nearest tile that is, and a tile
that is already there is not fetched again) nor computed. The library's paged kernels keep head_dim last in the keys,
so that they would need a copy of the cache at every step, and give no log-sum-exp, without which parts cannot be merged.

``write_token`` belongs to it: XLA's scatter keeps the cache in a layout of its own, from which the kernel would need a
copy of the whole cache at every step. So does a slice of stacked layers: kernels take the number of the layer.
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
    k: Float[Array, "*D B K e S"],
    v: Float[Array, "*D B K S e"],
    length: Int[Array, " B"],
    first: Int[Array, " B"],
    layer: Int[Array, " 1"] | None = None,
    *,
    interpret: bool = False,
    tile: int | None = None,
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """One query a row against slots ``first <= s < length``; output and log-sum-exp (nats) in float32.

    ``layer`` says which of stacked layers. Slots that are not seen must hold finite numbers. Raises ``ValueError`` for float64, or a cache that no tile divides.
    """
    batch, heads, e = q.shape
    groups, slots = v.shape[-3], v.shape[-2]
    k, v, layer = _stacked(k, v, layer)
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

    def here(b: Any, j: Any, first: Any, length: Any, layer: Any) -> Any:
        return tile_at(j, first[b], length[b], tile)

    out, lse = pl.pallas_call(
        partial(_kernel, tile=tile, groups=groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, slots // tile),
            in_specs=[
                whole,
                pl.BlockSpec((None, 1, groups, e, tile), lambda b, j, *s: (s[2][0], b, 0, 0, here(b, j, *s))),
                pl.BlockSpec((None, 1, groups, tile, e), lambda b, j, *s: (s[2][0], b, 0, here(b, j, *s), 0)),
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
    )(first.astype(jnp.int32), length.astype(jnp.int32), layer, grouped, k, v)
    return out[:, :, :repeat].reshape(batch, heads, e), lse[:, :, :repeat, 0].reshape(batch, heads)


def write_token(
    new_k: Float[Array, "B K e"],
    new_v: Float[Array, "B K e"],
    k: Float[Array, "*D B K e S"],
    v: Float[Array, "*D B K S e"],
    slot: Int[Array, " B"],
    layer: Int[Array, " 1"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*D B K e S"], Float[Array, "*D B K S e"]]:
    """The caches with one token a row at its slot, in place where they are donated; a slot outside is dropped."""
    shapes = k.shape, v.shape
    batch, groups, e = new_k.shape
    slots = v.shape[-2]
    k, v, layer = _stacked(k, v, layer)
    lanes, rows = (size if slots % size == 0 else slots for size in (LANES, SUBLANES))

    def tile(b: Any, size: int, slot: Any) -> Any:
        return jax.lax.div(jnp.clip(slot[b], 0, slots - 1), jnp.int32(size))

    cut_k = pl.BlockSpec((None, 1, groups, e, lanes), lambda b, s, n: (n[0], b, 0, 0, tile(b, lanes, s)))
    cut_v = pl.BlockSpec((None, 1, groups, rows, e), lambda b, s, n: (n[0], b, 0, tile(b, rows, s), 0))
    k, v = pl.pallas_call(
        partial(_write, tile=tile, lanes=lanes, rows=rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch,),
            in_specs=[
                pl.BlockSpec((1, groups, e, 1), lambda b, *_: (b, 0, 0, 0)),
                pl.BlockSpec((1, groups, 1, e), lambda b, *_: (b, 0, 0, 0)),
                cut_k,
                cut_v,
            ],
            out_specs=[cut_k, cut_v],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="write_token",
    )(slot.astype(jnp.int32), layer, new_k[..., None].astype(k.dtype), new_v[:, :, None].astype(v.dtype), k, v)
    return k.reshape(shapes[0]), v.reshape(shapes[1])


def _write(
    slot: Any, _: Any, new_k: Any, new_v: Any, k: Any, v: Any, out_k: Any, out_v: Any, *, tile: Any, lanes: int,
    rows: int,
) -> None:  # fmt: skip
    b = pl.program_id(0)
    at_k, at_v = (slot[b] - tile(b, size, slot) * size for size in (lanes, rows))
    out_k[0] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, k.shape[1:], 2) == at_k, new_k[0], k[0])
    out_v[0] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, v.shape[1:], 1) == at_v, new_v[0], v[0])


def _stacked(k: Array, v: Array, layer: Array | None) -> tuple[Array, Array, Array]:
    if layer is None:
        return k[None], v[None], jnp.zeros(1, jnp.int32)
    return k, v, layer.astype(jnp.int32).reshape(1)


def tile_at(j: Any, first: Any, length: Any, tile: int) -> Any:
    """The tile that step ``j`` of a row works on: ``j`` where it has something to see, else the nearest that has.

    Tile 0 where the row sees nothing.
    """
    # lax.div, not //: nothing here is negative, and the rule for signs asks the device what it is, also ahead of time
    low, high = (jax.lax.div(jnp.maximum(x, 0), jnp.int32(tile)) for x in (first, length - 1))
    return jnp.clip(j, jnp.minimum(low, high), high)


def _kernel(
    first: Any, length: Any, _: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, top: Any, total: Any, sums: Any, *, tile: int,
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
