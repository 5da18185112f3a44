"""Nested results as aligned text, or as JSON.

A *cell* is a number, text, None, a flat list, or an interval ``{"value", "low", "high"}``. A dict
of cells is a row; rows below one key make one table, labelled by the keys between.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 100_000  # columns: more than any table has
BROAD = 6  # a table of more cells a row, and fewer rows, is turned: its measures become the rows
Row = tuple[tuple[str, ...], dict[str, Any]]


def plain(value: Any) -> Any:
    """``value`` with JSON's own types alone: arrays as lists, paths as text, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # arrays and their scalars, without importing their libraries
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def write_json(result: Mapping[str, Any], stream: IO[str]) -> None:
    """One indented JSON object and a newline."""
    stream.write(json.dumps(plain(result), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_tables(result: Mapping[str, Any], stream: IO[str]) -> None:
    """A table of the top-level cells, then one a nested key."""
    result = plain(result)
    top = {key: value for key, value in result.items() if _is_cell(value)}
    groups = ([("", top)] if top else []) + [(key, value) for key, value in result.items() if key not in top]
    tables = [_table(title, list(_rows(group))) for title, group in groups]
    if stream.isatty():
        Console(file=stream, highlight=False).print(*tables, sep="\n")
        return
    # Off a terminal rich would fold everything into 80 columns; there, lines are as long as they must be.
    text = io.StringIO()
    Console(file=text, highlight=False, width=WIDE).print(*tables, sep="\n")
    stream.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(title: str, rows: list[Row]) -> Table:
    if len(rows) == 1 and not rows[0][0]:  # one unlabelled row reads better standing
        rows = [((name,), {"": cell}) for name, cell in rows[0][1].items()]
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    if len(columns) > max(BROAD, len(rows)) and all(label for label, _ in rows):  # more measures than a line holds
        named = [("/".join(label), row) for label, row in rows]
        rows = [((name,), {label: row[name] for label, row in named if name in row}) for name in columns]
        columns = [label for label, _ in named]
    depth = max((len(label) for label, _ in rows), default=0)
    table = Table(
        box=SIMPLE, title=Text(title) if title else None, title_justify="left", show_header=any(columns), pad_edge=False
    )
    for _ in range(depth):
        table.add_column("", overflow="fold")
    for name in columns:
        table.add_column(Text(name), justify="right" if any(columns) else "left", overflow="fold")
    for label, row in rows:
        cells = [*label, *[""] * (depth - len(label)), *(show(row.get(name, "")) for name in columns)]
        table.add_row(*map(Text, cells))
    return table


def _rows(value: Any, label: tuple[str, ...] = ()) -> Iterator[Row]:
    if isinstance(value, list):
        for entry in value:
            yield from _rows(entry, label)
        return
    if not isinstance(value, Mapping):
        yield label, {"value": value}
        return
    row = {key: entry for key, entry in value.items() if _is_cell(entry)}
    if row or not value:
        yield label, row
    for key, entry in value.items():
        if key not in row:
            yield from _rows(entry, (*label, key))


def _is_cell(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {"value", "low", "high"}
    return not isinstance(value, list) or not any(isinstance(entry, list | Mapping) for entry in value)


def show(cell: Any) -> str:
    """A cell as text: four significant digits, ``0.985 [0.97, 0.99]`` for an interval, ``-`` for None."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, Mapping):
        return f"{show(cell['value'])} [{show(cell['low'])}, {show(cell['high'])}]"
    if isinstance(cell, list):
        return ", ".join(map(show, cell))
    return str(cell)
