"""The box of a response: ``\\boxed{...}`` or ``\\fbox{...}``, found without regular-expression guesswork."""

from __future__ import annotations

import re

_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{?)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is consumed whole
_BLANK = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|\\text\s*(?=\{)|[\s~${}]")


def after_thinking(text: str) -> str | None:
    """What follows the last ``</think>``; None when a ``<think>`` never closes."""
    text = text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def find_box(text: str) -> tuple[str | None, str]:
    """``(content, state)`` of the last complete, balanced, non-empty box.

    ``state`` is ``complete`` with a content, else None with ``none``, ``empty`` or ``malformed``
    (by the last box there is). An outer box wins over one inside it; where the outer one never
    closes, a complete inner one counts. Linear in the length of the text.
    """
    closing = _matching_braces(text)
    content, state, inside = None, "none", -1
    for command in _COMMAND.finditer(text):
        start = command.end() - 1
        if start < inside:
            continue
        if not command[1] or start not in closing:
            state = "malformed"
            continue
        inside = closing[start]
        found = text[start + 1 : inside]
        state = "empty" if is_blank(found) else "complete"
        if state == "complete":
            content = found
    return content, state if content is None else "complete"


def is_blank(text: str) -> bool:
    """True when only spaces, dollars and braces are left."""
    return not _BLANK.sub("", text)


def is_balanced(text: str) -> bool:
    """True when every brace has its partner, escaped ones aside."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth < 0:
            return False
    return depth == 0


def unwrap_boxes(text: str) -> str:
    """The text with the box commands inside it taken off (their braces stay)."""
    return _COMMAND.sub(lambda m: m[1], text)


def _matching_braces(text: str) -> dict[int, int]:
    closing, stack = {}, []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            stack.append(brace.start())
        elif brace[0] == "}" and stack:
            closing[stack.pop()] = brace.start()
    return closing
