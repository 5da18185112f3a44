"""YAML text as a tree of plain values that remembers where each value was written.

Stricter than PyYAML: a key written twice is an error, only ``true`` and ``false`` are booleans (not
``no`` or ``off``), and ``1e-6`` is a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

from jaxrl.errors import UsageError

Path = tuple[str | int, ...]


@dataclass
class Document:
    """A tree, the name of what it was read from, and the origin of each path in it."""

    tree: Any
    name: str
    origins: dict[Path, str] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """``file:line`` or ``--set ...`` of the nearest enclosing value that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return self.name


def dotted(path: Path) -> str:
    """``algorithm.regularisers.0.coef``, as ``--set`` takes it."""
    return ".".join(str(part) for part in path)


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own attribute


for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse(text: str, name: str) -> Document:
    """Read one YAML document.

    Raises ``UsageError`` naming ``name`` and the line when the text is not YAML, when a key is
    written twice or is not text.
    """
    document = Document(None, name)
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document.tree = None if node is None else _construct(loader, node, (), document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise UsageError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise UsageError(f"{name}:{line}: not valid YAML: the character {chr(error.character)!r}") from error
    except (yaml.YAMLError, ValueError) as error:  # a tag that its value does not fit: !!int abc
        raise UsageError(f"{name}: not valid YAML: {error}") from error
    except RecursionError:
        raise UsageError(f"{name}: not valid YAML here: a value contains itself") from None
    finally:
        if loader is not None:
            loader.dispose()
    return document


def parse_value(text: str, name: str) -> Any:
    """One value as it would stand in a file: ``0.28``, ``[1, 16]``, ``{type: kl}``."""
    return parse(text, name).tree


def _construct(loader: _Loader, node: yaml.Node, path: Path, document: Document) -> Any:
    if path:
        document.origins[path] = f"{document.name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, i), document) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{document.name}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise UsageError(f"{where}: keys are text, got {key!r}; quote it if it is meant")
        if key in tree:
            raise UsageError(f"{where}: {dotted((*path, key))} is written twice; keep one of the two")
        tree[key] = _construct(loader, value_node, (*path, key), document)
        document.origins[(*path, key)] = where
    return tree


@dataclass(frozen=True)
class Override:
    """One ``--set a.b=c``."""

    path: Path
    value: Any
    text: str

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read ``KEY=VALUE``, the value as YAML. Raises ``UsageError`` when it is not that."""
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UsageError(f"--set {text}: expected KEY=VALUE, for example --set algorithm.loss.high=0.28")
        path = tuple(int(p) if p.isdecimal() else p for p in parts)
        return cls(path, parse_value(value, f"--set {key}"), f"--set {text}")


def override(document: Document, change: Override) -> None:
    """Set one value in place, making missing sections.

    Raises ``UsageError`` when the path goes through something that is not a section, or past the
    end of a list. Whether the key is known is for the reader of the tree to say.
    """
    node = document.tree
    for depth, part in enumerate(change.path):
        here = change.path[:depth]
        last = depth == len(change.path) - 1
        if isinstance(node, list):
            if not isinstance(part, int) or part >= len(node):
                have = f"the indices 0 to {len(node) - 1}" if node else "no entries"
                raise UsageError(f"{change.text}: {dotted(here)} is a list with {have}, and {part!r} is none of them")
        elif not isinstance(node, dict):
            raise UsageError(f"{change.text}: {dotted(here) or 'the config'} is {node!r}, which has no keys below it")
        else:
            part = str(part)
            if not last and node.get(part) is None:
                node[part] = {}
        if not last:
            node = node[part]
            continue
        node[part] = change.value
        document.origins = {p: o for p, o in document.origins.items() if p[: len(change.path)] != change.path}
        document.origins[change.path] = change.text
