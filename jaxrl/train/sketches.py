"""Sketches of the rows of an influence step, stored so that kernels across steps and runs can be formed later."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl.influence.sketch import Sketch, gradient_sketch
from jaxrl.models.decoder import Decoder
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.kernels import spread, trained_rows
from jaxrl.types import Batch, Rows

KINDS = ("sketch", "probe_sketch")
# By kind: the sketch and which rows of the batch or the probe it is of.
StepSketches = dict[str, tuple[Sketch, np.ndarray]]


def step_sketches(
    model: Decoder, batch: Batch, probe: Rows, *, rows: int, size: int, temperature: float = 1.0
) -> StepSketches:
    """Sketches of the rows whose kernels ``step_kernels`` takes: trained ones as ``sketch``, probes as ``probe_sketch``.

    Trained rows are scored at the rollouts' ``temperature``, probes at 1. Where the filters kept nothing there is no
    ``sketch``. The hash is the same at all steps of all runs.
    """
    chosen, followed = trained_rows(batch)[:rows], spread(len(probe.start), rows)
    found = {"probe_sketch": (gradient_sketch(model, probe[followed], size=size), followed)}
    if len(chosen):
        slots = np.resize(chosen, min(rows, len(batch.weight)))  # one length, so that there is one program
        trained = gradient_sketch(model, batch.rows[slots], size=size, temperature=temperature)
        found["sketch"] = (jax.tree.map(lambda x: x[: len(chosen)], trained), chosen)
    return found


def store_sketches(arrays: ArrayStore, found: StepSketches, step: int) -> None:
    """Store ``<kind>/<step>``, with what ``Sketch.of`` needs and the ``rows`` as attributes."""
    for kind, (sketch, rows) in found.items():
        arrays.put(f"{kind}/{step}", sketch.values, sketch.attributes() | {"rows": rows.tolist()})


def load_sketch(run: str | pathlib.Path, step: int, kind: str = "sketch") -> tuple[Sketch, list[int]]:
    """A stored sketch of a run, and the rows of the batch (``sketch``) or the probe (``probe_sketch``) it is of.

    Raises ``FileNotFoundError`` naming the steps that have one.
    """
    folder = pathlib.Path(run) / "arrays.zarr"
    about = folder / kind / str(step) / ".zattrs"
    if not about.exists():
        steps = sorted(int(f.name) for f in (folder / kind).glob("[0-9]*")) or "none"
        raise FileNotFoundError(
            f"{run}: no {kind} of step {step}; steps that have one: {steps} (influence.sketch is their size)"
        )
    attributes: dict[str, Any] = json.loads(about.read_text())
    return Sketch.of(ArrayStore(folder).read(f"{kind}/{step}"), attributes), attributes["rows"]
