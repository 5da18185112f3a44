"""The failures that a user can mend. Each becomes one message and an exit code, without a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class JaxrlError(Exception):
    """An expected failure, said in one message. Exit code 1."""

    exit_code = 1


class UsageError(JaxrlError):
    """Wrong arguments or a wrong config: nothing has started. Exit code 2."""

    exit_code = 2


class DoesNotHold(JaxrlError):
    """A gate, a plan or a check that ran and does not hold. Exit code 3.

    ``result`` is what was found all the same; the command prints it before the message.
    """

    exit_code = 3

    def __init__(self, message: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = result


class OutOfMemory(DoesNotHold, MemoryError):
    """A device had no room; the message names what fits."""


class GateFailed(DoesNotHold):
    """A condition on the base model that must hold before any reinforcement learning."""


def nearest(name: object, names: Iterable[object]) -> str:
    """A sentence that helps after an unknown name: the nearest match, or all names.

    ``nearest("grop", ["grpo", "self"])`` is ``"did you mean 'grpo'? (one of: grpo, self)"``.
    """
    known = [str(n) for n in names]
    if not known:
        return "no name is known here"
    match = get_close_matches(str(name), known, n=1, cutoff=0.6)
    listed = f"one of: {', '.join(known)}"
    return f"did you mean {match[0]!r}? ({listed})" if match else f"expected {listed}"
