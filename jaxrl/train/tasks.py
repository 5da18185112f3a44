"""What a run trains on: prompts by set, and the verdict on a response.

A task joins prompts (``data``) to verdicts (``rewards``); nothing above it knows which task runs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Int, Key

from jaxrl.data import arithmetic, datasets
from jaxrl.data.preferences import PairPool, load_preferences, tokenise_preferences
from jaxrl.data.prompts import PromptPool, build_pool, load_tokenizer
from jaxrl.data.synthetic import RESPONSE_LENGTH, Msa0, mode, oracle_responses, well_formed
from jaxrl.data.templates import make_template
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.rewards import MathRule, Verdict, Verifier, check_golds
from jaxrl.train.experiment import Experiment, Msa0Spec, ProblemsSpec


class Task(Protocol):
    """Prompts by set (``train`` first), stop ids, and verdicts in input order."""

    pools: Mapping[str, PromptPool]
    stop_ids: tuple[int, ...]
    vocab_limit: int | None
    notes: dict[str, Any]

    def grade(self, uid: Sequence[int], responses: Sequence[Sequence[int]]) -> list[Verdict]:
        """One verdict a response (token ids, end-of-sequence token included)."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """What a person reads in the rollout log."""
        ...

    def modes(self, responses: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Strategy of each response as a small integer, where the task knows strategies."""
        ...

    def demonstrations(self, uid: Sequence[int], n: int, key: Key[Array, ""]) -> list[list[list[int]]]:
        """``n`` correct solutions to each prompt as token ids, end-of-sequence token included; ``[]`` for a missing one.

        Raises ``UsageError`` when the task has none.
        """
        ...

    @property
    def pairs(self) -> PairPool:
        """Preferences of a file. Raises ``UsageError`` when the task names none."""
        ...

    def close(self) -> None:
        """End the verifier's processes."""
        ...


@dataclass
class Msa0Task:
    """The enumerable task; ``grade`` needs no process."""

    task: Msa0
    pools: Mapping[str, PromptPool]
    vocab_limit: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.task.stop_ids))

    def grade(self, uid: Sequence[int], responses: Sequence[Sequence[int]]) -> list[Verdict]:
        tokens, length = _padded(responses)
        right = self.task.correct(np.asarray(uid, np.int64), tokens, length)
        shaped = well_formed(tokens, length)
        kinds = np.where(right, "correct", np.where(shaped, "wrong", "no_box"))
        return [
            Verdict(str(kind), self.text(ids), "none" if kind == "no_box" else "complete", "msa0", 0.0)
            for kind, ids in zip(kinds, responses, strict=True)
        ]

    def text(self, ids: Sequence[int]) -> str:
        return self.task.decode([int(i) for i in ids])

    def modes(self, responses: Sequence[Sequence[int]]) -> np.ndarray | None:
        return mode(*_padded(responses))

    def demonstrations(self, uid: Sequence[int], n: int, key: Key[Array, ""]) -> list[list[list[int]]]:
        """The oracle's: a strategy at even odds, the teacher's habit of work, always the right answer."""
        return oracle_responses(np.asarray(uid), n, key).tolist()

    @property
    def pairs(self) -> PairPool:
        raise UsageError("task: msa0 has no preference file; use source: base")

    def close(self) -> None:
        pass


@dataclass
class ProblemsTask:
    """Problems with gold answers, graded by ``verify_math`` in killable workers."""

    pools: Mapping[str, PromptPool]
    golds: Mapping[int, str]
    ids: Mapping[int, str]
    tokenizer: Tokenizer
    rule: MathRule
    verifier: Verifier
    notes: dict[str, Any] = field(default_factory=dict)
    solutions: Mapping[int, list[int]] | None = None
    preferences: PairPool | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.tokenizer.stop_ids))

    @property
    def vocab_limit(self) -> int | None:
        return self.tokenizer.vocab_size

    def grade(self, uid: Sequence[int], responses: Sequence[Sequence[int]]) -> list[Verdict]:
        pairs = [(self.golds[int(u)], self.tokenizer.decode(ids)) for u, ids in zip(uid, responses, strict=True)]
        return self.verifier.verify(pairs, self.rule)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=False)

    def modes(self, responses: Sequence[Sequence[int]]) -> np.ndarray | None:
        return None

    def demonstrations(self, uid: Sequence[int], n: int, key: Key[Array, ""]) -> list[list[list[int]]]:
        if self.solutions is None:
            raise UsageError("task.solution: demonstrations are needed; name the field of task.train that holds them")
        return [[self.solutions[int(u)]] * n for u in uid]

    @property
    def pairs(self) -> PairPool:
        if self.preferences is None:
            raise UsageError("task.preferences: pairs of a file are needed; name the file")
        return self.preferences

    def close(self) -> None:
        self.verifier.close()


def make_task(experiment: Experiment, root: Key[Array, ""]) -> Task:
    """The task of an experiment; ``root`` is the run's root key (it draws the splits)."""
    if isinstance(experiment.task, Msa0Spec):
        return msa0_task(base_seed(experiment), root)
    source = experiment.task.tokenizer or experiment.model.path
    if source is None:
        raise UsageError("task.tokenizer: problems need a tokenizer; give its folder or hub id, or a model.path")
    return problems_task(experiment.task, source)


