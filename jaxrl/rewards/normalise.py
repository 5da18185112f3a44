"""One spelling for one meaning: gold and answer are rewritten alike before they are compared.

``clean`` keeps the LaTeX readable (words stay in ``\\text{}``, escaped percent and dollar signs stay);
``canonical`` further removes all that does not carry meaning, for comparison as strings.
"""

from __future__ import annotations

import re
import unicodedata

from jaxrl.rewards.boxes import unwrap_boxes

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
_SYMBOLS = {
    **dict.fromkeys("−–—‒﹣－‐‑", "-"),
    **dict.fromkeys("°º˚", r"^\circ "),
    **{"∞": r"\infty ", "×": r"\times ", "÷": r"\div ", "±": r"\pm "},
    **dict.fromkeys("⋅·∙", r"\cdot "),
    **{"≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots ", "⋯": r"\ldots "},
    **{"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda "},
    **{"√": r"\sqrt ", "，": ",", "。": ".", "→": r"\to ", "’": "'"},
}
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi"

# (pattern, replacement), in order. Patterns that start at a backslash never start at the second of two.
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<!\\)\\(?:\(|\)|\[|\])", " "),  # \( \) \[ \]
        (r"(?<!\\)\$", " "),
        (r"(?<!\\)\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
        (r"(?<!\\)\\(?:displaystyle|textstyle|limits)(?![A-Za-z])\s*", ""),
        (r"(?<=\d)(?:\\!)?(?:\{,\}|,\\!)(?:\\!)?(?=\d{3})", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:l?dots|cdots)(?![A-Za-z])|\.\.\.+", r"\\ldots "),
        (r"\\(?:mbox|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|operatorname)\s*(?=\{)", r"\\text"),
        (r"\s+", " "),
        (r"\\text\s*\{ ?([ei]) ?\}", r"{\1}"),  # numbers, not units
        (r"(?<![\d}])(?<![\d}] )\\text\s*\{ ?([A-Za-z]) ?\}", r"{\1}"),  # after a number it is a unit
        (r"(?:\\text\s*\{ ?(?:negative|minus) ?\}|^ ?(?:negative|minus)(?= )) ?(?=[\d\\.])", "-"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\le(?:q|qslant)?(?![A-Za-z])|<=", r"\\leq "),
        (r"\\ge(?:q|qslant)?(?![A-Za-z])|>=", r"\\geq "),
        (r"\\neq?(?![A-Za-z])|!=", r"\\neq "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<![A-Za-z\\])(?:np|numpy|math)\.(?=[a-z])", ""),
        (r"\*\*", "^"),
        (r"(?<=[\w)}\]])\s*\*\s*(?=[\w(\\{])", r" \\cdot "),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
        (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<=\^\{)\+(?=\d)", ""),
        (r"(?<=[\d.])\s*[x*]\s*(?=10\s*\^)", r"\\times "),
        (r"\s+", " "),
    ]
]
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CANONICAL: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"([\^_])\{([0-9A-Za-z])\}", r"\1\2"),
        (r"(?<![A-Za-z}\]^_])\{([0-9A-Za-z.]+)\}", r"\1"),  # {C} alone, not an argument
        (r"(?<!\d)\s+|\s+(?!\d)", ""),  # "1 2" is not "12"
    ]
]


def clean(text: str) -> str:
    """``text`` in one spelling; still LaTeX."""
    text = _unicode(unwrap_boxes(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _braced_calls(text)
    return strip_punctuation(text)


def canonical(text: str) -> str:
    """A cleaned text without spaces, ``\\text`` and idle braces; equal strings mean equal answers."""
    text = _TEXT.sub(r"\1", text)
    for pattern, replacement in _CANONICAL:
        text = pattern.sub(replacement, text)
    return text


def strip_punctuation(text: str) -> str:
    """Without the spaces and full stops around it."""
    text = text.strip()
    while text and text[-1] in ".,;:" and not text.endswith("\\;"):
        text = text[:-1].rstrip()
    return text


def closing_bracket(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``; -1 when none does. Kinds may mix: ``[0,1)``."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
    return -1


def strip_brackets(text: str) -> str:
    """Without the braces or parentheses that enclose the whole text."""
    text = text.strip()
    while text and text[0] in "({" and closing_bracket(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _unicode(text: str) -> str:
    """Characters with a meaning of their own first: NFKC alone turns x² into x2 and 1½ into 11/2."""
    text = re.sub(f"[{''.join(_SUPERSCRIPTS)}]+", lambda m: _script("^", m[0], _SUPERSCRIPTS), text)
    text = re.sub(f"[{''.join(_SUBSCRIPTS)}]+", lambda m: _script("_", m[0], _SUBSCRIPTS), text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    return unicodedata.normalize("NFKC", "".join(_character(c) for c in text))


def _script(mark: str, characters: str, table: dict[str, str]) -> str:
    return f"{mark}{{{''.join(table[c] for c in characters)}}}"


def _character(c: str) -> str:
    if c in _SYMBOLS:
        return _SYMBOLS[c]
    kind, _, points = unicodedata.decomposition(c).partition(" ")
    if kind == "<fraction>":  # ½, ⅓, ...
        above, _, below = "".join(chr(int(p, 16)) for p in points.split()).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    return c


def _braced_calls(text: str) -> str:
    """``\\sqrt(x)`` and ``^(x)`` as ``\\sqrt{x}`` and ``^{x}``; ``\\exp(x)`` as ``e^{x}``."""
    text = re.sub(r"\\exp\s*(?=\()", "e^", text)
    position = 0
    while found := re.compile(r"(?:\\sqrt|\^)\s*\(").search(text, position):
        start = found.end() - 1
        end = closing_bracket(text, start)
        position = found.end()
        if end > 0 and text[end] == ")":
            text = f"{text[:start].rstrip()}{{{text[start + 1 : end]}}}{text[end + 1 :]}"
    return text
