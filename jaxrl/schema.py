"""Trees of plain values to frozen dataclasses and back, strictly.

The dataclasses are the schema: their fields, types and defaults. On top of these come *registries*
(a field annotated with a protocol is read by the ``type:`` tag that names one of its classes) and
*ranges* (the numbers that a field accepts). Every problem is reported with its path and where it
was written; reading goes on to find the others.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, TypeAdapter, ValidationError

from jaxrl.errors import UsageError, nearest
from jaxrl.yamltree import Document, Path, dotted

FAILED = object()  # what reading returns for a value that has been reported


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, an end left out where ``above`` / ``below`` is set."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def bounds(self) -> dict[str, Any]:
        """The same as pydantic's keyword arguments."""
        ends = {("gt" if self.above else "ge"): self.low, ("lt" if self.below else "le"): self.high}
        return {name: value for name, value in ends.items() if value is not None}

    def __str__(self) -> str:
        low, high = (None if end is None else f"{end:.10g}" for end in (self.low, self.high))
        if low and high and not (self.above or self.below):
            return f"from {low} to {high}"
        words = (
            f"{'above' if self.above else 'of at least'} {low}",
            f"{'below' if self.below else 'of at most'} {high}",
        )
        return " and ".join(word for word, end in zip(words, (low, high), strict=True) if end)


@dataclass(frozen=True)
class Schema:
    """``registries``: protocol -> (tag -> class). ``ranges``: ``Class.field`` or ``field`` -> Range.

    ``untyped``: protocols whose pieces are of the field's default type where a config names none.
    """

    registries: Mapping[Any, Mapping[str, type]]
    ranges: Mapping[str, Range]
    untyped: tuple[Any, ...] = ()

    def range_of(self, cls: type, name: str) -> Range | None:
        """The range of a field: its own, or the one that all fields of this name share."""
        return self.ranges.get(f"{cls.__name__}.{name}", self.ranges.get(name))


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """Field name -> type, in order."""
    found = typing.get_type_hints(cls)
    return {f.name: found[f.name] for f in dataclasses.fields(cls) if f.init}


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the hint itself when it is none."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


# ---------------------------------------------------------------- reading


class Reader:
    """Reads one document; ``problems`` holds what was wrong."""

    def __init__(self, schema: Schema, document: Document) -> None:
        self.schema = schema
        self.document = document
        self.problems: list[str] = []

    def fail(self, path: Path, message: str) -> Any:
        """Report ``message`` about the value at ``path``."""
        where = f"{self.document.origin(path)}: {dotted(path)}" if path else self.document.origin(path)
        self.problems.append(f"{where}: {message}")
        return FAILED

    def finish(self, value: Any) -> Any:
        """``value``, or ``UsageError`` with every problem, one a line."""
        if self.problems:
            raise UsageError("\n".join(self.problems))
        return value

    def section(self, cls: Any, tree: Any, path: Path) -> Any:
        """An instance of the dataclass ``cls``. Unknown and missing keys are problems."""
        if tree is None:
            tree = {}
        if not isinstance(tree, dict):
            return self.fail(path, f"expected a section with keys ({', '.join(hints(cls))}), got {tree!r}")
        for key in tree:
            if key not in hints(cls):
                self.fail((*path, key), f"unknown key; {nearest(key, hints(cls))}")
        values = {}
        for field in dataclasses.fields(cls):
            if not field.init:
                continue
            if field.name in tree:
                hint, limits = hints(cls)[field.name], self.schema.range_of(cls, field.name)
                given = self.typed(hint, tree[field.name], field)
                values[field.name] = self.value(hint, given, (*path, field.name), limits)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                values[field.name] = self.fail((*path, field.name), "this key is needed and has no default")
        if any(value is FAILED for value in values.values()) or any(key not in hints(cls) for key in tree):
            return FAILED
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            return self.fail(*named(path, str(error)))

    def typed(self, hint: Any, tree: Any, field: dataclasses.Field[Any]) -> Any:
        """A piece that may be written without its ``type`` is of the default's."""
        if hint not in self.schema.untyped or not isinstance(tree, dict) or "type" in tree:
            return tree
        registry = self.schema.registries[hint]
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        tags = [tag for tag, cls in registry.items() if cls is type(made)]
        return {"type": tags[0], **tree} if tags else tree

    def value(self, hint: Any, tree: Any, path: Path, limits: Range | None) -> Any:
        """A value of type ``hint``: a piece, a section, a list of either, or a plain value."""
        options = [h for h in members(hint) if h is not types.NoneType]
        if tree is None and len(options) < len(members(hint)):
            return None
        registry = self.schema.registries.get(hint)
        if registry is not None:
            return self.piece(registry, tree, path)
        if len(options) == 1 and dataclasses.is_dataclass(options[0]):
            return self.section(options[0], tree, path)
        item = _item(hint)
        if item is not None and not _plain(item):
            return self.items(item, tree, path, limits)
        return self.leaf(hint, tree, path, limits)

    def items(self, item: Any, tree: Any, path: Path, limits: Range | None) -> Any:
        """A list of sections or pieces; ``(float, piece)`` pairs are written as a piece with ``coef``."""
        if not isinstance(tree, list | tuple):
            return self.fail(path, f"expected a list, got {tree!r}")
        read = self.weighted if typing.get_origin(item) is tuple else self.value
        values = [read(item, entry, (*path, i), limits) for i, entry in enumerate(tree)]
        return FAILED if any(value is FAILED for value in values) else tuple(values)

    def weighted(self, item: Any, tree: Any, path: Path, limits: Range | None) -> Any:
        """``{coef: 0.1, type: kl, ...}`` as ``(0.1, Kl(...))``."""
        number, protocol = typing.get_args(item)
        if not isinstance(tree, dict) or "coef" not in tree:
            return self.fail(path, f"expected a section with `coef` and `type`, got {tree!r}")
        coef = self.leaf(number, tree["coef"], (*path, "coef"), limits)
        rest = {key: value for key, value in tree.items() if key != "coef"}
        piece = self.value(protocol, rest, path, None)
        return FAILED if coef is FAILED or piece is FAILED else (coef, piece)

    def piece(self, registry: Mapping[str, type], tree: Any, path: Path) -> Any:
        """``{type: tag, ...}``, or the tag alone when every other key has a default."""
        if isinstance(tree, str):
            tree = {"type": tree}
        if not isinstance(tree, dict) or "type" not in tree:
            return self.fail(path, f"a `type` is needed, one of: {', '.join(registry)}; got {tree!r}")
        tag = tree["type"]
        if not isinstance(tag, str) or tag not in registry:
            return self.fail((*path, "type"), f"unknown type {tag!r}; {nearest(tag, registry)}")
        return self.section(registry[tag], {k: v for k, v in tree.items() if k != "type"}, path)

    def leaf(self, hint: Any, tree: Any, path: Path, limits: Range | None) -> Any:
        """A number, text, a choice, or a list of these, checked by pydantic in strict mode."""
        try:
            return _adapter(hint, limits).validate_python(_tuples(tree))
        except ValidationError as error:
            index = next((part for part in error.errors()[0]["loc"] if isinstance(part, int)), None)
            inside = index is not None and isinstance(tree, list | tuple) and index < len(tree)
            got = tree[index] if inside else tree
            where = (*path, index) if inside else path
            choices = [c for m in _alternatives(hint) if typing.get_origin(m) is Literal for c in typing.get_args(m)]
            if choices and isinstance(got, str):
                return self.fail(where, f"unknown value {got!r}; {nearest(got, choices)}")
            wanted = describe(_item(hint) if inside and _item(hint) else hint, limits)
            return self.fail(where, f"expected {wanted}, got {got!r}")


