"""Algorithms are compositions of pieces. ``prepare`` does, without theta, everything that couples rows.

Group means, filters and normalisers are frozen into ``advantage`` and ``weight``, so that a
training step is a tuple of terms, each ``sum_{n,t} weight * token_loss(theta)`` over its own rows.
Nothing here or in the training loop asks for an algorithm's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl.rl.advantages import Advantage, GroupZScore
from jaxrl.rl.filters import Filter, KeepAll, Prefilter, SampleAll, SampleGreedyFails
from jaxrl.rl.losses import Clip, TokenLoss
from jaxrl.rl.old_logps import OldLogps, Trainer
from jaxrl.rl.pieces import one_of, within
from jaxrl.rl.regularisers import Kl, Regulariser
from jaxrl.rl.weights import SequenceMeanTokenSum, TokenMean, Weights
from jaxrl.types import STOP_LENGTH, Batch, Graded, Term

TRUNCATED = ("keep", "mask")
NO_KEPT = ("regularise", "skip")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One recipe. The defaults are GRPO with a token-mean loss.

    - ``epochs``: passes over a rollout batch; ``minibatches``: optimiser steps a pass, over prompts
      split in order into equal parts, each with weights of its own.
    - ``kept_first``: put kept prompts first before the split, so that survivors fill the first
      mini-batches (the released SELF code drops the others and splits what is left).
    - ``truncated``: responses that hit the length limit are trained on (``keep``) or leave the
      policy term and its denominators (``mask``). Penalising them is a reward's business.
    - ``old_logps``: whose log-probs the loss's ratios are taken against, and a correction for the sampler's mismatch.
    - ``no_kept``: a mini-batch without a kept prompt still takes its step on the regularisers
      (``regularise``; without any, the gradient is zero and only the optimiser's momentum and decay
      act) or takes none (``skip``).

    Raises ``ValueError`` for values out of range and for combinations that would mean something
    else than they say.
    """

    prefilter: Prefilter = field(default_factory=SampleAll)
    keep: Filter = field(default_factory=KeepAll)
    advantage: Advantage = field(default_factory=GroupZScore)
    weights: Weights = field(default_factory=TokenMean)
    loss: TokenLoss = field(default_factory=Clip)
    old_logps: OldLogps = field(default_factory=Trainer)
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    epochs: int = 1
    minibatches: int = 1
    kept_first: bool = False
    truncated: str = "keep"
    no_kept: str = "regularise"

    def __post_init__(self) -> None:
        within("algorithm.epochs", self.epochs, 1)
        within("algorithm.minibatches", self.minibatches, 1)
        one_of("algorithm.truncated", self.truncated, TRUNCATED)
        one_of("algorithm.no_kept", self.no_kept, NO_KEPT)
        for coef, _ in self.regularisers:
            if not (math.isfinite(coef) and coef >= 0):
                raise ValueError(f"algorithm.regularisers.coef: expected a number of at least 0, got {coef!r}")
        if self.weights.over == "all" and not isinstance(self.prefilter, SampleAll):
            raise ValueError(
                "algorithm.weights.over: 'all' counts the rollouts of dropped prompts, but the prefilter drops them "
                "before they are sampled; use over: prompts, or move the filter to algorithm.keep"
            )

    @property
    def active(self) -> tuple[tuple[float, Regulariser], ...]:
        """Regularisers with a nonzero coefficient. One at 0 is neither built nor asks for anything."""
        return tuple((coef, piece) for coef, piece in self.regularisers if coef > 0)

    @property
    def needs(self) -> frozenset[str]:
        """Union of what the pieces need; see ``jaxrl.rl.pieces.NEEDS``."""
        pieces: list[Any] = [self.prefilter, self.keep, self.advantage, self.weights, self.loss, self.old_logps]
        pieces += [piece for _, piece in self.active]
        return reduce(frozenset.union, (piece.needs for piece in pieces), frozenset())

    @property
    def base_samples(self) -> int:
        """Base samples a prompt that the collector must draw; 0 when none are needed."""
        return max((p.samples for _, p in self.active if "base_samples" in p.needs), default=0)


def kept(algorithm: Algorithm, graded: Graded) -> Bool[Array, " P"]:
    """Prompts whose rollouts train the policy: they passed the prefilter and the filter."""
    return graded.prefiltered & algorithm.keep(graded)


def applied(algorithm: Algorithm, keep: Bool[Array, " P"]) -> Bool[Array, " minibatches"]:
    """Which mini-batches of ``prepare`` take an optimiser step, given ``kept(algorithm, graded)``."""
    keep = keep[_order(algorithm, keep)] if algorithm.kept_first else jnp.asarray(keep)
    return jnp.any(keep.reshape(algorithm.minibatches, -1), axis=1) | (algorithm.no_kept == "regularise")


