"""The critic of an algorithm whose advantages need values: what it is fitted to, and how."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.losses import ValueLoss
from jaxrl.rl.optimiser import Optimiser
from jaxrl.rl.pieces import one_of, within
from jaxrl.types import Batch, Graded, Term

TRUNKS = ("own", "shared")


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A value head on a trunk of its own or on the policy's (PPO; arXiv 1707.06347).

    - ``trunk``: ``own`` starts from the base model and has an ``optimiser`` of its own; ``shared`` is one more vector
      on the policy, fitted by the policy's optimiser through ``coef`` times the value loss (``optimiser`` is not used,
      and must be left out).
    - ``clip``: how far a value may leave its old one before its loss stops falling; None never.
    - ``warmup``: rollout batches that fit the critic alone before the policy moves (``own`` only: on a shared trunk
      fitting values moves the policy).

    A new critic says 0 everywhere. Raises ``ValueError`` for values out of range.
    """

    trunk: str = "own"
    optimiser: Optimiser | None = None
    coef: float = 1.0
    clip: float | None = 0.2
    warmup: int = 0

    def __post_init__(self) -> None:
        one_of("algorithm.critic.trunk", self.trunk, TRUNKS)
        within("algorithm.critic.coef", self.coef, 0)
        within("algorithm.critic.clip", self.clip, 0)
        within("algorithm.critic.warmup", self.warmup, 0)
        if self.shared and self.warmup:
            raise ValueError(
                "algorithm.critic.warmup: fitting values on a shared trunk moves the policy; use trunk: own, or 0"
            )
        if self.shared and self.optimiser is not None:
            raise ValueError(
                "algorithm.critic.optimiser: a shared trunk is stepped by the policy's optimiser; leave it out"
            )
        if self.optimiser is not None and self.optimiser.packing is not None:
            raise ValueError("algorithm.critic.optimiser.packing: a critic scores rows as they are; leave it out")

    @property
    def shared(self) -> bool:
        return self.trunk == "shared"

    @property
    def loss(self) -> ValueLoss:
        return ValueLoss(clip=self.clip)

    def term(self, graded: Graded, returns: Float[Array, "P G L"], mask: Bool[Array, "P G L"]) -> Term:
        """``coef`` times the mean over counted tokens of the value loss."""
        width = mask.shape[-1]
        count = jnp.maximum(jnp.sum(mask), 1).astype(returns.dtype)
        weight = jnp.where(mask, self.coef / count, 0)
        blank = jnp.zeros((weight.size // width, width), returns.dtype)
        batch = Batch(
            rows=graded.rollouts.rows.flat(),
            advantage=blank,
            old_logps=blank,
            weight=weight.reshape(-1, width),
            returns=returns.reshape(-1, width),
            old_values=graded.values.reshape(-1, width),
        )
        return Term(batch, self.loss)


def own_optimiser(critic: Critic | None) -> Optimiser:
    """Of a critic on its own trunk: AdamW at 1e-5 unless another was given."""
    return Optimiser(lr=1e-5) if critic is None or critic.optimiser is None else critic.optimiser
