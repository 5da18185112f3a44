"""What a verifier says about one response, and the rule it says it by."""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("correct", "wrong", "no_box", "timeout", "error")
BOXES = ("none", "empty", "malformed", "complete")


@dataclass(frozen=True)
class Verdict:
    """The judgement on one response.

    ``status``: ``correct``, ``wrong``, ``no_box``, ``timeout`` (the comparison was killed) or
    ``error`` (a gold that cannot be read, or a verifier that died). ``answer`` is the text of the
    box as written, or None. ``box``: ``none``, ``empty``, ``malformed`` (opened and never closed)
    or ``complete``. ``rule`` names the step that decided: ``gold``, ``box``, ``length``, ``text``,
    ``own`` (own comparison of numbers, units, lists and words) or ``math_verify``. ``seconds`` is
    the time the comparison took in the worker, 0 where no worker was asked.
    """

    status: str
    answer: str | None
    box: str
    rule: str
    seconds: float = 0.0

    @property
    def correct(self) -> bool:
        return self.status == "correct"


@dataclass(frozen=True, kw_only=True)
class MathRule:
    """How two mathematical answers are compared.

    ``relative_tolerance``: two numbers of which at least one is written as a decimal are equal when
    ``|gold - answer| <= relative_tolerance * |gold|``, in exact arithmetic; integers and fractions
    are compared exactly. ``evaluate_decimals``: also hold a decimal against a gold in closed form
    (``3.14159`` against ``\\pi``) by that tolerance; without it a decimal is exactly what it says.
    ``max_box_chars``: longer boxes are wrong without being parsed. ``positive_symbols``: letters
    that are read as positive numbers where a radical depends on it.
    """

    relative_tolerance: float = 1e-6
    evaluate_decimals: bool = False
    max_box_chars: int = 500
    positive_symbols: tuple[str, ...] = ("k", "m", "n")

    def __post_init__(self) -> None:
        if not 0 <= self.relative_tolerance < 1:
            raise ValueError(
                f"MathRule.relative_tolerance: expected 0 <= value < 1, got {self.relative_tolerance}; "
                "1e-6 accepts 0.333333 for 1/3"
            )
        if self.max_box_chars < 1:
            raise ValueError(f"MathRule.max_box_chars: expected at least 1, got {self.max_box_chars}")


MINERVA = MathRule(relative_tolerance=1e-4, evaluate_decimals=True)
MATH_RULES: dict[str, MathRule] = {"default": MathRule(), "minerva": MINERVA}
