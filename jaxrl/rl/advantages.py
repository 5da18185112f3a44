"""Advantages: how much better a response was than its group.

Called once a rollout batch, without theta: ``(Graded, used bool[P, G, L]) -> float[P, G, 1]`` (or
``[P, G, L]`` for per-token advantages), in the reward's dtype. ``used`` marks the tokens that count:
those of kept prompts and, where truncated responses are masked, not theirs; None takes every response
token. The prompts that a filter dropped are zeroed by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pass_at_k import PassK, PassKTraining
from jaxrl.rl.pieces import registry, within
from jaxrl.rl.token_advantages import BatchWhiten, Gae
from jaxrl.rl.token_rewards import Advantage, total_reward
from jaxrl.types import Graded


@dataclass(frozen=True, kw_only=True)
class GroupZScore(Advantage):
    """``(r - mean) / (std + eps)`` within the group of one prompt (GRPO; arXiv 2402.03300, arXiv 2510.02230 Eq. 10).

    ``ddof`` 1 is the sample standard deviation of the paper and its code, which bounds ``|A|`` by
    ``(G - 1) / sqrt(G)``; ``ddof`` 0 bounds it by ``sqrt(G - 1)``. The paper prints no ``eps``, its
    code adds 1e-6. A group whose rewards are all equal has advantage exactly 0: without the special
    case ``eps`` would amplify the rounding residue of its mean.

    Raises ``ValueError`` for a group of one, which has no spread to be measured against.
    """

    tag = "group_zscore"
    least_group = 2
    ddof: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1):
            raise ValueError(f"algorithm.advantage.ddof: expected 0 or 1, got {self.ddof!r}")
        within("algorithm.advantage.eps", self.eps, 0)

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        centred, equal = _centred(total_reward(graded), self.tag)
        std = jnp.std(total_reward(graded), axis=1, ddof=self.ddof, keepdims=True)
        return jnp.where(equal, 0, centred / jnp.where(equal, 1, std + self.eps))[..., None]


@dataclass(frozen=True, kw_only=True)
class Centre(Advantage):
    """``r - mean`` within the group (Dr. GRPO; arXiv 2503.20783). Exactly 0 when all rewards are equal."""

    tag = "centre"
    least_group = 2

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        centred, equal = _centred(total_reward(graded), self.tag)
        return jnp.where(equal, 0, centred)[..., None]


def _centred(reward: Float[Array, "P G"], tag: str) -> tuple[Float[Array, "P G"], Array]:
    """Rewards minus their group's mean, and bool[P, 1]: all rewards of the group are equal."""
    if reward.shape[1] < 2:
        raise ValueError(
            f"algorithm.advantage {tag}: compares the responses of one prompt, got {reward.shape[1]} a prompt; "
            "set rollout.n to 2 or more"
        )
    equal = jnp.max(reward, axis=1, keepdims=True) == jnp.min(reward, axis=1, keepdims=True)
    return reward - jnp.mean(reward, axis=1, keepdims=True), equal


@dataclass(frozen=True, kw_only=True)
class Plain(Advantage):
    """The reward itself (REINFORCE; Williams 1992): unbiased, without a baseline."""

    tag = "reward"

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        return total_reward(graded)[..., None]


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Advantage):
    """``r_i`` minus the mean of the prompt's other rewards, ``G/(G-1) (r_i - mean)`` (RLOO; arXiv 2402.14740)."""

    tag = "leave_one_out"
    least_group = 2

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        centred, equal = _centred(total_reward(graded), self.tag)
        g = graded.reward.shape[1]
        return jnp.where(equal, 0, centred * (g / (g - 1)))[..., None]


@dataclass(frozen=True, kw_only=True)
class GreedyBaseline(Advantage):
    """``r_i`` minus the reward of the current policy's greedy response (ReMax; arXiv 2310.10505)."""

    tag = "greedy_baseline"
    needs = frozenset({"greedy_reward"})

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        reward = total_reward(graded)
        return (reward - graded.greedy_reward[:, None].astype(reward.dtype))[..., None]


@dataclass(frozen=True, kw_only=True)
class Signed(Advantage):
    """``positive`` for a correct response, ``negative`` for any other, whatever the reward (arXiv 2506.01347).

    1 and 0 is PSR, 0 and -1 NSR, lambda and -1 W-REINFORCE. Their expected gradients are one, times
    ``positive - negative``: ``grad P(correct) = -grad P(wrong)``.
    """

    tag = "signed"
    positive: float = 0.1
    negative: float = -1.0

    def __post_init__(self) -> None:
        within("algorithm.advantage.positive", self.positive, 0)
        within("algorithm.advantage.negative", self.negative, -float("inf"), 0)

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        dtype = graded.reward.dtype
        right, wrong = jnp.asarray(self.positive, dtype), jnp.asarray(self.negative, dtype)
        return jnp.where(graded.correct, right, wrong)[..., None]


ADVANTAGES = registry(
    GroupZScore,
    Centre,
    Plain,
    LeaveOneOut,
    GreedyBaseline,
    Signed,
    BatchWhiten,
    Gae,
    PassK,
    PassKTraining,
)
