"""``sample``, ``eval`` and ``probe``: a model, or a run's checkpoint, on given problems."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl import keys
from jaxrl.commands.runs import is_run, open_run
from jaxrl.data.datasets import Problem
from jaxrl.data.prompts import build_pool, load_tokenizer
from jaxrl.data.templates import make_template
from jaxrl.errors import UsageError, nearest
from jaxrl.influence.probe import build_probe, save_probe
from jaxrl.models.decoder import Decoder, with_config
from jaxrl.models.hf import load_model
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature, TopP
from jaxrl.train import grading
from jaxrl.train.evaluate import curve, preset, sample_set
from jaxrl.train.experiment import ProblemsSpec
from jaxrl.train.record import write_json, write_jsonl
from jaxrl.train.tasks import Task, problems_task
from jaxrl.types import STOP_NAMES

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Subject:
    """What a command looks at: a model, the task that reads and grades, and which of its sets."""

    model: Decoder
    task: Task
    set: str
    max_new_tokens: int
    source: str


def subject(arguments: argparse.Namespace) -> Subject:
    """A model folder, hub id or run with problems; a run may name a set of its own task."""
    name, data = arguments.model, arguments.data
    if is_run(name):
        run = open_run(pathlib.Path(name), getattr(arguments, "step", None))
        length = arguments.max_new_tokens or run.experiment.rollout.max_new_tokens
        if data in run.setup.task.pools:
            task = first_of(run.setup.task, data, arguments.limit)
            return Subject(run.model, task, data, length, f"{name} step {run.step}")
        spec, tokenizer = run.experiment.task, run.experiment.model.path
        if not isinstance(spec, ProblemsSpec) or tokenizer is None:
            raise UsageError(f"--data {data}: this run's task has no such set; {nearest(data, run.setup.task.pools)}")
        task = problems_task(given(spec, arguments), spec.tokenizer or tokenizer)
        return Subject(run.model, task, "train", length, f"{name} step {run.step}")
    task = problems_task(given(ProblemsSpec(train=data), arguments), name)
    model = with_config(load_model(name), vocab_limit=task.vocab_limit)
    return Subject(model, task, "train", arguments.max_new_tokens or MAX_NEW_TOKENS, name)


def first_of(task: Task, name: str, limit: int | None) -> Task:
    """The task with the first ``limit`` prompts of one set."""
    if limit is None or limit >= len(task.pools[name]):
        return task
    pool = task.pools[name]
    cut = replace(pool, tokens=pool.tokens[:limit], uid=pool.uid[:limit])
    return replace(task, pools={**task.pools, name: cut})


def free(file: pathlib.Path, overwrite: bool) -> None:
    """Raise ``UsageError``, before any work, when a file that is to be written is there already."""
    if file.exists() and not overwrite:
        raise UsageError(f"{file}: is there already; add --overwrite to replace it, or name another --out")


def given(spec: ProblemsSpec, arguments: argparse.Namespace) -> ProblemsSpec:
    """The run's way of prompting on the command's problems."""
    changes: dict[str, Any] = {"train": arguments.data, "eval": (), "limit": arguments.limit}
    if arguments.template is not None:
        changes |= {"template": arguments.template, "examples": ()}
    return replace(spec, **changes)


def sample(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Responses to problems, written as JSONL with token ids, text and log-probability (nats)."""
    free(arguments.out, arguments.overwrite)
    strategy = strategy_of(arguments.temperature, arguments.top_p)
    if arguments.prompt is not None:
        records = _one_prompt(arguments, strategy)
    else:
        who = subject(arguments)
        try:
            records = sample_set(
                who.model,
                who.task,
                who.task.pools[who.set],
                strategy,
                n=arguments.n,
                key=keys.at(keys.root(arguments.seed), "sample"),
                max_new_tokens=who.max_new_tokens,
                desc="sample",
            ).records
        finally:
            who.task.close()
    write_jsonl(arguments.out, records)
    shown = {f"{r['uid']}.{r['sample']}": r["text"] for r in records[:3]}
    return {"samples": len(records), "file": str(arguments.out), "first": shown}


