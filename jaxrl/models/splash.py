"""Whole rows on a TPU: jax's splash attention, which skips the blocks of a row that causality or a window hides.

The kernel has a rule for reverse mode only. Its masks are static: a window is a number, not data.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

LANES = 128  # rows are padded to whole vector registers
BLOCKS = (512, 384, 256, LANES)  # tokens of a block, the largest that divides the padded row


def splash_rows(
    q: Float[Array, "B S h e"],
    k: Float[Array, "B S K e"],
    v: Float[Array, "B S K e"],
    segments: Int[Array, "B S"] | None = None,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B S h e"]:
    """Causal attention within segments over at most the ``window`` last tokens; scores and sums in float32.

    Raises ``ValueError`` for float64, which a TPU kernel does not take.
    """
    if q.dtype == jnp.float64:
        raise ValueError("attention: splash computes in float32; for float64 use attention 'xla'")
    width = q.shape[1]
    pad = -width % LANES
    kernel = _kernel(q.shape[2], width + pad, window, interpret)
    q, k, v = (_heads_first(x, pad) for x in (q * (1 / math.sqrt(q.shape[3])), k, v))
    if segments is None:
        out = jax.vmap(kernel)(q, k, v)
    else:  # padding lies to the right, where no token of the row looks: any id will do
        ids = jnp.pad(segments.astype(jnp.int32), ((0, 0), (0, pad)), constant_values=-1)
        out = jax.vmap(lambda q, k, v, s: kernel(q, k, v, splash.SegmentIds(s, s)))(q, k, v, ids)
    return out[:, :, :width].swapaxes(1, 2)


def _heads_first(x: Float[Array, "B S h e"], pad: int) -> Float[Array, "B h W e"]:
    return jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).swapaxes(1, 2)


def _kernel(heads: int, width: int, window: int | None, interpret: bool) -> splash.SplashAttentionKernel:
    shape = (width, width)
    # LocalMask counts the tokens to the left of the query's own, and none to the right makes it causal
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in BLOCKS if width % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    make = partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)
    return make(splash.MultiHeadMask([mask] * heads))
