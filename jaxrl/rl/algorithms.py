"""Algorithms are compositions of pieces. ``prepare`` does, without theta, everything that couples rows.

Group means, filters and normalisers are frozen into ``advantage`` and ``weight``, so that a
training step is a tuple of terms, each ``sum_{n,t} weight * token_loss(theta)`` over its own rows.
Nothing here or in the training loop asks for an algorithm's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl.rl.advantages import Advantage, GroupZScore
from jaxrl.rl.critic import Critic
from jaxrl.rl.filters import Filter, KeepAll, Prefilter, SampleAll
from jaxrl.rl.losses import Clip, TokenLoss
from jaxrl.rl.old_logps import OldLogps, Trainer
from jaxrl.rl.pieces import one_of, within
from jaxrl.rl.refill import Refill
from jaxrl.rl.regularisers import Regulariser
from jaxrl.rl.shaping import Shaping
from jaxrl.rl.weights import TokenMean, Weights
from jaxrl.types import STOP_LENGTH, Batch, Graded, Term

TRUNCATED = ("keep", "mask")
NO_KEPT = ("regularise", "skip")
WHOLE = ("matched", "probe", "probe_logps")  # fields of ``Graded`` that have no axis of prompts


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One recipe. The defaults are GRPO with a token-mean loss.

    - ``shaping``: ``(coef, piece)`` pairs that add to the reward of single tokens, before any advantage.
    - ``loss``: of the policy term, on rollouts; ``none`` for a recipe without one, which samples no rollouts unless a
      regulariser reads them.
    - ``regularisers``: ``(coef, piece)`` pairs, each a further term of the step, or a KL in the reward.
    - ``critic``: what gives the values that an advantage needs.
    - ``refill``: replace prompts that the filters drop; None masks their places.
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
    shaping: tuple[tuple[float, Shaping], ...] = ()
    advantage: Advantage = field(default_factory=GroupZScore)
    weights: Weights = field(default_factory=TokenMean)
    loss: TokenLoss = field(default_factory=Clip)
    old_logps: OldLogps = field(default_factory=Trainer)
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    critic: Critic | None = None
    refill: Refill | None = None
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
        for name in ("shaping", "regularisers"):
            for coef, _ in getattr(self, name):
                if not (math.isfinite(coef) and coef >= 0):
                    raise ValueError(f"algorithm.{name}.coef: expected a number of at least 0, got {coef!r}")
        for field_name, message in conflicts(self):
            raise ValueError(f"{field_name}: {message}")

    @property
    def active(self) -> tuple[tuple[float, Regulariser], ...]:
        """Regularisers with a nonzero coefficient. One at 0 is neither built nor asks for anything."""
        return tuple((coef, piece) for coef, piece in self.regularisers if coef > 0)

    @property
    def policy(self) -> bool:
        """Whether there is a policy term, on rollouts."""
        return self.loss.on_rollouts

    @property
    def needs(self) -> frozenset[str]:
        """Union of what the pieces need; see ``jaxrl.rl.pieces.NEEDS``."""
        pieces: list[Any] = [piece for _, piece in self.active]
        own: frozenset[str] = frozenset()
        if self.policy:
            pieces += [self.prefilter, self.keep, self.advantage, self.weights, self.loss]
            pieces += [piece for _, piece in self.shaping]
            own = frozenset({"rollouts"})
        found = reduce(frozenset.union, (piece.needs for piece in pieces), own)
        return found | self.old_logps.needs if "rollouts" in found else found

    def samples(self, need: str) -> int:
        """Responses a prompt that the collector must draw for ``need`` (``base_samples``, ...); 0 for none."""
        return max((p.samples for _, p in self.active if need in p.needs), default=0)

    @property
    def base_samples(self) -> int:
        """Base samples a prompt that the collector must draw; 0 when none are needed."""
        return self.samples("base_samples")

    @property
    def matched_run(self) -> str | None:
        """The run folder whose kept prompts a filter matches."""
        return self.prefilter.run or self.keep.run


def conflicts(x: Algorithm) -> Iterator[tuple[str, str]]:
    """``(field, message)`` of what pieces that are each in range say against each other."""
    if x.weights.over == "all" and not isinstance(x.prefilter, SampleAll):
        yield (
            "algorithm.weights.over",
            "'all' counts the rollouts of dropped prompts, but the prefilter drops them before they are sampled; "
            "use over: prompts, or move the filter to algorithm.keep",
        )
    values = x.needs & {"values", "end_values"}
    if values and x.critic is None:
        yield (
            "algorithm.critic",
            f"{x.advantage.tag} needs the values of a critic, and none is configured; add critic: {{trunk: own}} or "
            "{trunk: shared}",
        )
    if x.critic is not None and not values:
        yield "algorithm.critic", f"{x.advantage.tag} asks no critic for values; leave it out, or use advantage: gae"
    if not x.policy and not x.active:
        yield "algorithm.loss", "none leaves nothing to train on; give a loss, or a regulariser with a coefficient"
    if not x.policy and (x.refill or not isinstance(x.prefilter, SampleAll) or x.keep.drops):
        yield (
            "algorithm.loss",
            "filters and refill choose among the prompts of a policy term, and loss: none has none; leave them out",
        )
    if not x.policy and x.no_kept == "skip":
        yield "algorithm.no_kept", "loss: none keeps no prompt, so skip would never take a step; use regularise"
    if x.refill and not x.keep.drops and isinstance(x.prefilter, SampleAll):
        yield "algorithm.refill", "no filter drops a prompt, so there is nothing to refill; leave it out"
    if x.matched_run and x.refill:
        yield "algorithm.refill", "a filter that matches another run's count cannot be refilled; leave it out"
    if x.prefilter.run and x.keep.run:
        yield "algorithm.keep", "prefilter and keep both match a run; use one of them"


def kept(algorithm: Algorithm, graded: Graded) -> Bool[Array, " P"]:
    """Prompts whose rollouts train the policy: they passed the prefilter and the filter."""
    return graded.prefiltered & algorithm.keep(graded)


def applied(algorithm: Algorithm, keep: Bool[Array, " P"]) -> Bool[Array, " minibatches"]:
    """Which mini-batches of ``prepare`` take an optimiser step, given ``kept(algorithm, graded)``."""
    keep = keep[_order(algorithm, keep)] if algorithm.kept_first else jnp.asarray(keep)
    return jnp.any(keep.reshape(algorithm.minibatches, -1), axis=1) | (algorithm.no_kept == "regularise")


def prepare(algorithm: Algorithm, graded: Graded) -> tuple[tuple[Term, ...], ...]:
    """The terms of each optimiser mini-batch: the policy term first, where there is one, then one a regulariser.

    Last comes the value loss of a critic on a shared trunk; see ``value_terms`` for one on its own. Pure, and
    jit-able with ``algorithm`` static; no shape depends on what a filter decides. An epoch is one pass over the
    result. Raises ``ValueError`` when ``graded`` lacks something that the pieces need or when the prompts do not
    split evenly.
    """
    _check(algorithm, graded)
    return tuple(_terms(algorithm, *parts) for parts in _minibatches(algorithm, _frozen(algorithm, graded)))


def value_terms(algorithm: Algorithm, graded: Graded) -> tuple[tuple[Term, ...], ...]:
    """The terms of each optimiser step of a critic on its own trunk, split as ``prepare`` splits; empty without one."""
    critic = algorithm.critic
    if critic is None or critic.shared:
        return ()
    _check(algorithm, graded)
    parts = _minibatches(algorithm, _frozen(algorithm, graded))
    return tuple((critic.term(part[0], part[-1], part[2]),) for part in parts)


def _frozen(algorithm: Algorithm, graded: Graded) -> tuple[Any, ...]:
    """Everything that couples rows: ``(graded, keep, mask, advantage, factor, returns)``, leaves ``[P ...]``."""
    if "rollouts" not in algorithm.needs:
        return (graded, jnp.ones(graded.uid.shape, bool), None, None, None, None)
    keep = kept(algorithm, graded)
    mask = graded.rollouts.rows.mask()
    if algorithm.truncated == "mask":
        mask = mask & (graded.rollouts.stop != STOP_LENGTH)[..., None]
    old_logps, factor = algorithm.old_logps(graded, mask)
    graded = replace(graded, old_logps=old_logps)
    if not algorithm.policy:
        return (graded, keep, mask, None, None, None)
    graded = replace(graded, token_reward=_token_reward(algorithm, graded, mask))
    advantage = algorithm.advantage(graded, mask & keep[:, None, None])
    advantage = jnp.where(keep[:, None, None], advantage, 0)
    advantage = jnp.broadcast_to(advantage, mask.shape).astype(old_logps.dtype)
    return (graded, keep, mask, advantage, factor, algorithm.advantage.returns(graded))


def _token_reward(algorithm: Algorithm, graded: Graded, mask: Array) -> Array | None:
    """What shaping and a KL in the reward add, ``[P G L]``; None where nothing does."""
    parts = [coef * piece(graded, mask) for coef, piece in algorithm.shaping if coef > 0]
    parts += [piece.token_reward(coef, graded, mask) for coef, piece in algorithm.active if piece.in_reward]
    return reduce(jnp.add, [part.astype(graded.reward.dtype) for part in parts]) if parts else None


def _minibatches(algorithm: Algorithm, parts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """``parts`` of each mini-batch. What is not of the step's prompts, such as the probe, goes to each whole."""
    graded, *others = parts
    whole = {name: getattr(graded, name) for name in WHOLE}
    parts = (replace(graded, **dict.fromkeys(WHOLE)), *others)
    if algorithm.kept_first and others[0] is not None:
        order = _order(algorithm, others[0])
        parts = jax.tree.map(lambda x: x[order], parts)
    prompts = graded.uid.shape[0]
    size = prompts // algorithm.minibatches
    for at in range(0, prompts, size):
        graded, *others = jax.tree.map(lambda x, at=at: x[at : at + size], parts)
        yield (replace(graded, **whole), *others)


