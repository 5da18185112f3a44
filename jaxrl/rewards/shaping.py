"""From a verdict to a reward.

A piece is a frozen dataclass with ``__call__(verdict) -> float``. A timeout or an error pays what a wrong
answer pays and is counted apart; an empty box pays what no box pays.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxrl.errors import JaxrlError
from jaxrl.rewards.verdict import Verdict


class Reward(Protocol):
    """What a training run needs of a reward."""

    def __call__(self, verdict: Verdict) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Binary:
    """1 for a correct answer, else 0."""

    def __call__(self, verdict: Verdict) -> float:
        return 1.0 if verdict.correct else 0.0


@dataclass(frozen=True, kw_only=True)
class PlusMinus:
    """1 for a correct answer, else -1."""

    def __call__(self, verdict: Verdict) -> float:
        return 1.0 if verdict.correct else -1.0


@dataclass(frozen=True, kw_only=True)
class Paper:
    """1 correct, -0.5 a complete box that is wrong, -1 no box (arXiv 2510.02230, appendix A)."""

    def __call__(self, verdict: Verdict) -> float:
        if verdict.correct:
            return 1.0
        return -0.5 if verdict.box == "complete" else -1.0


@dataclass(frozen=True, kw_only=True)
class ReleasedCode:
    """1 correct, -1 only where a box was opened and never closed, else -0.5: as the paper's code pays.

    Its grader reads prompt + response and finds the empty box of the prompt where the response has none.
    """

    def __call__(self, verdict: Verdict) -> float:
        if verdict.correct:
            return 1.0
        return -1.0 if verdict.box == "malformed" else -0.5


@dataclass(frozen=True, kw_only=True)
class Custom:
    """A function of the caller's, ``call="module:function"``, from a ``Verdict`` to a number.

    ``def reward(verdict) -> float``: ``verdict.status`` is ``correct``, ``wrong``, ``no_box``, ``timeout`` or
    ``error``; ``verdict.answer`` what the response boxed. The module is imported from where jaxrl runs.

    Raises ``ValueError`` when made, if the module or the function is not there, and when called, if
    the function returns anything but a finite number; ``JaxrlError`` if the function itself raises.
    """

    call: str

    def __post_init__(self) -> None:
        _load(self.call)

    def __call__(self, verdict: Verdict) -> float:
        try:
            value = _load(self.call)(verdict)
        except Exception as error:  # whatever the caller's function raises
            raise JaxrlError(
                f"reward.call: {self.call} raised {type(error).__name__}: {error} for {verdict}; expected a function "
                "from a Verdict to a finite number"
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"reward.call: {self.call} returned {value!r} for {verdict}; expected a finite number")
        return number


# One verdict of each kind, to try a caller's function on before anything is spent.
SAMPLES = (
    Verdict("correct", "1", "complete", "text"),
    Verdict("wrong", "2", "complete", "text"),
    Verdict("no_box", None, "none", "box"),
    Verdict("timeout", "3", "complete", "math_verify"),
    Verdict("error", "4", "complete", "gold"),
)


def try_reward(reward: Reward) -> None:
    """Call a reward on a verdict of each status. Raises ``JaxrlError`` or ``ValueError`` as the reward does."""
    for verdict in SAMPLES:
        reward(verdict)


REWARDS: dict[str, type] = {
    "binary": Binary,
    "pm1": PlusMinus,
    "paper": Paper,
    "released_code": ReleasedCode,
    "custom": Custom,
}


@functools.cache
def _load(call: str) -> Callable[[Verdict], float]:
    module_name, colon, name = call.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"reward.call: expected 'module:function', got {call!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward.call: cannot import module {module_name!r} of {call!r} ({error}); is it on PYTHONPATH?"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward.call: module {module_name!r} has no function {name!r}{hint}")
    return function
