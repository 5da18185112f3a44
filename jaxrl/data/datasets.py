"""Problem files: JSONL, parquet, or a data set of the hub, with fields ``id``, ``problem``, ``answer``.

Gold answers are kept as published, the empty ones too: whether a gold can be graded is the reward's
business. What is checked here is that every row is there, whole and distinct.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.errors import JaxrlError

FIELDS = ("id", "problem", "answer")


class DataError(JaxrlError):
    """A problem file that cannot be used: the message names file, line and field."""


@dataclass(frozen=True)
class Problem:
    """One problem. ``extra`` holds every other field of its row (level, solution, unit tests, ...)."""

    id: str
    problem: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


def load_problems(source: str | pathlib.Path, *, fields: Mapping[str, str] | None = None) -> list[Problem]:
    """Problems of a ``.jsonl`` or ``.parquet`` file, or of a hub data set ``owner/name[:split]``.

    ``fields`` renames columns, as in ``{"problem": "question"}``. Hub rows and parquet rows without an id
    column are numbered. Raises ``DataError`` for a missing or unreadable file, a malformed line, a missing
    field, no rows at all, and an id that occurs twice.
    """
    path = pathlib.Path(source)
    names = {f: (fields or {}).get(f, f) for f in FIELDS}
    if path.suffix == ".jsonl":
        rows = jsonl_rows(path)
    elif path.suffix == ".parquet":
        rows = parquet_rows(path, names["id"])
    elif not path.exists() and _looks_like_hub_id(str(source)):
        rows = _hub_rows(str(source), names["id"])
    else:
        raise DataError(
            f"{source}: expected a .jsonl or .parquet file or a hub data set owner/name, "
            f"got {'a folder' if path.is_dir() else f'suffix {path.suffix!r}'}"
        )
    problems = [_problem(where, row, names) for where, row in rows]
    if not problems:
        raise DataError(f"{source}: holds no problems; expected at least one row with {', '.join(FIELDS)}")
    _check_distinct(problems, source)
    return problems


def jsonl_rows(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a JSONL file, each with ``file, line n`` to name it by. Raises ``DataError`` for what is none."""
    _check_file(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_distinct_keys)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})") from error
        except ValueError as error:  # a key twice, or an integer of more digits than Python reads
            raise DataError(f"{path}, line {number}: cannot be read ({error})") from error
        except RecursionError as error:
            raise DataError(f"{path}, line {number}: cannot be read (nested too deep)") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object a line, got {type(row).__name__}")
        yield f"{path}, line {number}", row


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return row


def parquet_rows(path: pathlib.Path, id_name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a parquet file likewise; rows without ``id_name`` are numbered."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_file(path)
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", {id_name: str(number), **row}


def _hub_rows(source: str, id_name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name, _, split = source.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"{source}: reading a data set from the hub needs the `data` extra; pip install 'jaxrl[data]', "
            "or give a .jsonl or .parquet file"
        ) from error
    try:
        rows = load_dataset(name, split=split or "train")
    except Exception as error:  # the client raises many kinds: no network, no such data set or split, gated
        raise DataError(
            f"{source}: the hub data set could not be loaded ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source}, row {number}", {id_name: f"{name}/{number}", **row}


def _problem(where: str, row: Mapping[str, Any], names: Mapping[str, str]) -> Problem:
    for name in names.values():
        if row.get(name) is None:
            raise DataError(
                f"{where}: field {name!r} is missing; the row has {', '.join(map(repr, row)) or 'no fields'}"
            )
        if not isinstance(row[name], (str, int, float)) or isinstance(row[name], bool):
            raise DataError(f"{where}: field {name!r} must be text or a number, got {type(row[name]).__name__}")
        if isinstance(row[name], float) and not math.isfinite(row[name]):
            raise DataError(f"{where}: field {name!r} must be text or a finite number, got {row[name]}")
    values = {f: str(row[name]) for f, name in names.items()}
    if not values["problem"].strip():
        raise DataError(f"{where}: field {names['problem']!r} is empty")
    used = set(names.values())
    return Problem(**values, extra={k: v for k, v in row.items() if k not in used})


def _check_file(path: pathlib.Path) -> None:
    if not path.is_file():
        raise DataError(f"{path}: no such file" if not path.exists() else f"{path}: expected a file, got a folder")


def _check_distinct(problems: Iterable[Problem], source: str | pathlib.Path) -> None:
    seen: dict[str, int] = {}
    for position, problem in enumerate(problems, 1):
        if problem.id in seen:
            raise DataError(f"{source}: id {problem.id!r} occurs twice, as problems {seen[problem.id]} and {position}")
        seen[problem.id] = position


def _looks_like_hub_id(source: str) -> bool:
    file = source.endswith((".json", ".csv", ".tsv", ".txt", ".gz", ".zip"))
    return source.count("/") == 1 and not source.startswith(("/", ".", "~")) and not file


def normalised(text: str) -> str:
    """Letters and digits only, in lower case: what two copies of one problem have in common."""
    return "".join(c for c in text if c.isalnum()).casefold()


def duplicate_prompts(problems: Sequence[Problem]) -> list[tuple[str, ...]]:
    """Groups of ids (two or more) whose problems are the same normalised text."""
    groups: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        groups[normalised(problem.problem)].append(problem.id)
    return [tuple(ids) for ids in groups.values() if len(ids) > 1]


def overlap(train: Sequence[Problem], evaluation: Sequence[Problem]) -> list[tuple[str, str]]:
    """(training id, evaluation id) of problems that are the same normalised text in both."""
    by_text: dict[str, list[str]] = defaultdict(list)
    for problem in train:
        by_text[normalised(problem.problem)].append(problem.id)
    return [(known, p.id) for p in evaluation for known in by_text.get(normalised(p.problem), ())]


@dataclass(frozen=True)
class DataReport:
    """Repeated training problems, and evaluation problems that are trained on, by evaluation set."""

    problems: int
    duplicates: list[tuple[str, ...]]
    overlaps: dict[str, list[tuple[str, str]]]

    def lines(self) -> list[str]:
        """The report for a terminal; one line a finding, and one when there is none."""
        extra = sum(len(group) - 1 for group in self.duplicates)
        said = [f"training: {self.problems} problems, {extra} of them repeat another"]
        said += [f"  same text: {', '.join(group)}" for group in self.duplicates[:SHOWN]]
        for name, pairs in self.overlaps.items():
            said.append(f"{name}: {len({e for _, e in pairs})} evaluation problems are also training problems")
            said += [f"  {e} is {t}" for t, e in pairs[:SHOWN]]
        return said


SHOWN = 5


def duplicates_report(train: Sequence[Problem], evals: Mapping[str, Sequence[Problem]]) -> DataReport:
    """Compare the training problems with themselves and with every evaluation set."""
    pairs = {name: overlap(train, problems) for name, problems in evals.items()}
    return DataReport(len(train), duplicate_prompts(train), pairs)
