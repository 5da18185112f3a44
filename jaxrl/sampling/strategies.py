"""How the next token is drawn from logits.

A strategy is a frozen dataclass: ``strategy(logits f32[B V], uniform f32[B]) -> (token i32[B],
logp f32[B])``, the second argument being one number in [0, 1) a row. ``logp`` is the
log-probability (nats) under the distribution actually sampled, after temperature and truncation.
Every draw is an inverse-CDF look-up, so a row's token depends on its own logits and number alone.
``strategy.process(logits)`` are the logits of the distribution, minus infinity off its support.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128  # ids whose mass is summed together before one of them is looked up


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token; ties go to the lowest id. ``logp`` is under the untempered model."""

    def __call__(self, logits: Float[Array, "B V"], uniform: Float[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, -jax.nn.logsumexp(logits - jnp.max(logits, axis=-1, keepdims=True), axis=-1)


class _Sampled(ABC):
    """A strategy that draws from the softmax of ``process(logits)``."""

    @abstractmethod
    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]: ...

    def __call__(self, logits: Float[Array, "B V"], uniform: Float[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
        return inverse_cdf(self.process(logits), uniform)


@dataclass(frozen=True, kw_only=True)
class Temperature(_Sampled):
    """The whole distribution at a temperature; 1.0 is the policy itself."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.value)

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return logits / self.value


@dataclass(frozen=True, kw_only=True)
class TopK(_Sampled):
    """Only the ``k`` most likely tokens (with those tied to the last)."""

    k: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if self.k < 1:
            raise ValueError(f"top_k: expected k >= 1, got {self.k}")

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        last = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))[0][:, -1:]
        return jnp.where(logits >= last, logits, -jnp.inf) / self.temperature


@dataclass(frozen=True, kw_only=True)
class TopP(_Sampled):
    """Nucleus sampling: the smallest set of most likely tokens that holds mass ``p`` (Holtzman et al., 2020).

    Tokens tied to the least likely of the set belong to it.
    """

    p: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if not 0 < self.p <= 1:
            raise ValueError(f"top_p: expected 0 < p <= 1, got {self.p}")

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        logits = logits / self.temperature
        if self.p >= 1:
            return logits
        probs = jax.nn.softmax(logits, axis=-1)
        return jnp.where(probs >= nucleus_edge(probs, self.p)[:, None], logits, -jnp.inf)


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


def inverse_cdf(
    logits: Float[Array, "B V"], uniform: Float[Array, " B"], block: int = BLOCK
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The token whose interval of the CDF (in id order) holds ``uniform``, and its log-probability in nats.

    Mass is summed by blocks of ids, then within the chosen block: a fifth of the time of one prefix
    sum over the vocabulary. A token without mass (logit minus infinity) is never returned: rounding
    of a parallel prefix sum does move the CDF where no mass is, so membership is tested by itself.
    """
    rows, vocab = logits.shape
    top = jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(logits - top)
    mass = jnp.pad(mass, [(0, 0), (0, -vocab % block)]).reshape(rows, -1, block)
    block_mass = jnp.sum(mass, axis=-1)
    total = jnp.sum(block_mass, axis=-1)
    target = uniform * total
    which, below = _first_above(block_mass, target)
    inside, _ = _first_above(jnp.take_along_axis(mass, which[:, None, None], axis=1)[:, 0], target - below)
    # only logits that are NaN reach the padding; their log-probability says so
    token = jnp.minimum(which * block + inside, vocab - 1)
    return token, _pick(logits, token) - top[:, 0] - jnp.log(total)


def _first_above(mass: Float[Array, "B n"], target: Float[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
    """First index with mass whose prefix sum exceeds ``target`` (else the last with mass); the sum before it."""
    prefix = jnp.cumsum(mass, axis=-1)
    some = mass > 0
    hit = some & (prefix > target[:, None])
    last = mass.shape[-1] - 1 - jnp.argmax(some[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)
    before = jnp.where(index > 0, _pick(prefix, jnp.maximum(index - 1, 0)), jnp.zeros((), mass.dtype))
    return index, before


def _pick(values: Float[Array, "B V"], index: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _check_temperature(value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"temperature: expected a number above 0, got {value}; use the greedy strategy for argmax")
