"""The last resort of a comparison: math-verify, and the checks that its "equal" has to pass.

Imported in the verifier's worker processes only.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import sympy
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify

from jaxrl.rewards.worker import Job

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warning that no timeout is set: ours is

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\w.])")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])(?:\^(?:\w|\{\w+\}))?\s*[({]?\s*)(\d+(?:\.\d+)?)\s*\^\s*\\circ"
)
_ODD_ROOT = re.compile(r"\\sqrt\s*\[\s*(\d*[13579])\s*\]\s*\{\s*-\s*([^{}+-]*)\}")
_DIGITS = 40
_SAME = sympy.Float("1e-25", _DIGITS)  # relative; both sides are evaluated to 40 digits
_SAMPLES = (sympy.Rational(7, 5), sympy.Rational(11, 13))


def compare(job: Job) -> str:
    """``correct``, ``wrong`` or ``bad_gold``."""
    gold, answer = _parse(job.gold), _parse(job.answer)
    if not gold:
        return "bad_gold"
    if not answer:
        return "wrong"
    if _verify(gold, answer):
        return "correct" if _plausible(gold[0], answer[0]) else "wrong"
    if _equal_once_more(gold[0], answer[0], job.positive_symbols):
        return "correct"
    if job.evaluate_decimals and _close(gold[0], answer[0], job.relative_tolerance):
        return "correct"
    return "wrong"


def exact_decimals(text: str) -> str:
    """Decimals as fractions: a float would be compared after rounding to six places."""
    return _DECIMAL.sub(_fraction, text)


def real_values(text: str) -> str:
    """Angles in degrees as radians, and an odd root of a negative number as the real one."""
    text = _DEGREES.sub(lambda m: rf"{m[1]}{{\frac{{{m[2]}\pi}}{{180}}}}", text)
    return _ODD_ROOT.sub(lambda m: rf"\left(-\sqrt[{m[1]}]{{{m[2]}}}\right)", text)


def _fraction(found: re.Match[str]) -> str:
    fraction = rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}"
    return rf"\left({fraction}\right)" if found.string[found.end() :].lstrip().startswith("^") else fraction


def _parse(text: str) -> list[Any]:
    """A sympy object and the text behind it; only the text where it is no mathematics; or nothing."""
    return parse(rf"\boxed{{{exact_decimals(real_values(text))}}}", extraction_config=_LATEX, parsing_timeout=None)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def _plausible(gold: Any, answer: Any) -> bool:
    """False where "equal" came from rounding: two tiny numbers, or a tiny factor before a variable."""
    if isinstance(gold, sympy.Tuple | FiniteSet | sympy.FiniteSet) and isinstance(answer, type(gold)):
        pairs = zip(gold.args, answer.args, strict=False)
        return len(gold.args) == len(answer.args) and (
            not isinstance(gold, sympy.Tuple) or all(_plausible(g, a) for g, a in pairs)
        )
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and gold.lhs == answer.lhs:
        return _plausible(gold.rhs, answer.rhs)
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    if not (gold.free_symbols or answer.free_symbols) and _differ(gold, answer):
        return False
    gaps = [_relative_gap(gold, answer, sample) for sample in _SAMPLES]
    return all(gap is None or gap <= _SAME for gap in gaps)


def _differ(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether two exact numbers are known to differ, however little: ``\\sqrt{10^{60}+1}`` and ``10^{30}``."""
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        return False
    try:
        gap = (gold.doit() - answer.doit()).evalf(15, maxn=400)
        return bool(gap.is_Float and gap._prec > 1 and gap != 0)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return False


def _relative_gap(gold: sympy.Expr, answer: sympy.Expr, sample: sympy.Rational) -> Any:
    """``|gold - answer| / max(|gold|, |answer|)`` with numbers for the variables; None where there is no number."""
    try:
        a, b = (_evaluate(e, sample) for e in (gold, answer))
        scale = max(abs(a), abs(b))
        return abs(a - b) / scale if scale else sympy.Integer(0)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None


def _evaluate(expression: sympy.Expr, sample: sympy.Rational) -> Any:
    names = sorted({s.name for s in expression.free_symbols})
    values = {s: sample + sympy.Rational(sum(map(ord, s.name)), 97) for s in expression.free_symbols}
    value = expression.subs(values).doit() if names else expression.doit()
    value = sympy.N(value, _DIGITS)
    if not value.is_number or not value.is_finite:
        raise ValueError("not a number")
    return value


def _equal_once_more(gold: Any, answer: Any, letters: tuple[str, ...]) -> bool:
    """Two cases that math-verify leaves: ``x`` against ``x^1`` or ``2x/2`` (it compares a lone symbol by name),
    and ``\\sqrt{1/n}`` against ``1/\\sqrt{n}`` (letters that count things are positive).
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    if {s.name for s in gold.free_symbols | answer.free_symbols} == {"i"}:  # with no other letter it is the number
        unit = dict.fromkeys(gold.free_symbols | answer.free_symbols, sympy.I)
        gold, answer = gold.subs(unit), answer.subs(unit)
        return bool(sympy.simplify(gold - answer) == 0)
    lone = isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol)
    positive = {
        s: sympy.Symbol(s.name, positive=True) for s in gold.free_symbols | answer.free_symbols if s.name in letters
    }
    if gold.has(sympy.Abs) or answer.has(sympy.Abs):
        positive = {}
    if not lone and not positive:
        return False
    try:
        return sympy.simplify(gold.subs(positive).doit() - answer.subs(positive).doit()) == 0
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return False


def _close(gold: Any, answer: Any, relative_tolerance: float) -> bool:
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    if gold.free_symbols or answer.free_symbols:
        return False
    gap = _relative_gap(gold, answer, _SAMPLES[0])
    return gap is not None and bool(gap <= relative_tolerance)
