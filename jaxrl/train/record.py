"""What a run writes while it trains: metric lines, readable rollouts, arrays, JSON files.

Every file is either appended by whole lines or written to a temporary name and renamed, so a
killed run leaves nothing half-written that a later one could trip over.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from jaxrl.errors import JaxrlError
from jaxrl.mean import Mean
from jaxrl.mesh import process_count


class NotFinite(JaxrlError):
    """A metric became NaN or infinite; the message names the step and the metric."""


class MetricLog:
    """``metrics.jsonl``: one object a step and kind, appended; lines from ``step`` on are cut at resume."""

    def __init__(self, path: pathlib.Path, resume_step: int | None = None) -> None:
        self.path = path
        if path.exists():
            lines = [] if resume_step is None else _whole_lines(path)
            kept = [line for line in lines if resume_step is not None and _before(json.loads(line), resume_step)]
            write_text(path, "".join(line + "\n" for line in kept))

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line; ``Mean`` values also store their count. Raises ``NotFinite`` on NaN or infinity.

        A mean over nothing is left out: a missing value is not zero.
        """
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "kind": kind}
        for name, value in values.items():
            line |= _entries(name, value)
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        finite = {k: v for k, v in line.items() if k not in bad}
        with self.path.open("a") as file:
            file.write(json.dumps(finite | ({"not_finite": bad} if bad else {})) + "\n")
        if bad:
            raise NotFinite(
                f"step {step}: {', '.join(bad)} of the {kind} metrics is not finite; the run stopped and its last "
                "checkpoint stands. Lower the learning rate or look at the rollouts of this step"
            )
        return finite

    def last(self, name: str, before: int) -> int:
        """The latest stored value of a counter at a step below ``before``; 0 when there is none."""
        if not self.path.exists():
            return 0
        lines = [json.loads(line) for line in _whole_lines(self.path)]
        return max((int(line[name]) for line in lines if name in line and line["step"] < before), default=0)


def environment(notes: Mapping[str, Any]) -> dict[str, Any]:
    """What else explains a run: versions, commit, command line, devices, and what loading the data noted."""
    import jax

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy", "math-verify")
    return {
        "versions": {name: _version(name) for name in ("jaxrl", *names)} | {"python": platform.python_version()},
        "commit": _commit(),
        "command": sys.argv,
        "devices": [f"{d.platform} {d.device_kind}" for d in jax.devices()],
        "processes": process_count(),
        "data": dict(notes),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that runs, with ``+`` when files differ from it; None outside a checkout."""
    here = pathlib.Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
        if head.returncode:
            return None
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def _entries(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mean):
        count = float(value.count)
        return {name: float(value.total) / count, f"{name}/n": count} if count else {}
    if isinstance(value, (bool, np.bool_)):
        return {name: bool(value)}
    if isinstance(value, (int, np.integer)):
        return {name: int(value)}
    return {name: float(value)}


def _before(line: Mapping[str, Any], step: int) -> bool:
    """Evaluations at step s describe the state before step s, so they stay; they were made at its checkpoint."""
    return line["step"] < step or (line["kind"] == "eval" and line["step"] <= step)


def _whole_lines(path: pathlib.Path) -> list[str]:
    """Complete lines; a last line without its newline was cut by a kill."""
    text = path.read_text()
    return text.split("\n")[:-1] if text else []


class ArrayStore:
    """``arrays.zarr``: named arrays through tensorstore. Floating arrays are NaN where nothing was written."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.open: dict[str, ts.TensorStore] = {}

    def require(self, name: str, shape: tuple[int, ...], dtype: str) -> ts.TensorStore:
        """Open an array, creating or growing it to ``shape``; one chunk a leading index."""
        if name in self.open:
            return self.open[name]
        spec: dict[str, Any] = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(self.root / name) + "/"},
        }
        if (self.root / name / ".zarray").exists():
            store = ts.open(spec, open=True).result()
            if store.shape[0] < shape[0]:
                store = store.resize(exclusive_max=list(shape), expand_only=True).result()
        else:
            kind = np.dtype(dtype)
            spec["metadata"] = {
                "shape": list(shape),
                "chunks": [1, *shape[1:]] if len(shape) > 1 else list(shape),
                "dtype": kind.str,
                "fill_value": "NaN" if kind.kind == "f" else False if kind.kind == "b" else 0,
            }
            store = ts.open(spec, create=True, delete_existing=True).result()
        self.open[name] = store
        return store

    def write(self, name: str, index: int, value: Any) -> None:
        """Store row ``index`` of an array that ``require`` opened."""
        self.open[name][index].write(np.asarray(value)).result()

    def put(self, name: str, value: Any, attributes: Mapping[str, Any] | None = None) -> None:
        """Store one whole array, with attributes beside it (``.zattrs``)."""
        value = np.asarray(value)
        self.open.pop(name, None)
        self.require(name, value.shape, value.dtype.str).write(value).result()
        if attributes:
            write_json(self.root / name / ".zattrs", dict(attributes))

    def read(self, name: str) -> np.ndarray:
        """A whole array as numpy."""
        if name not in self.open:
            spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.root / name) + "/"}}
            self.open[name] = ts.open(spec, open=True).result()
        return self.open[name].read().result()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary name to write to; it takes the name ``path`` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_json(path: pathlib.Path, value: Any) -> None:
    """JSON, indented, numpy scalars and arrays included."""
    write_text(path, json.dumps(value, indent=1, default=_plain) + "\n")


def write_jsonl(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One object a line."""
    write_text(path, "".join(json.dumps(r, default=_plain, ensure_ascii=False) + "\n" for r in records))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
