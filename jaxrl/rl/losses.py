"""Token losses: what one counted token adds to the loss, before its weight.

A loss is a function of one row, ``(logps float[L], row) -> float[L]``, where ``row`` is a ``Batch``
without its leading axis: it cannot see other rows, which is what makes micro-batches and the
gradient kernel exact. ``tokens`` lifts it to a batch; a loss that needs more than the log-probs of
its tokens (whole distributions, a reference model) overrides ``tokens``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.mean import Mean
from jaxrl.models.scoring import FORWARD, Scorer
from jaxrl.rl.pieces import Piece, one_of, registry, within
from jaxrl.types import Batch, wide

REFERENCE_NEEDS = {"base": "reference_model", "teacher": "teacher_model"}


class TokenLoss(Piece):
    """A loss a token, in nats where it is a log-probability. Pieces below are its instances."""

    # Ratio range (below, above 1) by which clip violations of this loss are counted.
    clip_range: tuple[float, float] = (0.2, 0.2)
    # Whether it is a policy term's, on rollouts; False for the one that stands for having none.
    on_rollouts: bool = True
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
class SequenceClip(TokenLoss):
    """``Clip`` with one ratio a response, ``exp(mean_t(logp - old_logp))`` over its counted tokens (GSPO; arXiv 2507.18071).

    Each counted token's loss is that of its response (with its own advantage, where those differ by token), meant
    with weights ``sequence_mean_token_mean``: then the response counts once. The ranges are small because the ratio is
    a geometric mean.
    """

    tag = "sequence_clip"
    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        within("algorithm.loss.low", self.low, 0, 1)
        within("algorithm.loss.high", self.high, 0)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.low, self.high

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        log_ratio, advantage = counted(logps - row.old_logps, row), counted(row.advantage, row)
        ratio = jnp.exp(jnp.sum(log_ratio) / tokens_counted(row, logps.dtype))
        clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high)
        return -jnp.minimum(ratio * advantage, clipped * advantage)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(TokenLoss):
    """``-A logp`` (REINFORCE; Williams 1992): no ratio, so it holds for the policy that sampled.

    At ratio 1 its gradient is that of ``Clip``.
    """

    tag = "policy_gradient"

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return -counted(row.advantage, row) * counted(logps, row)


@dataclass(frozen=True, kw_only=True)
class NoPolicy(TokenLoss):
    """Stands for having no policy term: the step is its regularisers. Calling it raises ``TypeError``."""

    tag = "none"
    on_rollouts = False

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        raise TypeError("algorithm.loss none has no values: a recipe with it has no policy term")

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        return self(batch.weight, batch)


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
    """``T^2 KL(p || q)`` of the next-token distributions at each prefix, p of the model ``who``, q of the one trained.

    Both at ``temperature`` T, whatever the rollouts': above 1 it shows more of p's order among unlikely tokens, and
    the factor keeps the gradient's size (arXiv 1503.02531). Raises ``ValueError`` for values out of range.
    """

    tag = "full"
    who: str = "base"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        one_of("loss full.who", self.who, tuple(REFERENCE_NEEDS))
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"loss full.temperature: expected a number above 0, got {self.temperature!r}")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({REFERENCE_NEEDS[self.who]})

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        known = reference_of(reference, self.who)
        return self.temperature**2 * score.kl(known, model, batch.rows, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class ValueLoss(TokenLoss):
    """``max((V - R)^2, (clip(V, old - clip, old + clip) - R)^2) / 2`` of a critic's values (PPO; verl).

    A value that left its old one by more than ``clip`` towards its return has no gradient; ``clip`` None clips nothing.
    """

    tag = "value"
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        within("algorithm.critic.clip", self.clip, 0)

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        """Of one row's values, which take the place of ``logps``."""
        values, returns = counted(logps, row), counted(row.returns, row)
        loss = (values - returns) ** 2
        if self.clip is not None:
            old = counted(row.old_values, row)
            loss = jnp.maximum(loss, (jnp.clip(values, old - self.clip, old + self.clip) - returns) ** 2)
        return loss / 2

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "N L"]:
        values = score.values(model, batch.rows)
        return jax.vmap(self)(values, _adopt(batch, values.dtype))


@dataclass(frozen=True, kw_only=True)
class K2(TokenLoss):
    """``(logp - ref)^2 / 2``: on on-policy tokens its expected gradient is that of the reverse KL."""

    tag = "k2"
    needs = frozenset({"ref_logps"})

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return k2(counted(logps, row), counted(row.ref_logps, row))


@dataclass(frozen=True, kw_only=True)
class K3(TokenLoss):
    """``ref/p - 1 - log(ref/p)``: on on-policy tokens its expected gradient is that of the *forward* KL."""

    tag = "k3"
    needs = frozenset({"ref_logps"})

    def __call__(self, logps: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
        return k3(counted(logps, row), counted(row.ref_logps, row))


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


def counted(values: Float[Array, " L"], row: Batch) -> Float[Array, " L"]:
    """``values`` at the tokens that weigh something, else 0: whatever lies elsewhere reaches no value and no gradient."""
    return jnp.where(row.weight != 0, values, 0)


def tokens_counted(row: Batch, dtype: jnp.dtype) -> Float[Array, ""]:
    """How many tokens of a row weigh something, at least 1."""
    return jnp.maximum(jnp.sum(row.weight != 0), 1).astype(dtype)


def _adopt(batch: Batch, dtype: jnp.dtype) -> Batch:
    """The batch's numbers in the dtype of the log-probs they meet."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch)


LOSSES = registry(Clip, SequenceClip, PolicyGradient, Nll, NoPolicy)
