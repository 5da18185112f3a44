"""Log-prob, log-partition and entropy of given tokens by blocks of the vocabulary, with a derivative of its own.

``[N V]`` never exists: one pass over blocks of the matrix keeps a running maximum, sum of exponentials and sum of
``e z``; the backward pass forms a block's logits again. Reverse mode only, and once: what needs forward mode or
second derivatives takes ``jaxrl.models.decoder.logits``. The method is that of levanter's and TRL's chunked heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl.models.head_blocks import MATRIX, POSITIONS, Blocks
from jaxrl.types import wide


def token_head(
    states: Float[Array, "N d"],
    matrix: Array,
    token: Int[Array, " N"],
    *,
    temperature: float | Array = 1.0,
    limit: int | None = None,
    tied: bool = True,
    block: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """``log p(token)``, the log-partition and the entropy of ``softmax(states matrix / temperature)``, all in nats.

    ``matrix`` is ``[V d]`` where ``tied`` (an embedding) and ``[d V]`` otherwise. Ids from ``limit`` on have
    probability 0; a ``token`` among them has log-prob minus infinity and no gradient. Products are accumulated, and
    results are, in at least float32; gradients come in the inputs' dtypes, that of the matrix summed over all N
    before it is rounded. ``block``: vocabulary entries at a time; memory is about ``N * block``. ``mesh``: the one
    that the arrays lie on, positions split like rows and the matrix like a parameter.
    """
    how = Blocks.of(matrix, limit, tied, block, mesh)
    return _head(how, divided(states, matrix, temperature), matrix, token.astype(jnp.int32))


def divided(states: Float[Array, "N d"], matrix: Array, temperature: float | Array) -> Float[Array, "N d"]:
    """The states over the temperature, which so has a gradient too; wide unless they match the matrix as they are."""
    plain = isinstance(temperature, int | float) and temperature == 1
    if plain and states.dtype == matrix.dtype:
        return states
    dtype = wide(states.dtype, matrix.dtype)
    return states.astype(dtype) if plain else states.astype(dtype) / jnp.asarray(temperature, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(how: Blocks, states: Array, matrix: Array, token: Array) -> tuple[Array, Array, Array]:
    return how.run(partial(_values, how), (states, matrix, token), (POSITIONS, MATRIX, POSITIONS), (POSITIONS,) * 3)


def _values(how: Blocks, states: Array, matrix: Array, token: Array) -> tuple[Array, Array, Array]:
    dtype = wide(states.dtype, matrix.dtype)
    rows = token.shape

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, energy, picked = carry
        z = how.logits(states, how.take(matrix, i))
        known = how.known(i)
        new = jnp.maximum(top, jnp.max(z if known is None else jnp.where(known, z, -jnp.inf), axis=1))
        z = z - new[:, None]
        e = jnp.exp(z) if known is None else jnp.where(known, jnp.exp(z), 0)
        total, energy = _moved(top - new, total, energy)
        total, energy = total + jnp.sum(e, axis=1), energy + jnp.sum(e * z, axis=1)
        hit = how.hit(i, token) if known is None else how.hit(i, token) & known
        found = jnp.sum(jnp.where(hit, z, 0), axis=1) + new
        return new, total, energy, jnp.where(jnp.any(hit, axis=1), found, picked)

    # the lowest finite number, whose difference to any other is no NaN
    start = (jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype), jnp.zeros(rows, dtype))
    top, total, energy, picked = jax.lax.fori_loop(0, how.count, body, (*start, jnp.full(rows, -jnp.inf, dtype)))
    highest = how.top(top)
    total, energy = (how.total(x) for x in _moved(top - highest, total, energy))
    lse = highest + jnp.log(total)
    return how.top(picked) - lse, lse, jnp.log(total) - energy / total


def _moved(by: Array, total: Array, energy: Array) -> tuple[Array, Array]:
    """``sum e^z`` and ``sum z e^z`` when ``by`` is added to every z."""
    scale = jnp.exp(by)
    return scale * total, scale * (energy + by * total)


def _forward(how: Blocks, states: Any, matrix: Any, token: Any) -> tuple[tuple[Array, Array, Array], Any]:
    out = _head(how, states.value, matrix.value, token.value)
    return out, (states.value, matrix.value, token.value, out[1], out[2])


def _backward(how: Blocks, kept: tuple[Array, ...], cotangents: tuple[Any, Any, Any]) -> tuple[Array, Array, None]:
    """``dz_v = g_logp (1[v = token] - p_v) + g_lse p_v - g_entropy p_v (log p_v + entropy)``, block by block."""
    states, matrix, token, lse, entropy = kept
    of_logp, of_lse, of_entropy = (None if isinstance(g, SymbolicZero) else g.astype(lse.dtype) for g in cotangents)
    of_logp = jnp.zeros_like(lse) if of_logp is None else jnp.where(token < how.limit, of_logp, 0)
    of_p = -of_logp if of_lse is None else of_lse - of_logp

    def part(
        states: Array, matrix: Array, token: Array, lse: Array, entropy: Array, of_logp: Array, of_p: Array, of_h: Any
    ) -> tuple[Array, Array]:
        def cotangent(i: Array, z: Array) -> Array:
            logp = z - lse[:, None]
            scale = of_p[:, None] if of_h is None else of_p[:, None] - of_h[:, None] * (logp + entropy[:, None])
            return jnp.exp(logp) * scale + jnp.where(how.hit(i, token), of_logp[:, None], 0)

        return how.pull(states, matrix, cotangent)

    arrays = (states, matrix, token, lse, entropy, of_logp, of_p, of_entropy)
    return *how.run(part, arrays, (POSITIONS, MATRIX, *(POSITIONS,) * 6), (POSITIONS, MATRIX)), None


_head.defvjp(_forward, _backward, symbolic_zeros=True)
