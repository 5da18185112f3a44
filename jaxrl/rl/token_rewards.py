"""What an advantage is made of: the rewards of responses and of single tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import Piece
from jaxrl.types import Graded


class Advantage(Piece, ABC):
    """``(Graded, used) -> float[P, G, #L]``. ``least_group``: responses a prompt that it is defined for."""

    least_group: int = 1

    @abstractmethod
    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G #L"]: ...

    def returns(self, graded: Graded) -> Float[Array, "P G L"] | None:
        """What a critic is fitted to, where this advantage has one."""
        return None


def total_reward(graded: Graded) -> Float[Array, "P G"]:
    """The reward of a response, with what shaping and a KL in the reward add to its tokens."""
    return graded.reward if graded.token_reward is None else graded.reward + jnp.sum(graded.token_reward, axis=-1)


def token_rewards(graded: Graded) -> Float[Array, "P G L"]:
    """Rewards by token: the response's own on its last token, beside what single tokens get; 0 off the response."""
    rows = graded.rollouts.rows
    last = rows.mask() & (jnp.arange(rows.tokens.shape[-1], dtype=jnp.int32)[None, None] == rows.length[..., None] - 1)
    own = jnp.where(last, graded.reward[..., None], 0)
    return own if graded.token_reward is None else own + jnp.where(rows.mask(), graded.token_reward, 0)
