"""Statistics of timings as cells of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Row = dict[str, Any]


def middle(values: np.ndarray) -> dict[str, float]:
    """Median with the smallest and the largest, as a cell of a table."""
    return {"value": float(np.median(values)), "low": float(values.min()), "high": float(values.max())}


def against(seconds: Mapping[str, np.ndarray], baseline: str, of: str) -> list[Row]:
    """One table row a case; ``of`` names its seconds over those of ``baseline`` in the same round."""
    return [
        {"case": name, "CPU-seconds": float(np.median(taken)), of: middle(taken / seconds[baseline])}
        for name, taken in seconds.items()
    ]
