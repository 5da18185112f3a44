"""JSON files read back with errors that name the file and the line. Needs no jax."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxrl.errors import JaxrlError


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """One JSON object. Raises ``JaxrlError`` with the file, and the line where it is malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise JaxrlError(f"{path}:{error.lineno}: malformed JSON ({error.msg}); write the file again") from error
    except UnicodeDecodeError as error:
        raise JaxrlError(f"{path}: expected UTF-8 text, and byte {error.start} is not; write the file again") from error
    if not isinstance(value, dict):
        raise JaxrlError(f"{path}: expected a JSON object, got {type(value).__name__}; write the file again")
    return value


def read_line(text: str, path: pathlib.Path, number: int) -> dict[str, Any]:
    """One line of ``metrics.jsonl``: an object with a whole number ``step``. Raises ``JaxrlError`` with its number.

    A ``step`` beyond 64 bits, or of another type, is refused: it could only be a damaged line.
    """
    try:
        line = json.loads(text)
        if not isinstance(line, dict):
            raise TypeError(f"it is of type {type(line).__name__}")
        step = line["step"]
        if isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 2**63:
            raise TypeError(f"step is {step!r}")
    except (ValueError, KeyError, TypeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise JaxrlError(
            f'{path}:{number}: expected one JSON object with an integer "step", got {text[:60]!r} '
            f"({said}); remove or repair the line"
        ) from error
    return line