def base_seed(experiment: Experiment) -> int:
    """The seed of the base model and of the task's hidden teacher."""
    return experiment.seed if experiment.base_seed is None else experiment.base_seed


def msa0_task(seed: int, root: Key[Array, ""]) -> Msa0Task:
    """MSA-0 with its train, held-out and out-of-distribution prompts."""
    task = Msa0(seed=seed)
    pools = {}
    for name, uid in task.split(root).items():
        prompts = task.prompts(uid)
        pools[name] = PromptPool(prompts.tokens.tolist(), prompts.uid, prompts.tokens.shape[1])
    return Msa0Task(task, pools)


def problems_task(spec: ProblemsSpec, tokenizer_source: str) -> ProblemsTask:
    """Read, check and tokenise the problem files.

    ``notes`` of the result counts dropped golds and long prompts, duplicates within the training set and
    problems shared between training and evaluation sets. Raises ``JaxrlError`` where a gold cannot be
    parsed (unless ``on_bad_gold`` is ``drop``).
    """
    tokenizer = load_tokenizer(tokenizer_source)
    template = make_template(spec.template, examples=spec.examples, instruction=spec.instruction, system=spec.system)
    rule, verifier = spec.rule, Verifier()
    sets = {"train": load_set(spec.train)[: spec.limit]}
    for source in spec.eval:
        sets[_unused(pathlib.PurePath(source).stem, sets)] = load_set(source)
    held_out = {name: problems for name, problems in sets.items() if name != "train"}
    notes: dict[str, Any] = {"data": datasets.duplicates_report(sets["train"], held_out).lines()}
    pools, golds, ids = {}, {}, {}
    for name, problems in sets.items():
        problems = _with_good_golds(problems, name, spec.on_bad_gold, rule, verifier, notes)
        pool = build_pool(problems, tokenizer, template, max_prompt=spec.max_prompt, too_long=spec.too_long)
        if pool.dropped:
            notes.setdefault("long_prompts_dropped", {})[name] = len(pool.dropped)
        sets[name] = problems
        offset = len(golds)
        golds |= {offset + i: p.answer for i, p in enumerate(problems)}
        ids |= {offset + i: p.id for i, p in enumerate(problems)}
        width = max(len(t) for t in pool.tokens)
        pools[name] = PromptPool(pool.tokens, pool.uid + offset, width, pool.dropped)
    solutions = None if spec.solution is None else _solutions(sets["train"], spec, tokenizer)
    preferences = None if spec.preferences is None else _preferences(spec, tokenizer, template)
    return ProblemsTask(pools, golds, ids, tokenizer, rule, verifier, notes, solutions, preferences)


def _solutions(problems: Sequence[datasets.Problem], spec: ProblemsSpec, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Worked solutions by prompt number, each ended by a stop id."""
    lacking = [p.id for p in problems if not str(p.extra.get(spec.solution) or "").strip()]
    if lacking:
        raise UsageError(
            f"task.solution: {len(lacking)} problems of {spec.train} have no field {spec.solution!r} with text, the "
            f"first {lacking[0]}; the fields are {', '.join(problems[0].extra) or 'none beside id, problem, answer'}"
        )
    stop = min(tokenizer.stop_ids)
    return {i: [*tokenizer.encode(str(p.extra[spec.solution]), special=False), stop] for i, p in enumerate(problems)}


def _preferences(spec: ProblemsSpec, tokenizer: Tokenizer, template: Any) -> PairPool:
    rows = load_preferences(str(spec.preferences))
    return tokenise_preferences(
        rows,
        tokenizer,
        template,
        max_prompt=spec.max_prompt,
        max_response=spec.max_preferred,
        stop_id=min(tokenizer.stop_ids),
    )


def load_set(source: str) -> list[datasets.Problem]:
    """Problems of a file, of a hub id, or of a built-in set (``arithmetic``, ``arithmetic-heldout``)."""
    if source in arithmetic.SETS:
        return [datasets.Problem(**problem) for problem in arithmetic.arithmetic_problems(source)]
    return datasets.load_problems(source)


def _with_good_golds(
    problems: list[Any], name: str, policy: str, rule: MathRule, verifier: Verifier, notes: dict[str, Any]
) -> list[Any]:
    bad = check_golds([p.answer for p in problems], rule, verifier=verifier)
    if not bad:
        return problems
    ids = [str(problems[i].id) for i in bad]
    if policy == "abort":
        raise JaxrlError(
            f"task: {len(bad)} gold answers of the {name} problems cannot be parsed: {', '.join(ids[:10])}"
            f"{' ...' if len(ids) > 10 else ''}; mend the file, or leave them out (in a config: task.on_bad_gold: drop)"
        )
    notes.setdefault("bad_golds_dropped", {})[name] = ids
    gone = set(bad)
    return [p for i, p in enumerate(problems) if i not in gone]


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, numbered where two evaluation files share it."""
    if name not in taken:
        return name
    return next(f"{name}-{i}" for i in range(2, 1000) if f"{name}-{i}" not in taken)


def _padded(responses: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "K T"], Int[np.ndarray, " K"]]:
    length = np.array([len(r) for r in responses], np.int32)
    tokens = np.zeros((len(responses), max(int(length.max(initial=0)), RESPONSE_LENGTH)), np.int32)
    for row, ids in zip(tokens, responses, strict=True):
        row[: len(ids)] = ids
    return tokens, length
