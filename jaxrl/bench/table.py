"""Timings of one benchmark as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.bench.compare import Measured
from jaxrl.bench.roofline import Peak, peak
from jaxrl.bench.timing import Row, middle

MB = 1e6


def table(found: Sequence[Measured], baseline: str, naive: str) -> list[Row]:
    """One row a case that was timed, in order; what is unknown is None.

    ``ratio`` and ``over best peer``: CPU-seconds over those of ``baseline``, and of the peer with the
    smallest median, in the same rounds. ``temp ratio`` and ``temp over NAIVE``: temporary memory over
    that of the two. ``differs by``: how far the kernel is from the first of our own, over its norm.
    """
    timed = {measured.case.name: measured for measured in found if measured.failure is None}
    peers = [measured for measured in timed.values() if measured.case.peer]
    best = min(peers, key=lambda measured: float(np.median(measured.seconds)), default=None)
    rows = []
    for name, measured in timed.items():
        row: Row = {"case": name, "CPU-seconds": float(np.median(measured.seconds))}
        row["ratio"] = _ratio(measured, timed[baseline])
        if best is not None:
            row["over best peer"] = _ratio(measured, best)
        row["temp MB"] = _mb(measured.temp_bytes)
        row["temp ratio"] = _over(measured.temp_bytes, timed[baseline].temp_bytes)
        if naive in timed:
            row[f"temp over {naive}"] = _over(measured.temp_bytes, timed[naive].temp_bytes)
        row["peak RSS MB"] = _mb(measured.peak_rss_bytes)
        row["differs by"] = measured.differs
        rows.append(row)
    return rows


def speeds(
    found: Sequence[Measured], tokens: int, base: str, least: Callable[[Peak], float] | None = None
) -> list[Row]:
    """One row a case that was timed: seconds, tokens a second, and ``ratio``, seconds over those of ``base``.

    They are CPU-seconds; with ``least``, the seconds that a device needs at least, they are by the wall, and ``of the
    bound`` is the share of them that could not be saved (None on a device of unknown peaks). ``differs by``: how far
    what was checked is from the first of our own, in the agreement's unit.
    """
    timed = {measured.case.name: measured for measured in found if measured.failure is None}
    second = "CPU-second" if least is None else "second"
    rows = []
    for name, measured in timed.items():
        row: Row = {"case": name, f"{second}s": middle(np.array(measured.seconds))}
        row[f"tokens/{second}"] = tokens / float(np.median(measured.seconds))
        row["ratio"] = _ratio(measured, timed[base])
        if least is not None:
            device = peak(measured.versions.get("device", ""))
            row["of the bound"] = None if device is None else middle(least(device) / np.array(measured.seconds))
        row["differs by"] = measured.differs
        rows.append(row)
    return rows


def _ratio(measured: Measured, base: Measured) -> dict[str, float]:
    """Over the rounds that both were timed in: a dear case has only the first."""
    rounds = min(len(measured.seconds), len(base.seconds))
    return middle(np.array(measured.seconds[:rounds]) / np.array(base.seconds[:rounds]))


def _over(value: int | None, base: int | None) -> float | None:
    return None if value is None or not base else value / base


def _mb(value: int | None) -> float | None:
    return None if value is None else value / MB
