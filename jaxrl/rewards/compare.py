"""Comparison in our own code: whatever can be decided without computer algebra, exactly and at once."""

from __future__ import annotations

import re

from jaxrl.rewards.normalise import canonical, closing_bracket, strip_brackets, strip_punctuation
from jaxrl.rewards.notation import (
    equation_sides,
    is_rounding,
    marks,
    names_its_value,
    read_ratio,
    split_outside,
    telling_words,
)
from jaxrl.rewards.number import numbers_equal, parse_number
from jaxrl.rewards.units import Unit, counted_things, parse_quantity, split_trailing_unit
from jaxrl.rewards.verdict import MathRule

_NAME = r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*"
_ASSIGNMENT = re.compile(rf"^({_NAME}(?:\(({_NAME})\))?|\({_NAME}(?:,\s*{_NAME})+\))\s*(?:=|\\in(?![A-Za-z]))\s*(.+)$")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+")
_BASE = re.compile(r"^(-?\d[0-9A-Fa-f]*)_(?:\{(?:\\text\{)?(\w+)\}?\}|(\d))$")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*\.?")
_WHOLLY_TEXT = re.compile(r"^\\text\s*\{([^{}]*)\}$")
_COMMENT = re.compile(r"\s*\\text\s*\{\s*\(?\s*(?:since|because|i\.e\.|that is|which is)\b.*$")
_AND = re.compile(r"\s*(?:,\s*)?(?:\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_DOTS = r"\ldots"
_OPEN, _CLOSE = ("(", "[", r"\{"), (")", "]", r"\}")


def own_comparison(gold: str, answer: str, rule: MathRule) -> bool | None:
    """True or False where our own code can tell, None where computer algebra is needed. Cleaned texts."""
    gold, answer = _COMMENT.sub("", gold), drop_approximation(_COMMENT.sub("", answer))
    answer = rename_bound_variable(gold, answer)
    if canonical(gold) == canonical(answer):
        return True
    if _DOTS in gold or _DOTS in answer:
        return False  # what the dots stand for is not for a machine to guess
    for decide in (
        *(_by_name, _by_base, _by_ratio, _by_list, _by_quantity, _by_word, _by_case, _by_unit),
        *(_by_equation, _by_telling_words, _by_mark),
    ):
        verdict = decide(gold, answer, rule)
        if verdict is not None:
            return verdict
    return None


def drop_approximation(text: str) -> str:
    """``x \\approx 11`` is 11; ``x = \\frac{1}{3} \\approx 0.33`` is a third; 5 is not about 6."""
    before, approx, after = text.partition(r"\approx")
    if not approx:
        return text
    if re.fullmatch(_NAME, before.strip()):
        return strip_punctuation(after) or text
    exact, rounded = parse_quantity(before), parse_quantity(strip_punctuation(after))
    if exact and rounded and not is_rounding(exact[0].value, rounded[0].value, after):
        return text
    return strip_punctuation(before) or text


def rename_bound_variable(gold: str, answer: str) -> str:
    """``f(t) = t`` in the letters of ``f(x) = x``."""
    ours, theirs = _ASSIGNMENT.match(gold), _ASSIGNMENT.match(answer)
    if not (ours and theirs and ours[2] and theirs[2]) or ours[2] == theirs[2]:
        return answer
    new, old = ours[2], theirs[2]
    if ours[1].split("(")[0] != theirs[1].split("(")[0] or re.search(rf"(?<![\\A-Za-z]){re.escape(new)}", theirs[3]):
        return answer
    return re.sub(rf"(?<![\\A-Za-z]){re.escape(old)}(?![A-Za-z])", lambda _: new, answer)


def split_list(text: str) -> tuple[str, list[str], str]:
    """``(open, items, close)`` of a pair, set, interval or bare list; one item where it is none of these."""
    text = _AND.sub(", ", text)
    start = next((mark for mark in _OPEN if text.startswith(mark)), "")
    end = next((mark for mark in _CLOSE if text.endswith(mark)), "")
    if start and end and closing_bracket(text, len(start) - 1) == len(text) - 1:
        items = _split_commas(text[len(start) : len(text) - len(end)])
        if len(items) > 1 or start == r"\{":
            return start, items, end
    return "", _split_commas(text), ""


def _by_base(gold: str, answer: str, rule: MathRule) -> bool | None:
    ours, theirs = _BASE.match(canonical(gold)), _BASE.match(canonical(answer))
    if not ours and not theirs:
        return None
    if not ours or not theirs:
        return False
    return ours[1].lstrip("0").upper() == theirs[1].lstrip("0").upper() and (ours[2] or ours[3]) == (
        theirs[2] or theirs[3]
    )


def _by_name(gold: str, answer: str, rule: MathRule) -> bool | None:
    """``x = 5`` is 5, and is ``x = 5``; whether it is ``y = 5`` is not decided here."""
    ours, theirs = _ASSIGNMENT.match(gold), _ASSIGNMENT.match(answer)
    if not ours and not theirs:
        return None
    if ours and theirs and canonical(ours[1]) != canonical(theirs[1]):
        return None
    gold, answer = ours[3] if ours else gold, theirs[3] if theirs else answer
    return None if "=" in gold + answer else own_comparison(gold, answer, rule)


def _by_list(gold: str, answer: str, rule: MathRule) -> bool | None:
    open_g, items_g, close_g = split_list(gold)
    open_a, items_a, close_a = split_list(answer)
    if _is_one_number(gold, answer, items_a) or (not open_g and _is_one_number(answer, gold, items_g)):
        return False
    if _is_thousands(gold, open_g, answer, items_a) or _is_thousands(answer, open_a, gold, items_g):
        return None
    if len(items_g) < 2 or len(items_a) < 2:
        both_sets = open_g == open_a == r"\{"
        return own_comparison(items_g[0], items_a[0], rule) if both_sets and len(items_g) == len(items_a) == 1 else None
    if open_g and open_a and (open_g, close_g) != (open_a, close_a):
        return False
    if len(items_g) != len(items_a):
        return None
    ordered = {open_g, open_a} & {"(", "["} != set()
    return _pairwise(items_g, items_a, rule) if ordered else _matching(items_g, items_a, rule)


def _by_quantity(gold: str, answer: str, rule: MathRule) -> bool | None:
    trusted = counted_things(gold)
    ours, theirs = parse_quantity(gold, trusted), parse_quantity(answer, trusted)
    if ours is None or theirs is None:
        return None
    return ours[1].agrees(theirs[1]) and numbers_equal(ours[0], theirs[0], rule.relative_tolerance)


def _by_word(gold: str, answer: str, rule: MathRule) -> bool | None:
    """Words are compared as words; a product of letters has the same value in any order."""
    ours, theirs = _word(gold), _word(answer)
    if len(ours) == 1 or len(theirs) == 1:  # choice letters
        return ours == theirs if ours.isalpha() and theirs.isalpha() else None
    if not (_WORDS.fullmatch(ours) and _WORDS.fullmatch(theirs)):
        return None
    prose = any(_WHOLLY_TEXT.match(t) or re.search("[A-Za-z]{4}", t) for t in (gold, answer))
    return ours.rstrip(".").casefold() == theirs.rstrip(".").casefold() if prose else None


def _by_case(gold: str, answer: str, rule: MathRule) -> bool | None:
    """R and r are two variables."""
    ours, theirs = _letters(gold), _letters(answer)
    same_but_for_case = {c.lower() for c in ours} == {c.lower() for c in theirs}
    return False if ours != theirs and same_but_for_case else None


def _by_unit(gold: str, answer: str, rule: MathRule) -> bool | None:
    """Closed forms: differing units of measure, else what is left without them."""
    (form_g, unit_g), (form_a, unit_a) = split_trailing_unit(gold), split_trailing_unit(answer)
    if not unit_g.agrees(unit_a) or (_is_percent(unit_a) and not _is_percent(unit_g)):
        return False
    return own_comparison(form_g, form_a, rule) if (form_g, form_a) != (gold, answer) else None


def _is_percent(unit: Unit) -> bool:
    return ("percent", 1) in unit.measures


def _by_ratio(gold: str, answer: str, rule: MathRule) -> bool | None:
    """``1:2:3`` part by part up to a common factor; a time of day is no fraction."""
    ours, theirs = read_ratio(gold), read_ratio(answer)
    if ours and theirs:
        if len(ours.parts) != len(theirs.parts):
            return False
        if ours.clock and theirs.clock:
            same = [*map(int, ours.parts)] == [*map(int, theirs.parts)]
            return same and (ours.half == theirs.half or not (ours.half and theirs.half))
        a, b = ours.numbers(), theirs.numbers()
        if a is None or b is None:
            return _pairwise(list(ours.parts), list(theirs.parts), rule)
        i = next((i for i, part in enumerate(a) if part), 0)
        return a == b or (b[i] / a[i] > 0 and all(x * b[i] == y * a[i] for x, y in zip(a, b, strict=True)))
    one, other = (ours, answer) if ours else (theirs, gold)
    if one is None or (len(one.parts) == 2 and not one.clock):
        return None
    return False if parse_number(other) else None


def _by_telling_words(gold: str, answer: str, rule: MathRule) -> bool | None:
    """Computer algebra drops words, "or less" among them."""
    return None if telling_words(gold) == telling_words(answer) else False


def _by_mark(gold: str, answer: str, rule: MathRule) -> bool | None:
    """Computer algebra drops primes and transposes, and reads ``n!!`` as ``(n!)!``."""
    return None if marks(gold) == marks(answer) else False


def _by_equation(gold: str, answer: str, rule: MathRule) -> bool | None:
    """``3 + 3 = 5`` is not 5: a value stands for an equation only if its left side names it."""
    if r"\approx" in answer and r"\approx" not in gold:
        return False
    ours, theirs = equation_sides(gold), equation_sides(answer)
    if (len(ours) > 1) == (len(theirs) > 1):
        return None
    equation, sides = (gold, ours) if len(ours) > 1 else (answer, theirs)
    if len(split_outside(equation, ",;")) > 1:
        return None
    if not names_its_value(sides[0]):
        return False
    if len(theirs) == 1:
        return None
    verdicts = [own_comparison(gold, side, rule) for side in theirs[1:]]
    return False if False in verdicts else None if None in verdicts else True


def open_side(gold: str, answer: str, rule: MathRule) -> str:
    """The one value of ``x = a = b`` that is not known to be the gold; the whole where there are more."""
    sides = equation_sides(answer)
    if (
        len(sides) == 1
        or not names_its_value(sides[0])
        or len(equation_sides(gold)) > 1
        or len(split_outside(answer, ",;")) > 1
    ):
        return answer
    left = [side for side in sides[1:] if not own_comparison(gold, side, rule)]
    return left[0] if len(left) == 1 else answer


def _is_one_number(text: str, other: str, items: list[str]) -> bool:
    """A bare ``1,234`` against several items that are no such number: it is not the list of 1 and 234."""
    return bool(_THOUSANDS.fullmatch(text)) and len(items) > 1 and not _THOUSANDS.fullmatch(other)


def _word(text: str) -> str:
    found = _WHOLLY_TEXT.match(strip_brackets(text))
    return strip_brackets(strip_punctuation(found[1] if found else strip_brackets(text)))


def _letters(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", _COMMAND.sub(" ", re.sub(r"\\text\s*\{[^{}]*\}", " ", text))))


def _is_thousands(text: str, bracket: str, other: str, other_items: list[str]) -> bool:
    """A bare ``1,234`` against one number is itself one number."""
    return not bracket and len(other_items) == 1 and parse_quantity(text) is not None


def _pairwise(gold: list[str], answer: list[str], rule: MathRule) -> bool | None:
    verdicts = [own_comparison(g, a, rule) for g, a in zip(gold, answer, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _matching(gold: list[str], answer: list[str], rule: MathRule) -> bool | None:
    """Each gold item finds its own answer item; None as soon as one comparison is open."""
    left = list(answer)
    for item in gold:
        verdicts = [own_comparison(item, candidate, rule) for candidate in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        else:
            return None if None in verdicts else False
    return True


def _split_commas(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c in ",;" and depth == 0:
            items.append(text[start:i])
            start = i + 1
    return [strip_punctuation(item) for item in [*items, text[start:]]]
