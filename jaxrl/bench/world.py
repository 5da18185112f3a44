"""The weights and rows of one kernel benchmark as a file that any numpy reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.influence.gradients import leaf_names, row_weights
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, build
from jaxrl.types import Rows


def write_world(file: Path, model: Decoder, sides: tuple[Rows, Rows]) -> None:
    """``model.NAME`` for every parameter; ``tokens_a/b``, ``start_a/b``, ``length_a/b`` of the rows with their
    per-token weights ``weights_a/b`` ``[N, T]``; ``config`` as JSON. All numbers in 32 bits."""
    leaves = zip(leaf_names(model), jax.tree.leaves(model), strict=True)
    arrays = {f"model.{name}": x.astype(jnp.float32) for name, x in leaves}
    for side, rows in zip("ab", sides, strict=True):
        arrays |= {f"tokens_{side}": rows.tokens, f"start_{side}": rows.start, f"length_{side}": rows.length}
        arrays[f"weights_{side}"] = row_weights(rows).astype(jnp.float32)
    arrays["config"] = np.array(json.dumps(asdict(model.config)))
    np.savez(file, **{name: np.asarray(x) for name, x in arrays.items()})


def as_model(world: Mapping[str, Any]) -> tuple[Decoder, tuple[Rows, Rows]]:
    """What ``write_world`` wrote, from the file's arrays with ``config`` as a dict."""
    config = ModelConfig(**{**world["config"], "windows": tuple(world["config"]["windows"])})
    leaves = {name.removeprefix("model."): jnp.asarray(x) for name, x in world.items() if name.startswith("model.")}
    a, b = (Rows(*(jnp.asarray(world[f"{part}_{side}"]) for part in ("tokens", "start", "length"))) for side in "ab")
    return build(config, leaves), (a, b)
