"""Run folders, read back as plain numbers. Needs no jax and no model.

Everything but the folder itself may be missing: a run that was killed, or recorded less, is still
readable, and ``Run.notes`` says in words what was not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import JaxrlError, nearest
from jaxrl.jsonfile import read_line
from jaxrl.jsonfile import read_object as read_json

NAMES = re.compile(r"^eval/(?P<set>[^/]+)/(?P<preset>[^/]+)/(?P<measure>.+)$")
EXACT = ("p_base", "p_now", "delta_plus")  # what the decomposition A5 reads of an exact evaluation
SPLITS = ("train", "heldout", "ood")  # drawn first and in this order; other sets follow by name


@dataclass(frozen=True)
class Run:
    """One run folder.

    ``config``: the configuration (nested), which config.json holds under ``experiment``.
    ``environment``: its other keys (versions, commit, command line, devices). ``metrics[name][step]``: what metrics.jsonl says; where a
    resumed run wrote a step twice, the later line counts. ``probe``: the arrays of probe.npz.
    ``exact``: the newest ``eval/exact*.json`` (keys in ``figures``). ``summary``: summary.json.
    ``notes``: what is missing, in words.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    probe: dict[str, np.ndarray] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """True when the metric was written at least once with a finite value."""
        return any(np.isfinite(list(self.metrics.get(name, {}).values())))

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps i64[n], ascending, and values f64[n] of one metric; null reads as NaN.

        Raises ``KeyError`` with the nearest recorded name when the metric was never written.
        """
        if name not in self.metrics:
            raise KeyError(f"{self.path / 'metrics.jsonl'}: no metric {name!r}{_hint(name, self.metrics)}")
        items = sorted(self.metrics[name].items())
        return np.array([step for step, _ in items], np.int64), np.array([value for _, value in items], float)

    def band(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Steps, low and high of the 95 % interval of ``name``; None where none was recorded.

        A bootstrap interval (``/low``, ``/high``) is used as it is, otherwise value +- 1.96 ``/se``.
        """
        if self.has(f"{name}/low") and self.has(f"{name}/high"):
            steps, low = self.series(f"{name}/low")
            high = self.metrics[f"{name}/high"]
            return steps, low, np.array([high.get(int(step), np.nan) for step in steps])
        if name in self.metrics and self.has(f"{name}/se"):
            steps, value = self.series(name)
            errors = self.metrics[f"{name}/se"]
            reach = 1.96 * np.array([errors.get(int(step), np.nan) for step in steps])
            return steps, value - reach, value + reach
        return None

    def at(self, name: str, step: int) -> float:
        """The value at ``step``, NaN where there is none."""
        return self.metrics.get(name, {}).get(step, float("nan"))

    def interval(self, name: str, step: int) -> tuple[float, float, float]:
        """Value, low and high at ``step``; NaN where there is none."""
        band = self.band(name)
        low = high = float("nan")
        if band is not None and step in band[0]:
            index = int(np.flatnonzero(band[0] == step)[0])
            low, high = float(band[1][index]), float(band[2][index])
        return self.at(name, step), low, high

    def eval_steps(self, subset: str, preset: str) -> list[int]:
        """Steps at which pass@k of a set was evaluated, ascending."""
        stem = f"eval/{subset}/{preset}/pass@"
        return sorted({step for name, line in self.metrics.items() if name.startswith(stem) for step in line})

    def eval_sets(self) -> list[tuple[str, str]]:
        """The (set, preset) pairs that were evaluated, train, heldout, ood first."""
        found = {(m["set"], m["preset"]) for m in map(NAMES.match, self.metrics) if m and m["measure"] != ""}
        return sorted(found, key=lambda pair: (split_order(pair[0]), pair))

    def eval_ks(self, subset: str, preset: str) -> list[int]:
        """The k of pass@k recorded for a set, ascending."""
        stem = f"eval/{subset}/{preset}/pass@"
        tails = (name[len(stem) :] for name in self.metrics if name.startswith(stem))
        return sorted(int(tail) for tail in tails if tail.isdigit())

    def array(self, name: str) -> np.ndarray | None:
        """One array of arrays.zarr, e.g. ``probe_logp_sum`` or ``kernel/20``; None if absent."""
        folder = self.path / "arrays.zarr" / name
        for marker, driver in ((".zarray", "zarr"), ("zarr.json", "zarr3")):
            if (folder / marker).is_file():
                import tensorstore

                spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(folder)}}
                return np.asarray(tensorstore.open(spec, read=True).result().read().result())
        return None

    def array_steps(self, group: str) -> list[int]:
        """The steps for which arrays.zarr holds ``group/<step>``."""
        folder = self.path / "arrays.zarr" / group
        return sorted(int(item.name) for item in folder.iterdir() if item.name.isdigit()) if folder.is_dir() else []


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read one run folder.

    A last line of metrics.jsonl that a killed run left unfinished is dropped and noted. Raises
    ``JaxrlError`` when the folder does not exist or holds neither config.json nor metrics.jsonl, and,
    with file and line number, for a malformed line or file.
    """
    path = Path(path)
    if not path.is_dir():
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise JaxrlError(f"run folder {path} does not exist{_hint(path.name, siblings)}")
    if not any((path / item).exists() for item in ("config.json", "metrics.jsonl")):
        raise JaxrlError(f"{path} holds neither config.json nor metrics.jsonl; give the folder of a run")
    notes: list[str] = []
    whole = _read_json(path / "config.json", notes)
    config = whole.get("experiment", whole)
    if not isinstance(config, dict):
        raise JaxrlError(f"{path / 'config.json'}: expected the settings of a run under experiment, got {config!r}")
    environment = {} if config is whole else {key: value for key, value in whole.items() if key != "experiment"}
    return Run(
        path=path,
        name=name or path.resolve().name,
        config=config,
        environment=environment,
        metrics=_read_metrics(path / "metrics.jsonl", notes),
        probe=read_arrays(path / "probe.npz"),
        exact=_read_exact(path / "eval", notes),
        summary=_read_json(path / "summary.json", []),
        notes=tuple(notes),
    )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file, {} when it does not exist. Raises ``JaxrlError`` naming a broken one."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:
        raise JaxrlError(f"{path}: expected an .npz file of plain arrays, got {error}; write it again") from error


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists as dotted names: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    if path.is_file():
        return read_json(path)
    notes.append(f"{path.name} is missing.")
    return {}


def _read_metrics(path: Path, notes: list[str]) -> dict[str, dict[int, float]]:
    if not path.is_file():
        notes.append(f"{path.name} is missing: no curve of this run can be drawn.")
        return {}
    metrics: dict[str, dict[int, float]] = {}
    lines = path.read_text(errors="replace").split("\n")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = read_line(text, path, number)
        except JaxrlError as error:
            if number == len(lines) and isinstance(error.__cause__, json.JSONDecodeError):  # no newline after it
                notes.append(f"The last line of {path.name} (line {number}) is cut off and was left out.")
                break
            raise
        step = line["step"]
        if line.get("not_finite"):
            notes.append(f"The run stopped at step {step}: {_listed(line['not_finite'])} was not finite.")
        for name, value in line.items():
            if (value is None or isinstance(value, int | float)) and name not in ("step", "time"):
                metrics.setdefault(name, {})[step] = float("nan") if value is None else float(value)
    return metrics


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_exact(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The newest ``exact*.json`` that has what A5 needs; a note for each that lacks a part of it."""
    files = sorted(folder.glob("exact*.json")) if folder.is_dir() else []
    usable = []
    for file in files:
        value = read_json(file)
        missing = [key for key in EXACT if not isinstance(value.get(key), list)]
        if missing:
            notes.append(f"eval/{file.name} was left out: it has no {', '.join(missing)}.")
        else:
            usable.append(value | {"file": str(file)})
    return max(usable, key=lambda value: value.get("step", -1)) if usable else {}


def split_order(name: str) -> int:
    """Sorts train, heldout, ood first."""
    return SPLITS.index(name) if name in SPLITS else len(SPLITS)


def _hint(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or nothing: there can be hundreds."""
    hint = nearest(name, known)
    return f"; {hint.split(' (one of')[0]}" if "did you mean" in hint else ""
