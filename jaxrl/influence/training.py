"""What a whole run adds to the check of one step: structure, growth and transfer over training (SCIENCE.md C13 to C15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl.influence.attribution import attribution
from jaxrl.influence.dynamics import Labelled, Snapshot, structure_over_training
from jaxrl.influence.transfer import transfer_scores

MEASURES = ("p", "delta_plus")
IN_UNITS = ("frozen gradient",)  # predictions of the change itself; the others are up to a scale


@dataclass(frozen=True)
class Transfer:
    """A29: family g after ``steps`` updates on family f alone, from one checkpoint.

    ``realised`` and ``predicted[name]``: measure (``p``: change of the probability of a correct response;
    ``delta_plus``: mean change of log-probability of correct responses, nats) -> ``[F G]``.
    ``norms``: measure -> gradient norm of the measure on family g.
    """

    trained: tuple[str, ...]
    measured: tuple[str, ...]
    steps: int
    realised: Mapping[str, Float[np.ndarray, "F G"]]
    predicted: Mapping[str, Mapping[str, Float[np.ndarray, "F G"]]]
    norms: Mapping[str, Float[np.ndarray, " G"]]


@dataclass(frozen=True)
class Training:
    """What is known beyond one step. What is missing is named in ``left_out``: ``c13``... -> a sentence why.

    ``recorded``: arrays ``step [T]``, ``change``, ``first``, ``sq_norms`` ``[T M]`` and ``update_sq [T]``, as
    ``attribution`` takes them. ``transfer`` is called last: it trains.
    """

    fixed: Labelled | None = None
    snapshots: Iterable[Snapshot] = ()
    recorded: Mapping[str, np.ndarray] | None = None
    transfer: Callable[[], Transfer] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


def training_audit(
    training: Training, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, np.ndarray]]]:
    """C13 to C15: findings (None where left out), the rows of T-C4, and arrays by file name."""
    found: dict[str, Any] = {"c13": None, "c14": None, "c15": None}
    table: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    if training.fixed is not None:
        say("kernel structure at checkpoints")
        found["c13"], table, arrays["structure"] = structure_over_training(training.snapshots, training.fixed)
    if training.recorded is not None:
        recorded = dict(training.recorded)
        step = recorded.pop("step")
        found["c14"] = {"step": step.tolist(), **attribution(**recorded)}
    if training.transfer is not None:
        say("training on one family at a time")
        transfer = training.transfer()
        found["c15"] = transfer_audit(transfer)
        arrays["transfer"] = transfer_arrays(transfer)
    return found, table, arrays


def transfer_audit(transfer: Transfer) -> dict[str, Any]:
    """C15: scores of every prediction and baseline, for both measures."""
    own = np.array([[f == g for g in transfer.measured] for f in transfer.trained])
    scores = {
        measure: transfer_scores(
            transfer.realised[measure], transfer.predicted[measure], transfer.norms[measure], own, IN_UNITS
        )
        for measure in MEASURES
    }
    return {"steps": transfer.steps, "trained": transfer.trained, "measured": transfer.measured, **scores}


def transfer_arrays(transfer: Transfer) -> dict[str, np.ndarray]:
    """What ``transfer.npz`` holds: names of families, and ``<measure>/realised`` and ``<measure>/<prediction>`` [F G]."""
    arrays = {"trained": np.array(transfer.trained), "measured": np.array(transfer.measured)}
    arrays["steps"] = np.array(transfer.steps)
    for measure in MEASURES:
        arrays[f"{measure}/realised"] = transfer.realised[measure]
        arrays |= {f"{measure}/{name}": x for name, x in transfer.predicted[measure].items()}
    return arrays
