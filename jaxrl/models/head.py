"""Log-prob, log-partition and entropy of given tokens by blocks of the vocabulary, with a derivative of its own.

``[N V]`` never exists: one pass over blocks of the matrix keeps a running maximum, sum of exponentials and sum of
``e z``; the backward pass forms a block's logits again. Reverse mode only, and once: what needs forward mode or
second derivatives takes ``jaxrl.models.decoder.logits``. The method is that of levanter's and TRL's chunked heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from jaxrl.types import wide

PARTS = 32  # blocks of a large vocabulary: 4,748 entries of 151,936
SMALLEST = 1024  # entries of a block at least


def token_head(
    states: Float[Array, "N d"],
    matrix: Array,
    token: Int[Array, " N"],
    *,
    temperature: float | Array = 1.0,
    limit: int | None = None,
    tied: bool = True,
    block: int | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """``log p(token)``, the log-partition and the entropy of ``softmax(states matrix / temperature)``, all in nats.

    ``matrix`` is ``[V d]`` where ``tied`` (an embedding) and ``[d V]`` otherwise. Ids from ``limit`` on have
    probability 0; a ``token`` among them has log-prob minus infinity and no gradient. Products are accumulated, and
    results are, in at least float32; gradients come in the inputs' dtypes, that of the matrix summed over all N
    before it is rounded. ``block``: vocabulary entries at a time; memory is about ``N * block``.
    """
    how = Layout.of(matrix, limit, tied, block)
    return _head(how, divided(states, matrix, temperature), matrix, token.astype(jnp.int32))


def block_size(vocab_size: int) -> int:
    """Vocabulary entries at a time: a 32nd, but not so few that a loop costs more than it saves."""
    return min(vocab_size, max(-(-vocab_size // PARTS), SMALLEST))


def divided(states: Float[Array, "N d"], matrix: Array, temperature: float | Array) -> Float[Array, "N d"]:
    """The states over the temperature, which so has a gradient too; wide unless they match the matrix as they are."""
    plain = isinstance(temperature, int | float) and temperature == 1
    if plain and states.dtype == matrix.dtype:
        return states
    dtype = wide(states.dtype, matrix.dtype)
    return states.astype(dtype) if plain else states.astype(dtype) / jnp.asarray(temperature, dtype)


@dataclass(frozen=True)
class Layout:
    """A matrix of ``size`` vocabulary entries, ``limit`` of them known, taken ``block`` at a time."""

    size: int
    limit: int
    tied: bool
    block: int

    @classmethod
    def of(cls, matrix: Array, limit: int | None, tied: bool, block: int | None) -> Layout:
        size = matrix.shape[0 if tied else 1]
        return cls(size, size if limit is None else min(limit, size), tied, min(block or block_size(size), size))

    @property
    def count(self) -> int:
        """Blocks that hold a known entry."""
        return -(-self.limit // self.block)

    @property
    def axis(self) -> int:
        return 0 if self.tied else 1

    def at(self, i: Array) -> Array:
        """The first entry of block i. The last block is moved back so as to end with the vocabulary."""
        return jnp.minimum(i * self.block, self.size - self.block).astype(jnp.int32)

    def known(self, i: Array) -> Bool[Array, "1 block"] | None:
        """Which entries of block i count: an earlier block has had some, others are above the limit. None for all."""
        if self.limit % self.block == 0:
            return None
        ids = self.at(i) + jnp.arange(self.block, dtype=jnp.int32)
        return ((ids >= i * self.block) & (ids < self.limit))[None]

    def hit(self, i: Array, token: Int[Array, " N"]) -> Bool[Array, "N block"]:
        return (token - self.at(i))[:, None] == jnp.arange(self.block, dtype=jnp.int32)[None]

    def take(self, matrix: Array, i: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(matrix, self.at(i), self.block, self.axis)

    def logits(self, states: Float[Array, "N d"], part: Array) -> Float[Array, "N block"]:
        return dot(states, part, (1, 1 if self.tied else 0))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(how: Layout, states: Array, matrix: Array, token: Array) -> tuple[Array, Array, Array]:
    dtype = wide(states.dtype, matrix.dtype)
    rows = token.shape

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, energy, picked = carry
        z = how.logits(states, how.take(matrix, i))
        known = how.known(i)
        new = jnp.maximum(top, jnp.max(z if known is None else jnp.where(known, z, -jnp.inf), axis=1))
        z = z - new[:, None]
        e = jnp.exp(z) if known is None else jnp.where(known, jnp.exp(z), 0)
        moved = top - new
        kept = jnp.exp(moved)
        energy = kept * (energy + moved * total) + jnp.sum(e * z, axis=1)
        total = kept * total + jnp.sum(e, axis=1)
        hit = how.hit(i, token) if known is None else how.hit(i, token) & known
        found = jnp.sum(jnp.where(hit, z, 0), axis=1) + new
        return new, total, energy, jnp.where(jnp.any(hit, axis=1), found, picked)

    # the lowest finite number, whose difference to any other is no NaN
    start = (jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype), jnp.zeros(rows, dtype))
    top, total, energy, picked = jax.lax.fori_loop(0, how.count, body, (*start, jnp.full(rows, -jnp.inf, dtype)))
    lse = top + jnp.log(total)
    return picked - lse, lse, jnp.log(total) - energy / total


def _forward(how: Layout, states: Any, matrix: Any, token: Any) -> tuple[tuple[Array, Array, Array], Any]:
    out = _head(how, states.value, matrix.value, token.value)
    return out, (states.value, matrix.value, token.value, out[1], out[2])


def _backward(how: Layout, kept: tuple[Array, ...], cotangents: tuple[Any, Any, Any]) -> tuple[Array, Array, None]:
    """``dz_v = g_logp (1[v = token] - p_v) + g_lse p_v - g_entropy p_v (log p_v + entropy)``, block by block."""
    states, matrix, token, lse, entropy = kept
    dtype = lse.dtype
    of_logp, of_lse, of_entropy = (None if isinstance(g, SymbolicZero) else g.astype(dtype) for g in cotangents)
    zero = jnp.zeros_like(lse)
    of_logp = zero if of_logp is None else jnp.where(token < how.limit, of_logp, 0)
    of_p = -of_logp if of_lse is None else of_lse - of_logp

    def cotangent(i: Array, z: Array) -> Array:
        logp = z - lse[:, None]
        scale = of_p[:, None]
        if of_entropy is not None:
            scale = scale - of_entropy[:, None] * (logp + entropy[:, None])
        return jnp.exp(logp) * scale + jnp.where(how.hit(i, token), of_logp[:, None], 0)

    return *pull(how, states, matrix, cotangent), None


def pull(
    how: Layout, states: Float[Array, "N d"], matrix: Array, cotangent: Callable[[Array, Array], Array]
) -> tuple[Array, Array]:
    """Gradients of states and matrix, given ``cotangent(i, logits of block i)`` by those logits."""
    dtype = wide(states.dtype, matrix.dtype)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        by_states, by_matrix = carry
        part = how.take(matrix, i)
        dz = cotangent(i, how.logits(states, part))
        known = how.known(i)
        dz = dz if known is None else jnp.where(known, dz, 0)
        by_states = by_states + dot(dz, part.astype(dtype), (1, how.axis))
        pair = (dz, states.astype(dtype)) if how.tied else (states.astype(dtype), dz)
        more = how.take(by_matrix, i) + dot(*pair, (0, 0)).astype(matrix.dtype)
        return by_states, jax.lax.dynamic_update_slice_in_dim(by_matrix, more, how.at(i), how.axis)

    # an entry is written by one block, which sums over all N (a second adds 0): nothing is rounded twice
    start = (jnp.zeros(states.shape, dtype), jnp.zeros_like(matrix))
    by_states, by_matrix = jax.lax.fori_loop(0, how.count, body, start)
    return by_states.astype(states.dtype), by_matrix


_head.defvjp(_forward, _backward, symbolic_zeros=True)


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contraction of one axis of each, accumulated in at least float32."""
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=wide(a.dtype, b.dtype))
