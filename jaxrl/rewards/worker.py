"""Runs in the verifier's own processes: computer algebra on strings that nobody has vetted.

Nothing here is imported by the caller's process beyond the function names; sympy and math-verify are
imported by ``start``, inside the worker and under its memory limit. A prediction is parsed as LaTeX
only: never ``eval``, never sympy's ``parse_expr``.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One comparison: cleaned texts, the seconds it may take, and the parts of the rule that matter here."""

    gold: str
    answer: str
    seconds: float
    relative_tolerance: float
    evaluate_decimals: bool
    positive_symbols: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """``status`` is ``correct``, ``wrong``, ``timeout``, ``bad_gold`` or ``error``. ``memory`` is the peak in bytes."""

    status: str
    seconds: float
    memory: int


class _Alarm(BaseException):
    """Not an Exception: the parsers swallow those."""


def start(memory_bytes: int) -> None:
    """Set the limits, then import and warm up, so that no job pays for it."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread of it would reserve address space
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ValueError, OSError):
        pass  # not every system has it; the wall-clock kill stands
    from jaxrl.rewards import algebra

    algebra.compare(Job(r"\frac{x}{2}", r"\frac{2x}{4}", 0, 1e-6, False, ()))


def run(job: Job) -> Report:
    """One comparison under an alarm, which spares the process where it can be interrupted at all."""
    from jaxrl.rewards import algebra

    begun = time.monotonic()
    seconds = int(0.8 * job.seconds)
    previous = signal.signal(signal.SIGALRM, _raise_alarm)
    signal.alarm(seconds)  # 0: no alarm, the pool's own clock decides
    try:
        status = algebra.compare(job)
    except _Alarm:
        status = "timeout"
    except (MemoryError, RecursionError):
        status = "error"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return Report(status, time.monotonic() - begun, _peak_memory())


def _raise_alarm(signum: int, frame: Any) -> None:
    raise _Alarm


def _peak_memory() -> int:
    try:  # of this program alone: ru_maxrss begins with the memory of the process that started it
        with open("/proc/self/status", encoding="ascii") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration, UnicodeDecodeError):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
