"""The training loop: collect, prepare, observe, update, observe, record. The only imperative file.

A step reads as DESIGN's data flow. Metrics stay on the device and are fetched one step late; the
state is donated; every compiled function keeps its shapes, so nothing recompiles after step two.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.evaluation.exact import Exact, exact
from jaxrl.mean import Mean
from jaxrl.models.decoder import Decoder
from jaxrl.rl.algorithms import applied, kept, prepare
from jaxrl.rl.metrics import rollout_metrics, sampler_gap
from jaxrl.rl.optimiser import learning_rate
from jaxrl.rl.update import update
from jaxrl.train import grading, pending
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.collect import Collected, Collector
from jaxrl.train.evaluate import evaluate_exact, evaluate_samples
from jaxrl.train.experiment import Experiment
from jaxrl.train.observe import BatchView, Observer
from jaxrl.train.progress import Progress
from jaxrl.train.record import ArrayStore, MetricLog, NotFinite, environment, write_json, write_jsonl
from jaxrl.train.setup import Setup, set_up, total_updates
from jaxrl.train.tasks import Msa0Task
from jaxrl.types import STOP_NAMES, STOP_NONE, TrainState

_prepare = jax.jit(prepare, static_argnums=0)
_update = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"), donate_argnums=0)


def train(
    experiment: Experiment,
    *,
    out: str | pathlib.Path | None = None,
    resume: bool = False,
    echo: Mapping[str, Any] | None = None,
    base: Decoder | None = None,
    quiet: bool = False,
) -> pathlib.Path:
    """Run an experiment and return its run folder (default ``runs/<time>``).

    ``resume`` goes on from the last checkpoint of ``out``, bit for bit as if it had never stopped. ``echo`` is
    written to ``config.json``. ``base`` is a base model that the caller already has.

    Raises ``UsageError`` when ``out`` holds another run, ``GateFailed`` when the base may not be used, and
    ``NotFinite`` naming step and metric when a number is NaN.
    """
    folder = open_folder(pathlib.Path(out or time.strftime("runs/%Y%m%d-%H%M%S")), resume)
    setup = set_up(experiment, folder, base)
    try:
        run = Run(experiment, setup, folder, resume, quiet)
        write_json(folder / "config.json", {"experiment": dict(echo or {}), **environment(setup.task.notes)})
        run.go()
    finally:
        setup.task.close()
    return folder


def open_folder(folder: pathlib.Path, resume: bool) -> pathlib.Path:
    """The run folder: new, or one to go on with. Fails before any work when it cannot be written."""
    if resume and not (folder / "config.json").exists():
        raise UsageError(f"{folder}: nothing to resume, it holds no config.json; start without --resume")
    if not resume and (folder / "config.json").exists():
        raise UsageError(f"{folder}: already holds a run; add --resume to go on with it, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ".writable", {})
        (folder / ".writable").unlink()
    except OSError as error:
        raise JaxrlError(
            f"{folder}: the run folder cannot be written ({error.strerror}); choose another --out"
        ) from error
    return folder


class Run:
    """One run in progress: what stands between steps, and the methods of a step in their order."""

    def __init__(self, experiment: Experiment, setup: Setup, folder: pathlib.Path, resume: bool, quiet: bool) -> None:
        self.x, self.setup, self.folder, self.quiet = experiment, setup, folder, quiet
        self.collector = Collector(
            setup.task, experiment.algorithm, experiment.rollout, experiment.reward, experiment.optimiser.microbatch
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", experiment.checkpoint)
        state = setup.first_state()
        if resume and self.checkpoints.steps():
            state = self.checkpoints.restore(state)
        self.state: TrainState = state
        self.start = int(state.step)
        self.log = MetricLog(folder / "metrics.jsonl", self.start if resume else None)
        self.arrays = ArrayStore(folder / "arrays.zarr")
        self.late: list[tuple[int, str, Any, Callable[[Any], dict[str, Any]]]] = []
        self.updates = self.log.last("optim/updates", self.start)
        self.exact_base: Exact | None = exact(setup.base) if isinstance(setup.task, Msa0Task) else None
        p, g = experiment.rollout.prompts, experiment.rollout.n
        for name, shape, dtype in (("reward", (p, g), "f4"), ("correct", (p, g), "?"), ("kept", (p,), "?")):
            self.arrays.require(name, (experiment.steps, *shape), dtype)
        self.observer = Observer(experiment, setup, self.collector, folder, self.arrays)

    def go(self) -> None:
        """All remaining steps; the last checkpoint and evaluation are of the trained model."""
        total = self.x.steps
        if self.start == 0:
            self.evaluate(0)
        with Progress(total - self.start, self.folder.name, quiet=self.quiet) as bar:
            for step in range(self.start, total):
                shown = self.step(step)
                bar.advance(1, **shown)
        self.flush()
        self.checkpoints.save(self.state)
        self.checkpoints.close()
        (self.folder / pending.FILE).unlink(missing_ok=True)

    def step(self, step: int) -> dict[str, str]:
        """One step: rollouts, terms, updates, and what they did to batch and probe."""
        began = time.monotonic()
        collected = self.collect(step)
        graded = collected.graded
        minibatches = _prepare(self.x.algorithm, graded)
        view = BatchView.of(self.state.model, minibatches, self.collector.temperature, self.x.optimiser.microbatch)
        self.observer.before(step, self.state, view)
        metrics, updates = self.update(graded, minibatches)
        metrics |= self.observer.after_batch(self.state, view)
        self.state = dataclasses.replace(self.state, step=jnp.asarray(step + 1, jnp.int32))
        metrics |= self.describe(collected)
        self.updates += updates
        metrics["optim/updates"] = self.updates
        metrics["cost/seconds"] = time.monotonic() - began
        self.record(step, collected)
        self.flush()
        self.push(step, "train", metrics)
        norm = metrics.get("optim/update_norm", Mean.scalar(0.0))
        for kind, values, finish in self.observer.after(step, self.state, norm):
            self.push(step, kind, values, finish)
        self.end_of_step(step + 1)
        return {
            "reward": f"{np.mean(collected.graded.reward):.3f}",
            "kept": f"{np.mean(collected.graded.prefiltered):.2f}",
        }

    def collect(self, step: int) -> Collected:
        """The step's rollouts: those kept from an interrupted try, or fresh ones."""
        held = pending.load(self.folder, step)
        if held is not None:
            return held
        collected = self.collector(self.state.model, self.setup.reference, self.setup.root, step)
        if self.is_checkpoint(step):
            pending.save(self.folder, step, collected)
        return collected

    def update(self, graded: Any, minibatches: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
        """All optimiser steps of one rollout batch. Metrics of several add up as means."""
        algorithm, optimiser = self.x.algorithm, self.x.optimiser
        acts = np.asarray(applied(algorithm, kept(algorithm, graded)))
        totals: dict[str, Mean] = {}
        for _ in range(algorithm.epochs):
            for terms, act in zip(minibatches, acts, strict=True):
                if not act:
                    continue
                self.state, metrics = _update(
                    self.state,
                    terms,
                    self.setup.reference,
                    tx=self.setup.tx,
                    temperature=self.collector.temperature,
                    microbatch=optimiser.microbatch,
                )
                totals = {name: totals.get(name, 0) + value for name, value in metrics.items()}
        return dict(totals), int(acts.sum()) * algorithm.epochs

    def describe(self, collected: Collected) -> dict[str, Any]:
        """Metrics of the rollouts."""
        graded = collected.graded
        metrics: dict[str, Any] = dict(rollout_metrics(self.x.algorithm, graded))
        counts = grading.counts(collected.verdicts)
        total = max(sum(counts.values()), 1)
        for status in ("no_box", "timeout", "error"):
            metrics[f"reward/{status}"] = Mean(np.float32(counts[status]), np.float32(total))
        mask = graded.rollouts.rows.mask()
        gap, worst = sampler_gap(graded.rollouts.logps, graded.old_logps, mask)
        metrics |= {"kl/sampler_mean": gap, "kl/sampler_max": worst}
        metrics["optim/lr"] = learning_rate(self.x.optimiser, self.updates, total=total_updates(self.x))
        metrics["cost/generated_tokens"] = collected.generated_tokens
        return metrics

    def record(self, step: int, collected: Collected) -> None:
        """Arrays of the step, and every few steps the rollouts as a person reads them."""
        graded = jax.device_get(collected.graded)
        self.arrays.write("reward", step, graded.reward)
        self.arrays.write("correct", step, graded.correct)
        self.arrays.write("kept", step, np.asarray(kept(self.x.algorithm, collected.graded)))
        every = self.x.rollout.log_every
        if every and step % every == 0:
            write_jsonl(self.folder / "rollouts" / f"{step:06d}.jsonl", self.readable(collected, graded))

    def readable(self, collected: Collected, graded: Any) -> list[dict[str, Any]]:
        """One record a response: prompt, text, verdict, reward, length, stop reason."""
        rows, stop = graded.rollouts.rows, graded.rollouts.stop
        text = self.setup.task.text
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
        """Write the queued lines. A NaN in one stops the run."""
        late, self.late = self.late, []
        for step, kind, values, finish in late:
            self.log.write(step, kind, finish(jax.device_get(values)))

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
        spec, task = self.x.eval, self.setup.task
        if isinstance(task, Msa0Task) and self.exact_base is not None:
            self.log.write(
                step, "eval", evaluate_exact(self.state.model, self.exact_base, task, spec.k, step, self.folder)
            )
            return
        metrics: dict[str, float] = {}
        for name in task.pools:
            if name != "train":
                metrics |= evaluate_samples(
                    self.state.model,
                    task,
                    name,
                    presets=spec.presets,
                    n=spec.n,
                    ks=spec.k,
                    key=keys.at(self.setup.root, "eval"),
                    max_new_tokens=self.x.rollout.max_new_tokens,
                    out=self.folder,
                    label=f"-{step:06d}",
                )
        if metrics:
            self.log.write(step, "eval", metrics)


__all__ = ["NotFinite", "Run", "open_folder", "train"]