def _terms(
    algorithm: Algorithm,
    graded: Graded,
    keep: Array,
    mask: Array | None,
    advantage: Array | None,
    factor: Array | None,
    returns: Array | None,
) -> tuple[Term, ...]:
    """The terms of one mini-batch."""
    extra = tuple(piece(coef, graded, mask, keep) for coef, piece in algorithm.active if not piece.in_reward)
    if advantage is None or mask is None:
        return extra
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
    shared = algorithm.critic is not None and algorithm.critic.shared
    value = (algorithm.critic.term(graded, returns, mask),) if shared else ()
    return (Term(batch, algorithm.loss), *extra, *value)


def _order(algorithm: Algorithm, keep: Bool[Array, " P"]) -> Array:
    """Kept prompts first, both parts in their old order."""
    return jnp.argsort(~jnp.asarray(keep), stable=True)


def _check(algorithm: Algorithm, graded: Graded) -> None:
    held = {
        "trainer_logps": graded.old_logps is not None,
        "base_samples": graded.base is not None and graded.base_correct is not None,
        "base_logps": graded.base_logps is not None,
        "stream_samples": graded.stream is not None,
        "teacher_samples": graded.teacher is not None,
        "probe": graded.probe is not None and graded.probe_logps is not None,
    }
    for name in ("greedy_correct", "greedy_reward", "ref_logps", "values", "end_values", "chance", "matched"):
        held[name] = getattr(graded, name) is not None
    for name in ("demonstrations", "pairs"):
        held[name] = getattr(graded, name) is not None
    if held["base_samples"]:
        held["base_samples"] = graded.base_correct.shape[1] >= algorithm.base_samples
    missing = sorted(name for name in algorithm.needs if not held.get(name, True))
    if missing:
        raise ValueError(f"the algorithm needs {', '.join(missing)}, which the graded rollouts do not hold")
    if graded.uid.shape[0] % algorithm.minibatches:
        raise ValueError(
            f"algorithm.minibatches: {graded.uid.shape[0]} prompts do not split into {algorithm.minibatches} "
            "equal mini-batches; change it or rollout.prompts"
        )
