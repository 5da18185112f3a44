"""From sampled tokens to verdicts, cell by cell of a ``[P G]`` table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from jaxrl.rewards import Verdict
from jaxrl.train.tasks import Task
from jaxrl.types import STOP_LENGTH, STOP_NONE, Rollouts

Verdicts = list[list[Verdict | None]]


def grade(task: Task, uid: Sequence[int], rollouts: Rollouts) -> Verdicts:
    """One verdict a response, None where nothing was sampled.

    A response cut off by the length limit is never correct (SCIENCE A.0): its verdict becomes ``wrong``.
    """
    rows, stop = jax.device_get((rollouts.rows, rollouts.stop))
    cells = np.argwhere(stop != STOP_NONE)
    verdicts = task.grade([int(uid[p]) for p, _ in cells], [response(rows, p, g) for p, g in cells])
    table: Verdicts = [[None] * stop.shape[1] for _ in range(stop.shape[0])]
    for (p, g), verdict in zip(cells, verdicts, strict=True):
        cut = stop[p, g] == STOP_LENGTH and verdict.status == "correct"
        table[p][g] = replace(verdict, status="wrong", rule="truncated") if cut else verdict
    return table


def response(rows: Any, p: int, g: int) -> list[int]:
    """Token ids of one response, its end-of-sequence token included."""
    return rows.tokens[p, g, rows.start[p, g] : rows.length[p, g]].tolist()


def tabulate(verdicts: Verdicts, value: Callable[[Verdict], Any], empty: Any) -> np.ndarray:
    """An array ``[P G]`` of ``value(verdict)``, ``empty`` where nothing was sampled."""
    return np.array([[empty if v is None else value(v) for v in row] for row in verdicts])


def correct(verdicts: Verdicts) -> Bool[np.ndarray, "P G"]:
    """Where the verdict is ``correct``."""
    return tabulate(verdicts, lambda v: v.status == "correct", False)


def counts(verdicts: Verdicts) -> Counter[str]:
    """Responses by verdict status."""
    return Counter(v.status for row in verdicts for v in row if v is not None)
