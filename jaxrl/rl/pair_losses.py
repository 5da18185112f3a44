"""Losses of one preference, from whole-response log-probs of the policy and the reference, nats.

An objective is a function of one unbatched pair: ``(chosen, rejected, ref_chosen, ref_rejected) -> loss``. All but
``SlicHf`` see only the margin ``h = (chosen - rejected) - (ref_chosen - ref_rejected)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.rl.pieces import Piece, one_of, registry, within

Scalar = Float[Array, ""]


class PairObjective(Piece, ABC):
    """``(chosen, rejected, ref_chosen, ref_rejected) -> loss``, all scalars, log-probs in nats."""

    @abstractmethod
    def __call__(self, chosen: Scalar, rejected: Scalar, ref_chosen: Scalar, ref_rejected: Scalar) -> Scalar: ...


@dataclass(frozen=True, kw_only=True)
class Dpo(PairObjective):
    """``-log sigmoid(beta h)`` (arXiv 2305.18290)."""

    tag = "dpo"
    beta: float = 0.1

    def __post_init__(self) -> None:
        _positive("beta", self.beta)

    def __call__(self, chosen: Scalar, rejected: Scalar, ref_chosen: Scalar, ref_rejected: Scalar) -> Scalar:
        return -jax.nn.log_sigmoid(self.beta * margin(chosen, rejected, ref_chosen, ref_rejected))


@dataclass(frozen=True, kw_only=True)
class Ipo(PairObjective):
    """``(h - 1 / (2 beta))^2`` (arXiv 2310.12036)."""

    tag = "ipo"
    beta: float = 0.1

    def __post_init__(self) -> None:
        _positive("beta", self.beta)

    def __call__(self, chosen: Scalar, rejected: Scalar, ref_chosen: Scalar, ref_rejected: Scalar) -> Scalar:
        return (margin(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True, kw_only=True)
class Slic(PairObjective):
    """``max(0, 1 - beta h)``: the hinge loss of the margin (arXiv 2305.10425 with a reference, as TRL's ``hinge``)."""

    tag = "slic"
    beta: float = 0.1

    def __post_init__(self) -> None:
        _positive("beta", self.beta)

    def __call__(self, chosen: Scalar, rejected: Scalar, ref_chosen: Scalar, ref_rejected: Scalar) -> Scalar:
        return jax.nn.relu(1 - self.beta * margin(chosen, rejected, ref_chosen, ref_rejected))


@dataclass(frozen=True, kw_only=True)
class SlicHf(PairObjective):
    """``max(0, delta - chosen + rejected) - weight * chosen`` (SLiC-HF; arXiv 2305.10425 Eq. 1), without a reference.

    The paper's regularising target is a supervised response; here it is the chosen one.
    """

    tag = "slic_hf"
    delta: float = 1.0
    weight: float = 0.1

    def __post_init__(self) -> None:
        within("algorithm.regularisers.preference.objective.delta", self.delta, 0)
        within("algorithm.regularisers.preference.objective.weight", self.weight, 0)

    def __call__(self, chosen: Scalar, rejected: Scalar, ref_chosen: Scalar, ref_rejected: Scalar) -> Scalar:
        return jax.nn.relu(self.delta - chosen + rejected) - self.weight * chosen


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Weights of pairs by how likely the policy writes them (IS-DAA; arXiv 2506.08681 and its code).

    ``w = exp(min(s, 2 clip))``, s being the sum over both responses of the policy's log-prob minus that of the policy
    that wrote the data: clipped from above alone. ``per`` ``response`` clips each response's at ``clip`` before they
    are added. ``self_normalise`` divides by the mean of w over the mini-batch. No gradient goes through w: through it
    the loss would push the chosen response down.
    """

    clip: float = 1.0
    per: str = "pair"
    self_normalise: bool = False

    def __post_init__(self) -> None:
        within("algorithm.regularisers.preference.importance.clip", self.clip, 0)
        one_of("algorithm.regularisers.preference.importance.per", self.per, ("pair", "response"))

    def log_ratio(self, change: Float[Array, "M 2"]) -> Float[Array, " M"]:
        """``log w`` from the responses' log-prob changes against the data's policy, nats."""
        if self.per == "response":
            return jnp.sum(jnp.minimum(change, self.clip), axis=1)
        return jnp.minimum(jnp.sum(change, axis=1), 2 * self.clip)

    def clipped(self, change: Float[Array, "M 2"]) -> Array:
        """Which pairs the clip acts on."""
        if self.per == "response":
            return jnp.any(change > self.clip, axis=1)
        return jnp.sum(change, axis=1) > 2 * self.clip


def margin(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array) -> Array:
    """``h``, nats: how much more the policy prefers the chosen response than the reference does."""
    return (chosen - rejected) - (ref_chosen - ref_rejected)


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(
            f"algorithm.regularisers.preference.objective.{name}: expected a number above 0, got {value!r}"
        )


PAIR_OBJECTIVES = registry(Dpo, Ipo, Slic, SlicHf)
