"""A world small enough to train in a second: a half-trained base, and experiments on it."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxrl.mesh import make_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.hf import save_model
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.filters import SampleAll
from jaxrl.rl.optimiser import Optimiser
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.weights import TokenMean
from jaxrl.train.experiment import (
    CheckpointSpec,
    EvalSpec,
    Experiment,
    InfluenceSpec,
    MeshSpec,
    ModelSpec,
    Msa0Spec,
    ProbeSpec,
    RolloutSpec,
)
from jaxrl.train.loop import Run
from jaxrl.train.supervised import BASE_CONFIG, train_base

SMALL: ModelConfig = replace(BASE_CONFIG, hidden_size=16, intermediate_size=32, num_layers=1)
GRPO = ALGORITHMS["grpo"]
SELF = replace(
    ALGORITHMS["self"],
    weights=TokenMean(over="kept"),
    regularisers=((0.1, Kl(direction="forward", scope="token", estimator="full", prompts="all", samples=2)),),
)
FILTER_ONLY = replace(SELF, regularisers=())
FKL_ONLY = replace(SELF, prefilter=SampleAll())
# Two epochs of two mini-batches by SGD with momentum, three rows a pass.
TWICE = {
    "algorithm": replace(GRPO, minibatches=2, epochs=2),
    "optimiser": Optimiser(type="sgd", lr=0.1, momentum=0.9, microbatch=3),
}


@functools.cache
def base_folder() -> str:
    """A model that solves a part of MSA-0 (no gate would pass it), trained once a process."""
    kept = tempfile.TemporaryDirectory(prefix="jaxrl-base-")
    base_folder.kept = kept  # removed when the process ends
    model = train_base(0, steps=600, batch=64, lr=8e-3, config=SMALL, quiet=True)
    return str(save_model(model, pathlib.Path(kept.name) / "model"))


def experiment(algorithm: Algorithm = GRPO, **changes: Any) -> Experiment:
    """Six steps of eight prompts by four rollouts; ``changes`` replace fields of the experiment."""
    return replace(
        Experiment(
            model=ModelSpec(path=base_folder()),
            task=Msa0Spec(),
            algorithm=algorithm,
            rollout=RolloutSpec(prompts=8, n=4, max_new_tokens=5, log_every=2),
            optimiser=Optimiser(lr=2e-3),
            steps=6,
            mesh=MeshSpec(data=-1, fsdp=1, tensor=1),
            probe=ProbeSpec(prompts=8, n=2),
            influence=InfluenceSpec(every=3, rows=4),
            eval=EvalSpec(every=3, n=4, k=(1, 4)),
            checkpoint=CheckpointSpec(every=2, keep_last=2),
        ),
        **changes,
    )


def lines(run: pathlib.Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Metric lines of a run, of one kind or all."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without what a clock says."""
    return [{k: v for k, v in line.items() if k not in ("time", "cost/seconds")} for line in records]


def arrays(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of ``arrays.zarr`` by name."""
    root = run / "arrays.zarr"
    names = sorted(str(f.parent.relative_to(root)) for f in root.rglob(".zarray"))
    spec = lambda name: {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{root / name}/"}}  # noqa: E731
    return {name: ts.open(spec(name), open=True).result().read().result() for name in names}


def use_devices(monkeypatch: Any, count: int) -> None:
    """Runs of this test take their mesh from the first ``count`` devices: 1 is fastest, and what a laptop has."""

    def mesh(data: int, fsdp: int, tensor: int) -> Any:
        return make_mesh(data, fsdp, tensor, devices=jax.devices()[:count])

    for user in ("setup", "dryrun"):
        monkeypatch.setattr(f"jaxrl.train.{user}.make_mesh", mesh)


class Killed(BaseException):
    """Stands for a kill: nothing in the library catches it."""


def stop_before_update(monkeypatch: Any, step: int) -> None:
    """The run dies at ``step`` with its rollouts collected and not trained on. ``monkeypatch.undo()`` mends it."""
    update = Run.update

    def dying(self: Run, *given: Any) -> Any:
        if int(self.state.step) == step:
            raise Killed
        return update(self, *given)

    monkeypatch.setattr(Run, "update", dying)


def last_state(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint, by name: parameters, optimiser state, step, key."""
    with ocp.StandardCheckpointer() as reader:
        newest = max((run / "checkpoints").iterdir(), key=lambda f: int(f.name) if f.name.isdigit() else -1)
        flat = reader.restore(newest.absolute() / "default")
    return {name: np.asarray(value) for name, value in flat.items()}


def assert_same_run(run: pathlib.Path, other: pathlib.Path) -> None:
    """Bitwise the same state, metric lines, arrays, probe, rollout logs and summary; clocks aside."""
    assert timeless(lines(run)) == timeless(lines(other))
    pairs = [(last_state(run), last_state(other)), (arrays(run), arrays(other))]
    pairs.append((dict(np.load(run / "probe.npz")), dict(np.load(other / "probe.npz"))))
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()]
        assert different == []
    logs = [{f.name: f.read_text() for f in (r / "rollouts").iterdir()} for r in (run, other)]
    assert logs[0] == logs[1]
    summaries = [json.loads((r / "summary.json").read_text()) | {"seconds": 0} for r in (run, other)]
    assert summaries[0] == summaries[1]
