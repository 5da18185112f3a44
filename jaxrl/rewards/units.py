"""What stands behind (or before) a number: units of measure, currencies, counted things."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from jaxrl.rewards.normalise import strip_punctuation
from jaxrl.rewards.nouns import is_harmless, may_be_a_noun, stem
from jaxrl.rewards.number import Number, parse_number

# canonical name: other spellings. A trailing "s" is dropped before the look-up.
_MEASURES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "nm": "nanometer nanometre",
    "inch": "in inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "ton": "tonne",
    "ml": "milliliter millilitre mL",
    "l": "liter litre L",
    "gal": "gallon",
    "second": "sec s",
    "millisecond": "ms",
    "minute": "min",
    "hour": "hr h",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "am": "a.m a.m.",
    "pm": "p.m p.m.",
    "degree": "deg",
    "radian": "rad",
    "dollar": "usd",
    "cent": "¢",
    "euro": "€ eur",
    "sterling": "£ gbp",
    "yen": "¥ jpy",
    "yuan": "rmb",
    "rupee": "₹ inr",
    "hertz": "hz Hz",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "volt": "V",
    "ampere": "A amp",
    "kelvin": "K",
    "celsius": "C",
    "fahrenheit": "F",
    "pascal": "Pa",
    "mole": "mol",
    "ev": "eV electronvolt",
    "percent": "percentage pct",
    "sqft": "",
}
_NAMES = {name: name for name in _MEASURES} | {
    spelling: name for name, spellings in _MEASURES.items() for spelling in spellings.split()
}
_COMPOUND = {"mph": ("mi", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour")}
_SCALE = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_IDLE = {"of", "the", "a", "an", "in", "is", "each", "total", "about", "approximately"}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3}
_TAIL = re.compile(r"\\text\s*\{|\^\\circ|(?<![\\A-Za-z])[A-Za-zµ¢€£¥₹]")
_TOKEN = re.compile(r"[A-Za-zµ¢€£¥₹][A-Za-z.'-]*|/|\^\s*\{?\s*(-?\d)\s*\}?")
_CURRENCY = re.compile(r"^(-?)\s*(?:US|USD)?\s*(\\\$|[€£¥₹])\s*")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_TRAILING = re.compile(r"^(.*\S)\s*(\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?|\^\\circ|\\%)$")


@dataclass(frozen=True)
class Unit:
    """``measures``: (name, power) of units of measure; ``things``: counted things."""

    measures: frozenset[tuple[str, int]] = frozenset()
    things: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.measures or self.things)

    def agrees(self, other: Unit) -> bool:
        """An omitted unit agrees with all; cm agrees with cm only; apples agree with red apples."""
        if not self or not other or (self.measures and self.measures == other.measures):
            return True
        if self.measures or other.measures:
            return False
        return self.things <= other.things or other.things <= self.things


def parse_quantity(text: str, trusted: frozenset[str] = frozenset()) -> tuple[Number, Unit] | None:
    """``(number, unit)`` of a cleaned text such as ``18 dollars`` or ``10 \\text{ cm}^2``, or None.

    Words that are no known unit, noun or adjective make it None, unless their stem is in ``trusted``.
    """
    text, currency = _CURRENCY.subn(r"\1", text.strip())
    mark = _TAIL.search(text)
    head, tail = (text[: mark.start()], text[mark.start() :]) if mark else (text, "")
    number = parse_number(head)
    words = _words(tail)
    if number is None or words is None:
        return None
    unit, scale = _unit(words + (["dollar"] if currency else []), trusted)
    if unit is None or not _reads_as_unit(head, tail, unit):
        return None
    percent = number.percent or ("percent", 1) in unit.measures
    measures = unit.measures - {("percent", 1)}
    return Number(number.value * scale, number.exact, percent), Unit(measures, unit.things)


def counted_things(text: str) -> frozenset[str]:
    """Stems of the words behind the number of a gold, for ``trusted``: all that do not change a number."""
    mark = _TAIL.search(text)
    words = _words(text[mark.start() :]) if mark else None
    return frozenset(stem(word) for word in words or () if may_be_a_noun(word))


def is_known(word: str) -> bool:
    """True for a word of a unit, of a counted thing, or one that says nothing."""
    lower = word.lower()
    return bool(_name(word)) or is_harmless(word) or lower in _IDLE or lower in _COMPOUND or lower in ("sq", "square")


def split_trailing_unit(text: str) -> tuple[str, Unit]:
    """A closed form without the unit of measure after it: ``3\\sqrt{2} \\text{ cm}``."""
    found = _TRAILING.match(text)
    if not found or found[1][-1] in "=,+-*/(^_":
        return text, Unit()
    unit, scale = _unit(["percent"] if found[2] == r"\%" else _words(found[2]) or [])
    if unit is None or not unit.measures or scale != 1:
        return text, Unit()
    if ("degree", 1) in unit.measures and _TRIGONOMETRIC.search(found[1]):
        return text, Unit()  # the cosine of 60 degrees is no angle
    return strip_punctuation(found[1]), unit


def _words(tail: str) -> list[str] | None:
    """Words, slashes and powers of a unit; None when something else is among them."""
    tail = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", tail).replace(r"^\circ", " degree ").replace(r"\cdot", " ")
    tail = re.sub(r"\bper ?cent\b", "percent", tail)
    if re.sub(r"[\s(){},.]|\\", "", _TOKEN.sub("", tail)):
        return None
    return [re.sub(r"[\s{}]", "", m[0]) for m in _TOKEN.finditer(tail)]


def _unit(words: list[str], trusted: frozenset[str] = frozenset()) -> tuple[Unit | None, Fraction]:
    measures: dict[str, int] = {}
    things: set[str] = set()
    scale, sign, power, last = Fraction(1), 1, 1, ""
    for word in words:
        name = _name(word)
        if word in ("/", "per"):
            sign = -1
        elif word.startswith("^") or (word in _POWERS and last and word.endswith("d")):
            if not last:
                return None, scale
            exponent = int(word[1:]) if word.startswith("^") else _POWERS[word]
            measures[last] += (1 if measures[last] > 0 else -1) * (exponent - 1)
        elif word in _POWERS:
            if word.endswith("d"):
                return None, scale  # 5 squared
            power = _POWERS[word]
        elif word.lower() in _COMPOUND:
            above, below = _COMPOUND[word.lower()]
            measures |= {above: 1, below: -1}
        elif word.rstrip("s") in _SCALE:
            scale *= _SCALE[word.rstrip("s")]
        elif name:
            measures[name] = measures.get(name, 0) + sign * power
            power, last = 1, name
        elif word.lower() not in _IDLE:
            if not is_harmless(word) and stem(word) not in trusted:
                return None, scale
            things.add(stem(word))
            power = 1
    if power != 1:
        return None, scale  # 5 square
    return Unit(frozenset(measures.items()), frozenset(things)), scale


def _name(word: str) -> str | None:
    if word in _NAMES:
        return _NAMES[word]
    word = word.lower().rstrip(".")
    if len(word) < 2:
        return None  # M is not m
    return _NAMES.get(word) or (_NAMES.get(word.removesuffix("s")) if len(word) > 2 else None)


def _reads_as_unit(head: str, tail: str, unit: Unit) -> bool:
    """Bare letters are a unit only if they read so: ``10 cm`` and ``5 apples``, but not ``3x`` or ``10 xy``."""
    if not tail or tail[0] in "\\^":
        return True
    spaced = head[-1:].isspace()
    words = [w for w in tail.split() if w[0].isalpha()]
    first = words[0].strip(".,") if words else ""
    if len(first) == 1:
        return spaced and bool(unit.measures)
    return (
        bool(_name(first))
        or first in _SCALE
        or first.lower() in _COMPOUND
        or first in _POWERS
        or (spaced and all(len(w) >= 3 for w in words if w not in _IDLE))
    )
