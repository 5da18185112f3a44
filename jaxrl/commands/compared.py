"""What ``kernel`` compares: two sets of rows of text under a model, or a run's batch and its probe."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.commands.runs import OpenedRun, open_run
from jaxrl.data.prompts import load_tokenizer
from jaxrl.data.rows import LabelledRows, read_rows
from jaxrl.data.synthetic import MODE_CODE, MODE_LANGUAGE
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.influence.gradients import leaf_names
from jaxrl.influence.probe import load_probe
from jaxrl.models.decoder import Decoder
from jaxrl.models.hf import load_model
from jaxrl.rl.algorithms import Algorithm, kept, prepare
from jaxrl.train.collect import Collector
from jaxrl.train.observe import BatchView
from jaxrl.types import Graded, Rows, Term

MODES = {MODE_LANGUAGE: "language", MODE_CODE: "code"}


@dataclass(frozen=True, eq=False)
class Side:
    """Rows and their labels, one entry a row."""

    rows: Rows
    labels: Mapping[str, Sequence[Any]]

    def chosen(self, index: np.ndarray) -> Side:
        """Some of the rows."""
        labels = {name: [values[i] for i in index] for name, values in self.labels.items()}
        return Side(jax.tree.map(lambda x: x[index], self.rows), labels)


@dataclass(frozen=True, eq=False)
class Compared:
    """A model and two sides, the same object where rows are compared with themselves.

    ``about`` says where they are from, ``out`` where the result goes by default. Of a run, ``term`` is the
    policy term of the step, whose rows are the first side, ``temperature`` the rollouts' and ``rows`` how many
    of each side training takes.
    """

    model: Decoder
    sides: tuple[Side, Side]
    about: dict[str, Any]
    out: pathlib.Path
    term: Term | None = None
    temperature: float = 1.0
    rows: int = 0


def of_files(arguments: argparse.Namespace) -> Compared:
    """The rows of ``--a`` and ``--b`` (default: those of ``--a`` again) in the model's own tokens."""
    name = arguments.model
    if arguments.a is None:
        raise UsageError(f"{name}: give the rows with --a FILE (JSONL of prompt and response); only a run has its own")
    if arguments.step is not None:
        raise UsageError(f"--step {arguments.step}: {name} is no run folder, and only a run has steps")
    model = load_model(name)
    check_parameters(model, name)
    a = _read(arguments.a, model, arguments)
    b = a if arguments.b is None else _read(arguments.b, model, arguments)
    numbers: dict[Any, int] = {}  # of distinct prompts, over both files
    for prompt in (*a.labels["prompt"], *b.labels["prompt"]):
        numbers.setdefault(prompt, len(numbers))
    sides = [
        Side(
            jax.tree.map(jnp.asarray, x.rows),
            {**x.labels, "prompt": [numbers[prompt] for prompt in x.labels["prompt"]]},
        )
        for x in (a, b)
    ]
    files = {"a": str(arguments.a), "b": str(arguments.b or arguments.a)}
    about = {"model": str(name), **files, "rows_cut": a.cut + (0 if b is a else b.cut)}
    return Compared(model, (sides[0], sides[0] if b is a else sides[1]), about, pathlib.Path("kernel.zarr"))


def _read(file: pathlib.Path, model: Decoder, arguments: argparse.Namespace) -> LabelledRows:
    config, longest = model.config, arguments.max_tokens
    if longest is not None and longest > config.max_positions:
        raise UsageError(f"--max-tokens {longest}: the model's context holds {config.max_positions} tokens")

    def tokenizer() -> Tokenizer:
        found = load_tokenizer(arguments.model)
        if found.vocab_size > config.vocab_size:
            raise JaxrlError(
                f"{arguments.model}: its tokenizer has {found.vocab_size} ids, the model's vocabulary "
                f"{config.vocab_size}; use the tokenizer that belongs to the model"
            )
        return found

    return read_rows(
        file,
        tokenizer,
        vocab_size=config.vocab_size if config.vocab_limit is None else config.vocab_limit,
        context=config.max_positions,
        max_tokens=longest,
        limit=arguments.limit,
    )


