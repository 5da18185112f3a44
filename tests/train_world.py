"""A world small enough to train in a second: a half-trained base, and experiments on it."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import tensorstore as ts

from jaxrl.models.config import ModelConfig
from jaxrl.models.hf import save_model
from jaxrl.rl.algorithms import ALGORITHMS, Algorithm
from jaxrl.rl.optimiser import Optimiser
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
from jaxrl.train.supervised import BASE_CONFIG, train_base

SMALL: ModelConfig = replace(BASE_CONFIG, hidden_size=16, intermediate_size=32, num_layers=1)
GRPO = ALGORITHMS["grpo"]
SELF = replace(
    ALGORITHMS["self"],
    weights=TokenMean(over="kept"),
    regularisers=((0.1, Kl(direction="forward", scope="token", estimator="full", prompts="all", samples=2)),),
)


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
            mesh=MeshSpec(data=8, fsdp=1, tensor=1),
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
