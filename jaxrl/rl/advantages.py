"""Advantages: how much better a response was than its group.

Called once a rollout batch, without theta: ``(Graded, used bool[P, G, L]) -> float[P, G, 1]`` (or
``[P, G, L]`` for per-token advantages), in the reward's dtype. ``used`` marks the tokens that count:
those of kept prompts and, where truncated responses are masked, not theirs; None takes every response
token. The prompts that a filter dropped are zeroed by the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded


class Advantage(Piece, ABC):
    """``(Graded, used) -> float[P, G, #L]``."""

    @abstractmethod
    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G #L"]: ...

    def returns(self, graded: Graded) -> Float[Array, "P G L"] | None:
        """What a critic is fitted to, where this advantage has one."""
        return None


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

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        centred, equal = _centred(total_reward(graded), self.tag)
        return jnp.where(equal, 0, centred)[..., None]


def total_reward(graded: Graded) -> Float[Array, "P G"]:
    """The reward of a response, with what shaping and a KL in the reward add to its tokens."""
    return graded.reward if graded.token_reward is None else graded.reward + jnp.sum(graded.token_reward, axis=-1)


def token_rewards(graded: Graded) -> Float[Array, "P G L"]:
    """Rewards by token: the response's own on its last token, beside what single tokens get; 0 off the response."""
    rows = graded.rollouts.rows
    last = rows.mask() & (jnp.arange(rows.tokens.shape[-1])[None, None] == rows.length[..., None] - 1)
    own = jnp.where(last, graded.reward[..., None], 0)
    return own if graded.token_reward is None else own + jnp.where(rows.mask(), graded.token_reward, 0)


def _centred(reward: Float[Array, "P G"], tag: str) -> tuple[Float[Array, "P G"], Array]:
    """Rewards minus their group's mean, and bool[P, 1]: all rewards of the group are equal."""
    if reward.shape[1] < 2:
        raise ValueError(
            f"algorithm.advantage {tag}: compares the responses of one prompt, got {reward.shape[1]} a prompt; "
            "set rollout.n to 2 or more"
        )
    equal = jnp.max(reward, axis=1, keepdims=True) == jnp.min(reward, axis=1, keepdims=True)
    return reward - jnp.mean(reward, axis=1, keepdims=True), equal


ADVANTAGES = registry(GroupZScore, Centre)