def _one_prompt(arguments: argparse.Namespace, strategy: Strategy) -> list[dict[str, Any]]:
    """Samples of one prompt given as text; nothing to grade."""
    if is_run(arguments.model):
        raise UsageError(
            f"{arguments.model}: is a run folder; --prompt takes a model folder or hub id (`jaxrl export` makes one of a "
            "run), and --data problems or a set of the run's own task"
        )
    tokenizer = load_tokenizer(arguments.model)
    template = make_template(arguments.template or "chat")
    pool = build_pool([Problem("prompt", arguments.prompt, "")], tokenizer, template)
    model = with_config(load_model(arguments.model), vocab_limit=tokenizer.vocab_size)
    rollouts = generate(
        model,
        pool.all(),
        strategy,
        n=arguments.n,
        key=keys.at(keys.root(arguments.seed), "sample"),
        max_new_tokens=arguments.max_new_tokens or MAX_NEW_TOKENS,
        stop_ids=tuple(tokenizer.stop_ids),
    )
    rows = rollouts.rows
    out = []
    for g in range(arguments.n):
        ids = np.asarray(rows.tokens[0, g, int(rows.start[0, g]) : int(rows.length[0, g])]).tolist()
        text, stop = tokenizer.decode(ids), STOP_NAMES[int(rollouts.stop[0, g])]
        out.append(
            {
                "uid": 0,
                "sample": g,
                "tokens": ids,
                "text": text,
                "logp": float(rollouts.logps[0, g].sum()),
                "stop": stop,
            }
        )
    return out


def eval(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """pass@k with 95 % intervals (cluster bootstrap over problems)."""
    who = subject(arguments)
    try:
        samples = sample_set(
            who.model,
            who.task,
            who.task.pools[who.set],
            preset(arguments.preset),
            n=arguments.n,
            key=keys.at(keys.root(arguments.seed), "eval"),
            max_new_tokens=who.max_new_tokens,
            desc="eval",
        )
    finally:
        who.task.close()
    name = pathlib.PurePath(arguments.data).stem
    table = curve(samples, arguments.k)
    result = {
        "model": who.source,
        "set": name,
        "preset": arguments.preset,
        "problems": len(samples.correct),
        "n": arguments.n,
        "metrics": table,
    }
    write_jsonl(arguments.out / f"{name}.jsonl", samples.records)
    write_json(arguments.out / f"{name}.json", result | {"correct": samples.correct})
    return result


def probe(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """A fixed set of graded solutions, as ``probe.npz``."""
    free(arguments.out, arguments.overwrite)
    who = subject(arguments)
    try:
        pool = who.task.pools[who.set]
        prompts = pool.select(np.arange(min(arguments.prompts, len(pool))))
        rollouts = generate(
            who.model,
            prompts,
            strategy_of(arguments.temperature, 1.0),
            n=arguments.n,
            key=keys.at(keys.root(arguments.seed), "probe"),
            max_new_tokens=who.max_new_tokens,
            stop_ids=who.task.stop_ids,
        )
        found = build_probe([(prompts.uid, rollouts, grading.correct(grading.grade(who.task, prompts.uid, rollouts)))])
    finally:
        who.task.close()
    save_probe(arguments.out, found)
    return {
        "file": str(arguments.out),
        "prompts": len(prompts.uid),
        "solutions": len(np.asarray(found.uid)),
        "correct": int(np.asarray(found.correct).sum()),
        "truncated": int(np.asarray(found.truncated).sum()),
    }


def strategy_of(temperature: float, top_p: float) -> Strategy:
    """The sampler of ``--temperature`` (0: greedy) and ``--top-p``."""
    if temperature == 0:
        return Greedy()
    return Temperature(value=temperature) if top_p >= 1 else TopP(p=top_p, temperature=temperature)
