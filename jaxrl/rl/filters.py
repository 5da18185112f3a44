"""Which prompts may teach. A filter never changes a shape: dropped prompts get weight 0.

A *prefilter* sees only the greedy results, before any rollout is paid for. A *filter* sees the
graded rollouts. Both decide by correctness, never by reward (a shaped reward can spread within a
group that is all wrong).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded


class Prefilter(Piece, ABC):
    """``greedy_correct bool[P] -> bool[P]``, True: sample this prompt."""

    @abstractmethod
    def __call__(self, greedy_correct: Bool[Array, " P"]) -> Bool[Array, " P"]: ...


class Filter(Piece, ABC):
    """``Graded -> bool[P]``, True: this prompt's rollouts train the policy."""

    @abstractmethod
    def __call__(self, graded: Graded) -> Bool[Array, " P"]: ...


@dataclass(frozen=True, kw_only=True)
class SampleAll(Prefilter):
    """Every prompt is sampled; only the shape of ``greedy_correct`` is read."""

    tag = "all"

    def __call__(self, greedy_correct: Bool[Array, " P"]) -> Bool[Array, " P"]:
        return jnp.ones(jnp.shape(greedy_correct), bool)


@dataclass(frozen=True, kw_only=True)
class SampleGreedyFails(Prefilter):
    """Only prompts whose greedy response is wrong (SELF; arXiv 2510.02230 Eq. 9).

    The indicator as printed keeps the solved prompts; the text, the released code and this piece
    keep the unsolved ones.
    """

    tag = "greedy_fails"
    needs = frozenset({"greedy_correct"})

    def __call__(self, greedy_correct: Bool[Array, " P"]) -> Bool[Array, " P"]:
        return ~jnp.asarray(greedy_correct)


@dataclass(frozen=True, kw_only=True)
class KeepAll(Filter):
    """Every sampled prompt trains."""

    tag = "all"

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return jnp.ones(graded.uid.shape, bool)


@dataclass(frozen=True, kw_only=True)
class KeepGreedyFails(Filter):
    """SELF's rule after sampling: same gradient as the prefilter, but every prompt's rollouts are paid for.

    For comparisons at equal generated tokens, and for denominators that count the dropped rollouts.
    """

    tag = "greedy_fails"
    needs = frozenset({"greedy_correct"})

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return ~graded.greedy_correct


@dataclass(frozen=True, kw_only=True)
class Mixed(Filter):
    """``0 < #correct < G``: the groups that carry a binary-reward signal (arXiv 2503.14476)."""

    tag = "mixed"

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return jnp.any(graded.correct, axis=1) & ~jnp.all(graded.correct, axis=1)


@dataclass(frozen=True, kw_only=True)
class SolveRate(Filter):
    """Prompts solved by a share of at most ``max`` of their rollouts (a probability)."""

    tag = "solve_rate"
    max: float

    def __post_init__(self) -> None:
        within("algorithm.keep.max", self.max, 0, 1)

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        # compared as counts: a share such as 3/10 is not exact in binary
        return jnp.sum(graded.correct, axis=1) <= int(self.max * graded.correct.shape[1] + 1e-9)


PREFILTERS = registry(SampleAll, SampleGreedyFails)
FILTERS = registry(KeepAll, KeepGreedyFails, Mixed, SolveRate)
