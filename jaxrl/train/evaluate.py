"""Evaluation of a model on a task: exact where the task can be enumerated, by samples elsewhere."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Key

from jaxrl import keys
from jaxrl.data.prompts import PromptPool
from jaxrl.errors import UsageError, nearest
from jaxrl.evaluation import passk
from jaxrl.evaluation.exact import Exact, decompose, exact, exact_metrics
from jaxrl.models.decoder import Decoder
from jaxrl.rewards import Verdict
from jaxrl.sampling.engine import SlotEngine
from jaxrl.sampling.requests import Engine, Sample
from jaxrl.sampling.rollouts import drawn
from jaxrl.sampling.strategies import Strategy, Temperature, TopP
from jaxrl.stats import Interval
from jaxrl.train import grading
from jaxrl.train.progress import Progress
from jaxrl.train.record import write_json, write_jsonl
from jaxrl.train.tasks import Msa0Task, Task
from jaxrl.types import STOP_NAMES

# Samplers by name: `full` is the policy itself, `yue` that of arXiv 2504.13837 and the SELF paper's evaluation.
PRESETS: dict[str, Strategy] = {"full": Temperature(value=1.0), "yue": TopP(p=0.95, temperature=0.6)}


@dataclass(frozen=True)
class Samples:
    """Graded evaluation samples of one set: correct counts and one record a sample."""

    correct: Int[np.ndarray, " P"]
    n: int
    records: list[dict[str, Any]]


def preset(name: str) -> Strategy:
    """A named sampler; an unknown name is answered with the nearest."""
    if name not in PRESETS:
        raise UsageError(f"eval.presets: unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def sample_set(
    model: Decoder,
    task: Task,
    pool: PromptPool,
    strategy: Strategy,
    *,
    n: int,
    key: Key[Array, ""],
    max_new_tokens: int,
    engine: Engine | None = None,
    desc: str = "evaluation",
) -> Samples:
    """``n`` responses to every prompt of a pool, graded while others are still being decoded.

    The key of a sample depends on the prompt and its index alone, so raising ``n`` later only adds. ``engine`` is
    what samples (default: our own).
    """
    engine = engine or SlotEngine()
    engine.load(model, 0)
    uid = [int(u) for u in pool.uid]
    options: dict[str, Any] = {"key": key, "max_new_tokens": max_new_tokens, "stop_ids": task.stop_ids}
    held: dict[tuple[int, int], Sample] = {}
    with Progress(len(pool) * n, desc, unit="sample") as bar, grading.Grader(task, uid, n) as grader:
        for p, g, one in drawn(engine, pool.all(), strategy, n=n, **options):
            held[p, g] = one
            grader.add(p, g, one.tokens, one.stop)
            bar.advance(1)
        verdicts = grader.finish()
    engine.sleep()
    records = [
        _record(task, uid[p], g, held[p, g], verdict)
        for p, row in enumerate(verdicts)
        for g, verdict in enumerate(row)
        if verdict is not None
    ]
    return Samples(grading.correct(verdicts).sum(axis=1), n, records)


def _record(task: Task, uid: int, g: int, found: Sample, verdict: Verdict) -> dict[str, Any]:
    """One sample as evaluation files keep it."""
    tokens = found.tokens.tolist()
    return {
        "uid": uid,
        "sample": g,
        "tokens": tokens,
        "text": task.text(tokens),
        "verdict": verdict.status,
        "correct": verdict.status == "correct",
        "logp": float(np.asarray(found.logps).sum()),
        "stop": STOP_NAMES[found.stop],
    }


def curve(samples: Samples, ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """pass@k with intervals for every k up to n, as ``{"pass@1": {"value", "low", "high", "se"}, ...}``."""
    usable = [k for k in ks if k <= samples.n]
    points = passk.curve(samples.correct, samples.n, usable)
    return {f"pass@{k}": _interval(points.at(k)) for k in usable}


def exact_summary(model: Decoder, base: Exact, task: Msa0Task, ks: Sequence[int], step: int) -> dict[str, Any]:
    """Exact values on MSA-0: intervals by split, and per prompt what the decomposition A5 needs."""
    now = exact(model)
    splits = {name: np.asarray(pool.uid) for name, pool in task.pools.items()}
    uid = np.concatenate(list(splits.values()))
    parts = decompose(base[uid], now[uid])
    return {
        "step": step,
        "metrics": {
            name: {measure: _interval(value) for measure, value in table.items()}
            for name, table in exact_metrics(now, splits, ks).items()
        },
        "uid": uid,
        "split": np.concatenate([[name] * len(ids) for name, ids in splits.items()]),
        "p_base": base[uid].p,
        "p_now": now[uid].p,
        "delta_plus": parts.change,
        "mode_share": now[uid].code_share,
    }


def _interval(interval: Interval) -> dict[str, float]:
    found = {name: float(getattr(interval, name)) for name in ("value", "low", "high", "se")}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def as_metrics(table: dict[str, dict[str, float]], stem: str, n: int | None = None) -> dict[str, float]:
    """Flat ``eval/<set>/<preset>/<measure>`` metrics with ``/low``, ``/high``, ``/se`` beside each."""
    out: dict[str, float] = {}
    for measure, interval in table.items():
        name = f"{stem}/{measure}"
        out[name] = interval["value"]
        out |= {f"{name}/{part}": interval[part] for part in ("low", "high", "se") if part in interval}
        if n is not None:
            out[f"{name}/n"] = n
    return out


def evaluate_exact(
    model: Decoder, base: Exact, task: Msa0Task, ks: Sequence[int], step: int, out: pathlib.Path
) -> dict[str, float]:
    """Write ``eval/exact-<step>.json`` and return its values as metrics."""
    summary = exact_summary(model, base, task, ks, step)
    write_json(out / "eval" / f"exact-{step:06d}.json", summary)
    metrics: dict[str, float] = {}
    for name, table in summary["metrics"].items():
        metrics |= as_metrics(table, f"eval/{name}/exact")
    return metrics


def evaluate_samples(
    model: Decoder,
    task: Task,
    name: str,
    *,
    presets: Sequence[str],
    n: int,
    ks: Sequence[int],
    key: Key[Array, ""],
    max_new_tokens: int,
    out: pathlib.Path,
    label: str,
    engine: Engine | None = None,
) -> dict[str, float]:
    """Sample one set under each preset; write samples and summary; return the values as metrics."""
    metrics: dict[str, float] = {}
    for which in presets:
        samples = sample_set(
            model,
            task,
            task.pools[name],
            preset(which),
            n=n,
            key=keys.at(key, "eval", name),
            max_new_tokens=max_new_tokens,
            engine=engine,
            desc=f"{name} {which}",
        )
        table = curve(samples, ks)
        stem = out / "eval" / f"{name}-{which}{label}"
        write_jsonl(stem.with_suffix(".jsonl"), samples.records)
        summary = {"set": name, "preset": which, "n": n, "problems": len(samples.correct), "metrics": table}
        write_json(stem.with_suffix(".json"), summary | {"correct": samples.correct})
        metrics |= as_metrics(table, f"eval/{name}/{which}", n)
    return metrics


def read_samples(path: pathlib.Path) -> list[dict[str, Any]]:
    """Sample records of an evaluation file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
