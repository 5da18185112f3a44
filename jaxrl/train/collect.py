"""One step's data: prompts, the prefilter's greedy pass, rollouts, verdicts, and what the pieces need.

Everything here is a pure function of (models, root key, step), so an interrupted step can be
collected again and comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from jaxrl import keys
from jaxrl.errors import UsageError
from jaxrl.mesh import to_mesh
from jaxrl.models.decoder import Decoder
from jaxrl.models.passes import packed_logps
from jaxrl.models.scoring import REVERSE, Reverse, Scorer
from jaxrl.rewards import Verdict
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.optimiser import Packing
from jaxrl.sampling.engines import own_engine
from jaxrl.sampling.requests import Engine
from jaxrl.sampling.rollouts import sample
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature
from jaxrl.train import grading
from jaxrl.train.experiment import RolloutSpec
from jaxrl.train.packed import layout
from jaxrl.train.tasks import Task
from jaxrl.types import Graded, Prompts, Rollouts, Rows


@dataclass(frozen=True)
class Collected:
    """A graded step and what the logs say of it. ``verdicts[p][g]`` is None where nothing was sampled."""

    graded: Graded
    verdicts: grading.Verdicts
    generated_tokens: int


@dataclass(frozen=True)
class Collector:
    """How a run collects.

    ``score_rows`` bounds the rows of one scoring pass, which ``packing`` packs; on a ``mesh`` rows are split over it.
    """

    task: Task
    algorithm: Algorithm
    spec: RolloutSpec
    reward: Callable[[Verdict], float]
    score_rows: int | None = None
    mesh: Mesh | None = None
    packing: Packing | None = None

    @property
    def temperature(self) -> float:
        return temperature_of(self.spec.strategy)

    @property
    def scorer(self) -> Scorer:
        """How rows are scored that this collector made: at as many positions as a response may have."""
        return Reverse(responses=self.spec.max_new_tokens, mesh=self.mesh)

    def __call__(self, policy: Decoder, reference: Decoder | None, root: Key[Array, ""], step: int) -> Collected:
        """Collect step ``step`` with the current policy; ``reference`` where a piece needs it."""
        spec, needs = self.spec, self.algorithm.needs
        prompts = self.task.pools["train"].take(root, step, spec.prompts)
        kept, greedy_correct, spent = np.ones(spec.prompts, bool), None, 0
        self.engine.load(policy, step)
        if spec.log_greedy or "greedy_correct" in needs:
            greedy_correct, spent = self._greedy(prompts, root, step)
            kept = np.asarray(self.algorithm.prefilter(jnp.asarray(greedy_correct)))
        with grading.Grader(self.task, prompts.uid, spec.n) as grader:
            drawn = self.sample(self.engine, prompts, spec.strategy, spec.n, root, step, np.flatnonzero(kept), grader)
            verdicts = grader.finish()
        self.engine.sleep()
        rollouts = self.place(drawn)
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
        shape, flat = rows.tokens.shape, rows.flat()
        if self.packing is None:
            return score_rows(model, flat, self.temperature, self.score_rows, self.scorer).reshape(shape)
        passes = layout(flat, None, self.packing, self.score_rows, self.mesh)
        return _packed_logps(model, flat, passes, temperature=self.temperature).reshape(shape)

    @cached_property
    def engine(self) -> Engine:
        """What samples the policy, laid out for a whole step, so that one with fewer prompts compiles nothing new."""
        engine = self.spec.engine.build(self.mesh)
        width = self.task.pools["train"].width
        engine.reserve(prompts=self.spec.prompts, width=width, max_new=self.spec.max_new_tokens)
        return engine

    @cached_property
    def base_engine(self) -> Engine:
        """What samples the base: a server keeps the policy."""
        return self.engine if "in_process" in self.engine.caps else own_engine(self.spec.engine, self.mesh)

    def sample(
        self,
        engine: Engine,
        prompts: Prompts,
        strategy: Strategy,
        n: int,
        root: Key[Array, ""],
        step: int,
        chosen: Sequence[int] | None = None,
        grader: grading.Grader | None = None,
    ) -> Rollouts:
        """``n`` responses to each of the ``chosen`` prompts (default: all), on the host; graded as they end."""
        return sample(
            engine,
            prompts,
            strategy,
            n=n,
            key=root,
            max_new_tokens=self.spec.max_new_tokens,
            stop_ids=self.task.stop_ids,
            step=step,
            chosen=chosen,
            finished=None if grader is None else lambda p, g, s: grader.add(p, g, s.tokens, s.stop),
        )

    def correct(self, prompts: Prompts, rollouts: Rollouts) -> Bool[np.ndarray, "P G"]:
        """Which responses are correct."""
        return grading.correct(grading.grade(self.task, prompts.uid, rollouts))

    def _greedy(self, prompts: Prompts, root: Key[Array, ""], step: int) -> tuple[Bool[np.ndarray, " P"], int]:
        rollouts = self.sample(self.engine, prompts, Greedy(), 1, keys.at(root, "greedy"), step)
        right = self.correct(prompts, rollouts)[:, 0]
        return right, int(np.asarray(rollouts.rows.response_length()).sum())

    def _with_base_samples(
        self, graded: Graded, reference: Decoder | None, prompts: Prompts, root: Key[Array, ""], step: int
    ) -> tuple[Graded, int]:
        """Fresh samples of the base model on the step's prompts, at temperature 1 and untruncated."""
        count = self.algorithm.base_samples
        self.base_engine.load(reference, step)
        base = self.sample(self.base_engine, prompts, Temperature(value=1.0), count, keys.at(root, "base"), step)
        self.base_engine.sleep()
        right = self.correct(prompts, base)
        spent = int(np.asarray(base.rows.response_length()).sum())
        return replace(graded, base=base, base_correct=right), spent


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


_packed_logps = jax.jit(packed_logps)


def score_rows(
    model: Any, rows: Rows, temperature: float = 1.0, at_once: int | None = None, score: Scorer = REVERSE
) -> Float[Array, "N L"]:
    """Log-probs of the tokens of ``[N L]`` rows in passes of ``at_once`` rows, nats; 0 off the response."""
    return in_passes(score, model, rows, temperature, at_once=at_once)


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
