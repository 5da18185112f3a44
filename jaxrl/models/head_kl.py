"""The KL divergence between two heads by blocks of the vocabulary, with a derivative of its own.

As in ``jaxrl.models.head``: ``[N V]`` never exists, one pass forward, one backward, reverse mode only.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.models.head import Layout, divided, pull
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
) -> Float[Array, " N"]:
    """``sum_v p_v log(p_v / q_v)``, nats: p of states ``known`` under ``reference``, q of ``states`` under ``matrix``.

    Matrices are ``[V d]`` where ``tied``, else ``[d V]``, both alike. No gradient reaches ``known`` and
    ``reference``. Dtypes, ``limit`` and ``block`` as for ``token_head``; memory is about twice that.
    """
    how = Layout.of(matrix, limit, tied, block)
    first = jax.lax.stop_gradient((divided(known, reference, temperature), reference))
    return _kl(how, *first, divided(states, matrix, temperature), matrix)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(how: Layout, known: Array, reference: Array, states: Array, matrix: Array) -> Array:
    return _sums(how, known, reference, states, matrix)[0]


def _sums(how: Layout, known: Array, reference: Array, states: Array, matrix: Array) -> tuple[Array, Array, Array]:
    """The divergence and both log-partitions."""
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
    lse, other = top + jnp.log(total), other_top + jnp.log(other_total)
    return gap / total - (lse - other), lse, other


def _forward(how: Layout, known: Array, reference: Array, states: Array, matrix: Array) -> tuple[Array, tuple]:
    found, lse, other = _sums(how, known, reference, states, matrix)
    return found, (known, reference, states, matrix, lse, other)


def _backward(how: Layout, kept: tuple[Array, ...], g: Array) -> tuple[None, None, Array, Array]:
    """``dw_v = g (q_v - p_v)``."""
    known, reference, states, matrix, lse, other = kept
    dtype, mine = lse.dtype, wide(states.dtype, matrix.dtype)

    def cotangent(i: Array, w: Array) -> Array:
        z = how.logits(known, how.take(reference, i)).astype(dtype)
        gap = jnp.exp(w.astype(dtype) - other[:, None]) - jnp.exp(z - lse[:, None])
        return (g[:, None] * gap).astype(mine)

    return None, None, *pull(how, states, matrix, cotangent)


_kl.defvjp(_forward, _backward)
