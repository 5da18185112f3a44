"""Ending a run early: once a logged metric reaches a number, given or another run's."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl.errors import UsageError, nearest
from jaxrl.train.collect import matched_counts
from jaxrl.train.experiment import Experiment, StopSpec


class Stops:
    """Follows a run's lines; ``reached`` names the condition that held first, None while none does."""

    def __init__(self, specs: Sequence[StopSpec], lines: Callable[[str], Iterable[Mapping[str, Any]]]) -> None:
        self.limits = [(spec.metric, limit(spec)) for spec in specs]
        self.reached: str | None = None
        for kind in ("train", "probe", "influence", "eval") if specs else ():
            for line in lines(kind):
                self.see(line)

    def see(self, line: Mapping[str, Any]) -> None:
        """A line as it was written."""
        for metric, least in self.limits:
            if self.reached is None and line.get(metric, float("-inf")) >= least:
                self.reached = f"{metric} reached {least:g} at step {line['step']}"


def check_others(experiment: Experiment) -> None:
    """Raise ``UsageError`` when a run that a filter or a stop condition matches is not there, before anything is paid for."""
    matched_counts(experiment)
    for spec in experiment.stop:
        limit(spec)


def limit(spec: StopSpec) -> float:
    """The number of a condition. Raises ``UsageError`` when the run to match did not log the metric."""
    if spec.value is not None:
        return spec.value
    path = pathlib.Path(str(spec.of)) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"stop.of: {path} cannot be read: {error}; give the folder of a run") from error
    found = [line[spec.metric] for line in lines if spec.metric in line]
    if not found:
        known = sorted({name for line in lines for name in line if "/" in name})
        raise UsageError(f"stop.metric: {spec.of} logged no {spec.metric!r}; {nearest(spec.metric, known)}")
    return float(found[-1])
