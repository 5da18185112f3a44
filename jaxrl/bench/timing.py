"""CPU-seconds of several cases, measured turn by turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]
MOST_CALLS = 1000


def interleaved(cases: Mapping[str, Callable[[], Any]], *, repeats: int, target: float) -> dict[str, np.ndarray]:
    """CPU-seconds of one call of each case, ``[repeats]``, all threads of this process counted.

    Every case is called twice first (compilation, then a look at its speed); then each round times
    all cases in turn, with as many calls of each as last ``target`` seconds. What disturbs the
    machine for a while thus disturbs all of them.
    """
    calls = {}
    for name, case in cases.items():
        _seconds(case, 1)
        calls[name] = min(MOST_CALLS, max(1, math.ceil(target / _seconds(case, 1))))
    rounds = [{name: _seconds(case, calls[name]) for name, case in cases.items()} for _ in range(repeats)]
    return {name: np.array([taken[name] for taken in rounds]) for name in cases}


def _seconds(case: Callable[[], Any], calls: int) -> float:
    """CPU-seconds a call; at least a nanosecond, so that ratios exist."""
    began = time.process_time()
    for _ in range(calls):
        jax.block_until_ready(case())
    return max(time.process_time() - began, 1e-9) / calls


def middle(values: np.ndarray) -> dict[str, float]:
    """Median with the smallest and the largest, as a cell of a table."""
    return {"value": float(np.median(values)), "low": float(values.min()), "high": float(values.max())}


def against(seconds: Mapping[str, np.ndarray], baseline: str, of: str) -> list[Row]:
    """One table row a case; ``of`` names its seconds over those of ``baseline`` in the same round."""
    return [
        {"case": name, "CPU-seconds": float(np.median(taken)), of: middle(taken / seconds[baseline])}
        for name, taken in seconds.items()
    ]
