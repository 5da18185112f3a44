"""One-digit sums and products in words: problems that a very small model solves now and then.

A built-in set needs no file: a config names it (``train: arithmetic``). Problems and splits are pure
functions of the operands, so that every machine makes the same sets.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OPERATIONS = {"plus": lambda a, b: a + b, "times": lambda a, b: a * b}
# Name in a config -> which problems.
SETS = ("arithmetic", "arithmetic-heldout")


def split_of(a: int, b: int) -> str:
    """``heldout`` for about one pair of operands in five, every digit among them; else ``train``.

    Both operations and both orders of a pair share its split: knowing 3 + 4 is knowing 4 + 3.
    """
    return "heldout" if zlib.crc32(f"{min(a, b)} {max(a, b)}".encode()) % 5 == 0 else "train"


def arithmetic_problems(name: str = "arithmetic") -> list[dict[str, str]]:
    """The problems of a set of ``SETS`` as ``{"id", "problem", "answer"}``: 154 to train on, 46 held out.

    Raises ``ValueError`` for another name.
    """
    if name not in SETS:
        raise ValueError(f"unknown built-in set {name!r}; expected one of: {', '.join(SETS)}")
    wanted = "heldout" if name.endswith("-heldout") else "train"
    return [
        {
            "id": f"arithmetic/{DIGITS[a]}-{word}-{DIGITS[b]}",
            "problem": f"What is {DIGITS[a]} {word} {DIGITS[b]}?",
            "answer": str(value(a, b)),
        }
        for word, value in OPERATIONS.items()
        for a in range(10)
        for b in range(10)
        if split_of(a, b) == wanted
    ]


def write_arithmetic(path: str | Path, name: str = "arithmetic") -> Path:
    """Write a set of ``SETS`` as a JSONL file of problems, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(problem) + "\n" for problem in arithmetic_problems(name))
    path.write_text("".join(lines), encoding="utf-8")
    return path
