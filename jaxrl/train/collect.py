"""One step's data: prompts, the prefilter's greedy pass, rollouts, verdicts, and what the pieces need.

Everything here is a pure function of (models, root key, step), so an interrupted step can be
collected again and comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from jaxrl import keys
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_logps
from jaxrl.rewards import Verdict
from jaxrl.rl.algorithms import Algorithm
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature
from jaxrl.train import grading
from jaxrl.train.experiment import RolloutSpec
from jaxrl.train.tasks import Task
from jaxrl.types import STOP_NONE, Graded, Prompts, Rollouts, Rows

PREFILTER_PARTS = 4  # sampling calls a step when a prefilter may empty some of them


@dataclass(frozen=True)
class Collected:
    """A graded step and what the logs say of it. ``verdicts[p][g]`` is None where nothing was sampled."""

    graded: Graded
    verdicts: grading.Verdicts
    generated_tokens: int


@dataclass(frozen=True)
class Collector:
    """How a run collects. ``score_rows`` bounds the rows of one scoring pass."""

    task: Task
    algorithm: Algorithm
    spec: RolloutSpec
    reward: Callable[[Verdict], float]
    score_rows: int | None = None

    @property
    def temperature(self) -> float:
        return temperature_of(self.spec.strategy)

    def __call__(self, policy: Decoder, reference: Decoder | None, root: Key[Array, ""], step: int) -> Collected:
        """Collect step ``step`` with the current policy; ``reference`` where a piece needs it."""
        spec, needs = self.spec, self.algorithm.needs
        prompts = self.task.pools["train"].take(root, step, spec.prompts)
        kept, greedy_correct, spent = np.ones(spec.prompts, bool), None, 0
        if "greedy_correct" in needs:
            greedy_correct, spent = self._greedy(policy, prompts, root, step)
            kept = np.asarray(self.algorithm.prefilter(jnp.asarray(greedy_correct)))
        rollouts = self._rollouts(policy, prompts, kept, root, step)
        verdicts = grading.grade(self.task, prompts.uid, rollouts)
        graded = Graded(
            rollouts=rollouts,
            uid=jnp.asarray(prompts.uid),
            reward=jnp.asarray(grading.tabulate(verdicts, self.reward, 0.0), jnp.float32),
            correct=jnp.asarray(grading.correct(verdicts)),
            prefiltered=jnp.asarray(kept),
            old_logps=self.score(policy, rollouts.rows),
            greedy_correct=None if greedy_correct is None else jnp.asarray(greedy_correct),
            ref_logps=self.score(reference, rollouts.rows) if "ref_logps" in needs else None,
        )
        spent += int(np.asarray(rollouts.rows.response_length()).sum())
        if "base_samples" in needs:
            graded, more = self._with_base_samples(graded, reference, prompts, root, step)
            spent += more
        return Collected(graded, verdicts, spent)

    def score(self, model: Decoder | None, rows: Rows) -> Float[Array, "P G L"]:
        """Log-probabilities of rollouts under a model, at the rollouts' temperature."""
        shape = rows.tokens.shape
        return score_rows(model, rows.flat(), self.temperature, self.score_rows).reshape(shape)

    def correct(self, prompts: Prompts, rollouts: Rollouts) -> Bool[np.ndarray, "P G"]:
        """Which responses are correct."""
        return grading.correct(grading.grade(self.task, prompts.uid, rollouts))

    def _greedy(
        self, policy: Decoder, prompts: Prompts, root: Key[Array, ""], step: int
    ) -> tuple[Bool[np.ndarray, " P"], int]:
        rollouts = _sample(self, policy, prompts, Greedy(), 1, keys.at(root, "greedy"), step)
        right = self.correct(prompts, rollouts)[:, 0]
        return right, int(np.asarray(rollouts.rows.response_length()).sum())

    def _rollouts(
        self, policy: Decoder, prompts: Prompts, kept: Bool[np.ndarray, " P"], root: Key[Array, ""], step: int
    ) -> Rollouts:
        """Rollouts of the kept prompts, in calls of one fixed shape; the others stay empty."""
        spec = self.spec
        if kept.all() and spec.chunk is None and "greedy_correct" not in self.algorithm.needs:
            return _sample(self, policy, prompts, spec.strategy, spec.n, root, step)
        size = spec.chunk or max(1, spec.prompts // PREFILTER_PARTS)
        out = _empty(prompts, spec.n, spec.max_new_tokens)
        index = np.flatnonzero(kept)
        for part in (index[i : i + size] for i in range(0, len(index), size)):
            slots = np.resize(part, size)  # a short last call repeats its prompts; the copies are dropped
            chosen = jax.tree.map(lambda x, s=slots: np.asarray(x)[s], prompts)
            got = _sample(self, policy, chosen, spec.strategy, spec.n, root, step)
            for whole, piece in zip(jax.tree.leaves(out), jax.tree.leaves(jax.device_get(got)), strict=True):
                whole[part] = piece[: len(part)]
        return jax.tree.map(jnp.asarray, out)

    def _with_base_samples(
        self, graded: Graded, reference: Decoder | None, prompts: Prompts, root: Key[Array, ""], step: int
    ) -> tuple[Graded, int]:
        """Fresh samples of the base model on the step's prompts, at temperature 1 and untruncated."""
        count = self.algorithm.base_samples
        base = _sample(self, reference, prompts, Temperature(value=1.0), count, keys.at(root, "base"), step)
        right = self.correct(prompts, base)
        spent = int(np.asarray(base.rows.response_length()).sum())
        return replace(graded, base=base, base_correct=jnp.asarray(right)), spent


def temperature_of(strategy: Strategy) -> float:
    """The temperature at which the sampled policy is scored.

    Raises ``ValueError`` for a truncating or greedy strategy: training scores the full vocabulary, so
    ratios would compare two different distributions.
    """
    if isinstance(strategy, Temperature):
        return strategy.value
    raise ValueError(
        f"rollout.strategy: {type(strategy).__name__} restricts the support, while training scores the whole "
        "vocabulary, which would bias every ratio; train with {type: temperature} and truncate in evaluation only"
    )


@jax.jit
def _score(model: Decoder, rows: Rows, temperature: Array) -> Float[Array, "N L"]:
    return token_logps(model, rows, temperature=temperature)


def score_rows(model: Any, rows: Rows, temperature: float = 1.0, at_once: int | None = None) -> Float[Array, "N L"]:
    """``token_logps`` of ``[N L]`` rows in passes of ``at_once`` rows, one compiled shape."""
    n = rows.tokens.shape[0]
    size = min(at_once or n, n)
    parts = []
    for i in range(0, n, size):
        index = np.minimum(np.arange(i, i + size), n - 1)
        parts.append(_score(model, jax.tree.map(lambda x, j=index: x[j], rows), jnp.float32(temperature)))
    return jnp.concatenate(parts)[:n] if len(parts) > 1 else parts[0]


def _sample(
    c: Collector, model: Any, prompts: Prompts, strategy: Strategy, n: int, root: Key[Array, ""], step: int
) -> Rollouts:
    return generate(
        model,
        prompts,
        strategy,
        n=n,
        key=root,
        max_new_tokens=c.spec.max_new_tokens,
        stop_ids=c.task.stop_ids,
        step=step,
    )


def _empty(prompts: Prompts, n: int, max_new: int) -> Rollouts:
    """Host arrays of rollouts without a response."""
    p, width = np.shape(prompts.tokens)
    tokens = np.zeros((p, n, width + max_new), np.int32)
    tokens[:, :, :width] = np.asarray(prompts.tokens)[:, None]
    length = np.repeat(np.asarray(prompts.length, np.int32)[:, None], n, axis=1)
    logps = np.zeros(tokens.shape, np.float32)
    return Rollouts(Rows(tokens, length, length.copy()), logps, np.full((p, n), STOP_NONE, np.int32))
