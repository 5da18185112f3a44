"""The training loop: collect, prepare, observe, update, observe, record. The only imperative file.

A step reads as DESIGN's data flow. Metrics stay on the device and are fetched one step late; the
state is donated; every compiled function keeps its shapes, so nothing recompiles after step two.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxrl import keys
from jaxrl.errors import JaxrlError
from jaxrl.evaluation.exact import Exact, exact
from jaxrl.mean import Mean
from jaxrl.models.critic import without_value_head
from jaxrl.models.decoder import Decoder
from jaxrl.rl.algorithms import Algorithm, applied, kept, prepare, value_terms
from jaxrl.rl.critic import own_optimiser
from jaxrl.rl.metrics import kl_estimates, rollout_metrics, sampler_mismatch
from jaxrl.rl.optimiser import Optimiser, learning_rate
from jaxrl.rl.update import STATIC, update
from jaxrl.sampling.engines import own_engine
from jaxrl.train import grading, pending
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.collect import Collected, Collector, matched_counts, with_probe
from jaxrl.train.evaluate import evaluate_exact, evaluate_samples
from jaxrl.train.experiment import Experiment
from jaxrl.train.folder import CONFIG, check_held, describe_run, note_data, open_folder, summarise
from jaxrl.train.observe import BatchView, Observer
from jaxrl.train.packed import term_layouts
from jaxrl.train.progress import Progress
from jaxrl.train.record import MetricLog, WriteFailed, environment, write_jsonl
from jaxrl.train.setup import Setup, set_up, total_updates
from jaxrl.train.stops import Stops, check_others
from jaxrl.train.tasks import Msa0Task
from jaxrl.types import STOP_NAMES, STOP_NONE, Graded, Term, TrainState, container


@container
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Terms of each mini-batch, those of a critic on its own trunk, kept prompts, and which mini-batches take a step."""

    minibatches: tuple[tuple[Term, ...], ...]
    values: tuple[tuple[Term, ...], ...]
    keep: Array
    applied: Array


_rate = jax.jit(learning_rate, static_argnums=0, static_argnames="total")
_update = jax.jit(update, static_argnames=STATIC, donate_argnums=0)


@partial(jax.jit, static_argnums=0)
def _prepare(algorithm: Algorithm, graded: Graded) -> Prepared:
    keep = kept(algorithm, graded)
    return Prepared(prepare(algorithm, graded), value_terms(algorithm, graded), keep, applied(algorithm, keep))


@partial(jax.jit, static_argnums=0)
def _describe(algorithm: Algorithm, graded: Graded) -> dict[str, Any]:
    """Metrics of the rollouts: rewards, lengths, shares, sampler against trainer, and where it is known KL to the base.

    And what the regularisers say of their samples.
    """
    metrics = rollout_metrics(algorithm, graded)
    for _, piece in algorithm.active:
        metrics |= piece.metrics(graded)
    if "rollouts" not in algorithm.needs:
        return metrics
    mask = graded.rollouts.rows.mask()
    if graded.old_logps is not None:
        metrics |= _mismatch(algorithm, graded.rollouts.logps, graded.old_logps, mask)
    if graded.ref_logps is not None:
        found = kl_estimates(algorithm.old_logps(graded, mask)[0], graded.ref_logps, mask)
        metrics |= {f"kl/base_{name}": value for name, value in found.items()}
    return metrics


@partial(jax.jit, static_argnums=0)
def _mismatch(algorithm: Algorithm, sampled: Array, trained: Array, mask: Array) -> dict[str, Any]:
    """Sampler against trainer, before any cap."""
    found = sampler_mismatch(sampled, trained, mask, cap=algorithm.old_logps.cap)
    return {f"kl/sampler_{name}": value for name, value in found.items()}


def check_gap(algorithm: Algorithm, step: int, line: Mapping[str, Any]) -> None:
    """Raise ``JaxrlError`` when the sampler's log-probs are too far off for a piece that trusts them."""
    gap, limit = line.get("kl/sampler_max", 0.0), algorithm.old_logps.max_gap
    if gap > limit:
        raise JaxrlError(
            f"step {step}: a token's log-prob differs by {gap:.3g} nats between sampler and trainer, above "
            f"algorithm.old_logps.max_gap = {limit:g}; the run stopped and its last checkpoint stands. Use "
            "old_logps: {type: tis} or {type: trainer}, or a max_gap that suits the model's dtype"
        )


