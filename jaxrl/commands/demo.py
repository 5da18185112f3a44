"""``demo``: base, GRPO and SELF on the enumerable task, the kernel check, and one report of it all."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from jaxrl import config, keys, train
from jaxrl.commands.check import finish_check, start_check
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.evaluation.exact import gates, require_gates
from jaxrl.report import render
from jaxrl.train.record import write_json
from jaxrl.train.supervised import train_base
from jaxrl.train.tasks import msa0_task

RUNS = ("grpo", "self")
CHECKED_STEP = 50  # of the GRPO run: Adam has momentum, and most groups still disagree
MEASURES = ("pass@1", "pass@16", "pass@64", "pass@256", "mode_share")


def demo(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Everything on MSA-0 in a few minutes. Raises ``GateFailed`` (exit code 3) when the base may not be used."""
    out, seed, began = pathlib.Path(arguments.out), int(arguments.seed), time.monotonic()
    if (out / "summary.json").exists() or any((out / name).exists() for name in RUNS):
        raise UsageError(f"{out}: already holds a demo; name another --out, or remove it")
    say(f"1/4 supervised base of seed {seed} (no reinforcement learning yet)")
    base = train_base(seed)
    root = keys.root(seed)
    require_gates(gates(base, msa0_task(seed, root).task, key=root))
    child = None
    try:
        for number, name in enumerate(RUNS, 2):
            say(f"{number}/4 {name}: 200 steps, probe and kernel beside them")
            overrides = [f"seed={seed}", f"checkpoint.keep_every={CHECKED_STEP}"]
            experiment = config.load_config(find_config(f"msa0/{name}.yaml"), overrides)
            train(experiment, out=out / name, base=base)
            if child is None:  # the check has a process of its own (double precision), so it runs beside the next run
                child = start_check(out / name, out / "check", step=CHECKED_STEP)
        say("4/4 kernel check in double precision, report")
        assert child is not None
        checked = finish_check(child, out / "check")
    finally:
        if child is not None and child.poll() is None:
            child.terminate()
    summary = summarise(out, checked)
    write_json(out / "summary.json", summary)
    report = render([out / name for name in RUNS], out / "report.html", ["GRPO", "SELF"], out / "check")
    return {
        "pass@k (exact)": headline(summary),
        "kernel check": {k: v for k, v in summary["kernel_check"].items() if not isinstance(v, list)},
        "seconds": round(time.monotonic() - began),
        "summary": str(out / "summary.json"),
        "report": str(report),
    }


def summarise(out: pathlib.Path, checked: Mapping[str, Any]) -> dict[str, Any]:
    """``base``, ``grpo`` and ``self`` by split, each measure with its interval, and the check's numbers."""
    tables = {"base": exact_table(out / RUNS[0], first=True)}
    tables |= {name: exact_table(out / name) for name in RUNS}
    return {**tables, "kernel_check": dict(checked)}


def exact_table(run: pathlib.Path, first: bool = False) -> dict[str, Any]:
    """The exact evaluation of a run's last step, or of its first (the base)."""
    files = sorted((run / "eval").glob("exact-*.json"))
    if not files:
        raise JaxrlError(f"{run}: holds no eval/exact-*.json; the run did not reach its evaluation")
    metrics = json.loads(files[0 if first else -1].read_text())["metrics"]
    return {split: {m: table[m] for m in MEASURES if m in table} for split, table in metrics.items()}


def headline(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a model and split."""
    return [
        {"model": model, "split": split} | {m: round(table[m]["value"], 3) for m in MEASURES if m in table}
        for model in ("base", *RUNS)
        for split, table in summary[model].items()
    ]


def find_config(name: str) -> pathlib.Path:
    """A config that ships with jaxrl: beside the package in a checkout, under ``share/jaxrl`` when installed."""
    package = pathlib.Path(__file__).resolve().parents[1]
    places = [package.parent / "configs", pathlib.Path(sys.prefix) / "share" / "jaxrl" / "configs"]
    for place in places:
        if (place / name).is_file():
            return place / name
    raise JaxrlError(f"configs/{name} was not found in {' or '.join(map(str, places))}; install jaxrl anew")


def say(text: str) -> None:
    """A line of progress, on standard error: standard output is the result's."""
    print(text, file=sys.stderr, flush=True)
