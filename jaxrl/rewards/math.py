"""Verdicts on mathematical answers: the box of a response held against a gold answer.

The order of the steps is the rule: cut the thinking, take the last complete box, compare as text,
compare in our own code, and only then ask computer algebra, in a process that can be killed.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxrl.rewards.boxes import after_thinking, find_box, is_balanced, is_blank
from jaxrl.rewards.compare import drop_approximation, open_side, own_comparison, rename_bound_variable
from jaxrl.rewards.normalise import canonical, clean
from jaxrl.rewards.number import is_huge, parse_number
from jaxrl.rewards.units import parse_quantity, split_trailing_unit
from jaxrl.rewards.verdict import MathRule, Verdict

if TYPE_CHECKING:
    from jaxrl.rewards.pool import Verifier

_DEFAULT_RULE = MathRule()
_MAX_GOLD_CHARS = 4000  # the longest published gold has 210; Python converts no more than 4300 digits
_NO_NUMBERS = {"nan", "inf", "infinity"}  # what became of a gold that a program computed


@dataclass(frozen=True)
class Question:
    """A comparison that needs computer algebra: cleaned texts, and the box as it was written."""

    gold: str
    answer: str
    box: str


def verify_math(gold: str, response: str, *, rule: MathRule = _DEFAULT_RULE) -> Verdict:
    """The verdict on one response (never prompt + response: prompts hold boxes of their own).

    ``gold`` comes bare, in ``$...$`` or in a box. Most answers are decided here; the others by one
    worker process that this call starts when first needed and that ends with the program. For many
    responses use ``Verifier.verify``.
    """
    first = judge(gold, response, rule)
    return first if isinstance(first, Verdict) else _shared_verifier().verify([(gold, response)], rule)[0]


def judge(gold: str, response: str, rule: MathRule = _DEFAULT_RULE) -> Verdict | Question:
    """The verdict, where it needs no computer algebra; else the question to put to it."""
    answered = after_thinking(response)
    content, state = (None, "none") if answered is None else find_box(answered)
    if content is None:
        return Verdict("no_box", None, state, "box")
    gold = read_gold(gold)
    if not _readable(gold):
        return Verdict("error", content, state, "gold")
    if len(content) > rule.max_box_chars:
        return Verdict("wrong", content, state, "length")
    gold, answer = clean(gold), clean(content)
    if canonical(gold) == canonical(answer):
        return Verdict("correct", content, state, "text")
    if is_huge(gold) or is_huge(answer):
        return Verdict("wrong", content, state, "own")
    decided = own_comparison(gold, answer, rule)
    if decided is not None:
        return Verdict("correct" if decided else "wrong", content, state, "own")
    answer = open_side(gold, rename_bound_variable(gold, drop_approximation(answer)), rule)
    return Question(split_trailing_unit(gold)[0], split_trailing_unit(answer)[0], content)


def read_gold(gold: str) -> str:
    """The content of the gold's box, or the gold itself where it has none."""
    content, state = find_box(gold)
    return content if content is not None else ("" if state == "empty" else gold)


def _readable(gold: str) -> bool:
    if len(gold) > _MAX_GOLD_CHARS or gold.strip(" $+-").casefold() in _NO_NUMBERS:
        return False
    return not is_blank(gold) and is_balanced(gold)


def check_golds(golds: Sequence[str], rule: MathRule = _DEFAULT_RULE, *, verifier: Verifier | None = None) -> list[int]:
    """Indices of golds that no answer could match: empty, unbalanced, over 4000 characters, ``nan`` or ``inf``, or not equal to themselves by computer algebra.

    Plain numbers and quantities need no worker; each other distinct gold costs about 10 ms.
    """
    open_golds: dict[str, list[int]] = {}
    bad = []
    for i, gold in enumerate(golds):
        text = read_gold(gold)
        if not _readable(text):
            bad.append(i)
        elif is_huge(clean(text)):
            continue  # equal to itself, and nothing else is asked of it
        elif parse_number(clean(text)) is None and parse_quantity(clean(text)) is None:
            open_golds.setdefault(clean(text), []).append(i)
    if open_golds:
        questions = [Question(gold, gold, gold) for gold in open_golds]
        verdicts = (verifier or _shared_verifier()).ask(questions, rule)
        bad += [i for v, at in zip(verdicts, open_golds.values(), strict=True) if not v.correct for i in at]
    return sorted(bad)


@functools.cache
def _shared_verifier() -> Verifier:
    from jaxrl.rewards.pool import Verifier

    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier
