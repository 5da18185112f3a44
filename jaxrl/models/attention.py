"""Attention by platform: whole rows, one new token a row, and many rows that continue one stored prompt.

Every kind is one function with several implementations, which give the same numbers up to rounding. A cache holds
keys as ``[B K H S]`` and values as ``[B K S H]`` (K key-value heads of H numbers, S slots). Parts of one softmax are
computed apart, each with the log-sum-exp of its scores, and joined by ``merge``.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.types import wide


def decode_attention(
    q: Float[Array, "B h e"],
    k: Float[Array, "B K e S"],
    v: Float[Array, "B K S e"],
    length: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """One query a row against the row's cache: slots ``first <= s < length`` (first: 0).

    Returns the output and the log-sum-exp of the scores (nats), both in at least float32: scores, softmax and sums
    are accumulated there. A row that sees nothing gives 0 and minus infinity.
    """
    out, lse = prefix_attention(q[:, None], k, v, length, first=None if first is None else first[:, None])
    return out[:, 0], lse[:, 0]


def prefix_attention(
    q: Float[Array, "P m h e"],
    k: Float[Array, "P K e S"],
    v: Float[Array, "P K S e"],
    length: Int[Array, " P"],
    *,
    first: Int[Array, "P m"] | None = None,
) -> tuple[Float[Array, "P m h e"], Float[Array, "P m h"]]:
    """Many queries of each stored prompt against its keys, as one matrix product a prompt and key-value head.

    Query (p, j) sees slots ``first[p, j] <= s < length[p]``. Returns what ``decode_attention`` returns.
    """
    p, m, h, e = q.shape
    groups, slots = v.shape[1], v.shape[2]
    dtype = wide(q.dtype)
    grouped = q.reshape(p, m, groups, h // groups, e)
    scores = jnp.einsum("pmgre,pges->pgmrs", grouped, k, preferred_element_type=dtype) / math.sqrt(e)
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None, :]
    seen = slot < length[:, None, None]
    if first is not None:
        seen = seen & (slot >= first[:, :, None])
    weights, total, lse = _softmax(scores, seen[:, None, :, None, :])
    out = jnp.einsum("pgmrs,pgse->pmgre", weights.astype(v.dtype), v, preferred_element_type=dtype)
    out = out / total.transpose(0, 2, 1, 3)[..., None]
    return out.reshape(p, m, h, e), lse.transpose(0, 2, 1, 3).reshape(p, m, h)


def merge(
    out_a: Float[Array, "*B h e"],
    lse_a: Float[Array, "*B h"],
    out_b: Float[Array, "*B h e"],
    lse_b: Float[Array, "*B h"],
) -> Float[Array, "*B h e"]:
    """Attention to the union of two disjoint sets of keys, from attention to each: the weights are ``exp(lse)``.

    An empty part (0 and minus infinity) changes nothing; two empty parts give 0.
    """
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    a, b = jnp.exp(lse_a - top)[..., None], jnp.exp(lse_b - top)[..., None]
    total = a + b
    return (out_a * a + out_b * b) / jnp.where(total > 0, total, jnp.ones_like(total))


def _softmax(scores: Float[Array, "*B S"], seen: Bool[Array, "*B S"]) -> tuple[Array, Array, Array]:
    """Weights before normalisation, their sum (1 where nothing is seen) and the log-sum-exp of the seen scores."""
    low: Any = jnp.finfo(scores.dtype).min
    scores = jnp.where(seen, scores, low)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), jnp.zeros_like(scores))
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    total = jnp.where(empty, jnp.ones_like(total), total)
    return weights, total, jnp.where(empty, -jnp.inf, top + jnp.log(total))
