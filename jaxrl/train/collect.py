"""One step's data: prompts, the prefilter's greedy pass, rollouts, verdicts, and what the pieces need.

Everything here is a pure function of (models, root key, step), so an interrupted step can be
collected again and comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl import keys
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.mesh import to_mesh
from jaxrl.models.critic import without_value_head
from jaxrl.models.decoder import Decoder
from jaxrl.models.passes import packed_logps
from jaxrl.models.scoring import REVERSE, Reverse, Scorer, StateValues
from jaxrl.rewards import Verdict
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.algorithms import kept as kept_prompts
from jaxrl.rl.losses import reference_of
from jaxrl.rl.optimiser import Packing
from jaxrl.sampling.engines import own_engine
from jaxrl.sampling.requests import Engine
from jaxrl.sampling.rollouts import sample
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature
from jaxrl.train import grading
from jaxrl.train.experiment import Experiment, RolloutSpec
from jaxrl.train.extras import Extras
from jaxrl.train.packed import layout
from jaxrl.train.rounds import Round, chances, kept_counts, response_tokens
from jaxrl.train.tasks import Task
from jaxrl.types import Graded, Probe, Prompts, Rollouts, Rows


@dataclass(frozen=True)
class Collected:
    """A graded step and what the logs say of it. ``verdicts[p][g]`` is None where nothing was sampled.

    ``notes``: metrics of collecting that the graded arrays do not show, as ``(total, count)``.
    """

    graded: Graded
    verdicts: grading.Verdicts
    generated_tokens: int
    notes: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collector:
    """How a run collects.

    ``score_rows`` bounds the rows of one scoring pass, which ``packing`` packs; on a ``mesh`` rows are split over it.
    ``matched``: prompts that another run kept by step, for filters that match it. ``probe``: rows and base log-probs
    of the run's probe, for pieces that train on it.
    """

    task: Task
    algorithm: Algorithm
    spec: RolloutSpec
    reward: Callable[[Verdict], float]
    score_rows: int | None = None
    mesh: Mesh | None = None
    packing: Packing | None = None
    matched: Int[np.ndarray, " steps"] | None = None
    probe: tuple[Rows, Float[np.ndarray, "M L"]] | None = None

    @property
    def temperature(self) -> float:
        return temperature_of(self.spec.strategy)

    @property
    def scorer(self) -> Scorer:
        """How rows are scored that this collector made: at as many positions as a response may have."""
        return Reverse(responses=self.spec.max_new_tokens, mesh=self.mesh)

    def __call__(
        self, model: Decoder, reference: Any, root: Key[Array, ""], step: int, critic: Decoder | None = None
    ) -> Collected:
        """Collect step ``step`` with the current policy.

        ``reference``: the base, or a dict of ``base`` and ``teacher``, where a piece needs them. ``critic``: one on a
        trunk of its own; the policy's value head serves else.
        """
        policy, needs = without_value_head(model), self.algorithm.needs
        self.engine.load(policy, step)
        found = self.rounds(root, step)
        self.engine.sleep()
        rollouts = self.place(found.rollouts)
        graded = replace(
            found.graded(self.reward),
            rollouts=rollouts,
            old_logps=self.score(policy, rollouts.rows) if "trainer_logps" in needs else None,
            ref_logps=self.score(reference_of(reference, "base"), rollouts.rows) if "ref_logps" in needs else None,
        )
        graded, spent = Extras(self, reference, root, step)(
            replace(graded, **self.values(critic or model, rollouts.rows))
        )
        return Collected(
            self.place(graded), found.verdicts, found.spent + spent, found.notes if self.algorithm.refill else {}
        )

    def rounds(self, root: Key[Array, ""], step: int) -> Round:
        """The step's rollouts as they were graded: one generation batch, or as many as a refill takes."""
        pool, refill, places = self.task.pools["train"], self.algorithm.refill, self.spec.prompts
        found = self.round(pool.take(root, step, places), root, step)
        if refill is None:
            return found
        kept, seen = self.kept(found), set(found.prompts.uid.tolist())
        for number in range(1, refill.rounds):
            if kept.all() or len(seen) == len(pool):
                break
            prompts = pool.take(keys.at(root, "refill"), step * (refill.rounds - 1) + number - 1, places)
            fresh = np.array([uid not in seen for uid in prompts.uid.tolist()])
            seen |= set(prompts.uid.tolist())
            more = self.round(prompts, root, step, fresh, None if self.algorithm.keep.drops else int((~kept).sum()))
            found, kept = found.filled(kept, more, self.kept(more) & fresh)
        if refill.short == "stop" and not kept.all():
            raise JaxrlError(
                f"step {step}: {int(kept.sum())} of {places} prompts passed the filters after {found.count} generation "
                "batches (algorithm.refill.rounds); the run stopped and its last checkpoint stands. Use more rounds, "
                "other problems, or refill.short: continue"
            )
        return found

    def round(
        self,
        prompts: Prompts,
        root: Key[Array, ""],
        step: int,
        fresh: Bool[np.ndarray, " P"] | None = None,
        room: int | None = None,
    ) -> Round:
        """One generation batch: the greedy pass, the prefilter, rollouts and verdicts.

        ``fresh``: prompts that may be sampled at all; ``room``: how many of those that pass the prefilter at most.
        """
        spec, needs = self.spec, self.algorithm.needs
        count = len(prompts.uid)
        fresh = np.ones(count, bool) if fresh is None else fresh
        chance = chances(root, step, prompts.uid) if "chance" in needs else None
        matched = None if self.matched is None else np.int32(self.matched[step])
        kept, greedy, spent = fresh, None, 0
        if spec.log_greedy or needs & {"greedy_correct", "greedy_reward"}:
            greedy, spent = self._greedy(prompts, root, step, np.flatnonzero(fresh))
        if "rollouts" in needs:
            right = np.array([v is not None and v.correct for v in greedy or [None] * count])
            kept = kept & np.asarray(self.algorithm.prefilter(jnp.asarray(right), chance, matched))
        else:
            kept = np.zeros(count, bool)
        kept = kept & (np.cumsum(kept) <= (count if room is None else room))
        with grading.Grader(self.task, prompts.uid, spec.n) as grader:
            drawn = self.sample(self.engine, prompts, spec.strategy, spec.n, root, step, np.flatnonzero(kept), grader)
            verdicts = grader.finish()
        return Round(prompts, drawn, verdicts, greedy, kept, chance, matched, spent + response_tokens(drawn))

    def _greedy(
        self, prompts: Prompts, root: Key[Array, ""], step: int, chosen: Sequence[int]
    ) -> tuple[list[Verdict | None], int]:
        """Verdicts of the greedy responses, and their tokens."""
        drawn = self.sample(self.engine, prompts, Greedy(), 1, keys.at(root, "greedy"), step, chosen)
        return [row[0] for row in grading.grade(self.task, prompts.uid, drawn)], response_tokens(drawn)

    def kept(self, found: Round) -> Bool[np.ndarray, " P"]:
        """Which prompts of a generation batch train."""
        return np.asarray(kept_prompts(self.algorithm, found.graded(self.reward)))

    def values(self, model: Decoder, rows: Rows) -> dict[str, Array]:
        """What the critic says of the rollouts, where a piece asks."""
        needs = self.algorithm.needs
        if self.algorithm.critic is None:
            return {}
        shape = rows.start.shape
        flat = rows.flat()
        # one more column: the state after the last token has a value too
        longer = Rows(jnp.pad(flat.tokens, ((0, 0), (0, 1))), flat.start, jnp.maximum(flat.length, flat.start) + 1)
        scorer = Reverse(responses=self.spec.max_new_tokens + 1, mesh=self.mesh)
        found = in_passes(StateValues(scorer), model, longer, 1.0, at_once=self.score_rows)
        end = jnp.take_along_axis(found, longer.length[:, None] - 1, axis=1)[:, 0]
        values = jnp.where(rows.mask(), found[:, :-1].reshape(*shape, -1), 0)
        return {"values": values} | ({"end_values": end.reshape(shape)} if "end_values" in needs else {})

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

    def score_flat(self, model: Decoder, rows: Rows) -> Float[Array, "N L"]:
        """Log-probabilities of rows of any width at temperature 1, ``score_rows`` a pass."""
        return score_rows(model, rows, 1.0, self.score_rows, Reverse(mesh=self.mesh))

    @cached_property
    def engine(self) -> Engine:
        """What samples the policy, laid out for a whole step, so that one with fewer prompts compiles nothing new."""
        engine = self.spec.engine.build(self.mesh)
        width = self.task.pools["train"].width
        engine.reserve(prompts=self.spec.prompts, width=width, max_new=self.spec.max_new_tokens)
        return engine

    @cached_property
    def base_engine(self) -> Engine:
        """What samples the base and a teacher: a server keeps the policy."""
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


def matched_counts(experiment: Experiment) -> Int[np.ndarray, " steps"] | None:
    """What a filter that matches another run needs of it; None where there is no such filter."""
    run = experiment.algorithm.matched_run
    return None if run is None else kept_counts(run, steps=experiment.steps, prompts=experiment.rollout.prompts)


def with_probe(collector: Collector, probe: Probe, base_logps: Float[np.ndarray, "M L"]) -> Collector:
    """The collector of a run, knowing the run's probe where a piece trains on it; rows cut off by the limit stay out."""
    if "probe" not in collector.algorithm.needs:
        return collector
    whole = np.flatnonzero(~np.asarray(probe.truncated))
    rows = jax.tree.map(lambda x: np.asarray(x)[whole], probe.rows)
    return replace(collector, probe=(rows, np.asarray(base_logps)[whole]))


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
