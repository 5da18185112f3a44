"""Regularisers: further terms of a training step, each a plain sum over its own rows.

A regulariser turns graded rollouts into a ``Term`` whose weights already hold its coefficient and
its normaliser. It is called once an optimiser mini-batch, without theta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.mean import Mean
from jaxrl.rl.divergences import NegativeEntropy, SquaredChange
from jaxrl.rl.kl import DIRECTIONS, ESTIMATORS, KL_LOSSES, KL_REWARD, SCOPES, WHERE, check_kl
from jaxrl.rl.losses import FullKl, Nll, TokenLoss, k1
from jaxrl.rl.pieces import Piece, one_of, registry, within
from jaxrl.types import Batch, Graded, Rows, Samples, Term

PROMPTS = ("all", "kept")
# Where samples come from -> what the collector is asked for.
SAMPLES = {
    "base": "base_samples",
    "stream": "stream_samples",
    "teacher": "teacher_samples",
    "demonstrations": "demonstrations",
}


class Regulariser(Piece, ABC):
    """``(coef, Graded, mask bool[P, G, L], keep bool[P]) -> Term`` with weights ``coef * normaliser``.

    ``mask`` marks the counted tokens of the rollouts, ``keep`` the prompts that the filters kept. One that is
    ``in_reward`` is no term: ``token_reward`` says what it adds to the reward of single tokens.
    """

    samples: int = 0  # samples a prompt that the collector draws for it
    in_reward: bool = False

    @abstractmethod
    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term: ...

    def metrics(self, graded: Graded) -> dict[str, Mean]:
        """What it says of the samples that it is given; by default nothing."""
        return {}

    def token_reward(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"]) -> Float[Array, "P G L"]:
        """What it adds to the rewards of tokens, 0 off the mask. Raises ``TypeError`` for one that is a term."""
        raise TypeError(f"{self.tag} is a term of its own and adds nothing to the reward")


@dataclass(frozen=True, kw_only=True)
class Kl(Regulariser):
    """A KL divergence between the policy and the base model (arXiv 2510.02230 Eq. 9 uses the forward one).

    ``direction`` ``forward`` is KL(base || policy), ``reverse`` KL(policy || base). ``estimator``:
    on samples of the base, ``nll`` (minus the constant base entropy) or ``full`` (whole next-token
    distributions at base prefixes: less variance), for the forward KL; on the rollouts, ``k2`` or
    ``full`` (reverse) and ``k3`` (forward), right while the rollouts are on-policy. ``scope`` ``token``
    averages over all counted tokens of the mini-batch, ``sequence`` sums over a response and averages
    over responses: with base samples the first is the second over the mean length (a ratio estimate).

    ``where`` ``reward`` takes ``-coef * (log p - log p_base)`` into the reward of each rollout token: reverse,
    sequence, k1. It then acts where the policy term does, on kept prompts.

    ``prompts``: regularise ``all`` prompts of the batch, whether or not a filter kept them, only
    ``kept`` ones, or those of a ``stream`` of their own. ``source``: ``all`` base samples or only ``correct``
    ones (then the target is the base given correctness). ``samples``: base samples a prompt.

    Raises ``ValueError`` for an unknown name and, with the reason, for a combination whose expected
    gradient is not that of the KL it names.
    """

    tag = "kl"
    direction: str = "forward"
    scope: str = "token"
    estimator: str = "full"
    where: str = "loss"
    prompts: str = "all"
    source: str = "all"
    samples: int = 4

    def __post_init__(self) -> None:
        field = "algorithm.regularisers.kl"
        one_of(f"{field}.direction", self.direction, DIRECTIONS)
        one_of(f"{field}.scope", self.scope, SCOPES)
        one_of(f"{field}.estimator", self.estimator, ESTIMATORS)
        one_of(f"{field}.where", self.where, WHERE)
        one_of(f"{field}.prompts", self.prompts, (*PROMPTS, "stream"))
        one_of(f"{field}.source", self.source, ("all", "correct"))
        within(f"{field}.samples", self.samples, 1)
        check_kl(field, (self.direction, self.scope, self.estimator, self.where))
        if self.source == "correct" and not self.on_base:
            raise ValueError(f"{field}.source: {self._uses_rollouts}; 'correct' selects base samples")
        if self.prompts == "stream" and not self.on_base:
            raise ValueError(f"{field}.prompts: {self._uses_rollouts}; a 'stream' holds base samples")

    @property
    def _uses_rollouts(self) -> str:
        return f"{self.direction} {self.estimator} uses the rollouts"

    @property
    def in_reward(self) -> bool:
        return (self.direction, self.scope, self.estimator, self.where) == KL_REWARD

    @property
    def loss(self) -> TokenLoss:
        """Of its term. Raises ``TypeError`` when it is in the reward."""
        if self.in_reward:
            raise TypeError("algorithm.regularisers.kl: k1 in the reward is no term; see token_reward")
        return KL_LOSSES[self.direction, self.scope, self.estimator, self.where]

    @property
    def on_base(self) -> bool:
        """Whether its rows are base samples (else the rollouts)."""
        return self.direction == "forward" and self.estimator in ("nll", "full")

    @property
    def needs(self) -> frozenset[str]:
        if self.in_reward:
            return frozenset({"rollouts", "ref_logps"})
        if not self.on_base:
            return self.loss.needs | {"rollouts"}
        return self.loss.needs | {SAMPLES["stream" if self.prompts == "stream" else "base"]}

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        loss, logps, ref_logps = self.loss, None, None
        if self.on_base:
            source = "stream" if self.prompts == "stream" else "base"
            rows, used = _chosen(samples_of(graded, source), self.samples, self.source == "correct")
        else:
            rows, used, logps, ref_logps = graded.rollouts.rows, mask, graded.old_logps, graded.ref_logps
        if self.prompts == "kept":
            used = used & keep[:, None, None]
        return term_of(coef, rows, used, self.scope, loss, logps=logps, ref_logps=ref_logps)

    def token_reward(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"]) -> Float[Array, "P G L"]:
        if not self.in_reward:
            return super().token_reward(coef, graded, mask)
        return jnp.where(mask, -coef * k1(graded.old_logps, graded.ref_logps), 0)


@dataclass(frozen=True, kw_only=True)
class Imitation(Regulariser):
    """Likelihood of, or distillation on, responses that the policy did not write (SFT, rejection sampling, distillation).

    ``source``: samples of the ``base``, of it on a ``stream`` of prompts, of the ``teacher``, or the task's
    ``demonstrations``; ``select``: ``all`` of them or ``correct`` ones. ``estimator``: ``nll`` of their tokens, or
    ``full``, ``T^2 KL(p^{1/T} || q^{1/T})`` from the next-token distributions p of the model that wrote them (of the
    teacher on demonstrations; arXiv 1503.02531), with ``temperature`` T. ``scope``: ``token`` averages over all
    tokens, ``sequence`` sums over a response and averages over responses, ``sequence_mean_token_mean`` averages over
    both. ``samples``: responses a prompt, at most. ``prompts``: ``all`` of the batch, or those that a filter ``kept``.

    Raises ``ValueError`` for an unknown name and for values out of range.
    """

    tag = "imitation"
    source: str = "demonstrations"
    select: str = "all"
    estimator: str = "nll"
    temperature: float = 1.0
    scope: str = "token"
    prompts: str = "all"
    samples: int = 1

    def __post_init__(self) -> None:
        field = "algorithm.regularisers.imitation"
        one_of(f"{field}.source", self.source, tuple(SAMPLES))
        one_of(f"{field}.select", self.select, ("all", "correct"))
        one_of(f"{field}.estimator", self.estimator, ("nll", "full"))
        one_of(f"{field}.scope", self.scope, (*SCOPES, "sequence_mean_token_mean"))
        one_of(f"{field}.prompts", self.prompts, PROMPTS)
        within(f"{field}.samples", self.samples, 1)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"{field}.temperature: expected a number above 0, got {self.temperature!r}")
        if self.estimator == "nll" and self.temperature != 1:
            raise ValueError(f"{field}.temperature: tempers whole distributions; use estimator: full, or leave it out")
        if self.source == "stream" and self.prompts == "kept":
            raise ValueError(f"{field}.prompts: filters keep prompts of the batch, and a stream has its own; use all")

    @property
    def loss(self) -> TokenLoss:
        if self.estimator == "nll":
            return Nll()
        who = "base" if self.source in ("base", "stream") else "teacher"
        return FullKl(who=who, temperature=self.temperature)

    @property
    def needs(self) -> frozenset[str]:
        return self.loss.needs | {SAMPLES[self.source]}

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        rows, used = _chosen(samples_of(graded, self.source), self.samples, self.select == "correct")
        if self.prompts == "kept":
            used = used & keep[:, None, None]
        return term_of(coef, rows, used, self.scope, self.loss)


@dataclass(frozen=True, kw_only=True)
class Entropy(Regulariser):
    """An entropy bonus: ``-coef`` times the mean over counted rollout tokens of the entropy they were drawn with.

    At the rollouts' temperature, prefixes taken as they are (arXiv 1602.01783). ``prompts``: those that a filter
    ``kept``, or ``all``.
    """

    tag = "entropy"
    prompts: str = "kept"
    needs = frozenset({"rollouts"})

    def __post_init__(self) -> None:
        one_of("algorithm.regularisers.entropy.prompts", self.prompts, PROMPTS)

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        used = mask & keep[:, None, None] if self.prompts == "kept" else mask
        return term_of(coef, graded.rollouts.rows, used, "token", NegativeEntropy(), logps=graded.old_logps)


@dataclass(frozen=True, kw_only=True)
class TrustRegion(Regulariser):
    """Half the squared change of the base's log-probs on the run's probe: what the kernel says a step does elsewhere.

    ``scope`` ``token``: the mean over the probe's tokens of ``(log p - log p_base)^2 / 2``; ``sequence``: the mean
    over its responses of that of their sums. At temperature 1. The whole probe is scored in every optimiser step.
    """

    tag = "trust_region"
    scope: str = "token"
    needs = frozenset({"probe"})

    def __post_init__(self) -> None:
        one_of("algorithm.regularisers.trust_region.scope", self.scope, SCOPES)

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        rows, known = graded.probe[:, None], graded.probe_logps[:, None]
        loss = SquaredChange(whole=self.scope == "sequence")
        return term_of(coef, rows, rows.mask(), self.scope, loss, ref_logps=known)


def samples_of(graded: Graded, source: str) -> Samples:
    """The samples of ``source``, a key of ``SAMPLES``."""
    if source == "base":
        return Samples(graded.base.rows, graded.base_correct)
    return getattr(graded, source)


def term_of(
    coef: float,
    rows: Rows,
    used: Bool[Array, "P B L"],
    scope: str,
    loss: TokenLoss,
    *,
    logps: Float[Array, "P B L"] | None = None,
    ref_logps: Float[Array, "P B L"] | None = None,
) -> Term:
    """``coef`` times the mean of ``loss`` over the ``used`` tokens of ``[P B]`` rows.

    ``scope``: over tokens (``token``), over responses of their sums (``sequence``) or of their means
    (``sequence_mean_token_mean``). Responses without a used token do not count.
    """
    dtype = jnp.result_type(float) if logps is None else logps.dtype
    length = jnp.sum(used, axis=-1, keepdims=True)
    count = jnp.maximum(jnp.sum(length if scope == "token" else length > 0), 1).astype(dtype)
    weight = coef / count
    if scope == "sequence_mean_token_mean":
        weight = weight / jnp.maximum(length, 1).astype(dtype)
    weight = jnp.where(used, weight, 0).reshape(-1, used.shape[-1])
    blank = jnp.zeros(weight.shape, dtype)
    batch = Batch(
        rows=rows.flat(),
        advantage=blank,
        old_logps=blank if logps is None else logps.reshape(weight.shape),
        weight=weight,
        ref_logps=None if ref_logps is None else ref_logps.reshape(weight.shape),
    )
    return Term(batch, loss)


def _chosen(samples: Samples, most: int, correct: bool) -> tuple[Rows, Bool[Array, "P B L"]]:
    """The first ``most`` responses of each prompt, and which of their tokens count."""
    rows = samples.rows[:, :most]
    used = rows.mask()
    return rows, used & samples.correct[:, :most, None] if correct else used


REGULARISERS = registry(Kl, Imitation, Entropy, TrustRegion)
