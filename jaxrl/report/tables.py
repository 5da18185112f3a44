"""The report's tables: built as values, shown in HTML with few digits and in CSV with all of them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl import stats
from jaxrl.report.curves import passk_rows
from jaxrl.report.read import Run, flatten
from jaxrl.report.style import MINUS

SHOWN_K = 5  # columns of pass@k that fit a page; the CSV has every k
CHECK_TITLES = {
    "T-C1": "T-C1. Exactness of the gradients, and the slopes of the remainders.",
    "T-C2": "T-C2. Audit of the bound: single pairs, batches, Adam.",
    "T-C3": "T-C3. What one Adam step is made of: shares of the predicted change.",
}
EXPECTED = {
    "slope_single": ("slope of log median remainder against log η, single pairs", "2.00 ± 0.05", lambda v: abs(v - 2) <= 0.05),
    "slope_batch": ("the same for the whole batch", "2", lambda v: abs(v - 2) <= 0.05),
    "slope_second_order": ("the same after the second-order term", "3.0 ± 0.1", lambda v: abs(v - 3) <= 0.1),
    "sign_agreement": ("probes whose sign is predicted, batch at η = 1e-3", "1", lambda v: v >= 1),
    "violations_single": ("pairs that violate Eq. 4 (by O(η), where |A| = C)", "reported", None),
    "violations_batch": ("probes above max |K|, batch", "0", lambda v: v <= 0),
    "tightness_quantiles": ("tightness |Δ|/(ηC|K|): 5, 25, 50, 75, 95 %", "reported", None),
    "adam_residual": ("Adam's four parts against g·Δθ, relative", "≤ 1e-10", lambda v: v <= 1e-10),
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; NaN ends mean that none was recorded."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Table:
    """``rows`` hold strings, numbers and ``Interval``s; ``shown`` picks the columns of the HTML (all if empty)."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    shown: tuple[int, ...] = ()

    def csv(self) -> str:
        """Full precision; an interval takes three columns."""
        wide = [any(isinstance(row[i], Interval) for row in self.rows) for i in range(len(self.columns))]
        header = [part for name, w in zip(self.columns, wide, strict=True)
                  for part in ((name, f"{name} low", f"{name} high") if w else (name,))]  # fmt: skip
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(header)
        for row in self.rows:
            cells: list[Any] = []
            for value, w in zip(row, wide, strict=True):
                item = value if isinstance(value, Interval) or not w else Interval(value)
                cells += [_raw(part) for part in ((item.value, item.low, item.high) if w else (item,))]
            writer.writerow(cells)
        return out.getvalue()

    def html_rows(self) -> list[list[dict[str, str]]]:
        """The shown cells: ``text``, and ``range`` where there is an interval."""
        return [[_cell(row[i]) for i in self.picked()] for row in self.rows]

    def picked(self) -> tuple[int, ...]:
        """Indices of the shown columns."""
        return self.shown or tuple(range(len(self.columns)))


