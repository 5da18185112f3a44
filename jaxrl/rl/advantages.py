"""Advantages: how much better a response was than its group.

Called once a rollout batch, without theta: ``Graded -> float[P, G, 1]`` (or ``[P, G, L]`` for
per-token advantages), in the reward's dtype. The prompts that a filter dropped are zeroed by the
caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded


class Advantage(Piece, ABC):
    """``Graded -> float[P, G, #L]``."""

    @abstractmethod
    def __call__(self, graded: Graded) -> Float[Array, "P G #L"]: ...


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

    def __call__(self, graded: Graded) -> Float[Array, "P G 1"]:
        centred, equal = _centred(graded.reward, self.tag)
        std = jnp.std(graded.reward, axis=1, ddof=self.ddof, keepdims=True)
        return jnp.where(equal, 0, centred / jnp.where(equal, 1, std + self.eps))[..., None]


@dataclass(frozen=True, kw_only=True)
class Centre(Advantage):
    """``r - mean`` within the group (Dr. GRPO; arXiv 2503.20783). Exactly 0 when all rewards are equal."""

    tag = "centre"

    def __call__(self, graded: Graded) -> Float[Array, "P G 1"]:
        centred, equal = _centred(graded.reward, self.tag)
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


ADVANTAGES = registry(GroupZScore, Centre)
