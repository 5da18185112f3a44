"""What the pieces of an algorithm have in common.

A piece is a frozen, hashable, keyword-only dataclass with ``__call__``: printable, comparable,
static under ``jax.jit``, written to JSON and read from YAML by its ``tag``. ``needs`` says what the
collector must bring for it; nothing else branches on which algorithm is running.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

# Everything that a piece can ask the collector for.
NEEDS = frozenset(
    {
        "rollouts",  # of the policy; without them nothing is sampled but what is named below
        "trainer_logps",
        "sampler_logps",
        "ref_logps",
        "greedy_correct",
        "greedy_reward",
        "values",
        "end_values",
        "chance",
        "matched",
        "reference_model",
        "teacher_model",
        "base_samples",
        "base_logps",
        "stream_samples",
        "teacher_samples",
        "demonstrations",
        "pairs",
        "probe",
    }
)


class Piece:
    """Base of all pieces: a tag and the (by default empty) set of needs."""

    tag: ClassVar[str]
    needs: frozenset[str] = frozenset()


def registry(*classes: type[Any]) -> dict[str, type[Any]]:
    """Tag -> class."""
    return {cls.tag: cls for cls in classes}


def one_of(field: str, value: str, options: Iterable[str]) -> None:
    """Raise ``ValueError`` naming the field, the options and the nearest of them, unless ``value`` is one."""
    options = tuple(options)
    if value not in options:
        near = difflib.get_close_matches(str(value), options, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{field}: expected one of {', '.join(options)}, got {value!r}{hint}")


def within(field: str, value: float | None, low: float, high: float = float("inf")) -> None:
    """Raise ``ValueError`` unless ``value`` is None or ``low <= value <= high``."""
    if value is not None and not low <= value <= high:
        bound = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise ValueError(f"{field}: expected a number {bound}, got {value!r}")
