"""Token losses of regularisers that look at whole distributions or at change: how far a policy is from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.models.scoring import FORWARD, Scorer
from jaxrl.rl.losses import TokenLoss, counted, reference_of, tokens_counted
from jaxrl.types import Batch


@dataclass(frozen=True, kw_only=True)
class ReverseKl(TokenLoss):
    """``KL(model || base)`` of the next-token distributions at the rollouts' prefixes and temperature."""

    tag = "reverse_full"
    needs = frozenset({"reference_model"})

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return score.reverse_kl(model, reference_of(reference, "base"), batch.rows, temperature=temperature)


@dataclass(frozen=True, kw_only=True)
class NegativeEntropy(TokenLoss):
    """Minus the entropy (nats) of the distribution that each token was drawn from, its prefix taken as it is."""

    tag = "entropy"

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return -score.scores(model, batch.rows, temperature=temperature)[1]


@dataclass(frozen=True, kw_only=True)
class SquaredChange(TokenLoss):
    """Half the squared change (nats squared) of log-probs against ``ref_logps``, at temperature 1.

    Of each token's; or, where ``whole``, of the response's, spread evenly over its counted tokens.
    """

    tag = "squared_change"
    whole: bool = False

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        change = counted(logps - row.ref_logps, row)
        if not self.whole:
            return change**2 / 2
        count = tokens_counted(row, logps.dtype)
        return jnp.broadcast_to(jnp.sum(change) ** 2 / (2 * count), change.shape)

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return super().tokens(model, reference, batch, temperature=1.0, score=score)
