"""YAML to ``Experiment``, strictly, and back.

``load_config`` reads a file with dotted overrides; ``to_tree`` is the resolved echo that a run folder
keeps and ``from_tree`` reads again; ``changed`` says what a resumed run may not change.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl.data.templates import make_template
from jaxrl.errors import UsageError, nearest
from jaxrl.rewards.shaping import REWARDS, Reward
from jaxrl.rl.advantages import ADVANTAGES, Advantage
from jaxrl.rl.filters import FILTERS, PREFILTERS, Filter, Prefilter
from jaxrl.rl.losses import LOSSES, TokenLoss
from jaxrl.rl.old_logps import OLD_LOGPS, OldLogps
from jaxrl.rl.pair_losses import PAIR_OBJECTIVES, PairObjective
from jaxrl.rl.preferences import Preference
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import REGULARISERS, Regulariser
from jaxrl.rl.shaping import SHAPING, Shaping
from jaxrl.rl.weights import WEIGHTS, Weights
from jaxrl.sampling.engines import ENGINES, EngineSpec
from jaxrl.sampling.strategies import STRATEGIES, Strategy, Temperature
from jaxrl.schema import FAILED, Range, Reader, Schema, dump, named
from jaxrl.train.experiment import Experiment, Msa0Spec, ProblemsSpec
from jaxrl.yamltree import Document, Override, Path, dotted, override, parse

COUNT = Range(1, 10**9)
CADENCE = Range(0, 10**9)  # in steps; 0 is never
SEED = Range(0, 2**32 - 1)
SHARE = Range(0, 1)
SIZE = Range(1, 10**7)

# What every number of a config accepts: by class and field, or by field alone.
RANGES: dict[str, Range] = {
    "seed": SEED,
    "base_seed": SEED,
    "steps": COUNT,
    "prompts": COUNT,
    "n": COUNT,
    "max_new_tokens": SIZE,
    "slots": SIZE,
    "SlotSpec.chunk": SIZE,
    "admit": SIZE,
    "ahead": Range(0, 100),
    "pools": Range(1, 20),
    "keep": COUNT,
    "RemoteSpec.probe": Range(2, 10**4),
    "concurrency": Range(1, 10**5),
    "max_staleness": Range(0, 10**6),
    **dict.fromkeys(("tolerance", "timeout", "backoff", "ceiling", "patience"), Range(0, 10**6, above=True)),
    "log_every": CADENCE,
    "max_prompt": SIZE,
    "limit": COUNT,
    "rows": COUNT,
    "ProbeSpec.every": COUNT,
    "InfluenceSpec.every": CADENCE,
    "sketch": Range(0, 10**7),
    "EvalSpec.every": CADENCE,
    "CheckpointSpec.every": COUNT,
    "keep_last": COUNT,
    "keep_every": COUNT,
    "data": Range(-1, 10**6),
    "fsdp": Range(-1, 10**6),
    "tensor": Range(-1, 10**6),
    # strategies
    "k": COUNT,
    "p": Range(0, 1, above=True),
    "value": Range(0, 100, above=True),
    "temperature": Range(0, 100, above=True),
    # algorithm
    "epochs": Range(1, 1000),
    "minibatches": COUNT,
    "regularisers": Range(0, 10**6),  # their coefficients
    "shaping": Range(0, 10**6),
    "samples": COUNT,
    "pairs": COUNT,
    "rate": SHARE,
    "rounds": Range(2, 1000),
    "cache": SIZE,
    "Overlong.limit": SIZE,
    "gamma": SHARE,
    "lam": SHARE,
    "positive": Range(0, 1000),
    "negative": Range(-1000, 0),
    "beta": Range(0, 1000, above=True),
    "delta": Range(0, 1000),
    "weight": Range(0, 1000),
    "coef": Range(0, 10**6),
    "Critic.clip": Range(0, 10**6, above=True),
    "Importance.clip": Range(0, 100),
    "BatchWhiten.eps": SHARE,
    "max_preferred": SIZE,
    "StopSpec.value": Range(-(10**18), 10**18),
    "ddof": SHARE,
    "GroupZScore.eps": SHARE,
    "max": SHARE,
    "length": SIZE,
    "low": SHARE,
    "high": Range(0, 1000),
    "dual": Range(1, 1000),
    "cap": Range(0, 10**6, above=True),
    "max_gap": Range(0, 1000),
    # optimiser
    "lr": Range(0, 10),
    "warmup": CADENCE,
    "final": SHARE,
    "weight_decay": Range(0, 10),
    "clip": Range(0, 10**6, above=True),
    "b1": Range(0, 1, below=True),
    "b2": Range(0, 1, below=True),
    "momentum": Range(0, 1, below=True),
    "Optimiser.eps": Range(0, 1, above=True),
    "microbatch": COUNT,
    "Packing.width": Range(2, 10**7),
    # grading
    "relative_tolerance": Range(0, 1, below=True),
    "max_box_chars": Range(1, 10**5),
    # a decoder with fresh weights
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_positions", "vocab_limit"), SIZE),
    **dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), Range(1, 10**4)),
    "head_dim": Range(2, 10**4),
    "windows": SIZE,
    "rope_theta": Range(1, 10**12),
    "norm_eps": Range(0, 1, above=True),
    "init_std": Range(0, 10),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), Range(0, 10**6, above=True)),
    "original_max_position": SIZE,
}

SCHEMA = Schema(
    registries={
        Msa0Spec | ProblemsSpec: {"msa0": Msa0Spec, "problems": ProblemsSpec},
        Reward: REWARDS,
        Prefilter: PREFILTERS,
        Filter: FILTERS,
        Shaping: SHAPING,
        Advantage: ADVANTAGES,
        Weights: WEIGHTS,
        TokenLoss: LOSSES,
        OldLogps: OLD_LOGPS,
        Regulariser: REGULARISERS | {Preference.tag: Preference},
        PairObjective: PAIR_OBJECTIVES,
        Strategy: STRATEGIES,
        EngineSpec: ENGINES,
    },
    ranges=RANGES,
    untyped=(EngineSpec,),
)

# What a resumed run may change, by dotted prefix: how long it goes on, and what it writes on the way.
RESUMABLE = ("steps", "stop", "eval", "checkpoint", "rollout.log_every", "rollout.engine")


def load_config(path: str | pathlib.Path, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file, with ``KEY=VALUE`` overrides (``algorithm.loss.high=0.28``).

    Raises ``UsageError`` with every problem found, each with its file and line (or its ``--set``),
    its dotted key, what was expected and what came.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a config is UTF-8 text, and byte {error.start} is not") from error
    except OSError as error:
        raise UsageError(f"{path}: the config cannot be read: {error.strerror}") from error
    document = parse(text, str(path))
    changes = [Override.parse(change) for change in overrides]
    _check_top(document)
    names = [c for c in changes if c.path in (("algorithm",), ("algorithm", "name"))]
    for change in names:
        if change.path[-1] == "name" and isinstance(document.tree.get("algorithm"), str):
            document.tree["algorithm"] = {}
        override(document, change)
    _expand_algorithm(document)
    for change in changes:
        if change not in names:
            override(document, change)
    return _read(document)


def from_tree(tree: Mapping[str, Any], name: str = "config") -> Experiment:
    """The experiment of a tree, as ``to_tree`` wrote it or as YAML would give it. Raises ``UsageError``."""
    document = Document(dict(tree), name)
    _expand_algorithm(document)
    return _read(document)


def to_tree(experiment: Experiment) -> dict[str, Any]:
    """Every resolved value, with JSON's own types; ``from_tree`` gives the same experiment back."""
    return dump(SCHEMA, experiment)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted keys that differ between two resolved trees and that a resumed run may not change.

    The number of steps may change only under a constant learning rate: the other schedules end with it.
    """
    allowed = RESUMABLE
    if any(tree.get("optimiser", {}).get("schedule") != "constant" for tree in (old, new)):
        allowed = tuple(key for key in allowed if key != "steps")
    return [key for key, _, _ in _differences(old, new, ()) if not any(f"{key}.".startswith(f"{a}.") for a in allowed)]


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any], run: str | pathlib.Path) -> None:
    """Raise ``UsageError`` naming each key and both values when ``new`` cannot resume the run of ``old``.

    A key that ``old`` was written without has its default.
    """
    with contextlib.suppress(UsageError):
        old = to_tree(from_tree(old))
    refused = set(changed(old, new))
    lines = [f"  {key}: {was!r} -> {now!r}" for key, was, now in _differences(old, new, ()) if key in refused]
    if lines:
        raise UsageError(
            f"{run}: cannot resume with a changed config; restore these or start a new run with another --out\n"
            + "\n".join(lines)
        )


# ---------------------------------------------------------------- inside


def _check_top(document: Document) -> None:
    if not isinstance(document.tree, dict):
        found = "nothing" if document.tree is None else repr(document.tree)
        raise UsageError(f"{document.name}: expected a config with keys model, task, algorithm, ...; found {found}")


def _expand_algorithm(document: Document) -> None:
    """Replace the name of a recipe by its pieces, changed by the pieces written beside the name."""
    _check_top(document)
    given = document.tree.get("algorithm")
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict) or "name" not in given:
        return
    name = given["name"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        origin = document.origin(("algorithm", "name"))
        raise UsageError(f"{origin}: algorithm.name: unknown algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    recipe = dump(SCHEMA, ALGORITHMS[name])
    for key, value in given.items():
        if key != "name":
            recipe[key] = _over(recipe.get(key), value)
    document.tree = {**document.tree, "algorithm": recipe}


def _over(recipe: Any, given: Any) -> Any:
    """Keys of a piece change that piece; another ``type`` is another piece."""
    if not isinstance(recipe, dict) or not isinstance(given, dict):
        return given
    tag = recipe.get("type")  # a plain section, such as a critic, has none
    return {**recipe, **given} if given.get("type", tag) == tag else given


def _read(document: Document) -> Experiment:
    reader = Reader(SCHEMA, document)
    experiment = reader.section(Experiment, document.tree, ())
    if experiment is not FAILED:
        for path, message in _conflicts(experiment):
            reader.fail(path, message)
    return reader.finish(experiment)


def _conflicts(x: Experiment) -> Iterator[tuple[Path, str]]:
    """What is wrong between values that are each in range."""
    yield from _model_conflicts(x)
    if isinstance(x.task, ProblemsSpec):
        spec = x.task
        try:
            make_template(spec.template, examples=spec.examples, instruction=spec.instruction, system=spec.system)
        except UsageError as error:
            yield named(("task",), str(error))
    rollout, algorithm, optimiser = x.rollout, x.algorithm, x.optimiser
    if not isinstance(rollout.strategy, Temperature):
        yield (
            ("rollout", "strategy"),
            "training samples from the whole distribution, which is what it scores (a truncated one would bias every "
            "ratio); use {type: temperature, value: ...}",
        )
    least = algorithm.advantage.least_group if algorithm.policy else 1
    if rollout.n < least:
        yield (
            ("rollout", "n"),
            f"the advantage compares the responses of one prompt: expected {least} or more, got {rollout.n}",
        )
    yield from _algorithm_conflicts(x)
    if rollout.prompts % algorithm.minibatches:
        yield (
            ("algorithm", "minibatches"),
            f"{rollout.prompts} prompts do not split into {algorithm.minibatches} equal mini-batches; "
            "change it or rollout.prompts",
        )
    updates = x.steps * algorithm.epochs * algorithm.minibatches
    if optimiser.warmup >= updates:
        yield ("optimiser", "warmup"), f"{optimiser.warmup} updates of warm-up, but the run has only {updates}"
    if max(x.eval.k, default=1) > x.eval.n:
        yield ("eval", "k"), f"pass@{max(x.eval.k)} is not defined for eval.n = {x.eval.n} samples; raise n or drop it"
    axes = {"data": x.mesh.data, "fsdp": x.mesh.fsdp, "tensor": x.mesh.tensor}
    wrong = [axis for axis, size in axes.items() if size == 0] or [axis for axis, size in axes.items() if size < 0][1:]
    if wrong:
        yield (
            ("mesh", wrong[0]),
            f"expected at least 1 device an axis and at most one -1 (what the others leave), got {axes}",
        )


def _algorithm_conflicts(x: Experiment) -> Iterator[tuple[Path, str]]:
    """What an algorithm asks for that the rest of the config does not give."""
    needs, teacher = x.algorithm.needs, x.teacher
    taught = needs & {"teacher_samples", "teacher_model"}
    if taught and (teacher is None or (teacher.path is None) == (teacher.base is None)):
        yield ("teacher",), "the algorithm distils from a teacher: give either its path (a folder or hub id) or base"
    if teacher is not None and not taught:
        yield ("teacher",), "no piece of the algorithm asks for a teacher; leave it out"
    if teacher is not None and teacher.base is not None and not isinstance(x.task, Msa0Spec):
        yield ("teacher", "base"), "only the task msa0 trains a teacher of its own; give teacher.path"
    if isinstance(x.task, ProblemsSpec):
        wanted = (("demonstrations", "solution", x.task.solution), ("pairs", "preferences", x.task.preferences))
        for need, key, value in wanted:
            if need in needs and value is None:
                yield ("task", key), f"the algorithm needs {need}, which this key names; it is not given"
            if need not in needs and value is not None:
                yield ("task", key), f"no piece of the algorithm needs {need}; leave it out"
    elif "pairs" in needs:
        yield ("task",), "msa0 has no preference file; use {type: preference, source: base}"
    scores = [piece for _, piece in x.algorithm.active if isinstance(piece, Preference)]
    if scores and x.optimiser.packing is not None:
        yield ("optimiser", "packing"), "pairs are not packed; leave it out"


def _model_conflicts(x: Experiment) -> Iterator[tuple[Path, str]]:
    given = [name for name in ("path", "init", "base") if getattr(x.model, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        yield ("model",), f"expected exactly one of path (a folder or hub id), init and base, got {got}"
    elif isinstance(x.task, ProblemsSpec) and x.model.path is None and x.task.tokenizer is None:
        yield (
            ("model",),
            f"problems are text, and {given[0]} brings no tokenizer; give model.path or task.tokenizer, "
            "a folder or hub id (--set model.path=FOLDER)",
        )


def _differences(old: Any, new: Any, path: Path) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield dotted(path), old, new
