"""How the next token is drawn from logits.

A strategy is a frozen dataclass: ``strategy(logits f32[B V], uniform f32[B]) -> (token i32[B],
logp f32[B])``, the second argument being one number in [0, 1) a row. ``logp`` is the
log-probability (nats) under the distribution actually sampled, after temperature and truncation.
Every draw is an inverse-CDF look-up, so a row's token depends on its own logits and number alone.
``strategy.process(logits)`` are the logits of the distribution, minus infinity off its support.

A strategy is a pytree whose numbers are leaves: a program that takes one as an argument serves every
temperature, ``k`` and ``p`` of its class. Holding Python numbers it is comparable and hashable, and its
values are checked; arrays and tracers are taken as they are.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.types import container

BLOCK = 128  # ids whose mass is summed together before one of them is looked up


@container
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


@container
@dataclass(frozen=True, kw_only=True)
class Temperature(_Sampled):
    """The whole distribution at a temperature; 1.0 is the policy itself."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.value)

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return _over(logits, self.value)


@container
@dataclass(frozen=True, kw_only=True)
class TopK(_Sampled):
    """Only the ``k`` most likely tokens (with those tied to the last)."""

    k: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_k(self.k)

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return _over(keep_top_k(logits, self.k), self.temperature)


@container
@dataclass(frozen=True, kw_only=True)
class TopP(_Sampled):
    """Nucleus sampling: the smallest set of most likely tokens that holds mass ``p`` (Holtzman et al., 2020).

    Tokens tied to the least likely of the set belong to it.
    """

    p: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_p(self.p)

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return keep_top_p(_over(logits, self.temperature), self.p)


@container
@dataclass(frozen=True, kw_only=True)
class TopKTopP(_Sampled):
    """The nucleus of mass ``p`` of the ``k`` most likely tokens, renormalised, at a temperature."""

    k: int
    p: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_k(self.k)
        _check_p(self.p)

    def process(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return keep_top_p(_over(keep_top_k(logits, self.k), self.temperature), self.p)


Strategy = Greedy | Temperature | TopK | TopP | TopKTopP
STRATEGIES: dict[str, type[Strategy]] = {
    "greedy": Greedy,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "top_k_top_p": TopKTopP,
}


def keep_top_k(logits: Float[Array, "B V"], k: int | Int[Array, ""]) -> Float[Array, "B V"]:
    """``logits``, minus infinity below the ``k``-th largest of a row; ``k`` beyond the vocabulary keeps all.

    The edge is found by counting: 32 passes over the logits (64 in double precision), whatever ``k``.
    """
    key = _ordered(logits)
    count = jnp.minimum(jnp.asarray(k, jnp.int32), logits.shape[-1])

    def enough(middle: Array) -> Bool[Array, " B"]:
        return jnp.sum(key >= middle[:, None], axis=-1, dtype=jnp.int32) >= count

    edge = _bisect(enough, jnp.min(key, axis=-1), jnp.max(key, axis=-1))
    # asked this way round, logits that are not numbers stay to show in the log-probability
    return jnp.where(logits < _unordered(edge, logits.dtype)[:, None], -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "B V"], p: float | Float[Array, ""]) -> Float[Array, "B V"]:
    """``logits``, minus infinity off the nucleus of mass ``p``; 1 keeps all."""
    probs = jax.nn.softmax(logits, axis=-1)
    p = jnp.asarray(p, logits.dtype)
    edge = jnp.where(p >= 1, 0, nucleus_edge(probs, p))  # the probabilities may sum to more than 1 by rounding
    return jnp.where(probs < edge[:, None], -jnp.inf, logits)


def nucleus_edge(probs: Float[Array, "B V"], p: float | Float[Array, ""]) -> Float[Array, " B"]:
    """Largest probability ``e`` with ``sum(probs[probs >= e]) >= p``, without a sort."""
    key = _ordered(probs)
    target = jnp.minimum(jnp.asarray(p, probs.dtype), jnp.sum(probs, axis=-1))

    def enough(middle: Array) -> Bool[Array, " B"]:
        return jnp.sum(jnp.where(key >= middle[:, None], probs, 0), axis=-1) >= target

    return _unordered(_bisect(enough, jnp.zeros_like(key[:, 0]), jnp.max(key, axis=-1)), probs.dtype)


def _bisect(
    enough: Callable[[Array], Bool[Array, " B"]], low: Int[Array, " B"], high: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Largest integer from ``low`` to ``high`` of each row that is ``enough``, as ``low`` is and none above another that is not.

    A fixed number of passes: a row costs and gives the same whatever its neighbours.
    """

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span  # low is enough, and high + 1 is not
        middle = (low | high) - ((low ^ high) >> 1)  # the mean rounded up; a plain sum overflows
        found = enough(middle)
        return jnp.where(found, middle, low), jnp.where(found, high, middle - 1)

    return jax.lax.fori_loop(0, jnp.iinfo(low.dtype).bits, halve, (low, high))[0]


def _ordered(values: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Integers in the order of the floats: their bits, those of negative ones but the sign turned over."""
    bits = jax.lax.bitcast_convert_type(values, _bits(values.dtype))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _unordered(key: Int[Array, "*n"], dtype: Any) -> Float[Array, "*n"]:
    """The inverse of ``_ordered``."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.iinfo(key.dtype).max, key), dtype)


def _bits(dtype: Any) -> Any:
    return jnp.int64 if dtype == jnp.float64 else jnp.int32


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


def _over(logits: Float[Array, "B V"], temperature: Any) -> Float[Array, "B V"]:
    return logits / jnp.asarray(temperature, logits.dtype)


def _check_temperature(value: Any) -> None:
    if isinstance(value, numbers.Real) and not 0 < value < math.inf:
        raise ValueError(f"temperature: expected a number above 0, got {value}; use the greedy strategy for argmax")


def _check_k(k: Any) -> None:
    if isinstance(k, numbers.Real) and not (isinstance(k, numbers.Integral) and k >= 1):
        raise ValueError(f"top_k: expected an integer k >= 1, got {k}")


def _check_p(p: Any) -> None:
    if isinstance(p, numbers.Real) and not 0 < p <= 1:
        raise ValueError(f"top_p: expected 0 < p <= 1, got {p}")
