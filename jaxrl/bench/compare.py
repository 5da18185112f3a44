"""Cases that compute the same, each in a process of its own, timed turn by turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxrl.bench.workers import Worker, WorkerFailed

TARGET = 0.3  # CPU-seconds that one timing should last; shorter calls are repeated
SLOW = 20.0  # CPU-seconds of a first call beyond which no second is needed to know its speed
DEAR = 100.0  # CPU-seconds of a call beyond which it is timed in the first round alone
MOST_CALLS = 1000
SHARE = 0.8  # of the memory that is free at the start: what one worker may take


def distance(values: np.ndarray, truth: np.ndarray) -> float:
    """``|values - truth| / |truth|``, Frobenius norms."""
    return float(np.linalg.norm(values - truth) / np.linalg.norm(truth))


@dataclass(frozen=True)
class Agreement:
    """When a case computes the same as the others: ``distance(values, truth)`` is at most ``limit``.

    ``what`` and ``unit`` are for the message: "another kernel: it differs by 0.1 of the norm".
    """

    what: str
    unit: str
    limit: float
    distance: Callable[[np.ndarray, np.ndarray], float] = distance


KERNEL = Agreement("another kernel", "of the norm", 1e-3)


@dataclass(frozen=True)
class Case:
    """What a worker computes, the command that its job is appended to, and whether it is another library's."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    peer: bool = False


@dataclass
class Measured:
    """What was found about a case. ``seconds``: seconds of one call, one entry a round, from the first on.

    ``failure`` says why it was left out, or is None.
    """

    case: Case
    seconds: list[float] = field(default_factory=list)
    temp_bytes: int | None = None
    peak_rss_bytes: int | None = None
    differs: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    calls: int = 1  # of one timing
    dear: bool = False


def compare(
    cases: Sequence[Case],
    world: Path,
    shape: tuple[int, int],
    *,
    repeats: int,
    agreement: Agreement = KERNEL,
    made: int | None = None,
    target: float = TARGET,
    clock: str = "cpu",
) -> list[Measured]:
    """Start, warm up and check every case, one after the other; then time all of them in turn, ``repeats`` times.

    Values are compared with the first ones that are not a peer's, and every call must have made ``made``
    (None: nothing is counted). A case whose worker fails, or that computes something else, leaves at
    that point; the others go on. Only the first case, which they are held against, cannot be missed:
    then ``WorkerFailed`` is raised. Nothing else runs beside a timing. ``clock``: ``cpu``, or ``wall``
    where an accelerator computes.
    """
    found, memory = [Measured(case) for case in cases], free_memory()
    limit = int(SHARE * memory) if memory and clock == "cpu" else None
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        truth: np.ndarray | None = None
        for measured in found:
            case = measured.case
            _say(f"{case.name}: first call")
            job = {"world": str(world), "case": case.name, "memory": limit, "clock": clock}
            messages = world.parent / f"{len(workers)}.log"
            worker = stack.enter_context(Worker(case.name, case.command, job, case.env, messages))
            try:
                truth = _warm_up(worker, measured, shape, truth, agreement, target)
                _count(worker, made)
                workers[case.name] = worker
            except WorkerFailed as error:
                _drop(worker, measured, error, needed=measured is found[0])
        for index in range(repeats):
            for measured in found:
                if measured.failure is None and not (measured.dear and index):
                    _say(f"{measured.case.name}: round {index + 1} of {repeats}")
                    _time(workers[measured.case.name], measured, made, needed=measured is found[0])
    return found


def _warm_up(
    worker: Worker,
    measured: Measured,
    shape: tuple[int, int],
    truth: np.ndarray | None,
    agreement: Agreement,
    target: float,
) -> np.ndarray | None:
    """The first call: check what it gave, and settle how many calls make a timing. Returns the true values."""
    answer = worker.first(shape)
    measured.temp_bytes, measured.versions = answer["temp_bytes"], answer["versions"]
    values = answer["values"]
    if values is not None and truth is None and not measured.case.peer:
        truth = values
    elif values is not None and truth is not None:
        measured.differs = agreement.distance(values, truth)
        if not measured.differs <= agreement.limit:
            raise WorkerFailed(
                f"{worker.name}: {agreement.what}: it differs by {measured.differs:.3g} {agreement.unit}, "
                f"at most {agreement.limit:g} is rounding"
            )
    took = answer["seconds"] if answer["seconds"] > SLOW else worker.seconds(1)
    measured.calls = min(MOST_CALLS, max(1, math.ceil(target / took)))
    measured.dear = took > DEAR
    return truth


def _count(worker: Worker, made: int | None) -> None:
    if worker.made != made:
        raise WorkerFailed(f"{worker.name}: a call should have made {made}, and made {worker.made}")


def _time(worker: Worker, measured: Measured, made: int | None, needed: bool) -> None:
    try:
        seconds = worker.seconds(measured.calls)
        _count(worker, made)
        measured.seconds.append(seconds)
        measured.peak_rss_bytes = worker.peak_rss_bytes
    except WorkerFailed as error:
        _drop(worker, measured, error, needed)


def _drop(worker: Worker, measured: Measured, error: WorkerFailed, needed: bool) -> None:
    if needed:
        raise error
    measured.failure = str(error)
    _say(measured.failure)
    worker.close()


def free_memory() -> int | None:
    """Bytes that could be allocated now without swapping, or None where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)
