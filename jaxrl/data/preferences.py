"""Preference files: a prompt, a chosen and a rejected response a row, as pairs of token rows."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from jaxrl import keys
from jaxrl.data.datasets import DataError, jsonl_rows, parquet_rows
from jaxrl.data.prompts import encode_prompt, pad_right
from jaxrl.data.templates import Template
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UsageError
from jaxrl.types import Rows

TEXTS, LOGPS = ("prompt", "chosen", "rejected"), ("chosen_logp", "rejected_logp")


@dataclass(frozen=True)
class PreferenceRow:
    """One preference. ``logps``: whole-response log-probs (nats) under the policy that wrote it, chosen first."""

    where: str
    prompt: str
    chosen: str
    rejected: str
    logps: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class PairPool:
    """Tokenised preferences and the order in which training takes them."""

    rows: Rows  # [X 2 L], numpy
    data_logps: Float[np.ndarray, "X 2"] | None = None

    def __len__(self) -> int:
        return len(self.rows.start)

    def take(self, key: Key[Array, ""], step: int, n: int) -> tuple[Rows, Float[np.ndarray, "n 2"] | None]:
        """The ``n`` pairs of one step: a pure function of key and step, each epoch a fresh permutation."""
        if not 1 <= n <= len(self):
            raise UsageError(
                f"task.preferences: {n} pairs a step (rollout.prompts) cannot be taken from {len(self)}; "
                f"expected 1 to {len(self)}"
            )
        epoch, part = divmod(int(step), len(self) // n)
        order = jax.random.permutation(keys.at(key, "order", epoch), np.arange(len(self), dtype=np.int32))
        at = np.asarray(order)[part * n : (part + 1) * n]
        return jax.tree.map(lambda x: x[at], self.rows), None if self.data_logps is None else self.data_logps[at]


def load_preferences(source: str | pathlib.Path) -> list[PreferenceRow]:
    """Preferences of a ``.jsonl`` or ``.parquet`` file with fields ``prompt``, ``chosen`` and ``rejected``.

    ``chosen_logp`` and ``rejected_logp``, where one row has them, are needed in all. Raises ``DataError`` naming file
    and row for a missing or empty text, two equal responses, a log-prob that is none, an ``id`` that occurs twice,
    and for a file without rows.
    """
    path = pathlib.Path(source)
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{source}: expected a .jsonl or .parquet file of preferences, got suffix {path.suffix!r}")
    raw = list(jsonl_rows(path) if path.suffix == ".jsonl" else parquet_rows(path, "id"))
    if not raw:
        raise DataError(f"{source}: holds no preferences; expected rows with {', '.join(TEXTS)}")
    scored = any(row.get(name) is not None for _, row in raw for name in LOGPS)
    seen: dict[str, str] = {}
    for where, row in raw:
        if row.get("id") is not None and (first := seen.setdefault(str(row["id"]), where)) != where:
            raise DataError(f"{where}: id {row['id']!r} occurs in {first} too; ids are distinct")
    return [_row(where, row, scored) for where, row in raw]


def tokenise_preferences(
    rows: Sequence[PreferenceRow],
    tokenizer: Tokenizer,
    template: Template,
    *,
    max_prompt: int,
    max_response: int,
    stop_id: int,
) -> PairPool:
    """Rows of prompt and response, each response ended by ``stop_id``; one width for all.

    Raises ``DataError`` naming the row whose prompt or response is longer than allowed (tokens, the stop id
    included), or whose responses are one to this tokenizer.
    """
    tokens, start = [], []
    for row in rows:
        prompt = encode_prompt(row.prompt, tokenizer, template)
        _fits(row.where, "prompt", len(prompt), max_prompt)
        both = []
        for name in ("chosen", "rejected"):
            response = [*tokenizer.encode(getattr(row, name), special=False), stop_id]
            _fits(row.where, name, len(response), max_response)
            both.append([*prompt, *response])
        if both[0] == both[1]:
            raise DataError(f"{row.where}: chosen and rejected have the same tokens; nothing is preferred")
        tokens += both
        start += [len(prompt)] * 2
    ids, length = pad_right(tokens, max(map(len, tokens)))
    made: Any = Rows(ids, np.asarray(start, np.int32), length)
    made = jax.tree.map(lambda x: x.reshape(len(rows), 2, *x.shape[1:]), made)
    logps = None if rows[0].logps is None else np.array([row.logps for row in rows], np.float32)
    return PairPool(made, logps)


def _fits(where: str, name: str, length: int, limit: int) -> None:
    if length > limit:
        key = "task.max_prompt" if name == "prompt" else "task.max_preferred"
        raise DataError(
            f"{where}: field {name!r} has {length} tokens, more than {key} = {limit}; raise it or drop the row"
        )


def _row(where: str, row: Mapping[str, Any], scored: bool) -> PreferenceRow:
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            raise DataError(
                f"{where}: field {name!r} must be text, got {row.get(name)!r}; a row has {', '.join(TEXTS)}"
            )
        if not row[name].strip():
            raise DataError(f"{where}: field {name!r} is empty; drop the row or give its text")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where}: chosen and rejected are the same text; nothing is preferred")
    return PreferenceRow(where, *(row[name] for name in TEXTS), _logps(where, row) if scored else None)


def _logps(where: str, row: Mapping[str, Any]) -> tuple[float, float]:
    found = [row.get(name) for name in LOGPS]
    for name, value in zip(LOGPS, found, strict=True):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value > 0:
            raise DataError(
                f"{where}: field {name!r} must be a log-probability (a finite number of at most 0), got {value!r}; "
                "give it for every row, or for none"
            )
    return float(found[0]), float(found[1])
