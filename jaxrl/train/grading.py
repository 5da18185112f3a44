"""From sampled tokens to verdicts, cell by cell of a ``[P G]`` table."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
    table = _blank(*stop.shape)
    for (p, g), verdict in zip(cells, verdicts, strict=True):
        table[p][g] = _final(verdict, stop[p, g])
    return table


class Grader:
    """Grades samples on a thread of its own while others are still being decoded.

    ``with Grader(task, uid, n) as grader:`` call ``add`` a finished sample, in any order, then ``finish`` for the
    table that ``grade`` gives, a cell that was never added being None. What has arrived meanwhile is graded at once,
    at most ``batch`` responses a call of ``task.grade``; verdicts do not depend on how they were batched. Leaving the
    block ends the thread, whatever was raised in it.
    """

    def __init__(self, task: Task, uid: Sequence[int], n: int, *, batch: int = 16) -> None:
        if batch < 1 or n < 1:
            raise ValueError(f"Grader: expected n >= 1 and batch >= 1, got {n} and {batch}")
        self._task, self._uid, self._batch = task, [int(u) for u in uid], batch
        self._table = _blank(len(self._uid), n)
        self._added: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[_Cell | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="grader", daemon=True)
        self._thread.start()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._error = self._error or RuntimeError("Grader: its block was left by an exception")  # skip what waits
        self._close()

    def add(self, p: int, g: int, tokens: Sequence[int] | np.ndarray, stop: int) -> None:
        """Hand over response ``g`` to prompt ``p``: its token ids, the end-of-sequence token included, and its stop.

        Never waits for a verdict. Raises ``ValueError`` for a cell outside the table or one that was added before,
        ``RuntimeError`` after ``finish``.
        """
        if not self._thread.is_alive():
            raise RuntimeError("Grader: samples cannot be added after finish")
        if not (0 <= p < len(self._table) and 0 <= g < len(self._table[0])):
            raise ValueError(
                f"Grader: sample ({p}, {g}) is outside {len(self._table)} prompts by {len(self._table[0])}"
            )
        if (p, g) in self._added:
            raise ValueError(f"Grader: sample ({p}, {g}) was added twice")
        self._added.add((p, g))
        self._queue.put(_Cell(p, g, [int(t) for t in tokens], int(stop)))

    def finish(self) -> Verdicts:
        """Wait for the last verdict. Raises what ``task.grade`` raised; what was added after that is not graded."""
        self._close()
        if self._error is not None:
            raise self._error
        return self._table

    def _close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        """Until told to end: wait for a sample, and grade it with those that wait beside it."""
        more = True
        while more:
            part = [self._queue.get()]
            while part[-1] is not None and len(part) < self._batch and not self._queue.empty():
                part.append(self._queue.get())
            more = part[-1] is not None
            cells = [cell for cell in part if cell is not None]
            if cells and self._error is None:
                self._grade(cells)

    def _grade(self, cells: list[_Cell]) -> None:
        try:
            verdicts = self._task.grade([self._uid[c.p] for c in cells], [c.tokens for c in cells])
            for cell, verdict in zip(cells, verdicts, strict=True):
                self._table[cell.p][cell.g] = _final(verdict, cell.stop)
        except BaseException as error:  # it belongs to the thread that calls finish
            self._error = error


class _Cell(NamedTuple):
    p: int
    g: int
    tokens: list[int]
    stop: int


def _blank(prompts: int, n: int) -> Verdicts:
    return [[None] * n for _ in range(prompts)]


def _final(verdict: Verdict, stop: int) -> Verdict:
    """A response cut off by the length limit is never correct (SCIENCE A.0)."""
    cut = stop == STOP_LENGTH and verdict.status == "correct"
    return replace(verdict, status="wrong", rule="truncated") if cut else verdict


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
