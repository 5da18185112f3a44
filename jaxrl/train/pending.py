"""Rollouts that are collected and not yet trained on, kept beside a checkpoint.

Collecting is a pure function of the state and the step, so a lost file costs time and changes
nothing; with it, a run killed between rollout and update pays for its rollouts once.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl.rewards import Verdict
from jaxrl.train.collect import Collected
from jaxrl.train.record import replacing
from jaxrl.types import Graded, Pairs, Rollouts, Rows, Samples

FILE = "pending.npz"
NESTED = {
    "rollouts": Rollouts,
    "base": Rollouts,
    "rows": Rows,
    "probe": Rows,
    "stream": Samples,
    "teacher": Samples,
    "demonstrations": Samples,
    "pairs": Pairs,
}


def save(folder: pathlib.Path, step: int, collected: Collected) -> None:
    """Write ``pending.npz`` for ``step``."""
    verdicts = [[None if v is None else dataclasses.asdict(v) for v in row] for row in collected.verdicts]
    note = {
        "step": step,
        "generated_tokens": collected.generated_tokens,
        "verdicts": verdicts,
        "notes": collected.notes,
    }
    arrays = {"note": np.array(json.dumps(note))} | _flatten(jax.device_get(collected.graded))
    with replacing(folder / FILE) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def load(folder: pathlib.Path, step: int) -> Collected | None:
    """What ``save`` kept for ``step``, as host arrays; None when there is nothing whole to read, or of another step."""
    path = folder / FILE
    try:
        with np.load(path) as stored:
            arrays = dict(stored)
        note = json.loads(str(arrays.pop("note")))
        if note["step"] != step:
            return None
        verdicts = [[None if v is None else Verdict(**v) for v in row] for row in note["verdicts"]]
        notes = {name: (float(a), float(b)) for name, (a, b) in note["notes"].items()}
        return Collected(_build(Graded, arrays), verdicts, int(note["generated_tokens"]), notes)
    except Exception:  # damaged in whatever way, by a kill or a copy: numpy, zip and JSON each raise kinds of their own
        return None


def _flatten(value: Any, prefix: str = "") -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(value):
        item, name = getattr(value, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            out |= _flatten(item, f"{name}.")
        elif item is not None:
            out[name] = np.asarray(item)
    return out


def _build(kind: Any, arrays: dict[str, np.ndarray], prefix: str = "") -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        if name in arrays:
            values[field.name] = arrays[name]
        elif any(key.startswith(f"{name}.") for key in arrays):
            values[field.name] = _build(NESTED[field.name], arrays, f"{name}.")
    return kind(**values)
