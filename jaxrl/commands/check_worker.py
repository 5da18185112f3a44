"""The process that checks: ``python -m jaxrl.commands.check_worker RUN|MODEL OUT``, in double precision.

Started by ``jaxrl.commands.check`` with ``JAX_ENABLE_X64=1``; its last line on standard error says what
went wrong, if anything did.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.commands.check_run import training_of, training_of_model
from jaxrl.commands.runs import OpenedRun, is_run, open_run
from jaxrl.data.synthetic import enumerate_responses
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.influence.check import check_model, double
from jaxrl.influence.probe import load_probe
from jaxrl.influence.training import Training
from jaxrl.models.decoder import Decoder, cast
from jaxrl.models.hf import load_model
from jaxrl.rl.advantages import GroupZScore
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.collect import Collector, score_rows
from jaxrl.train.setup import total_updates
from jaxrl.train.tasks import Msa0Task
from jaxrl.types import STOP_EOS, Graded, Probe, Rollouts, Rows, Term

HORIZONS = (10, 50)  # steps on, for the part of C10 that looks over a checkpoint interval

ENUMERATED = 2  # response tokens of the score identity: 553 responses


@dataclass(frozen=True)
class Case:
    """What is checked: a model at one step, that step's terms, and how it would be stepped."""

    model: Decoder
    optimiser: Optimiser
    opt_state: Any
    terms: tuple[Term, ...]
    probe: Probe
    reference: Decoder | None
    temperature: float
    total: int
    group_size: int
    enumerated: Rows | None
    later: Mapping[int, Decoder]
    training: Training


def main(argv: list[str] | None = None) -> int:
    """Parse, check, write; 0 or 1."""
    parser = argparse.ArgumentParser(prog="jaxrl.commands.check_worker")
    parser.add_argument("model")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--probe", type=pathlib.Path)
    a = parser.parse_args(argv)
    try:
        with ExitStack() as open_things:
            probe = None if a.probe is None else load_probe(a.probe)
            if is_run(a.model):
                case = of_run(pathlib.Path(a.model), a.step, probe, a.pairs, open_things)
            else:
                case = of_model(a.model, probe, a.pairs)
            check_case(case, a.pairs, a.out)
    except (JaxrlError, OSError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    except Exception as error:  # a bug: the traceback first, which is shown only when asked for
        traceback.print_exc()
        print(f"internal error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def check_case(case: Case, pairs: int, out: pathlib.Path) -> None:
    """Run everything and write the folder."""
    check_model(
        case.model,
        case.optimiser,
        case.opt_state,
        case.terms,
        case.probe,
        reference=case.reference,
        temperature=case.temperature,
        total=case.total,
        pairs=pairs,
        group_size=case.group_size,
        enumerated=case.enumerated,
        later=case.later,
        training=case.training,
        out=out,
    )


def of_run(folder: pathlib.Path, step: int | None, probe: Probe | None, pairs: int, open_things: ExitStack) -> Case:
    """A run's checkpoint in double precision, and the batch that it would train on next.

    Its task stays open until ``open_things`` are closed: later parts of the check sample and grade.
    """
    run = open_run(folder, step)
    open_things.callback(run.setup.task.close)
    x, setup = run.experiment, run.setup
    check_algorithm(x.algorithm, folder)
    model, reference = double(run.state.model), double(setup.reference)
    rollout = replace(x.rollout, log_greedy=False)  # greedy answers are sampled where a piece needs them only
    collector = Collector(setup.task, x.algorithm, rollout, x.reward, x.optimiser.microbatch)
    collected = collector(model, reference, setup.root, run.step, double(run.state.critic_model))
    probe = probe or load_probe(folder / "probe.npz")
    return Case(
        model=model,
        optimiser=x.optimiser,
        opt_state=run.state.opt_state,
        terms=prepare(x.algorithm, double(collected.graded))[0],
        probe=probe,
        reference=reference,
        temperature=collector.temperature,
        total=total_updates(x),
        group_size=x.rollout.n,
        enumerated=enumerated(run),
        later=later(run),
        training=training_of(run, collector, probe, pairs),
    )


def check_algorithm(algorithm: Algorithm, folder: pathlib.Path) -> None:
    """Raise ``UsageError`` for a run whose updates are not those of a policy term on the policy's parameters."""
    if not algorithm.policy:
        raise UsageError(
            f"{folder}: its algorithm has no policy term, and the check is of one; check the model that `jaxrl export` "
            "makes of a checkpoint"
        )
    if algorithm.critic is not None and algorithm.critic.shared:
        raise UsageError(
            f"{folder}: its critic shares the policy's trunk, so that values move the policy too, which the check does "
            "not account for; train with algorithm.critic.trunk: own"
        )


def of_model(name: str, probe: Probe | None, pairs: int) -> Case:
    """A model on its probe alone: the probe's own rows are the batch, grouped by prompt and z-scored."""
    if probe is None:
        raise UsageError(f"{name}: a model is checked on solutions; give --probe FILE (`jaxrl probe` makes one)")
    model = cast(load_model(name), jnp.float64)
    uid, count = np.unique(np.asarray(probe.uid), return_counts=True)
    n = int(count.min())
    if n < 2:
        raise UsageError(f"{name}: the probe has prompts with one solution; two a prompt are needed for advantages")
    index = np.stack([np.flatnonzero(np.asarray(probe.uid) == u)[:n] for u in uid])
    rows = jax.tree.map(lambda x: jnp.asarray(x)[index], probe.rows)
    logps = score_rows(model, rows.flat()).reshape(rows.tokens.shape)
    correct = jnp.asarray(probe.correct)[index]
    graded = Graded(
        rollouts=Rollouts(rows, logps, jnp.full(index.shape, STOP_EOS, jnp.int32)),
        uid=jnp.asarray(uid, jnp.int32),
        reward=correct.astype(jnp.float64),
        correct=correct,
        prefiltered=jnp.ones(len(uid), bool),
        old_logps=logps,
    )
    optimiser = Optimiser(lr=1e-6)
    state = make_optimiser(optimiser, total=1).init(model)
    terms = prepare(Algorithm(advantage=GroupZScore()), graded)[0]
    return Case(
        model, optimiser, state, terms, probe, None, 1.0, 1, n, None, {}, training_of_model(model, probe, pairs)
    )


def enumerated(run: OpenedRun) -> Rows | None:
    """Every response to one prompt within a few tokens, cut-off ones included, where the task can be enumerated (C2)."""
    if not isinstance(run.setup.task, Msa0Task):
        return None
    prompt = run.setup.task.pools["train"].tokens[0]
    responses, length = enumerate_responses(ENUMERATED)
    tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(responses), 1)), responses], axis=1)
    start = np.full(len(tokens), len(prompt), np.int32)
    return jax.tree.map(jnp.asarray, Rows(tokens, start, start + length))


def later(run: OpenedRun) -> dict[int, Decoder]:
    """The run's own parameters some steps on, as far as its checkpoints reach."""
    checkpoints = Checkpoints(run.folder / "checkpoints", run.experiment.checkpoint)
    try:
        steps = [h for h in HORIZONS if run.step + h in checkpoints.steps()]
        return {h: checkpoints.restore(run.setup.first_state(), run.step + h).model for h in steps}
    finally:
        checkpoints.close()


if __name__ == "__main__":
    sys.exit(main())
