"""One step's data: prompts, the prefilter's greedy pass, rollouts, verdicts, and what the pieces need.

Everything here is a pure function of (models, root key, step), so an interrupted step can be
collected again and comes out the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from jaxrl import keys
from jaxrl.errors import UsageError
from jaxrl.mesh import RULES, to_mesh
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
    """How a run collects. ``score_rows`` bounds the rows of one scoring pass; on a ``mesh`` rows are split over it."""

    task: Task
    algorithm: Algorithm
    spec: RolloutSpec
    reward: Callable[[Verdict], float]
    score_rows: int | None = None
    mesh: Mesh | None = None

    @property
    def temperature(self) -> float:
        return temperature_of(self.spec.strategy)

    def __call__(self, policy: Decoder, reference: Decoder | None, root: Key[Array, ""], step: int) -> Collected:
        """Collect step ``step`` with the current policy; ``reference`` where a piece needs it."""
        spec, needs = self.spec, self.algorithm.needs
        prompts = self.task.pools["train"].take(root, step, spec.prompts)
        kept, greedy_correct, spent = np.ones(spec.prompts, bool), None, 0
        if spec.log_greedy or "greedy_correct" in needs:
            greedy_correct, spent = self._greedy(policy, prompts, root, step)
            kept = np.asarray(self.algorithm.prefilter(jnp.asarray(greedy_correct)))
        rollouts = self.place(self._rollouts(policy, prompts, kept, root, step))
        verdicts = grading.grade(self.task, prompts.uid, rollouts)
        graded = Graded(
            rollouts=rollouts,
            uid=prompts.uid,
            reward=grading.tabulate(verdicts, self.reward, 0.0).astype(np.float32),
            correct=grading.correct(verdicts),
            prefiltered=kept,
            old_logps=self.score(policy, rollouts.rows) if "trainer_logps" in needs else None,
            greedy_correct=greedy_correct,
            ref_logps=self.score(reference, rollouts.rows) if "ref_logps" in needs else None,
        )
        spent += int(np.asarray(rollouts.rows.response_length()).sum())
        if "base_samples" in needs:
            graded, more = self._with_base_samples(graded, reference, prompts, root, step)
            spent += more
        return Collected(self.place(graded), verdicts, spent)

    def place(self, tree: Any) -> Any:
        """Arrays with a leading axis of prompts or rows, split over the mesh.

        Freshly collected and read back from a file, a step's arrays lie the same way, so that they run the same
        programs to the same bits.
        """
        return jax.tree.map(jnp.asarray, tree) if self.mesh is None else to_mesh(self.mesh, tree)

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
        spec, size = self.spec, prompts_a_call(self.spec, self.algorithm, self.mesh)
        if size == spec.prompts and kept.all():
            return _sample(self, policy, prompts, spec.strategy, spec.n, root, step)
        out = _empty(prompts, spec.n, spec.max_new_tokens)
        index = np.flatnonzero(kept)
        for part in (index[i : i + size] for i in range(0, len(index), size)):
            slots = np.resize(part, size)  # a short last call repeats its prompts; the copies are dropped
            chosen = jax.tree.map(lambda x, s=slots: np.asarray(x)[s], prompts)
            got = _sample(self, policy, chosen, spec.strategy, spec.n, root, step)
            for whole, piece in zip(jax.tree.leaves(out), jax.tree.leaves(jax.device_get(got)), strict=True):
                whole[part] = piece[: len(part)]
        return out

    def _with_base_samples(
        self, graded: Graded, reference: Decoder | None, prompts: Prompts, root: Key[Array, ""], step: int
    ) -> tuple[Graded, int]:
        """Fresh samples of the base model on the step's prompts, at temperature 1 and untruncated."""
        count = self.algorithm.base_samples
        base = _sample(self, reference, prompts, Temperature(value=1.0), count, keys.at(root, "base"), step)
        right = self.correct(prompts, base)
        spent = int(np.asarray(base.rows.response_length()).sum())
        return replace(graded, base=base, base_correct=right), spent


def prompts_a_call(spec: RolloutSpec, algorithm: Algorithm, mesh: Mesh | None = None) -> int:
    """Prompts of one sampling call: all, ``chunk``, or where a prefilter may drop some a part, in whole mesh shares."""
    if spec.chunk is not None:
        return min(spec.chunk, spec.prompts)
    if "greedy_correct" not in algorithm.needs:
        return spec.prompts
    split = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in RULES["rows"])
    return min(spec.prompts, -(-spec.prompts // PREFILTER_PARTS // split) * split)


def temperature_of(strategy: Strategy) -> float:
    """The temperature at which the sampled policy is scored.

    Raises ``UsageError`` for a truncating or greedy strategy: training scores the full vocabulary, so
    ratios would compare two different distributions.
    """
    if isinstance(strategy, Temperature):
        return strategy.value
    raise UsageError(
        f"rollout.strategy: {type(strategy).__name__} restricts the support, while training scores the whole "
        "vocabulary, which would bias every ratio; train with {type: temperature} and truncate in evaluation only"
    )


def score_rows(model: Any, rows: Rows, temperature: float = 1.0, at_once: int | None = None) -> Float[Array, "N L"]:
    """``token_logps`` of ``[N L]`` rows in passes of ``at_once`` rows."""
    return in_passes(token_logps, model, rows, temperature, at_once=at_once)


@partial(jax.jit, static_argnames=("score", "at_once"))
def in_passes(score: Callable[..., Any], model: Any, rows: Rows, temperature: float, *, at_once: int | None) -> Any:
    """``score(model, rows, temperature=...)`` of ``[N L]`` rows, ``at_once`` rows a pass, as one program.

    ``score`` returns one array ``[N L]`` or a tuple of them. A pass takes every so-maniest row, so that rows which
    are split over devices stay where they are; the last rows of a count that does not divide are repeated.
    """
    n = rows.tokens.shape[0]
    if at_once is None or at_once >= n:
        return score(model, rows, temperature=temperature)
    passes = -(-n // at_once)
    if passes * at_once != n:
        rows = rows[jnp.minimum(jnp.arange(passes * at_once), n - 1)]
    parts = jax.tree.map(lambda x: x.reshape(at_once, passes, *x.shape[1:]).swapaxes(0, 1), rows)
    found = jax.lax.map(lambda part: score(model, part, temperature=temperature), parts)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:n], found)


def _sample(
    c: Collector, model: Any, prompts: Prompts, strategy: Strategy, n: int, root: Key[Array, ""], step: int
) -> Rollouts:
    return generate(
        model,
        c.place(prompts),
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
