"""Regularisers: further terms of a training step, each a plain sum over its own rows.

A regulariser turns graded rollouts into a ``Term`` whose weights already hold its coefficient and
its normaliser. It is called once an optimiser mini-batch, without theta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.losses import K2, K3, FullKl, Nll, TokenLoss
from jaxrl.rl.pieces import Piece, one_of, registry, within
from jaxrl.types import Batch, Graded, Rows, Term

# (direction, scope, estimator) -> the loss whose expected gradient is that of the KL named.
KL_LOSSES: dict[tuple[str, str, str], TokenLoss] = {
    ("forward", "token", "full"): FullKl(),
    ("forward", "token", "nll"): Nll(),
    ("forward", "token", "k3"): K3(),
    ("forward", "sequence", "full"): FullKl(),
    ("forward", "sequence", "nll"): Nll(),
    ("reverse", "token", "k2"): K2(),
}

_K1 = (
    "k1 used as a loss on on-policy samples has zero expected gradient (the score averages to zero); "
    "use k2 for the reverse or full for the forward KL"
)
_SEQUENCE = (
    "at detached prefixes an on-policy estimator misses how theta moves the prefixes themselves; "
    "it gives the sum of conditional KLs, scope token"
)
# Why the others are refused.
KL_REFUSED: dict[tuple[str, str, str], str] = {
    ("forward", "token", "k1"): _K1,
    ("forward", "sequence", "k1"): _K1,
    ("reverse", "token", "k1"): _K1,
    ("reverse", "sequence", "k1"): _K1,
    ("forward", "token", "k2"): "k2 on on-policy samples gives the gradient of the reverse KL; use k3, nll or full",
    ("forward", "sequence", "k2"): "k2 on on-policy samples gives the gradient of the reverse KL; use nll or full",
    ("forward", "sequence", "k3"): _SEQUENCE + "; use nll or full on base samples",
    ("reverse", "token", "k3"): "k3 on on-policy samples gives the gradient of the forward KL; use k2",
    ("reverse", "sequence", "k2"): _SEQUENCE,
    ("reverse", "sequence", "k3"): _SEQUENCE + ", and for k3 that of the forward KL",
    ("reverse", "token", "nll"): "the NLL of base samples is a forward KL; use k2",
    ("reverse", "sequence", "nll"): "the NLL of base samples is a forward KL",
    ("reverse", "token", "full"): "full sums over the base's distribution at base prefixes, a forward KL; use k2",
    ("reverse", "sequence", "full"): "full sums over the base's distribution at base prefixes, a forward KL",
}


class Regulariser(Piece, ABC):
    """``(coef, Graded, mask bool[P, G, L], keep bool[P]) -> Term`` with weights ``coef * normaliser``.

    ``mask`` marks the counted tokens of the rollouts, ``keep`` the prompts that the filters kept.
    """

    samples: int = 0  # base samples a prompt that the collector draws for it

    @abstractmethod
    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term: ...


@dataclass(frozen=True, kw_only=True)
class Kl(Regulariser):
    """A KL divergence between the policy and the base model (arXiv 2510.02230 Eq. 9 uses the forward one).

    ``direction`` ``forward`` is KL(base || policy), ``reverse`` KL(policy || base). ``estimator``:
    on samples of the base, ``nll`` (minus the constant base entropy) or ``full`` (whole next-token
    distributions at base prefixes: less variance); on the rollouts, ``k2`` (reverse) or ``k3``
    (forward), right while the rollouts are on-policy. ``scope`` ``token`` averages over all counted
    tokens of the mini-batch, ``sequence`` sums over a response and averages over responses: with
    base samples the first is the second over the mean length (a ratio estimate).

    ``prompts``: regularise ``all`` prompts of the batch, whether or not a filter kept them, or only
    ``kept`` ones. ``source``: ``all`` base samples or only ``correct`` ones (then the target is the
    base given correctness). ``samples``: base samples a prompt.

    Raises ``ValueError`` for an unknown name and, with the reason, for a combination whose expected
    gradient is not that of the KL it names.
    """

    tag = "kl"
    direction: str = "forward"
    scope: str = "token"
    estimator: str = "full"
    prompts: str = "all"
    source: str = "all"
    samples: int = 4

    def __post_init__(self) -> None:
        field = "algorithm.regularisers.kl"
        one_of(f"{field}.direction", self.direction, ("forward", "reverse"))
        one_of(f"{field}.scope", self.scope, ("token", "sequence"))
        one_of(f"{field}.estimator", self.estimator, ("nll", "full", "k1", "k2", "k3"))
        one_of(f"{field}.prompts", self.prompts, ("all", "kept"))
        one_of(f"{field}.source", self.source, ("all", "correct"))
        within(f"{field}.samples", self.samples, 1)
        chosen = (self.direction, self.scope, self.estimator)
        if chosen in KL_REFUSED:
            raise ValueError(f"{field}: {' '.join(chosen)} is refused: {KL_REFUSED[chosen]}")
        if self.source == "correct" and not self.on_base:
            raise ValueError(f"{field}.source: {self.estimator} uses the rollouts; 'correct' selects base samples")

    @property
    def loss(self) -> TokenLoss:
        return KL_LOSSES[self.direction, self.scope, self.estimator]

    @property
    def on_base(self) -> bool:
        """Whether its rows are base samples (else the rollouts)."""
        return self.estimator in ("nll", "full")

    @property
    def needs(self) -> frozenset[str]:
        return self.loss.needs | ({"base_samples"} if self.on_base else frozenset())

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        if self.on_base:
            rows = graded.base.rows[:, : self.samples]
            used = rows.mask()
            if self.source == "correct":
                used = used & graded.base_correct[:, : self.samples, None]
            logps, ref_logps = jnp.zeros(used.shape, graded.old_logps.dtype), None
        else:
            rows, used, logps, ref_logps = graded.rollouts.rows, mask, graded.old_logps, graded.ref_logps
        if self.prompts == "kept":
            used = used & keep[:, None, None]
        return Term(self._batch(coef, rows, used, logps, ref_logps), self.loss)

    def _batch(
        self, coef: float, rows: Rows, used: Bool[Array, "P B L"], logps: Float[Array, "P B L"], ref_logps: Array | None
    ) -> Batch:
        unit = used if self.scope == "token" else jnp.any(used, axis=-1)
        count = jnp.maximum(jnp.sum(unit), 1).astype(logps.dtype)
        weight = jnp.where(used, coef / count, 0)
        width = used.shape[-1]
        return Batch(
            rows=rows.flat(),
            advantage=jnp.zeros((weight.size // width, width), logps.dtype),
            old_logps=logps.reshape(-1, width),
            weight=weight.reshape(-1, width),
            ref_logps=None if ref_logps is None else ref_logps.reshape(-1, width),
        )


REGULARISERS = registry(Kl)
