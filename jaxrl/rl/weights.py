"""Loss weights: how per-token losses add up to the loss of one optimiser mini-batch.

``(mask bool[P, G, L], keep bool[P]) -> float[P, G, L]``, fixed without theta, zero off the mask and
on dropped prompts. All normalisation happens here, so that the loss is a plain sum over rows
whatever the micro-batches. ``over`` says what the denominator counts:

- ``kept``: the rollouts of kept prompts, so a filter never shrinks the step;
- ``all``: every rollout of the mini-batch, dropped ones included;
- ``prompts``: as ``kept``, then times the kept share of the mini-batch's prompts. This is the
  released SELF code, whose denominator stays at the mini-batch of 64 prompts.

Rows without counted tokens are not sequences and enter no denominator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import Piece, one_of, registry, within

OVER = ("kept", "all", "prompts")


@dataclass(frozen=True, kw_only=True)
class Weights(Piece, ABC):
    """``(mask, keep) -> float[P, G, L]`` in the default float dtype."""

    over: str = "kept"

    def __post_init__(self) -> None:
        one_of("algorithm.weights.over", self.over, OVER)

    def __call__(self, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Float[Array, "P G L"]:
        used = mask & keep[:, None, None]
        share = self.share(used, mask if self.over == "all" else used)
        if self.over == "prompts":
            share = share * jnp.mean(keep, dtype=share.dtype)
        return jnp.where(used, share, 0)

    @abstractmethod
    def share(self, used: Bool[Array, "P G L"], counted: Bool[Array, "P G L"]) -> Float[Array, "#P #G 1"]:
        """Weight of a used token, given the tokens that the denominator counts."""


@dataclass(frozen=True, kw_only=True)
class TokenMean(Weights):
    """The mean over all tokens of the mini-batch: long responses weigh more (DAPO, verl's default)."""

    tag = "token_mean"

    def share(self, used: Bool[Array, "P G L"], counted: Bool[Array, "P G L"]) -> Float[Array, "1 1 1"]:
        return 1 / _count(counted, axis=(0, 1, 2))


@dataclass(frozen=True, kw_only=True)
class SequenceMeanTokenMean(Weights):
    """Mean over a response's tokens, then over responses (GRPO as first published)."""

    tag = "sequence_mean_token_mean"

    def share(self, used: Bool[Array, "P G L"], counted: Bool[Array, "P G L"]) -> Float[Array, "P G 1"]:
        return 1 / (_sequences(counted) * _count(used, axis=2))


@dataclass(frozen=True, kw_only=True)
class SequenceMeanTokenSum(Weights):
    """Sum over a response's tokens, mean over responses (arXiv 2510.02230 Eq. 11)."""

    tag = "sequence_mean_token_sum"

    def share(self, used: Bool[Array, "P G L"], counted: Bool[Array, "P G L"]) -> Float[Array, "1 1 1"]:
        return 1 / _sequences(counted)


@dataclass(frozen=True, kw_only=True)
class SequenceMeanTokenSumNorm(Weights):
    """Token sum over a constant ``length`` (tokens), mean over responses (Dr. GRPO; arXiv 2503.20783)."""

    tag = "sequence_mean_token_sum_norm"
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algorithm.weights.length", self.length, 1)

    def share(self, used: Bool[Array, "P G L"], counted: Bool[Array, "P G L"]) -> Float[Array, "1 1 1"]:
        return 1 / (_sequences(counted) * self.length)


def _count(mask: Bool[Array, "P G L"], axis: tuple[int, ...] | int) -> Array:
    """How many are set, at least 1 (an empty mask has only zero weights to normalise)."""
    return jnp.maximum(jnp.sum(mask, axis=axis, keepdims=True), 1).astype(jnp.result_type(float))


def _sequences(mask: Bool[Array, "P G L"]) -> Float[Array, "1 1 1"]:
    return _count(jnp.any(mask, axis=2, keepdims=True), axis=(0, 1, 2))


WEIGHTS = registry(TokenMean, SequenceMeanTokenMean, SequenceMeanTokenSum, SequenceMeanTokenSumNorm)