def prepare(algorithm: Algorithm, graded: Graded) -> tuple[tuple[Term, ...], ...]:
    """The terms of each optimiser mini-batch: the policy term first, then one a regulariser.

    Pure, and jit-able with ``algorithm`` static; no shape depends on what a filter decides. An
    epoch is one pass over the result. Raises ``ValueError`` when ``graded`` lacks something that
    the pieces need or when the prompts do not split evenly.
    """
    _check(algorithm, graded)
    keep = kept(algorithm, graded)
    mask = graded.rollouts.rows.mask()
    if algorithm.truncated == "mask":
        mask = mask & (graded.rollouts.stop != STOP_LENGTH)[..., None]
    old_logps, factor = algorithm.old_logps(graded, mask)
    graded = replace(graded, old_logps=old_logps)
    advantage = jnp.where(keep[:, None, None], algorithm.advantage(graded), 0)
    advantage = jnp.broadcast_to(advantage, mask.shape).astype(old_logps.dtype)
    parts = (graded, keep, mask, advantage, factor)
    if algorithm.kept_first:
        order = _order(algorithm, keep)
        parts = jax.tree.map(lambda x: x[order], parts)
    size = keep.shape[0] // algorithm.minibatches
    starts = range(0, keep.shape[0], size)
    return tuple(_terms(algorithm, *jax.tree.map(lambda x, at=at: x[at : at + size], parts)) for at in starts)


def _terms(
    algorithm: Algorithm, graded: Graded, keep: Array, mask: Array, advantage: Array, factor: Array | None
) -> tuple[Term, ...]:
    """The terms of one mini-batch."""
    weight = algorithm.weights(mask, keep).astype(graded.old_logps.dtype)
    if factor is not None:
        weight = weight * factor.astype(weight.dtype)
    width = mask.shape[-1]
    batch = Batch(
        rows=graded.rollouts.rows.flat(),
        advantage=advantage.reshape(-1, width),
        old_logps=graded.old_logps.reshape(-1, width),
        weight=weight.reshape(-1, width),
        ref_logps=None if graded.ref_logps is None else graded.ref_logps.reshape(-1, width),
    )
    extra = tuple(piece(coef, graded, mask, keep) for coef, piece in algorithm.active)
    return (Term(batch, algorithm.loss), *extra)


def _order(algorithm: Algorithm, keep: Bool[Array, " P"]) -> Array:
    """Kept prompts first, both parts in their old order."""
    return jnp.argsort(~jnp.asarray(keep), stable=True)


def _check(algorithm: Algorithm, graded: Graded) -> None:
    held = {
        "greedy_correct": graded.greedy_correct is not None,
        "ref_logps": graded.ref_logps is not None,
        "values": graded.values is not None,
        "trainer_logps": graded.old_logps is not None,
        "base_samples": graded.base is not None
        and graded.base_correct is not None
        and graded.base_correct.shape[1] >= algorithm.base_samples,
    }
    missing = sorted(name for name in algorithm.needs if not held.get(name, True))
    if missing:
        raise ValueError(f"the algorithm needs {', '.join(missing)}, which the graded rollouts do not hold")
    if graded.uid.shape[0] % algorithm.minibatches:
        raise ValueError(
            f"algorithm.minibatches: {graded.uid.shape[0]} prompts do not split into {algorithm.minibatches} "
            "equal mini-batches; change it or rollout.prompts"
        )


_FORWARD_KL = (1e-4, Kl(direction="forward", scope="token", estimator="full", prompts="all"))

# Named recipes. Where the paper (arXiv 2510.02230) and its released code differ, the plain name is
# the paper and `_released_code` the code: token mean instead of Eq. 11's token sum, a dual clip at
# 3, two mini-batches a rollout batch, no forward KL; filtered prompts leave the batch, survivors
# fill the mini-batches in order and their step keeps the full mini-batch's denominator, and a
# mini-batch without survivors is skipped. Not reproduced: survivors repeated to fill the GPUs, and
# a token mean that depends on the micro-batches. The paper states neither the normalisation nor
# the estimator of its forward KL: `token` and `full` are ours.
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(weights=SequenceMeanTokenSum()),
    "self": Algorithm(prefilter=SampleGreedyFails(), weights=SequenceMeanTokenSum(), regularisers=(_FORWARD_KL,)),
    "filter_only": Algorithm(prefilter=SampleGreedyFails(), weights=SequenceMeanTokenSum()),
    "fkl_only": Algorithm(weights=SequenceMeanTokenSum(), regularisers=(_FORWARD_KL,)),
    "grpo_released_code": Algorithm(weights=TokenMean(over="kept"), loss=Clip(dual=3.0), minibatches=2),
    "self_released_code": Algorithm(
        prefilter=SampleGreedyFails(),
        weights=TokenMean(over="prompts"),
        loss=Clip(dual=3.0),
        minibatches=2,
        kept_first=True,
        no_kept="skip",
    ),
}
