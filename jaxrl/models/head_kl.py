"""The KL divergence between two heads by blocks of the vocabulary, with a derivative of its own.

As in ``jaxrl.models.head``: ``[N V]`` never exists, one pass forward, one backward, reverse mode only.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl.models.head import divided
from jaxrl.models.head_blocks import MATRIX, POSITIONS, Blocks
from jaxrl.types import wide


def token_head_kl(
    known: Float[Array, "N e"],
    reference: Array,
    states: Float[Array, "N d"],
    matrix: Array,
    *,
    temperature: float | Array = 1.0,
    limit: int | None = None,
    tied: bool = True,
    block: int | None = None,
    mesh: Mesh | None = None,
    turned: bool = False,
) -> Float[Array, " N"]:
    """``sum_v p_v log(p_v / q_v)``, nats: p of states ``known`` under ``reference``, q of ``states`` under ``matrix``.

    ``turned``: ``sum_v q_v log(q_v / p_v)`` instead. Matrices are ``[V d]`` where ``tied``, else ``[d V]``, both alike. No gradient reaches ``known`` and
    ``reference``. Dtypes, ``limit``, ``block`` and ``mesh`` as for ``token_head``; memory is about twice that.
    """
    how = Blocks.of(matrix, limit, tied, block, mesh)
    first = jax.lax.stop_gradient((divided(known, reference, temperature), reference))
    return _kl(how, turned, *first, divided(states, matrix, temperature), matrix)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kl(how: Blocks, turned: bool, known: Array, reference: Array, states: Array, matrix: Array) -> Array:
    return _divergence(how, turned, known, reference, states, matrix)[0]


def _divergence(
    how: Blocks, turned: bool, known: Array, reference: Array, states: Array, matrix: Array
) -> tuple[Array, Array, Array]:
    """The divergence, and the log-partitions of p and q."""
    arrays = (states, matrix, known, reference) if turned else (known, reference, states, matrix)
    found, first, second = how.run(partial(_sums, how), arrays, (POSITIONS, MATRIX) * 2, (POSITIONS,) * 3)
    return (found, second, first) if turned else (found, first, second)


def _sums(how: Blocks, known: Array, reference: Array, states: Array, matrix: Array) -> tuple[Array, Array, Array]:
    """The divergence of the first from the second, and both log-partitions."""
    dtype = wide(known.dtype, reference.dtype, states.dtype, matrix.dtype)

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, gap, other_top, other_total = carry
        z = how.logits(known, how.take(reference, i)).astype(dtype)
        w = how.logits(states, how.take(matrix, i)).astype(dtype)
        difference, ok = z - w, how.known(i)
        if ok is not None:
            z, w, difference = jnp.where(ok, z, -jnp.inf), jnp.where(ok, w, -jnp.inf), jnp.where(ok, difference, 0)
        new = jnp.maximum(top, jnp.max(z, axis=1))
        e, kept = jnp.exp(z - new[:, None]), jnp.exp(top - new)
        total, gap = kept * total + jnp.sum(e, axis=1), kept * gap + jnp.sum(e * difference, axis=1)
        other = jnp.maximum(other_top, jnp.max(w, axis=1))
        more = jnp.sum(jnp.exp(w - other[:, None]), axis=1)
        return new, total, gap, other, jnp.exp(other_top - other) * other_total + more

    low, zero = jnp.full(states.shape[:1], jnp.finfo(dtype).min, dtype), jnp.zeros(states.shape[:1], dtype)
    top, total, gap, other_top, other_total = jax.lax.fori_loop(0, how.count, body, (low, zero, zero, low, zero))
    highest, other_highest = how.top(top), how.top(other_top)
    scale = jnp.exp(top - highest)
    total, gap = how.total(scale * total), how.total(scale * gap)
    other_total = how.total(jnp.exp(other_top - other_highest) * other_total)
    lse, other = highest + jnp.log(total), other_highest + jnp.log(other_total)
    return gap / total - (lse - other), lse, other


def _forward(
    how: Blocks, turned: bool, known: Array, reference: Array, states: Array, matrix: Array
) -> tuple[Array, tuple]:
    found, lse, other = _divergence(how, turned, known, reference, states, matrix)
    return found, (known, reference, states, matrix, lse, other, found)


def _backward(how: Blocks, turned: bool, kept: tuple[Array, ...], g: Array) -> tuple[None, None, Array, Array]:
    """``dw_v = g (q_v - p_v)``; turned, ``g q_v (log(q_v / p_v) - KL)``."""

    def part(
        known: Array, reference: Array, states: Array, matrix: Array, lse: Array, other: Array, found: Array, g: Array
    ) -> tuple[Array, Array]:
        def cotangent(i: Array, w: Array) -> Array:
            z = how.logits(known, how.take(reference, i)).astype(lse.dtype)
            logp, logq = z - lse[:, None], w.astype(lse.dtype) - other[:, None]
            by = jnp.exp(logq) * (logq - logp - found[:, None]) if turned else jnp.exp(logq) - jnp.exp(logp)
            return (g[:, None] * by).astype(w.dtype)

        return how.pull(states, matrix, cotangent)

    like = (*(POSITIONS, MATRIX) * 2, *(POSITIONS,) * 4)
    return None, None, *how.run(part, (*kept, g), like, (POSITIONS, MATRIX))


_kl.defvjp(_forward, _backward)
