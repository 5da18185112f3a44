"""The run folder as a whole: opened for a new run or to go on, described in ``config.json``, summed up at the end."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import JaxrlError, UsageError
from jaxrl.train.record import MetricLog, write_json

CONFIG, SUMMARY = "config.json", "summary.json"
HELD = (CONFIG, "base", "checkpoints", "metrics.jsonl", "arrays.zarr", "probe.npz")  # what makes a folder a run's


def open_folder(folder: pathlib.Path, resume: bool) -> pathlib.Path:
    """The run folder: new, or one to go on with.

    Raises ``UsageError`` when there is nothing to resume or when a new run would mix with what the folder holds,
    and ``JaxrlError`` before any work when it cannot be written.
    """
    if resume and not (folder / CONFIG).exists():
        raise UsageError(f"{folder}: nothing to resume, it holds no {CONFIG}; start without --resume")
    found = [] if resume else [name for name in HELD if (folder / name).exists()]
    if CONFIG in found:
        raise UsageError(f"{folder}: already holds a run; add --resume to go on with it, or name another folder")
    if found:
        raise UsageError(
            f"{folder}: holds {', '.join(found)} but no {CONFIG}, so it is no run to go on with; "
            "remove what is left there, or name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise JaxrlError(
            f"{folder}: the run folder cannot be written ({error.strerror}); choose another --out"
        ) from error
    return folder


def describe_run(folder: pathlib.Path, echo: Mapping[str, Any], about: Mapping[str, Any], resume: bool) -> None:
    """Write ``config.json``: the resolved experiment, and ``about`` what runs it.

    A run that goes on keeps what its first part said, and lists what each later part ran on under ``resumed``.
    """
    if resume:
        held = json.loads((folder / CONFIG).read_text())
        about = held | {"resumed": [*held.get("resumed", []), dict(about)]}
    write_json(folder / CONFIG, {"experiment": None} | dict(about) | {"experiment": dict(echo)})


def note_data(folder: pathlib.Path, notes: Mapping[str, Any]) -> None:
    """Add to ``config.json`` what loading the data found: duplicates, overlaps, what was dropped."""
    held = json.loads((folder / CONFIG).read_text())
    write_json(folder / CONFIG, held | {"data": dict(notes)})


def summarise(folder: pathlib.Path, log: MetricLog, steps: int) -> None:
    """Write ``summary.json``: steps, updates, seconds, and the last evaluation as rows of set and preset."""
    lines = log.lines("train")
    last: dict[str, Any] = (log.lines("eval") or [{}])[-1]
    table: dict[str, dict[str, Any]] = {}
    for name, value in last.items():
        match name.split("/"):
            case ["eval", set_name, preset, measure]:
                table.setdefault(f"{set_name}/{preset}", {})[measure] = _interval(last, name, value)
    summary = {
        "steps": steps,
        "updates": lines[-1]["optim/updates"] if lines else 0,
        "seconds": round(sum(line["cost/seconds"] for line in lines), 1),
        "generated tokens": sum(line["cost/generated_tokens"] for line in lines),
    }
    write_json(folder / SUMMARY, summary | ({"evaluation": table} if table else {}))


def _interval(line: Mapping[str, Any], name: str, value: float) -> Any:
    """A value with the ends of its interval, where it has one."""
    ends = {end: line[f"{name}/{end}"] for end in ("low", "high") if f"{name}/{end}" in line}
    return {"value": value, **ends} if len(ends) == 2 else value
