"""What a run folder gives the check beyond one step: labelled probes at its checkpoints, and its recorded steps."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.commands.check_transfer import family_transfer
from jaxrl.commands.runs import OpenedRun
from jaxrl.data.prompts import response_tokens
from jaxrl.data.synthetic import MODE_CODE, MODE_LANGUAGE, digits
from jaxrl.evaluation.exact import Exact, exact
from jaxrl.influence.check import double
from jaxrl.influence.dynamics import Labelled, Snapshot, saved_diagonal
from jaxrl.influence.probe import counted
from jaxrl.influence.training import Training
from jaxrl.report.kernels import attributes
from jaxrl.report.read import Run, read_run
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Temperature
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.collect import Collector
from jaxrl.train.tasks import Msa0Task, Task
from jaxrl.types import STOP_EOS, Probe, Prompts, Rows

SNAPSHOTS = 6  # checkpoints at most, the base and the checked one among them
MODES = {MODE_LANGUAGE: "language", MODE_CODE: "code"}
HARD, EASY = 0.1, 0.3  # success of the base: below, at least
ALONE = {
    "c13": "One model without checkpoints: the kernel's structure stands alone, with nothing over training to compare.",
    "c14": "C14 follows a run's steps, and a model has none.",
    "c15": "C15 trains on from a run's checkpoint, and a model has none.",
}


def training_of(run: OpenedRun, collector: Collector, probe: Probe, pairs: int) -> Training:
    """Everything that the run's folder and task allow, and why the rest is left out."""
    left_out: dict[str, str] = {}
    msa0 = isinstance(run.setup.task, Msa0Task)
    base = exact(double(run.setup.base)) if msa0 else None
    fixed = labelled_probe(run.setup.task, probe, 2 * pairs, base)
    steps = chosen_steps(run)
    if len(steps) < 3:
        left_out["c13"] = (
            f"Only the base and step {steps[-1]} are kept as checkpoints: structure is compared at two steps."
        )
    recorded, reason = recorded_steps(run.folder)
    if recorded is None:
        left_out["c14"] = reason
    if not msa0:
        left_out["c15"] = "C15 needs families of prompts with exact probabilities; only the task msa0 has them."
    return Training(
        fixed=fixed,
        snapshots=snapshots(run, collector, fixed, difficulty(probe, base), steps),
        recorded=recorded,
        transfer=(lambda: family_transfer(run, collector)) if msa0 else None,
        left_out=left_out,
    )


def training_of_model(model: Any, probe: Probe, pairs: int) -> Training:
    """A model on its own: the structure of its kernel on the probe, and nothing over training."""
    fixed = labelled_probe(None, probe, 2 * pairs)
    return Training(fixed=fixed, snapshots=(Snapshot(0, model),), left_out=ALONE)


def labelled_probe(task: Task | None, probe: Probe, limit: int, base: Exact | None = None) -> Labelled:
    """At most ``limit`` finished rows of the probe, whole prompts evenly spread over it, with their labels.

    Raises ``ValueError`` when no row is finished.
    """
    ok, uid = np.flatnonzero(counted(probe)), np.asarray(probe.uid)
    if not len(ok):
        raise ValueError("the probe has no row with a finished response; the check needs at least one")
    prompts, sizes = np.unique(uid[ok], return_counts=True)
    count = max(1, min(len(prompts), limit // max(1, int(np.median(sizes)))))
    chosen = prompts[np.linspace(0, len(prompts) - 1, count).round().astype(int)]
    rows = ok[np.isin(uid[ok], chosen)][:limit]
    correct = np.asarray(probe.correct)
    return labelled(task, probe.rows[rows], uid[rows], correct[rows], difficulty(probe, base))


def labelled(
    task: Task | None, rows: Rows, uid: np.ndarray, correct: np.ndarray, hardness: Mapping[int, str]
) -> Labelled:
    """Rows on the device with every label that is known."""
    labels = {"correct": np.where(correct, "correct", "wrong"), "difficulty": np.array([hardness[int(u)] for u in uid])}
    tokens, length = response_tokens(rows)
    responses = [t[:n].tolist() for t, n in zip(tokens, length, strict=True)]
    modes = None if task is None else task.modes(responses)
    if modes is not None:
        labels["mode"] = np.array([MODES.get(int(m), "") for m in modes])
    if isinstance(task, Msa0Task):
        labels["family"] = np.array([str(f) for f in digits(uid)[0]])
    return Labelled(jax.tree.map(jnp.asarray, rows), np.asarray(uid), labels)


def difficulty(probe: Probe, base: Exact | None) -> dict[int, str]:
    """``easy``, ``hard`` or ``""`` (between) of each of the probe's prompts.

    By the base's probability of a correct response where it is exact (hard below 0.1, easy from 0.3), else
    by the share of the probe's own samples that are correct (hard 0, easy at least half).
    """
    uid, correct = np.asarray(probe.uid), np.asarray(probe.correct)
    prompts = np.unique(uid)
    rate = np.array([correct[uid == u].mean() for u in prompts]) if base is None else base.p[prompts]
    low, high = (rate == 0, rate >= 0.5) if base is None else (rate < HARD, rate >= EASY)
    return dict(zip(prompts.tolist(), np.select([low, high], ["hard", "easy"], "").tolist(), strict=True))


def snapshots(
    run: OpenedRun, collector: Collector, fixed: Labelled, hardness: Mapping[int, str], steps: list[int]
) -> Iterator[Snapshot]:
    """The base and the run's checkpoints in double precision, one at a time, each with fresh samples of its own."""
    checkpoints = Checkpoints(run.folder / "checkpoints", run.experiment.checkpoint)
    try:
        for step in steps:
            state = run.setup.first_state()
            state = checkpoints.restore(state, step) if step else state
            model = double(state.model)
            diagonal = saved_diagonal(run.experiment.optimiser, double(state.opt_state))
            yield Snapshot(step, model, diagonal, fresh_probe(run, collector, model, fixed, hardness))
    finally:
        checkpoints.close()


def chosen_steps(run: OpenedRun) -> list[int]:
    """The base (0) and up to ``SNAPSHOTS - 1`` of the run's checkpoints, the checked one among them."""
    checkpoints = Checkpoints(run.folder / "checkpoints", run.experiment.checkpoint)
    try:
        steps = [step for step in checkpoints.steps() if step]
    finally:
        checkpoints.close()
    spread = {steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), SNAPSHOTS - 2)).round().astype(int)}
    return sorted({0, run.step} | spread)


