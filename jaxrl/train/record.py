"""What a run writes while it trains: metric lines, readable rollouts, JSON files.

Every file is either appended by whole lines or written to a temporary name and renamed, so a
killed run or a full disk leaves nothing half-written that a later one could trip over.
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

from jaxrl.errors import JaxrlError
from jaxrl.jsonfile import read_line
from jaxrl.mean import Mean
from jaxrl.mesh import process_count


class NotFinite(JaxrlError):
    """A metric became NaN or infinite; the message names the step and the metric."""


class WriteFailed(JaxrlError):
    """The file system refused a write; the message names the file and the reason."""

    @classmethod
    def of(cls, path: pathlib.Path, error: BaseException) -> WriteFailed:
        """From what the system said of ``path``."""
        said = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        return cls(f"{path}: cannot be written: {said}; nothing half-written was left")


class MetricLog:
    """``metrics.jsonl``: one object a step and kind, appended; a run that goes on from ``step`` cuts what it will redo."""

    def __init__(self, path: pathlib.Path, step: int = 0) -> None:
        self.path = path
        if path.exists():
            kept = [text for text, line in metric_lines(path) if _before(line, step)]
            write_text(path, "".join(text + "\n" for text in kept))

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line; ``Mean`` values also store their count. Raises ``NotFinite`` on NaN or infinity.

        A mean over nothing is left out: a missing value is not zero.
        """
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "kind": kind}
        for name, value in values.items():
            line |= _entries(name, value)
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        finite = {k: v for k, v in line.items() if k not in bad}
        append(self.path, json.dumps(finite | ({"not_finite": bad} if bad else {})) + "\n")
        if bad:
            raise NotFinite(
                f"step {step}: {', '.join(bad)} of the {kind} metrics is not finite; the run stopped and its last "
                "checkpoint stands. Lower the learning rate or look at the rollouts of this step"
            )
        return finite

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, in order."""
        return [line for _, line in metric_lines(self.path) if line.get("kind") == kind]


def environment() -> dict[str, Any]:
    """What else explains a run: versions, commit, command line, devices."""
    import jax

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy", "math-verify")
    return {
        "versions": {name: _version(name) for name in ("jaxrl", *names)} | {"python": platform.python_version()},
        "commit": _commit(),
        "command": sys.argv,
        "devices": [f"{d.platform} {d.device_kind}" for d in jax.devices()],
        "processes": process_count(),
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
    """Whether a run that goes on from ``step`` keeps this line.

    An evaluation at step s is of the state before step s, and is written before that state is stored: with a
    checkpoint of step s it stands. A start from step 0 has no checkpoint and evaluates again.
    """
    return line["step"] < step or (line.get("kind") == "eval" and line["step"] == step > 0)


def metric_lines(path: pathlib.Path) -> list[tuple[str, dict[str, Any]]]:
    """Complete lines as text and as read; a last line without its newline was cut by a kill.

    Nothing when there is no file. Raises ``JaxrlError`` with file and line number for a malformed line.
    """
    whole = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    return [(text, read_line(text, path, number)) for number, text in enumerate(whole, 1) if text.strip()]


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary name to write to; it takes the name ``path`` when the block ends well.

    Raises ``WriteFailed`` when the file system refuses; then ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise WriteFailed.of(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def append(path: pathlib.Path, text: str) -> None:
    """Add whole lines to a file, or leave it as it was and raise ``WriteFailed``."""
    data = text.encode()
    try:
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise WriteFailed.of(path, error) from error


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
