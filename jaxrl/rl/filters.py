"""Which prompts may teach. A filter never changes a shape: dropped prompts get weight 0.

A *prefilter* acts before any rollout is paid for and sees only the greedy results and chance. A
*filter* sees the graded rollouts. Both decide by correctness, never by reward (a shaped reward can
spread within a group that is all wrong); the one exception says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded


class Seen(NamedTuple):
    """What is known of a step's prompts before any rollout.

    ``chance`` is uniform in [0, 1) a prompt, ``matched`` the number of prompts that another run kept at this step; both
    are there for pieces that need them.
    """

    greedy_correct: Bool[Array, " P"]  # only its shape is read by pieces that do not need it
    chance: Float[Array, " P"] | None
    matched: Int[Array, ""] | None


class Prefilter(Piece, ABC):
    """``greedy_correct bool[P] -> bool[P]``, True: sample this prompt. See ``Seen`` for the other arguments."""

    run: str | None = None  # the run folder whose kept prompts are matched

    def __call__(
        self,
        greedy_correct: Bool[Array, " P"],
        chance: Float[Array, " P"] | None = None,
        matched: Int[Array, ""] | None = None,
    ) -> Bool[Array, " P"]:
        return self.choose(Seen(jnp.asarray(greedy_correct), chance, matched))

    @abstractmethod
    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        """What ``__call__`` answers."""


class Filter(Piece, ABC):
    """``Graded -> bool[P]``, True: this prompt's rollouts train the policy."""

    run: str | None = None  # as for a prefilter
    drops: bool = True  # False: every sampled prompt is kept

    @abstractmethod
    def __call__(self, graded: Graded) -> Bool[Array, " P"]: ...


@dataclass(frozen=True, kw_only=True)
class SampleAll(Prefilter):
    """Every prompt is sampled."""

    tag = "all"

    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        return jnp.ones(seen.greedy_correct.shape, bool)


@dataclass(frozen=True, kw_only=True)
class SampleGreedyFails(Prefilter):
    """Only prompts whose greedy response is wrong (SELF; arXiv 2510.02230 Eq. 9).

    The indicator as printed keeps the solved prompts; the text, the released code and this piece
    keep the unsolved ones.
    """

    tag = "greedy_fails"
    needs = frozenset({"greedy_correct"})

    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        return ~seen.greedy_correct


@dataclass(frozen=True, kw_only=True)
class SampleGreedySucceeds(Prefilter):
    """Only prompts whose greedy response is right: Eq. 9 of arXiv 2510.02230 as printed, a control."""

    tag = "greedy_succeeds"
    needs = frozenset({"greedy_correct"})

    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        return seen.greedy_correct


@dataclass(frozen=True, kw_only=True)
class SampleRandom(Prefilter):
    """Each prompt with probability ``rate``, whatever its answers: drift of a filter without its choice."""

    tag = "random"
    needs = frozenset({"chance"})
    rate: float

    def __post_init__(self) -> None:
        within("algorithm.prefilter.rate", self.rate, 0, 1)

    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        return seen.chance < self.rate


@dataclass(frozen=True, kw_only=True)
class SampleMatched(Prefilter):
    """As many prompts as the run in folder ``run`` kept at the same step, drawn at random.

    With ``no_kept: skip`` both runs take the same optimiser steps too.
    """

    tag = "matched"
    needs = frozenset({"chance", "matched"})
    run: str

    def choose(self, seen: Seen) -> Bool[Array, " P"]:
        return smallest(seen.chance, seen.matched)


@dataclass(frozen=True, kw_only=True)
class KeepAll(Filter):
    """Every sampled prompt trains."""

    tag = "all"
    drops = False

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
class KeepGreedySucceeds(Filter):
    """Prompts whose greedy response is right, after sampling: the inverse filter."""

    tag = "greedy_succeeds"
    needs = frozenset({"greedy_correct"})

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return jnp.asarray(graded.greedy_correct)


@dataclass(frozen=True, kw_only=True)
class Mixed(Filter):
    """``0 < #correct < G``: the groups that carry a binary-reward signal (DAPO; arXiv 2503.14476)."""

    tag = "mixed"

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return jnp.any(graded.correct, axis=1) & ~jnp.all(graded.correct, axis=1)


@dataclass(frozen=True, kw_only=True)
class RewardSpread(Filter):
    """Groups whose rewards are not all equal: drops from every denominator what has advantage 0.

    By reward, so under a shaped one a group that is all wrong may stay, which ``mixed`` drops.
    """

    tag = "reward_spread"

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return jnp.max(graded.reward, axis=1) > jnp.min(graded.reward, axis=1)


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


@dataclass(frozen=True, kw_only=True)
class KeepRandom(Filter):
    """Each prompt with probability ``rate``, after sampling: at the generated tokens of a run without a filter."""

    tag = "random"
    needs = frozenset({"chance"})
    rate: float

    def __post_init__(self) -> None:
        within("algorithm.keep.rate", self.rate, 0, 1)

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return graded.chance < self.rate


@dataclass(frozen=True, kw_only=True)
class KeepMatched(Filter):
    """As many prompts as the run in folder ``run`` kept at the same step, drawn at random after sampling."""

    tag = "matched"
    needs = frozenset({"chance", "matched"})
    run: str

    def __call__(self, graded: Graded) -> Bool[Array, " P"]:
        return smallest(graded.chance, graded.matched)


def smallest(chance: Float[Array, " P"], count: Int[Array, ""]) -> Bool[Array, " P"]:
    """The ``count`` entries with the smallest numbers, the first of equal ones."""
    chance = jnp.asarray(chance)
    rank = jnp.argsort(jnp.argsort(chance, stable=True), stable=True)
    return rank < jnp.asarray(count, rank.dtype)


PREFILTERS = registry(SampleAll, SampleGreedyFails, SampleGreedySucceeds, SampleRandom, SampleMatched)
FILTERS = registry(
    KeepAll, KeepGreedyFails, KeepGreedySucceeds, Mixed, RewardSpread, SolveRate, KeepRandom, KeepMatched
)
