"""``train``, ``export`` and ``report``; and run folders opened again."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl import config
from jaxrl import train as run_experiment
from jaxrl.errors import UsageError
from jaxrl.jsonfile import read_object
from jaxrl.models.critic import without_value_head
from jaxrl.models.decoder import Decoder
from jaxrl.models.hf import save_model
from jaxrl.report import render
from jaxrl.report.mirror import to_tensorboard, to_wandb
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.dryrun import dry_run
from jaxrl.train.entry import experiment_of
from jaxrl.train.experiment import Experiment, MeshSpec
from jaxrl.train.setup import Setup, set_up
from jaxrl.types import TrainState


@dataclass(frozen=True)
class OpenedRun:
    """A finished or interrupted run: its experiment, what it starts from, and one checkpointed state."""

    folder: pathlib.Path
    experiment: Experiment
    setup: Setup
    state: TrainState

    @property
    def step(self) -> int:
        return int(self.state.step)

    @property
    def model(self) -> Decoder:
        """The policy, without the value head of a critic on its trunk."""
        return without_value_head(self.state.model)


def is_run(path: str | pathlib.Path) -> bool:
    """True for a folder that ``train`` wrote; a model folder's ``config.json`` has no experiment."""
    file = pathlib.Path(path) / "config.json"
    return file.is_file() and "experiment" in read_object(file)


def open_run(folder: pathlib.Path, step: int | None = None) -> OpenedRun:
    """Open a run at a checkpoint (default: its last), on the devices that are here, whatever it was trained on.

    Raises ``UsageError`` when it is not a run folder.
    """
    if not is_run(folder):
        raise UsageError(f"{folder}: not a run folder; expected the config.json that `jaxrl train` writes")
    experiment = read_experiment(folder)
    setup = set_up(replace(experiment, mesh=MeshSpec()), folder)
    checkpoints = Checkpoints(folder / "checkpoints", experiment.checkpoint)
    try:
        state = checkpoints.restore(setup.first_state(), step)
    except BaseException:
        setup.task.close()
        raise
    finally:
        checkpoints.close()
    return OpenedRun(folder, experiment, setup, state)


def read_experiment(folder: pathlib.Path) -> Experiment:
    """The experiment of a run folder."""
    file = folder / "config.json"
    return config.from_tree(experiment_of(file), str(file))


def train(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train as a config says, or with ``--dry-run`` only compile it."""
    experiment = config.load_config(arguments.config, arguments.set)
    if arguments.dry_run:
        return dry_run(experiment)
    folder = arguments.out or pathlib.Path("runs") / f"{arguments.config.parent.name}-{arguments.config.stem}"
    run_experiment(experiment, out=folder, resume=arguments.resume)
    return {"run": str(folder)} | json.loads((folder / "summary.json").read_text())


def export(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """A trained checkpoint as a Hugging Face folder, tokenizer files carried along."""
    run = open_run(arguments.run, arguments.step)
    try:
        source = run.experiment.model.path
        dtype = arguments.dtype or "float32"
        save_model(run.model, arguments.out, dtype, source=source, overwrite=arguments.overwrite)
    finally:
        run.setup.task.close()
    return {"model": str(arguments.out), "step": run.step, "dtype": arguments.dtype or "float32"}


def report(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """One page about one run or several."""
    for run in arguments.runs:
        if not run.is_dir():
            raise UsageError(f"{run}: no such run folder")
    out = arguments.out or arguments.runs[0] / "report.html"
    names = list(arguments.names) if arguments.names else None
    result: dict[str, Any] = {}
    for run in arguments.runs:
        if arguments.tensorboard:
            result[f"TensorBoard points of {run.name}"] = to_tensorboard(run, arguments.tensorboard / run.name)
        if arguments.wandb:
            result[f"Weights & Biases points of {run.name}"] = to_wandb(run, arguments.wandb)
    return {"report": str(render(list(arguments.runs), out, names))} | result