def fresh_probe(
    run: OpenedRun, collector: Collector, model: Any, fixed: Labelled, hardness: Mapping[int, str]
) -> Labelled | None:
    """As many finished samples of the checkpoint as the fixed probe has, on prompts of it; None if there are none.

    Sampled in the shape of a training step, at temperature 1, with a key that is the same at all steps.
    """
    spec, task = run.experiment.rollout, run.setup.task
    prompts = some_prompts(fixed, spec.prompts, task.pools["train"].width)
    rollouts = generate(
        model,
        collector.place(prompts),
        Temperature(value=1.0),
        n=spec.n,
        key=keys.at(run.setup.root, "fresh"),
        max_new_tokens=spec.max_new_tokens,
        stop_ids=task.stop_ids,
    )
    correct = collector.correct(prompts, rollouts).ravel()
    finished = np.flatnonzero(np.asarray(rollouts.stop).ravel() == STOP_EOS)
    if not len(finished):
        return None
    keep = finished[np.linspace(0, len(finished) - 1, min(len(finished), len(fixed.uid))).round().astype(int)]
    uid = np.repeat(np.asarray(prompts.uid), spec.n)
    rows = jax.tree.map(np.asarray, rollouts.rows.flat())[keep]
    return labelled(task, rows, uid[keep], correct[keep], hardness)


def some_prompts(fixed: Labelled, count: int, width: int) -> Prompts:
    """At most ``count`` prompts, evenly spread over the fixed probe, padded to ``width`` or the longest."""
    first = np.unique(fixed.uid, return_index=True)[1]
    at = first[np.linspace(0, len(first) - 1, min(count, len(first))).round().astype(int)]
    start, rows = np.asarray(fixed.rows.start)[at], np.asarray(fixed.rows.tokens)[at]
    tokens = np.zeros((len(at), max(width, int(start.max()))), np.int32)
    for row, source, n in zip(tokens, rows, start, strict=True):
        row[:n] = source[:n]
    return Prompts(tokens, start.astype(np.int32), fixed.uid[at].astype(np.int32))


def recorded_steps(folder: pathlib.Path) -> tuple[dict[str, np.ndarray] | None, str]:
    """What the run recorded of its influence steps, as ``attribution`` takes it; else None and why not."""
    run = read_run(folder)
    logps, steps = run.array("probe_logp_sum"), run.array_steps("predicted")
    found = [one for step in steps if (one := _recorded_step(run, step, logps)) is not None]
    if not found:
        return None, (
            "C14 needs steps with predictions, norms and one update each (influence.every, epochs and minibatches 1); "
            "the run recorded none."
        )
    if len(found) < 2:
        return None, "C14 compares steps; the run recorded one alone."
    return {name: np.stack([one[name] for one in found]) for name in found[0]}, ""


def _recorded_step(run: Run, step: int, logps: np.ndarray | None) -> dict[str, np.ndarray] | None:
    kernel, about = run.array(f"probe_kernel/{step}"), attributes(run, f"probe_kernel/{step}")
    rows = about.get("probe_rows")
    strength, each = (run.at(f"probe/{name}", step) for name in ("strength_sum", "strength_per_update_sum"))
    if logps is None or kernel is None or rows is None or about.get("normalise") != "sum" or not each > 0:
        return None
    change = (logps[step + 1].astype(np.float64) - logps[step])[rows]
    first = np.asarray(run.array(f"predicted/{step}"), np.float64)[rows]
    if not change.any() or not first.any():
        return None
    found = {"step": step, "change": change, "first": first, "sq_norms": np.diag(kernel), "update_sq": strength / each}
    return {name: np.asarray(value) for name, value in found.items()}
