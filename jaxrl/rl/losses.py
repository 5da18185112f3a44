"""Token losses: what one counted token adds to the loss, before its weight.

A loss is a function of one row, ``(logps float[L], row) -> float[L]``, where ``row`` is a ``Batch``
without its leading axis: it cannot see other rows, which is what makes micro-batches and the
gradient kernel exact. ``tokens`` lifts it to a batch; a loss that needs more than the log-probs of
its tokens (whole distributions, a reference model) overrides ``tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.mean import Mean
from jaxrl.models.scoring import FORWARD, Scorer
from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Batch, wide


class TokenLoss(Piece):
    """A loss a token, in nats where it is a log-probability. Pieces below are its instances."""

    # Ratio range (below, above 1) by which clip violations of this loss are counted.
    clip_range: tuple[float, float] = (0.2, 0.2)
    # Whether ``refresh`` does anything.
    refreshes: bool = False

    def refresh(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> tuple[Batch, dict[str, Mean]]:
        """The batch of one optimiser step with what must be fixed by the current policy, and metrics of it.

        Called once a step on the whole mini-batch, without gradient, before any micro-batch.
        """
        return batch, {}

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        """Losses of one row. Raises ``TypeError`` for a loss that has only the form ``tokens``."""
        raise TypeError(f"{type(self).__name__} is no function of a row's log-probs; call .tokens")

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        """Losses of every position. ``temperature`` is the rollouts': the policy trained is the one that sampled.

        ``score``: how log-probs are got; the default passes through every transformation.
        """
        logps = score(model, batch.rows, temperature=temperature)
        return jax.vmap(self)(logps, _adopt(batch, logps.dtype))


@dataclass(frozen=True, kw_only=True)
class Clip(TokenLoss):
    """``-min(rho A, clip(rho, 1 - low, 1 + high) A)``, ``rho = exp(logp - old_logp)`` (PPO; arXiv 1707.06347).

    ``dual`` = c > 1 bounds the loss of a token with negative advantage by ``-c A`` (arXiv
    1912.09729; verl's default is 3). With one update a rollout batch rho is 1 and no clip acts.
    """

    tag = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        within("algorithm.loss.low", self.low, 0, 1)
        within("algorithm.loss.high", self.high, 0)
        within("algorithm.loss.dual", self.dual, 1)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.low, self.high

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        # Weightless tokens get ratio 1: an overflow there would turn 0 * inf into a NaN gradient.
        ratio = jnp.exp(jnp.where(row.weight != 0, logps - row.old_logps, 0))
        clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high)
        loss = -jnp.minimum(ratio * row.advantage, clipped * row.advantage)
        if self.dual is None:
            return loss
        return jnp.where(row.advantage < 0, jnp.minimum(loss, -self.dual * row.advantage), loss)


@dataclass(frozen=True, kw_only=True)
class Nll(TokenLoss):
    """``-logp``, of the model itself: its rows were not sampled by this policy, so temperature is 1."""

    tag = "nll"

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return -logps

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return super().tokens(model, reference, batch, temperature=1.0, score=score)


@dataclass(frozen=True, kw_only=True)
class FullKl(TokenLoss):
    """``KL(reference || model)`` of the next-token distributions at each prefix, both at temperature 1."""

    tag = "full"
    needs = frozenset({"reference_model"})

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return score.kl(reference_of(reference, "base"), model, batch.rows)


@dataclass(frozen=True, kw_only=True)
class K2(TokenLoss):
    """``(logp - ref)^2 / 2``: on on-policy tokens its expected gradient is that of the reverse KL."""

    tag = "k2"
    needs = frozenset({"ref_logps"})

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return k2(_counted(logps, row), _counted(row.ref_logps, row))


@dataclass(frozen=True, kw_only=True)
class K3(TokenLoss):
    """``ref/p - 1 - log(ref/p)``: on on-policy tokens its expected gradient is that of the *forward* KL."""

    tag = "k3"
    needs = frozenset({"ref_logps"})

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return k3(_counted(logps, row), _counted(row.ref_logps, row))


def k1(logps: Array, ref_logps: Array) -> Array:
    """``logp - ref``, nats: unbiased for ``KL(pi || ref)`` on samples of pi."""
    return logps - ref_logps


def k2(logps: Array, ref_logps: Array) -> Array:
    """``(logp - ref)^2 / 2``, nats squared over two: biased, low variance."""
    return 0.5 * (logps - ref_logps) ** 2


def k3(logps: Array, ref_logps: Array) -> Array:
    """``exp(d) - 1 - d`` with ``d = ref - logp``, nats: unbiased for ``KL(pi || ref)``, never negative."""
    return jnp.expm1(ref_logps - logps) - (ref_logps - logps)


def reference_of(reference: Any, who: str) -> Any:
    """The frozen model ``who`` (``base`` or ``teacher``) out of a step's reference models.

    ``reference`` is the base alone, or a dict of models by name. Raises ``ValueError`` when it is not there.
    """
    found = reference.get(who) if isinstance(reference, dict) else reference if who == "base" else None
    if found is None:
        raise ValueError(f"a loss of this step needs the {who} model, got None")
    return found


def weighted_sum(
    model: Any, reference: Any, batch: Batch, loss: TokenLoss, *, temperature: float, score: Scorer = FORWARD
) -> Float[Array, ""]:
    """``sum_{n,t} weight[n, t] * loss[n, t]``, accumulated in at least float32: the loss of one term."""
    values = loss.tokens(model, reference, batch, temperature=temperature, score=score)
    dtype = wide(values.dtype, batch.weight.dtype)
    weight = batch.weight.astype(dtype)
    return jnp.sum(jnp.where(weight != 0, values.astype(dtype), 0) * weight)


def _counted(values: Array, row: Batch) -> Array:
    return jnp.where(row.weight != 0, values, 0)


def _adopt(batch: Batch, dtype: jnp.dtype) -> Batch:
    """The batch's numbers in the dtype of the log-probs they meet."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch)


LOSSES = registry(Clip, Nll)
