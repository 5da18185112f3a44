"""Notation that computer algebra drops or folds, read from cleaned texts so that it counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from jaxrl.rewards.number import parse_number
from jaxrl.rewards.units import is_known

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_AFTER_NUMBER = re.compile(r"\d\s+([A-Za-z]{3,}(?:\s+[A-Za-z]+)*)")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
_LINKS = {"and", "or"}
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:\s*(?:\\text\s*\{)?\s*([ap])\.?\s*m\.?\s*\}?)?", re.IGNORECASE)
_PRIME = re.compile(r"'|\\prime(?![A-Za-z])")
_TRANSPOSE = re.compile(r"[A-Z)]\s*\^\s*(?:\{\s*)?(?:T|\\top|\\intercal|\\text\s*\{\s*T\s*\})(?![A-Za-z])")
_NAME = r"\\?[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?'*"
_LETTERS = r"(?:\\angle|\\triangle|\\circ)?\s*[A-Z]{1,4}"
_SYMBOL = re.compile(
    rf"{_NAME}|{_LETTERS}|\|{_LETTERS}\||{_NAME}(?:\^\{{?-1\}}?)?\s*\(.*\)|\([^()]*\)|\[[^\[\]]*\]|[a-z]\s*\\circ\s*[a-z]\(.*\)"
    rf"|\\(?:overline|overrightarrow|vec|hat|bar|text|mathbf|mathbb|mathcal)\s*\{{[^{{}}]*\}}(?:_(?:\w|\{{[^{{}}]*\}}))?(?:\(.*\))?"
    rf"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:{_NAME}|{_LETTERS})"
)
_EQUALS = re.compile(r"(?<![<>!:])=")


@dataclass(frozen=True)
class Ratio:
    """``1:2:3``; ``clock`` where it may be a time of day, with its ``half`` ("a", "p" or "")."""

    parts: tuple[str, ...]
    clock: bool = False
    half: str = ""

    def numbers(self) -> list[Fraction] | None:
        """The parts, where all of them are plain numbers."""
        found = [parse_number(part) for part in self.parts]
        return None if None in found else [number.value for number in found if number]


def read_ratio(text: str) -> Ratio | None:
    """A text with colons outside brackets, or None."""
    if found := _CLOCK.fullmatch(text.strip()):
        return Ratio((found[1], found[2]), True, (found[3] or "").lower())
    parts = split_outside(text, ":")
    return Ratio(tuple(parts)) if len(parts) > 1 and all(parts) else None


def split_outside(text: str, marks: str) -> list[str]:
    """The pieces between those marks that no bracket encloses, without spaces around them."""
    items, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c in marks and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()]


def equation_sides(text: str) -> list[str]:
    """What stands between the equals signs outside brackets; one item where there is none."""
    return split_outside(_EQUALS.sub("\0", text), "\0")


def telling_words(text: str) -> Counter[str]:
    """Words of a text that are no unit, counted thing or filler: "or less", "halves", "not"."""
    pieces = [*_TEXT.findall(text), *_AFTER_NUMBER.findall(_TEXT.sub(" ", text))]
    found: Counter[str] = Counter()
    for piece in pieces:
        words = [word.lower() for word in _WORD.findall(piece)]
        if set(words) <= _LINKS:
            continue  # between two answers; "or more" is another matter
        alone = len(words) == 1 and words[0] in ("square", "sq")
        found.update(word for word in words if alone or not is_known(word))
    return found


def marks(text: str) -> tuple[int, int, bool]:
    """Primes, double factorials, and whether a matrix is transposed."""
    return len(_PRIME.findall(text)), text.replace(" ", "").count("!!"), bool(_TRANSPOSE.search(text))


def is_rounding(value: Fraction, rounded: Fraction, text: str) -> bool:
    """Whether ``text``, which is ``rounded``, is ``value`` rounded to the places it has, or within two per cent."""
    places = re.search(r"\.(\d+)", text)
    half_a_unit = Fraction(1, 2 * 10 ** (len(places[1]) if places else 0))
    return abs(value - rounded) <= max(half_a_unit, abs(value) / 50)


def names_its_value(left: str) -> bool:
    """Whether ``left = value`` gives a name to the value: one symbol, or one function of something."""
    return bool(_SYMBOL.fullmatch(left))