def show(value: Any) -> str:
    """Few digits, a true minus sign, a dash for what is missing."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    if isinstance(value, int):
        return f"{value}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "—" if math.isnan(value) else str(value)
        small = value != 0 and not 1e-3 <= abs(value) < 1e5
        return (f"{value:.2e}" if small else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}").replace("-", MINUS)
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


def headline(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> Table:
    """Base and runs by set: pass@k with intervals, and mode share (A9, A14)."""
    ks = sorted({k for run in runs for pair in sets for k in run.eval_ks(*pair)})
    rows = []
    for subset, preset in sets:
        for label, run, step, _, _ in passk_rows(runs, subset, preset):
            stem = f"eval/{subset}/{preset}"
            values = [Interval(*run.interval(f"{stem}/pass@{k}", step)) for k in ks]
            rows.append((subset, preset, label, step, *values, Interval(*run.interval(f"{stem}/mode_share", step))))
    few = ks if len(ks) <= SHOWN_K else _spread(ks)
    presets = len({preset for _, preset in sets}) > 1
    shown = (0, *((1,) if presets else ()), 2, 3, *(4 + ks.index(k) for k in few), 4 + len(ks))
    columns = ("split", "sampler", "model", "step", *(f"pass@{k}" for k in ks), "mode share")
    caption = (
        "Pass@k (A9) and mode share (A14), with 95 % cluster bootstrap intervals over prompts; base is before training."
    )
    return Table("headline", caption, columns, tuple(rows), shown)


def influence(runs: Sequence[Run]) -> Table:
    """Cumulative influence on the probe at the last step that recorded it."""
    names = (("all", "all (A3)"), ("interference", "correct, pooled Δ⁺ (A4a)"), ("interference_macro", "correct, by prompt (A4b)"),
             ("incorrect", "incorrect Δ⁻ (A4f)"), ("selectivity", f"Δ⁺ {MINUS} Δ⁻"))  # fmt: skip
    rows = []
    for run in runs:
        steps = run.series("probe/cumulative_all_sum")[0] if run.has("probe/cumulative_all_sum") else []
        if len(steps):
            last = int(steps[-1])
            values = [Interval(*run.interval(f"probe/cumulative_{name}_sum", last)) for name, _ in names]
            rows.append((run.name, last, *values, Interval(*run.interval("kl/forward_base", last))))
    columns = ("run", "step", *(label for _, label in names), "KL(base‖now) (A19)")
    caption = (
        "Change of the probe's summed log-probability since step 0 in nats, with 95 % cluster-robust intervals: "
        f"the mean over all base samples can only fall (it is {MINUS}KL), so read the columns against it. Only prompts "
        "of which the probe holds a correct sample enter Δ⁺: easy ones more than hard ones, so it differs from the "
        "exact mean over all prompts in the decomposition's table."
    )
    return Table("influence", caption, columns, tuple(rows))


def decomposition(runs: Sequence[tuple[str, Mapping[str, np.ndarray]]], splits: Sequence[str]) -> Table:
    """Means of the terms of A5 by run and split, and how often Delta+ and p disagree."""
    rows = []
    for split in splits:
        for name, part in runs:
            chosen = part["split"] == split
            if chosen.any():
                terms = [_mean(part[key][chosen]) for key in ("delta_plus", "log_ratio", "narrowing")]
                odd = (part["delta_plus"] < 0) & (part["log_ratio"] > 0)
                rows.append((split, name, int(chosen.sum()), *terms, _mean(odd[chosen])))
    columns = ("split", "run", "prompts", "Δ⁺ (nats)", "log p_T/p_b (nats)", "KLc (nats)", "share with Δ⁺ < 0 and p up")
    caption = f"A5. Δ⁺ = log(p_T/p_b) {MINUS} KLc, means over prompts with 95 % bootstrap intervals."
    return Table("decomposition", caption, columns, tuple(rows))


def environment(runs: Sequence[Run]) -> Table:
    """Versions, commit, command line and devices, one column a run."""
    flat = [flatten(run.environment) for run in runs]
    names = list(dict.fromkeys(name for item in flat for name in item))
    rows = tuple((name, *(_text(item.get(name)) for item in flat)) for name in names)
    return Table("environment", "Where and how each run was made.", ("item", *(run.name for run in runs)), rows)


def settings(runs: Sequence[Run]) -> tuple[Table, Table]:
    """(settings that differ between the runs, settings that all share)."""
    flat = [flatten(run.config) for run in runs if run.config]
    names = list(dict.fromkeys(name for item in flat for name in item))
    same = [name for name in names if all(item.get(name, _ABSENT) == flat[0].get(name, _ABSENT) for item in flat)]
    differ = [name for name in names if name not in same]
    columns = tuple(run.name for run in runs if run.config)
    rows = tuple((name, *(_text(item.get(name, _ABSENT)) for item in flat)) for name in differ)
    common = tuple((name, _text(flat[0][name])) for name in same)
    return (
        Table("settings-that-differ", "Settings in which the runs differ.", ("setting", *columns), rows),
        Table("settings-in-common", "Settings that all runs share.", ("setting", "value"), common),
    )


def kernel_check(scalars: Mapping[str, Any]) -> Table:
    """The scalars of ``kernel_check`` beside what the theory demands."""
    rows = []
    for name, (meaning, expected, holds) in EXPECTED.items():
        if (value := scalars.get(name)) is not None:
            verdict = "—" if holds is None else "yes" if isinstance(value, int | float) and holds(value) else "NO"
            rows.append((name, meaning, value, expected, verdict))
    caption = "The kernel check at a glance (C.1); violations are fractions."
    return Table("kernel-check", caption, ("name", "meaning", "value", "expected", "holds"), tuple(rows))


def check_table(name: str, folder: Path, tables: Mapping[str, Any]) -> Table | None:
    """T-C1, T-C2 or T-C3 from check.json, else from its CSV file; None where neither has it."""
    rows = tables.get(name)
    if not rows:
        files = [f for f in folder.glob("*.csv") if f.stem.lower().replace("_", "-") == name.lower()]
        rows = list(csv.DictReader(files[0].read_text().splitlines())) if files else None
    if not rows:
        return None
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    values = tuple(tuple(_number(row.get(column)) for column in columns) for row in rows)
    return Table(name, CHECK_TITLES.get(name, name), columns, values)


_ABSENT = object()


def _mean(values: np.ndarray) -> Interval:
    """Mean over prompts with its bootstrap interval."""
    found = stats.cluster_bootstrap(values)
    return Interval(found.value, found.low, found.high)


def _cell(value: Any) -> dict[str, str]:
    if isinstance(value, Interval):
        known = not math.isnan(value.low)
        return {"text": show(value.value), "range": f"[{show(value.low)}, {show(value.high)}]" if known else ""}
    return {"text": show(value), "range": ""}


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return json.dumps(value)


def _number(value: Any) -> Any:
    """A CSV cell as a number where it is one."""
    if isinstance(value, str):
        try:
            return float(value) if any(c in value.lower() for c in ".enf") else int(value)
        except ValueError:
            return value
    return value


def _raw(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return repr(value) if isinstance(value, float) else show(value) if isinstance(value, list | tuple) else str(value)


def _spread(ks: list[int]) -> list[int]:
    """At most ``SHOWN_K`` of the k: the first, the last, and evenly spaced ones between."""
    return [ks[round(i * (len(ks) - 1) / (SHOWN_K - 1))] for i in range(SHOWN_K)]
