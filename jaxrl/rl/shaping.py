"""Shaping: rewards of single tokens beside what the verdict pays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded


class Shaping(Piece, ABC):
    """``(Graded, mask bool[P, G, L]) -> float[P, G, L]``, added to the rewards of tokens, before any advantage."""

    @abstractmethod
    def __call__(self, graded: Graded, mask: Bool[Array, "P G L"]) -> Float[Array, "P G L"]: ...


@dataclass(frozen=True, kw_only=True)
class Overlong(Shaping):
    """Soft punishment of long responses, on their last token (DAPO; arXiv 2503.14476 Eq. 13).

    0 up to ``limit - cache`` tokens, falling linearly to -1 at ``limit`` tokens, -1 beyond. The end-of-sequence token
    counts. Empty slots get nothing.
    """

    tag = "overlong"
    limit: int
    cache: int

    def __post_init__(self) -> None:
        within("algorithm.shaping.limit", self.limit, 1)
        within("algorithm.shaping.cache", self.cache, 1, self.limit)

    def __call__(self, graded: Graded, mask: Bool[Array, "P G L"]) -> Float[Array, "P G L"]:
        rows = graded.rollouts.rows
        length = rows.response_length().astype(graded.reward.dtype)
        amount = -jnp.clip((length - (self.limit - self.cache)) / self.cache, 0, 1)
        last = jnp.arange(mask.shape[-1], dtype=jnp.int32)[None, None] == rows.length[..., None] - 1
        return jnp.where(last & rows.mask(), amount[..., None], 0)


SHAPING = registry(Overlong)
