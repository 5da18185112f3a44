"""What a benchmark with workers found: tables, versions, and why a case is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from jaxrl.bench.compare import Measured
from jaxrl.bench.timing import Row
from jaxrl.models.decoder import Decoder


@dataclass
class Report:
    """The models' shapes, rows by the title of their table, versions by library, and why a case is missing."""

    sizes: list[Row] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, title: str, rows: list[Row], found: Sequence[Measured]) -> None:
        """One table, with the versions and failures of its cases."""
        self.tables[title] = rows
        self.failed += [f"{title}: {measured.failure}" for measured in found if measured.failure is not None]
        for measured in found:
            self.versions |= measured.versions


def shape(name: str, model: Decoder) -> Row:
    """One row about a model."""
    config = model.config
    return {
        "size": name,
        "d": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "MLP": config.intermediate_size,
        "V": config.vocab_size,
        "parameters": sum(x.size for x in jax.tree.leaves(model)),
    }