def of_run(arguments: argparse.Namespace) -> Compared:
    """The batch that the run would train on from its checkpoint (default: the last), and its fixed probe."""
    folder = pathlib.Path(arguments.model)
    for option in ("a", "b", "max_tokens"):
        if getattr(arguments, option) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')}: {folder} is a run folder, whose batch is compared with its probe; to "
                "compare rows of your own, give the model folder that `jaxrl export` makes of it"
            )
    run = open_run(folder, arguments.step)
    x, setup = run.experiment, run.setup
    try:
        check_parameters(run.model, f"{folder} step {run.step}")
        if not x.algorithm.policy:
            raise UsageError(
                f"{folder}: its algorithm has no policy term, so no rollouts to compare with the probe; export a "
                "checkpoint and give rows of your own (--a, --b)"
            )
        collector = Collector(setup.task, x.algorithm, x.rollout, x.reward, x.optimiser.microbatch, setup.mesh)
        graded = collector(run.state.model, setup.reference, setup.root, run.step, run.state.critic_model).graded
        view = BatchView.of(None, prepare(x.algorithm, graded), collector.temperature, None)
        batch = Side(view.batch.rows, batch_labels(run, graded, x.algorithm))
        probe = load_probe(folder / "probe.npz")
        followed = Side(collector.place(probe.rows), probe_labels(run, probe))
    finally:
        setup.task.close()
    return Compared(
        model=run.model,
        sides=(batch, followed),
        about={"model": str(folder), "step": run.step},
        out=folder / f"kernel-{run.step:06d}.zarr",
        term=view.term,
        temperature=view.temperature,
        rows=x.influence.rows,
    )


def batch_labels(run: OpenedRun, graded: Graded, algorithm: Algorithm) -> dict[str, list[Any]]:
    """Labels of the rows that ``prepare`` makes of ``graded``, in its order."""
    keep = np.asarray(kept(algorithm, graded))
    order = np.argsort(~keep, kind="stable") if algorithm.kept_first else np.arange(len(keep))
    rows = jax.tree.map(lambda x: np.asarray(x)[order], graded.rollouts.rows)
    correct = np.asarray(graded.correct)[order]
    return _labels(run, np.repeat(np.asarray(graded.uid)[order], correct.shape[1]), correct.ravel(), rows.flat())


def probe_labels(run: OpenedRun, probe: Any) -> dict[str, list[Any]]:
    """Labels of the probe's rows."""
    return _labels(run, np.asarray(probe.uid), np.asarray(probe.correct), probe.rows)


def _labels(run: OpenedRun, uid: np.ndarray, correct: np.ndarray, rows: Rows) -> dict[str, list[Any]]:
    """Prompt, verdict, set, and where the task knows strategies the mode."""
    task = run.setup.task
    sets = {int(u): name for name, pool in task.pools.items() for u in pool.uid}
    tokens, start, length = (np.asarray(x) for x in (rows.tokens, rows.start, rows.length))
    modes = task.modes([line[i:j].tolist() for line, i, j in zip(tokens, start, length, strict=True)])
    labels = {
        "set": [sets.get(int(u)) for u in uid],
        "correct": ["correct" if right else "incorrect" for right in correct],
        "prompt": [int(u) for u in uid],
    }
    return labels if modes is None else labels | {"mode": [MODES.get(int(mode)) for mode in modes]}


def check_parameters(model: Decoder, source: str) -> None:
    """Raise ``JaxrlError`` naming the parameter, and its layer, when one is NaN or infinite."""
    for name, leaf in zip(leaf_names(model), jax.tree.leaves(model), strict=True):
        if bool(jnp.all(jnp.isfinite(leaf))):
            continue
        bad = ~np.isfinite(np.asarray(leaf))
        layer = f" of layer {int(np.argwhere(bad)[0, 0])}" if name.startswith("layers.") else ""
        raise JaxrlError(
            f"{source}: the parameter {name}{layer} holds NaN or infinity ({int(bad.sum())} of {bad.size} entries); "
            "no gradient of this model means anything, use another checkpoint"
        )
