"""The run folder as a whole: opened for a new run or to go on, described in ``config.json``, summed up at the end."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import JaxrlError, UsageError
from jaxrl.jsonfile import read_object
from jaxrl.train.record import MetricLog, metric_lines, write_json

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


def check_held(folder: pathlib.Path, steps: int) -> None:
    """Refuse, before anything is rewritten, to go on with a run that is past ``steps`` or has lost a part of itself.

    A checkpoint of step N stands on what the N steps before it recorded: a run that went on without would say it
    began in the middle. Raises ``UsageError``.
    """
    done = max((int(f.name) for f in (folder / "checkpoints").glob("*") if f.name.isdigit()), default=0)
    if done > steps:
        raise UsageError(f"{folder}: {done} steps are done; steps must be at least {done}, got {steps}")
    if not done:
        return
    needed = {"metrics.jsonl": folder / "metrics.jsonl", "arrays.zarr": folder / "arrays.zarr" / "reward" / ".zarray"}
    missing = [name for name, file in needed.items() if not file.exists()]
    if missing:
        raise UsageError(
            f"{folder}: cannot resume at step {done}: {' and '.join(missing)} of the steps before it "
            f"{'is' if len(missing) == 1 else 'are'} missing; put it back, or start a new run with another --out"
        )
    trained = (line["step"] for _, line in metric_lines(folder / "metrics.jsonl") if line.get("kind") == "train")
    last = max(trained, default=-1)
    if last < done - 1:
        ends = f"ends with step {last}" if last >= 0 else "holds no step"
        raise UsageError(
            f"{folder}: cannot resume at step {done}: metrics.jsonl {ends}, so it is older than the checkpoint; put the "
            f"whole file back, remove checkpoints/ beyond step {last + 1}, or start a new run with another --out"
        )


def describe_run(folder: pathlib.Path, echo: Mapping[str, Any], about: Mapping[str, Any], resume: bool) -> None:
    """Write ``config.json``: the resolved experiment, and ``about`` what runs it.

    A run that goes on keeps what its first part said, and lists what each later part ran on under ``resumed``.
    """
    if resume:
        held = read_object(folder / CONFIG)
        about = held | {"resumed": [*held.get("resumed", []), dict(about)]}
    write_json(folder / CONFIG, {"experiment": None} | dict(about) | {"experiment": dict(echo)})


def note_data(folder: pathlib.Path, notes: Mapping[str, Any]) -> None:
    """Add to ``config.json`` what loading the data found: duplicates, overlaps, what was dropped."""
    held = read_object(folder / CONFIG)
    write_json(folder / CONFIG, held | {"data": dict(notes)})


def summarise(folder: pathlib.Path, log: MetricLog, steps: int, stopped: str | None = None) -> None:
    """Write ``summary.json``: steps, updates, seconds, and the last evaluation as rows of set and preset.

    ``stopped``: why the run ended before its last step.
    """
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
    if stopped:
        summary["stopped"] = stopped
    write_json(folder / SUMMARY, summary | ({"evaluation": table} if table else {}))


def _interval(line: Mapping[str, Any], name: str, value: float) -> Any:
    """A value with the ends of its interval, where it has one."""
    ends = {end: line[f"{name}/{end}"] for end in ("low", "high") if f"{name}/{end}" in line}
    return {"value": value, **ends} if len(ends) == 2 else value