def named(path: Path, message: str) -> tuple[Path, str]:
    """The path that a message names itself (``optimiser.lr: ...``) where that lies below ``path``."""
    key, colon, rest = message.partition(": ")
    inside = bool(path) and colon and key.startswith(f"{dotted(path)}.")
    return ((*path, *key.split(".")[len(path) :]), rest) if inside else (path, message)


def describe(hint: Any, limits: Range | None = None) -> str:
    """``hint`` in words: ``an integer of at least 1, or null``."""
    item = _item(hint)
    if item is not None:
        return f"a list, each entry {describe(item, limits)}"
    if len(members(hint)) > 1:
        words = [describe(m, limits) for m in members(hint) if m is not types.NoneType]
        return " or ".join(words) + (", or null" if types.NoneType in members(hint) else "")
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    word = {int: "an integer", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))
    return f"{word} {limits}" if limits and hint in (int, float) else word


def _item(hint: Any) -> Any:
    """The entry type of ``tuple[entry, ...]``; None for anything else."""
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) is tuple and len(args) == 2 and args[1] is Ellipsis else None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    item = _item(hint)
    return members(hint if item is None else item)


def _plain(hint: Any) -> bool:
    """Whether pydantic alone can judge the type."""
    plain = (int, float, str, bool, types.NoneType)
    return all(m in plain or typing.get_origin(m) is Literal for m in members(hint))


def _tuples(tree: Any) -> Any:
    return tuple(_tuples(entry) for entry in tree) if isinstance(tree, list | tuple) else tree


@functools.cache
def _adapter(hint: Any, limits: Range | None) -> TypeAdapter:
    return TypeAdapter(_annotated(hint, limits))


def _annotated(hint: Any, limits: Range | None) -> Any:
    """``hint`` with strict scalars, the numbers among them bounded and finite."""
    item = _item(hint)
    if item is not None:
        return tuple.__class_getitem__((_annotated(item, limits), ...))
    if len(members(hint)) > 1:
        return typing.Union[tuple(_annotated(m, limits) for m in members(hint))]  # noqa: UP007 - built at run time
    bounds = limits.bounds() if limits else {}
    if hint is int:
        return Annotated[int, Strict(), Field(**bounds)]
    if hint is float:
        return Annotated[float, Strict(), Field(allow_inf_nan=False, **bounds)]
    return Annotated[hint, Strict()] if hint in (str, bool) else hint


# ---------------------------------------------------------------- writing


def dump(schema: Schema, value: Any, hint: Any = None) -> Any:
    """The tree that reads back to ``value``: dicts, lists, numbers, text, booleans and None."""
    if isinstance(value, tuple):
        item = _item(hint)
        if item is not None and typing.get_origin(item) is tuple:
            protocol = typing.get_args(item)[1]
            return [{"coef": coef, **dump(schema, piece, protocol)} for coef, piece in value]
        return [dump(schema, entry, item) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    cls = type(value)
    tree = {name: dump(schema, getattr(value, name), h) for name, h in hints(cls).items()}
    registry = schema.registries.get(hint)
    if registry is None:
        return tree
    tag = next((tag for tag, known in registry.items() if known is cls), None)
    if tag is None:
        raise UsageError(
            f"{cls.__name__} has no type tag, so a run with it cannot be written down; add it to its registry"
        )
    return {"type": tag, **tree}
