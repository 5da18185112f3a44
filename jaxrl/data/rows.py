"""Rows given by people: prompts with responses and labels, one JSON object a line, as token rows.

A line has ``prompt`` and ``response``, each text or a list of token ids, and may have the labels
``group``, ``label``, ``correct``, ``mode`` and ``difficulty``, and an ``advantage``, a number. Text is tokenised as it stands: no
template and no beginning-of-text token is added, prompt and response are tokenised apart (as
sampling joins them). A response given as text gets the end-of-sequence token, which is scored,
unless it ends with a stop token already or the line says ``"complete": false``. Ids are taken as
they are.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from jaxrl.data.datasets import DataError, jsonl_rows
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.types import Rows

TEXTS = ("prompt", "response")
LABELS = ("group", "label", "correct", "mode", "difficulty", "advantage")


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Token rows as host arrays, and what is known of each.

    ``labels[name]`` has one entry a row, None where the row says nothing; ``prompt`` is always there and
    is the prompt's ids. ``cut`` counts rows that lost tokens to ``max_tokens``.
    """

    rows: Rows
    labels: Mapping[str, Sequence[Any]]
    cut: int = 0


def read_rows(
    path: pathlib.Path,
    tokenizer: Callable[[], Tokenizer],
    *,
    vocab_size: int,
    context: int,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> LabelledRows:
    """The first ``limit`` rows of a file, padded to the longest.

    ``tokenizer`` is called once, and only when a row holds text. ``vocab_size`` is one more than the
    largest id that the model knows, ``context`` the tokens that it can read. ``max_tokens`` cuts
    longer rows at the end of the response.

    Raises ``DataError`` naming the file and line: for a malformed line, a missing or empty field, a
    row without a response token, an id outside the vocabulary, a row longer than the context; and
    for a file without rows.
    """
    made: list[Tokenizer] = []

    def known() -> Tokenizer:
        if not made:
            made.append(tokenizer())
        return made[0]

    pairs, labels, cut = [], {name: [] for name in LABELS}, 0
    for where, row in islice(jsonl_rows(path), limit):
        prompt, response = (_ids(where, row, name, known, vocab_size) for name in TEXTS)
        cut += max_tokens is not None and len(prompt) + len(response) > max_tokens
        pairs.append(_fitted(where, prompt, response, context, max_tokens))
        for name in LABELS:
            labels[name].append(_label(where, row, name))
    if not pairs:
        raise DataError(f"{path}: holds no rows; expected at least one line with {' and '.join(TEXTS)}")
    given = {name: values for name, values in labels.items() if any(v is not None for v in values)}
    return LabelledRows(padded(pairs), {**given, "prompt": [tuple(prompt) for prompt, _ in pairs]}, int(cut))


def padded(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
    """Rows from (prompt ids, response ids), padded with 0 to the longest."""
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    tokens = np.zeros((len(pairs), width), np.int32)
    for line, (prompt, response) in zip(tokens, pairs, strict=True):
        line[: len(prompt) + len(response)] = [*prompt, *response]
    start = np.array([len(prompt) for prompt, _ in pairs], np.int32)
    return Rows(tokens, start, start + np.array([len(response) for _, response in pairs], np.int32))


def _ids(
    where: str, row: Mapping[str, Any], name: str, tokenizer: Callable[[], Tokenizer], vocab_size: int
) -> list[int]:
    """The token ids of one field."""
    if name not in row:
        have = ", ".join(map(repr, row)) or "no fields"
        raise DataError(f'{where}: field {name!r} is missing; expected {{"prompt": ..., "response": ...}}, got {have}')
    value = row[name]
    text = isinstance(value, str)
    if not text and not (isinstance(value, list) and all(type(i) is int for i in value)):
        raise DataError(f"{where}: field {name!r} must be text or a list of token ids, got {str(value)[:60]!r}")
    ids = tokenizer().encode(value) if text else list(value)
    if not ids:
        need = "its first token" if name == "prompt" else "a response token: without one its score is constant"
        raise DataError(f"{where}: field {name!r} is empty, and a row needs {need}; write it, or leave the line out")
    if text and name == "response" and _complete(where, row) and ids[-1] not in tokenizer().stop_ids:
        ids.append(end_id(tokenizer()))
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise DataError(
            f"{where}: field {name!r} holds id {wrong[0]}, outside the model's vocabulary of {vocab_size}; "
            "is this the model's own tokenizer?"
        )
    return ids


def end_id(tokenizer: Tokenizer) -> int:
    """The token that ends a response: the tokenizer's own end of sequence where it stops sampling, else the first."""
    own = tokenizer.backend.eos_id
    return own if own in tokenizer.stop_ids else min(tokenizer.stop_ids)


def _complete(where: str, row: Mapping[str, Any]) -> bool:
    value = row.get("complete", True)
    if not isinstance(value, bool):
        raise DataError(f"{where}: field 'complete' must be true or false, got {str(value)[:60]!r}")
    return value


def _label(where: str, row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    if name == "advantage" and value is not None and not (type(value) in (int, float) and math.isfinite(value)):
        raise DataError(f"{where}: field 'advantage' must be a finite number, got {str(value)[:60]!r}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise DataError(f"{where}: label {name!r} must be text, a number, true or false, got {type(value).__name__}")


def _fitted(
    where: str, prompt: list[int], response: list[int], context: int, max_tokens: int | None
) -> tuple[list[int], list[int]]:
    """The row, cut to ``max_tokens``."""
    allowed = context if max_tokens is None else max_tokens
    if len(prompt) + len(response) <= allowed:
        return prompt, response
    if max_tokens is None:
        raise DataError(
            f"{where}: the row has {len(prompt) + len(response)} tokens, more than the model's context of {context}; "
            "shorten it, or cut rows with --max-tokens"
        )
    if len(prompt) >= max_tokens:
        raise DataError(
            f"{where}: the prompt alone has {len(prompt)} tokens, so that --max-tokens {max_tokens} leaves no "
            "response token; raise it, or leave the line out"
        )
    return prompt, response[: max_tokens - len(prompt)]
