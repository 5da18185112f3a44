"""How the next token is drawn from logits.

A strategy is a frozen dataclass: ``strategy(logits f32[B V], keys [B]) -> (token i32[B],
logp f32[B])``. ``logp`` is the log-probability (nats) under the distribution actually sampled,
after temperature and truncation. Every draw is an inverse-CDF look-up of one uniform number a
row, so a row's token depends on its own logits and key alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token; ties go to the lowest id. ``logp`` is under the untempered model."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, _logp_of(jax.nn.log_softmax(logits, axis=-1), token)


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """The whole distribution at a temperature; 1.0 is the policy itself."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.value)

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        return _draw(logits / self.value, keys)


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Only the ``k`` most likely tokens (with those tied to the last)."""

    k: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if self.k < 1:
            raise ValueError(f"top_k: expected k >= 1, got {self.k}")

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        logits = logits / self.temperature
        last = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))[0][:, -1:]
        return _draw(jnp.where(logits >= last, logits, -jnp.inf), keys)


@dataclass(frozen=True, kw_only=True)
class TopP:
    """Nucleus sampling: the smallest set of most likely tokens that holds mass ``p`` (Holtzman et al., 2020)."""

    p: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if not 0 < self.p <= 1:
            raise ValueError(f"top_p: expected 0 < p <= 1, got {self.p}")

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        logits = logits / self.temperature
        if self.p >= 1:
            return _draw(logits, keys)
        probs = jax.nn.softmax(logits, axis=-1)
        return _draw(jnp.where(probs >= nucleus_edge(probs, self.p)[:, None], logits, -jnp.inf), keys)


Strategy = Greedy | Temperature | TopK | TopP
STRATEGIES: dict[str, type[Strategy]] = {
    "greedy": Greedy,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
}


def nucleus_edge(probs: Float[Array, "B V"], p: float) -> Float[Array, " B"]:
    """Largest probability ``e`` with ``sum(probs[probs >= e]) >= p``.

    Found without a sort: non-negative floats are ordered as their bit patterns are, so a bisection
    over the bits ends at the exact edge.
    """
    bits = jnp.int64 if probs.dtype == jnp.float64 else jnp.int32
    as_bits = jax.lax.bitcast_convert_type(probs, bits)
    target = jnp.minimum(p, jnp.sum(probs, axis=-1))

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span  # mass(>= low) >= p > mass(>= high)
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(as_bits >= middle[:, None], probs, 0), axis=-1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    span = (jnp.zeros(probs.shape[0], bits), jnp.max(as_bits, axis=-1) + 1)
    low, _ = jax.lax.fori_loop(0, jnp.iinfo(bits).bits - 1, halve, span)
    return jax.lax.bitcast_convert_type(low, probs.dtype)


def _draw(logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
    logp = jax.nn.log_softmax(logits, axis=-1)
    cdf = jnp.cumsum(jnp.exp(logp), axis=-1)
    uniform = jax.vmap(lambda k: jax.random.uniform(k, (), logp.dtype))(keys)
    # Scaled by the last entry, since rounding may leave it a little off 1; bounded by the first index
    # that reaches it, so that an impossible token at the end is never drawn.
    total = cdf[:, -1:]
    token = jnp.sum(cdf <= uniform[:, None] * total, axis=-1, dtype=jnp.int32)
    token = jnp.minimum(token, jnp.sum(cdf < total, axis=-1, dtype=jnp.int32))
    return token, _logp_of(logp, token)


def _logp_of(logp: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]


def _check_temperature(value: float) -> None:
    if not value > 0:
        raise ValueError(f"temperature: expected a number above 0, got {value}; use the greedy strategy for argmax")
