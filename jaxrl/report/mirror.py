"""A run's metric lines, read into TensorBoard or Weights & Biases. Both are optional extras.

They read ``metrics.jsonl`` and never write to the run folder, so they can follow a run that goes on,
be added afterwards, or be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxrl.errors import JaxrlError
from jaxrl.report.read import Run, read_run

SIDE = ("/n", "/se", "/low", "/high")  # counts and bounds stand beside a value and are not curves of their own


def scalars(run: Run) -> Iterator[tuple[str, int, float]]:
    """``(name, step, value)`` of every metric, by step."""
    points = [
        (step, name, value)
        for name, line in run.metrics.items()
        if not name.endswith(SIDE)
        for step, value in line.items()
    ]
    for step, name, value in sorted(points):
        yield name, step, value


def to_tensorboard(run: Path, out: Path) -> int:
    """Write a run's metrics as TensorBoard events under ``out``; returns how many points.

    Raises ``JaxrlError`` without the ``tensorboard`` extra.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise JaxrlError("--tensorboard needs the extra: pip install 'jaxrl[tensorboard]'") from error
    count = 0
    with SummaryWriter(str(out)) as writer:
        for name, step, value in scalars(read_run(run)):
            writer.add_scalar(name, value, step)
            count += 1
    return count


def to_wandb(run: Path, project: str) -> int:
    """Log a run's metrics, with its config, as one Weights & Biases run; returns how many points.

    Raises ``JaxrlError`` without the ``wandb`` extra.
    """
    try:
        import wandb
    except ImportError as error:
        raise JaxrlError("--wandb needs the extra: pip install 'jaxrl[wandb]'") from error
    read = read_run(run)
    count = 0
    with wandb.init(project=project, name=read.name, config=read.config) as logged:
        steps: dict[int, dict[str, float]] = {}
        for name, step, value in scalars(read):
            steps.setdefault(step, {})[name] = value
            count += 1
        for step, line in steps.items():
            logged.log(line, step=step)
    return count
