"""What a compiled program moves between devices, read from its text."""

from __future__ import annotations

import math
import re
from typing import Any

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"= (\(?[^=]*?\)?) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collective_bytes(text: str, within: str = "") -> dict[str, int]:
    """Bytes that come out of each kind of collective on one device, by ``Compiled.as_text()``.

    ``within``: count only operations whose ``op_name`` holds this text (the names of the traced
    functions they stem from).

    What lies in a loop counts as often as the loop runs: by XLA's known trip count, or where a backend does
    not write that down (TPU) by the constant that the loop's counter is compared with. Raises
    ``ValueError`` for a loop with a collective inside whose count is not known.
    """
    bodies, entry = _computations(text)
    known: dict[str, dict[str, int]] = {}

    def of(name: str) -> dict[str, int]:
        if name not in known:
            known[name] = total = dict.fromkeys(COLLECTIVES, 0)
            for line in bodies[name]:
                found = _OPERATION.search(line)
                if found is None:
                    continue
                kind = found[2].removesuffix("-start")
                if kind in COLLECTIVES and within in line:
                    total[kind] += _bytes(
                        found[1], halves=kind != found[2] and kind in ("all-gather", "collective-permute")
                    )
                for called, times in _calls(line, found[2], of, bodies):
                    for key, value in called.items():
                        total[key] += times * value
        return known[name]

    return of(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by name, and the entry's name."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():  # comments number the parts of long tuples
        head = _COMPUTATION.match(line)
        if head:
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _calls(line: str, kind: str, of: Any, bodies: dict[str, list[str]]) -> list[tuple[dict[str, int], int]]:
    """What an operation runs, and how often. Of an asynchronous one the start alone runs it."""
    if kind.endswith(("-update", "-done")):
        return []
    names = re.findall(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    names += [x.strip().lstrip("%") for x in branches[1].split(",")] if branches else []
    called = [of(name) for name in names]
    if kind != "while":
        return [(x, 1) for x in called]
    count = _trips(line, bodies)
    if count is None and any(any(x.values()) for x in called):
        raise ValueError(f"a loop holds collectives and does not say how often it runs: {line.strip()[:120]}")
    return [(x, count or 0) for x in called]


def _trips(line: str, bodies: dict[str, list[str]]) -> int | None:
    """How often a loop runs. Loops that jax writes count up from 0 by one until the counter is not below a constant."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    name = re.search(r"condition=%?([\w.\-]+)", line)
    condition = bodies.get(name[1], []) if name else []
    constants = dict(re.findall(r"%([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)", "\n".join(condition)))
    test = re.search(
        r"ROOT .* compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT", next((x for x in condition if "ROOT" in x), "")
    )
    return int(constants[test[1]]) if test and test[1] in constants else None


def _bytes(shape: str, halves: bool = False) -> int:
    """Bytes of the arrays of a shape; ``halves``: operands come first and results after, which alone count."""
    arrays = [(kind, dims) for kind, dims in _ARRAY.findall(shape) if kind in _SIZES and (dims or not halves)]
    arrays = arrays[len(arrays) // 2 :] if halves else arrays
    return sum(_SIZES[kind] * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in arrays)