def train(
    experiment: Experiment,
    echo: Mapping[str, Any],
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    base: Decoder | None = None,
    quiet: bool = False,
) -> pathlib.Path:
    """``jaxrl.train`` below the config: ``echo`` is the experiment as ``config.json`` keeps it."""
    folder = open_folder(pathlib.Path(out or time.strftime("runs/%Y%m%d-%H%M%S")), resume)
    if resume:
        check_held(folder, experiment.steps)
    describe_run(folder, echo, environment(), resume)  # first: from here on a killed run can be resumed
    try:
        check_others(experiment)
        setup = set_up(experiment, folder, base)
    except BaseException:
        if not resume:
            (folder / CONFIG).unlink()  # nothing has begun: the folder is free again
        raise
    task = setup.task
    try:
        note_data(folder, task.notes)
        for line in () if quiet else task.notes.get("data", ()):
            print(line, file=sys.stderr, flush=True)
        run = Run(experiment, setup, folder, quiet)
        del setup  # and with it the base, unless a piece needs a reference
        run.go()
    finally:
        task.close()
    return folder


class Run:
    """One run in progress: what stands between steps, and the methods of a step in their order."""

    def __init__(self, experiment: Experiment, setup: Setup, folder: pathlib.Path, quiet: bool = False) -> None:
        self.x, self.task, self.root, self.folder, self.quiet = experiment, setup.task, setup.root, folder, quiet
        self.reference, self.tx, self.critic_tx = setup.reference, setup.tx, setup.critic_tx
        optimiser, rollout = experiment.optimiser, experiment.rollout
        self.collector = Collector(
            setup.task,
            experiment.algorithm,
            rollout,
            experiment.reward,
            optimiser.microbatch,
            setup.mesh,
            optimiser.packing,
            matched_counts(experiment),
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", experiment.checkpoint)
        state = setup.first_state()
        self.state: TrainState = self.checkpoints.restore(state) if self.checkpoints.steps() else state
        self.start = int(self.state.step)
        self.log = MetricLog(folder / "metrics.jsonl", self.start)
        self.updates = max((line["optim/updates"] for line in self.log.lines("train")), default=0)
        self.late: list[tuple[int, str, Any, Callable[[Any], dict[str, Any]]]] = []
        self.arrays = ArrayStore(folder / "arrays.zarr")
        p, g = rollout.prompts, rollout.n
        for name, shape, dtype in (("reward", (p, g), "f4"), ("correct", (p, g), "?"), ("kept", (p,), "?")):
            self.arrays.require(name, (experiment.steps, *shape), dtype)
        self.exact_base: Exact | None = exact(setup.base) if isinstance(setup.task, Msa0Task) else None
        self.observer = Observer(experiment, setup, self.collector, folder, self.arrays)
        self.collector = with_probe(self.collector, self.observer.probe, self.observer.base_logps)
        self.generated = sum(line["cost/generated_tokens"] for line in self.log.lines("train"))
        self.stops = Stops(experiment.stop, self.log.lines)

    def go(self) -> None:
        """All remaining steps; the last checkpoint and evaluation are of the trained model."""
        total = self.x.steps
        try:
            if self.start == 0 and self.x.eval.every:
                self.evaluate(0)
            with Progress(total, self.folder.name, quiet=self.quiet, done=self.start) as bar:
                for step in range(self.start, total):
                    if self.stops.reached:
                        self.stop_early(step)
                        break
                    bar.advance(1, **self.step(step))
            self.checkpoints.save(self.state)
            summarise(self.folder, self.log, int(self.state.step), self.stops.reached)
        except WriteFailed as error:
            steps = self.checkpoints.steps()
            stands = f"the checkpoint of step {steps[-1]} stands" if steps else "there is no checkpoint yet"
            raise WriteFailed(f"{error}. The run stopped, and {stands}; make room and add --resume") from error
        finally:
            self.checkpoints.close()
        (self.folder / pending.FILE).unlink(missing_ok=True)

    def step(self, step: int) -> dict[str, str]:
        """One step: rollouts, terms, updates, and what they did to batch and probe."""
        began = time.monotonic()
        algorithm = self.x.algorithm
        collected = self.collect(step)
        ready = _prepare(algorithm, collected.graded)
        view = BatchView.of(
            self.policy if algorithm.policy and self.observer.observes(step) else None,
            ready.minibatches,
            self.collector.temperature if algorithm.policy else 1.0,
            self.x.optimiser.microbatch,
            self.collector.scorer,
        )
        self.observer.before(step, self.policy, view)
        acts = np.asarray(ready.applied) & (algorithm.critic is None or step >= algorithm.critic.warmup)
        metrics, updates = self.update(ready, acts)
        metrics |= view.metrics(self.policy)
        self.state = dataclasses.replace(self.state, step=self.state.step + 1)
        metrics |= self.describe(collected, view)
        self.updates += updates
        metrics["optim/updates"] = self.updates
        self.record(step, collected, ready.keep)
        self.flush()
        metrics["cost/seconds"] = time.monotonic() - began
        self.push(step, "train", metrics)
        norm = metrics["optim/update_norm"] if updates == 1 else None  # norms of several updates do not add up
        for kind, values, finish in self.observer.after(step, self.policy, norm):
            self.push(step, kind, values, finish)
        if self.x.stop:
            self.flush()  # what a run stops by must be known before the next step
        self.end_of_step(step + 1)
        return {
            "reward": f"{np.mean(collected.graded.reward):.3f}",
            "kept": f"{np.mean(collected.graded.prefiltered):.2f}",
        }

    @property
    def policy(self) -> Decoder:
        """The model of the current state, without the value head of a critic on its trunk."""
        return without_value_head(self.state.model)

    def stop_early(self, step: int) -> None:
        """A stop condition holds before step ``step``: evaluate what that step's end would have evaluated."""
        every = self.x.eval.every
        if not (every and step % every == 0):
            self.flush()
            self.evaluate(step)

    def collect(self, step: int) -> Collected:
        """The step's rollouts: those kept from an interrupted try, or fresh ones."""
        held = pending.load(self.folder, step)
        if held is not None:
            return dataclasses.replace(held, graded=self.collector.place(held.graded))
        collected = self.collector(self.state.model, self.reference, self.root, step, self.state.critic_model)
        if self.is_checkpoint(step):
            pending.save(self.folder, step, collected)
        return collected

    def update(self, ready: Prepared, acts: np.ndarray) -> tuple[dict[str, Any], int]:
        """All optimiser steps of one rollout batch, and their number. Metrics of several add up as means."""
        algorithm, optimiser = self.x.algorithm, self.x.optimiser
        totals: dict[str, Mean] = {}
        layouts = [
            term_layouts(terms, optimiser, self.collector.mesh) if act else None
            for terms, act in zip(ready.minibatches, acts, strict=True)
        ]
        values = ready.values or (None,) * len(acts)
        for _ in range(algorithm.epochs):
            for terms, value, packed, act in zip(ready.minibatches, values, layouts, acts, strict=True):
                if act:
                    self.state, metrics = self.step_on(self.state, terms, optimiser, self.tx, packed)
                    totals = {name: totals.get(name, 0) + found for name, found in metrics.items()} | {
                        name: found for name, found in totals.items() if name not in metrics
                    }
                if value is not None:
                    totals = self.fit_critic(value, totals)
        return dict(totals), int(acts.sum()) * algorithm.epochs

    def step_on(
        self, state: TrainState, terms: tuple[Term, ...], optimiser: Optimiser, tx: Any, packed: Any
    ) -> tuple[TrainState, dict[str, Mean]]:
        """One optimiser step; ``state`` is donated."""
        return _update(
            state,
            terms,
            self.reference,
            tx=tx,
            temperature=self.collector.temperature,
            microbatch=optimiser.microbatch,
            score=self.collector.scorer,
            layouts=packed,
        )

    def fit_critic(self, terms: tuple[Term, ...], totals: dict[str, Mean]) -> dict[str, Mean]:
        """One step of a critic on its own trunk; ``totals`` with ``critic/loss`` and ``critic/grad_norm`` added."""
        optimiser = own_optimiser(self.x.algorithm.critic)
        state, metrics = self.step_on(self.state.critic, terms, optimiser, self.critic_tx, None)
        self.state = dataclasses.replace(self.state, critic=dataclasses.replace(state, step=state.step + 1))
        found = {"critic/loss": metrics["policy/loss"], "critic/grad_norm": metrics["optim/grad_norm"]}
        return totals | {name: totals.get(name, 0) + value for name, value in found.items()}

    def describe(self, collected: Collected, view: BatchView) -> dict[str, Any]:
        """Metrics of the rollouts and of what they cost."""
        algorithm, batch = self.x.algorithm, view.batch
        metrics = _describe(algorithm, collected.graded)
        if view.before is not None and collected.graded.old_logps is None:  # then the batch holds the sampler's
            metrics |= _mismatch(algorithm, batch.old_logps, view.before, batch.rows.mask())
        counts = grading.counts(collected.verdicts)
        total = np.float32(sum(counts.values()))
        for status in ("no_box", "timeout", "error"):
            metrics[f"reward/{status}"] = Mean(np.float32(counts[status]), total)
        metrics["optim/lr"] = _rate(self.x.optimiser, self.updates, total=total_updates(self.x))
        self.generated += collected.generated_tokens
        metrics["cost/generated_tokens"] = collected.generated_tokens
        metrics["cost/total_tokens"] = self.generated
        metrics |= {name: Mean(np.float32(a), np.float32(b)) for name, (a, b) in collected.notes.items()}
        return metrics

    def record(self, step: int, collected: Collected, keep: Array) -> None:
        """Arrays of the step, and every few steps the rollouts as a person reads them."""
        graded = jax.device_get(collected.graded)
        for name, value in (("reward", graded.reward), ("correct", graded.correct), ("kept", keep)):
            self.arrays.write(name, step, value)
        every = self.x.rollout.log_every
        if every and step % every == 0:
            write_jsonl(self.folder / "rollouts" / f"{step:06d}.jsonl", self.readable(collected, graded))

    def readable(self, collected: Collected, graded: Any) -> list[dict[str, Any]]:
        """One record a response: prompt, text, verdict, reward, length, stop reason."""
        rows, stop = graded.rollouts.rows, graded.rollouts.stop
        text = self.task.text
        return [
            {
                "uid": int(graded.uid[p]),
                "sample": g,
                "prompt": text(rows.tokens[p, g, : rows.start[p, g]].tolist()),
                "response": text(grading.response(rows, p, g)),
                "verdict": verdict.status,
                "answer": verdict.answer,
                "reward": float(graded.reward[p, g]),
                "length": int(rows.length[p, g] - rows.start[p, g]),
                "stop": STOP_NAMES[stop[p, g]],
            }
            for p, row in enumerate(collected.verdicts)
            for g, verdict in enumerate(row)
            if verdict is not None and stop[p, g] != STOP_NONE
        ]

    def push(self, step: int, kind: str, values: Any, finish: Callable[[Any], dict[str, Any]] = dict) -> None:
        """Queue a line. It is fetched and written a step later, when its values have long arrived."""
        self.late.append((step, kind, values, finish))

    def flush(self) -> None:
        """Write the queued lines. A NaN in one stops the run, and so does a sampler that is too far off."""
        late, self.late = self.late, []
        for step, kind, values, finish in late:
            line = self.log.write(step, kind, finish(jax.device_get(values)))
            check_gap(self.x.algorithm, step, line)
            self.stops.see(line)

    def end_of_step(self, step: int) -> None:
        """Evaluation and checkpoint of the state before step ``step``."""
        every = self.x.eval.every
        if step == self.x.steps or (every and step % every == 0):
            self.flush()
            self.evaluate(step)
        if self.is_checkpoint(step):
            self.flush()  # a state whose step was not finite is never kept
            self.checkpoints.save(self.state)

    def is_checkpoint(self, step: int) -> bool:
        return step % self.x.checkpoint.every == 0

    def evaluate(self, step: int) -> None:
        """pass@k of every evaluation set (and of the training prompts where that is exact)."""
        spec, task = self.x.eval, self.task
        if isinstance(task, Msa0Task) and self.exact_base is not None:
            self.log.write(step, "eval", evaluate_exact(self.policy, self.exact_base, task, spec.k, step, self.folder))
            return
        metrics: dict[str, float] = {}
        for name in task.pools:
            if name != "train":
                metrics |= evaluate_samples(
                    self.policy,
                    task,
                    name,
                    presets=spec.presets,
                    n=spec.n,
                    ks=spec.k,
                    key=keys.at(self.root, "eval"),
                    max_new_tokens=self.x.rollout.max_new_tokens,
                    out=self.folder,
                    label=f"-{step:06d}",
                    engine=own_engine(self.x.rollout.engine, self.collector.mesh),
                )
        if metrics:
            self.log.write(step, "eval", metrics)
