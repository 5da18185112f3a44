"""What the kernel check found: whether it holds, its tables T-C1 to T-C4, and its folder."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.tables import plain

# (name, where in the findings, low, high): what must hold for `ok`.
HOLDS = (
    ("c1 forward mode", ("c1", "forward"), 0, 1e-8),
    ("c1 central differences", ("c1", "central"), 0, 1e-6),
    ("c2 score identity", ("c2", "error"), 0, 1e-10),
    ("slope_single", ("c3", "first", "value"), 1.95, 2.05),
    ("slope_second_order", ("c3", "second", "value"), 2.9, 3.1),
    ("c4 fit of tightness on |A|/C, slope", ("c4", "fit_slope"), 0.99, 1.01),
    ("c4 fit of tightness on |A|/C, R2", ("c4", "fit_r2"), 0.999, 1),
    ("c4 change by rows with A = 0", ("c4", "silent_max"), 0, 0),
    ("slope_batch", ("c5", "first", "value"), 1.95, 2.05),
    ("sign_agreement", ("c5", "sign_agreement_below"), 1, 1),
    ("c5 kernel sum against the loss gradient", ("c5", "kernel_error"), 0, 1e-10),
    ("c6 bound by the largest |K|", ("c6", "violations_max"), 0, 0),
    ("adam_residual", ("c9", "residual"), 0, 1e-10),
    ("c11 change by all-equal groups", ("c11", "change"), 0, 0),
    ("c11 contribution of all-equal groups", ("c11", "contribution"), 0, 0),
    ("c14 sum of the parts", ("c14", "residual"), 0, 1e-10),
    ("c14 largest squared cosine", ("c14", "largest_cos2"), 0, 1.001),
)


def verdicts(found: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The findings with their headline numbers, ``ok``, and ``failures`` as sentences.

    ``slope_single`` and ``slope_second_order`` are of single pairs (C3), ``slope_batch`` of the batch
    (C5, as is ``c5/second``), ``sign_agreement`` is at eta = 1e-3, ``violations_batch`` the share of
    probe rows above the largest ``|K|``. A number that could not be measured is None, and a failure.
    ``blocks`` are the rows of T-C4; without any there is no such table.
    """
    failures = [_failure(found, *rule) for rule in HOLDS if found.get(rule[1][0]) is not None]
    failures = [text for text in failures if text]
    tables = {"T-C1": exactness_table(found), "T-C2": bound_table(found), "T-C3": step_table(found)}
    if blocks:
        tables["T-C4"] = [dict(row) for row in blocks]
    result = {
        "ok": not failures,
        "failures": failures,
        "slope_single": found["c3"]["first"]["value"],
        "slope_batch": found["c5"]["first"]["value"],
        "slope_second_order": found["c3"]["second"]["value"],
        "sign_agreement": found["c5"]["sign_agreement"],
        "violations_single": found["c4"]["violations"],
        "violations_batch": found["c6"]["violations_max"],
        "tightness_quantiles": found["c4"]["tightness"],
        "adam_residual": found["c9"]["residual"],
        "tables": tables,
    }
    return plain(result | dict(found))


def _failure(found: Mapping[str, Any], name: str, path: tuple[str, ...], low: float, high: float) -> str | None:
    value: Any = found
    for key in path:
        value = value[key]
    if low <= value <= high:
        return None
    reason = found[path[0]].get(path[1], {}) if path[-1] == "value" else {}
    if isinstance(reason, Mapping) and reason.get("reason"):
        return f"{name}: {reason['reason']}"
    return f"{name}: {value:.6g} is outside {low:g}..{high:g}"


def exactness_table(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """T-C1: errors of the gradients, and slopes with the window they were fitted on."""
    rows: list[dict[str, Any]] = [
        {"quantity": "kernel, forward mode against reverse", "value": found["c1"]["forward"], "expected": "≤ 1e-8"},
        {"quantity": "kernel against central differences", "value": found["c1"]["central"], "expected": "≤ 1e-6"},
    ]
    if found.get("c2"):
        rows.append({"quantity": "score identity", "value": found["c2"]["error"], "expected": "≤ 1e-10"})
    slopes = (
        ("slope, single pairs", found["c3"]["first"], "2.00 ± 0.05"),
        ("slope, single pairs, same prompt", found["c3"].get("same_prompt"), "2"),
        ("slope, single pairs, across prompts", found["c3"].get("cross_prompt"), "2"),
        ("slope, single pairs, after second order", found["c3"]["second"], "3.0 ± 0.1"),
        ("slope, batch", found["c5"]["first"], "2.00 ± 0.05"),
        ("slope, batch, after second order", found["c5"]["second"], "3"),
    )
    for name, slope, expected in slopes:
        if slope is not None:
            row = {"quantity": name, "value": slope["value"], "expected": expected}
            rows.append(row | {"eta from": slope["low"], "eta to": slope["high"], "points": slope["points"]})
    return rows


def bound_table(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """T-C2: the bound on single pairs, on a batch (largest, mean, one entry), and read with eta = lr under Adam."""
    single, batch, adam = found["c4"], found["c6"], found["c9"]

    def row(name: str, n: int, violations: float, tightness: Any = None, **more: float) -> dict[str, Any]:
        low, middle, high = (tightness[i] for i in (0, 2, 4)) if tightness else (None, None, None)
        cells = {"bound": name, "n": n, "violations": violations, "5 %": low, "50 %": middle, "95 %": high}
        return cells | {key: more.get(key) for key in ("sign", "Spearman", "partial")}

    return [
        row("single pair, |K|", single["pairs"], single["violations"], single["tightness"]),
        row("batch, largest |K|", batch["probes"], batch["violations_max"], batch["tightness_max"],
            Spearman=batch["spearman_max"]),
        row("batch, mean |K|", batch["probes"], batch["violations_mean"], batch["tightness_mean"],
            sign=batch["sign_prediction"], Spearman=batch["spearman_mean"], partial=batch["partial_mean_given_norm"]),
        row("batch, one |K|", batch["probes"], batch["violations_single"], sign=batch["sign_mean_kernel"]),
        row("Adam with η = lr, mean |K|", batch["probes"], adam["naive_violations"], sign=adam["against_sgd"]["sign"]),
    ]  # fmt: skip


def step_table(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """T-C3: what the optimiser's step does to the probe, by part, and what the first order leaves."""
    account = found["c9"]
    rows = [{"part": name, "share": p["share"], "rms (nats)": p["rms"]} for name, p in account["parts"].items()]
    one = found["c10"].get("1")
    left = {} if one is None else {"share": 1 - one["explained"]}
    return [*rows, {"part": "left by the first order (of squares)"} | left]


def write_check(
    out: str | os.PathLike[str], result: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write ``check.json``, every entry of ``arrays`` as ``<name>.npz``, and every table as CSV, each whole or not at all."""
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, held in arrays.items():
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **held)
        _write(folder / f"{name}.npz", buffer.getvalue())
    for name, rows in result["tables"].items():
        _write(folder / f"{name}.csv", _csv(rows).encode())
    _write(folder / "check.json", json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _write(path: pathlib.Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
