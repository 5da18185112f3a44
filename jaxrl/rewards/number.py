"""Plain numbers, read exactly: integers, decimals, fractions, mixed numbers and a x 10^n."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from jaxrl.rewards.normalise import strip_brackets

_PLAIN = re.compile(r"\d+\.?\d*|\.\d+")
_THOUSANDS = re.compile(r"\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_POWER = re.compile(r"(?:(.+?)\s*(?:\\times|\\cdot)\s*)?(10|\{10\})\s*\^\s*(?:\{\s*(-?\d{1,5})\s*\}|(\d))")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_RATIO = re.compile(r"([^/]+)/([^/]+)")
_MIXED = re.compile(r"(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_PERCENT = re.compile(r"\s*\\%\s*$")
_DEPTH = 4  # brackets in brackets; more is not a plain number
_MAX_CHARS = 4000  # Python converts no more than 4300 digits
_HUGE = re.compile(r"\^[\s{(]*[+-]?\d[\d,]{5,}")


@dataclass(frozen=True)
class Number:
    """``exact`` is False where a decimal point was written; ``percent`` where the text ends in ``%``.

    ``value`` is the number as written: 28 for ``28\\%``.
    """

    value: Fraction
    exact: bool
    percent: bool = False


def parse_number(text: str) -> Number | None:
    """The number that a cleaned text is, or None."""
    if len(text) > _MAX_CHARS:
        return None
    text, count = _PERCENT.subn("", text.strip())
    parsed = _signed(text, _DEPTH)
    return None if parsed is None else Number(*parsed, percent=count > 0)


def is_huge(text: str) -> bool:
    """True where an exponent has six digits or more: neither we nor computer algebra should write that out."""
    return bool(_HUGE.search(text))


def numbers_equal(gold: Number, answer: Number, relative_tolerance: float) -> bool:
    """Whether ``answer`` is ``gold``.

    A percent sign in the answer counts: ``10\\%`` is not 10. One in the gold may be left out of the
    answer (the question asked for a percentage) or be worked in: 12.5 and 0.125 are both ``12.5\\%``.
    """
    if gold.percent and not answer.percent:
        return _close(gold, answer, relative_tolerance) or _close(_hundredth(gold), answer, relative_tolerance)
    if answer.percent and not gold.percent:
        answer = _hundredth(answer)
    return _close(gold, answer, relative_tolerance)


def _close(gold: Number, answer: Number, relative_tolerance: float) -> bool:
    if gold.exact and answer.exact:
        return gold.value == answer.value
    # repr: the tolerance as it was written, so that 0.333333 is within 1e-6 of 1/3, and exactly so
    return abs(gold.value - answer.value) <= Fraction(repr(relative_tolerance)) * abs(gold.value)


def _hundredth(number: Number) -> Number:
    return Number(number.value / 100, number.exact)


Parsed = tuple[Fraction, bool] | None


def _signed(text: str, depth: int) -> Parsed:
    inner = strip_brackets(text)
    if "," in inner and inner != text.strip():
        return None  # (100,200) is a pair; 100,200 is a number
    text, sign = inner, 1
    if text[:1] in ("+", "-"):
        sign = -1 if text[0] == "-" else 1
        text = strip_brackets(text[1:])
    parsed = _unsigned(text, depth) if depth else None
    return parsed and (sign * parsed[0], parsed[1])


def _unsigned(text: str, depth: int) -> Parsed:
    if _PLAIN.fullmatch(text) or _THOUSANDS.fullmatch(text):
        digits = text.replace(",", "").replace(" ", "")
        return Fraction(digits.rstrip(".")), "." not in digits.rstrip(".")
    if found := _REPEATING.fullmatch(text):
        whole, start, period = found[1] or "0", found[2], found[3] or found[4]
        value = Fraction(int(whole + start)) + Fraction(int(period), 10 ** len(period) - 1)
        return value / 10 ** len(start), True
    if found := _MIXED.fullmatch(text):
        whole, above, below = (int(g) for g in found.groups() if g is not None)
        return (whole + Fraction(above, below), True) if below else None
    if found := _POWER.fullmatch(text):
        mantissa = _signed(found[1], depth - 1) if found[1] else (Fraction(1), True)
        return mantissa and (mantissa[0] * Fraction(10) ** int(found[3] or found[4]), mantissa[1])
    if found := _FRACTION.fullmatch(text) or _RATIO.fullmatch(text):
        above, below = _signed(found[1], depth - 1), _signed(found[2], depth - 1)
        return (above[0] / below[0], above[1] and below[1]) if above and below and below[0] else None
    return None
