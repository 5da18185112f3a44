"""How far down the step size a batch's effect can be seen in lower precision (SCIENCE.md C12, KERNEL.md 6).

The step of C5 again, with scores computed and parameters kept as training would keep them. Rounding
sets a floor under every measured change; below some step size the floor is all there is.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxrl.influence.sweep import moved_scores
from jaxrl.models.decoder import Decoder, cast, with_config
from jaxrl.types import Rows

ETAS = 10.0 ** np.arange(-1, -9.25, -0.5)
# (name, dtype in which parameters are kept and moved, dtype in which scores are computed)
CASES = (
    ("float32", "float32", "float32"),
    ("bfloat16, float32 masters", "float32", "bfloat16"),
    ("bfloat16 parameters", "bfloat16", "bfloat16"),
)


def precision_sweep(model: Decoder, direction: Decoder, probe: Rows, first: Float[np.ndarray, " M"]) -> dict[str, Any]:
    """C12: the step ``eta * direction`` measured in double precision and in each of ``CASES``.

    ``first [M]`` is the double-precision derivative along ``direction``. A case: ``summary`` of its
    measured changes against the exact ones.
    """
    exact = changes(model, direction, probe)
    predicted = ETAS[:, None] * first
    found: dict[str, Any] = {"eta": ETAS.tolist(), "exact_remainder": _medians(exact - predicted).tolist()}
    found["predicted"] = _medians(predicted).tolist()
    for name, kept, computed in CASES:
        held, step = (with_config(cast(tree, kept), dtype=computed) for tree in (model, direction))
        found[name] = summary(ETAS, changes(held, step, probe), exact, predicted)
        if kept != "float32":
            found[name]["changed"] = [changed_share(held, step, eta) for eta in ETAS]
    return found


def changes(model: Decoder, direction: Any, probe: Rows) -> Float[np.ndarray, "E M"]:
    """Measured change of every probe row's score at every eta of ``ETAS``, nats."""
    found = np.stack([moved_scores(model, direction, eta, probe) for eta in (0.0, *ETAS)])
    return found[1:] - found[:1]


def changed_share(model: Any, direction: Any, eta: float) -> float:
    """Share of parameters whose stored value differs after the step."""
    moved = total = 0
    for p, d in zip(jax.tree.leaves(model), jax.tree.leaves(direction), strict=True):
        old, step = np.asarray(p), np.asarray(d)
        moved += int(np.sum(old + step.dtype.type(eta) * step != old))
        total += old.size
    return moved / total


def summary(
    eta: Float[np.ndarray, " E"],
    measured: Float[np.ndarray, "E M"],
    exact: Float[np.ndarray, "E M"],
    predicted: Float[np.ndarray, "E M"],
) -> dict[str, Any]:
    """Median ``error`` (``|measured - exact|``) and ``sign`` agreement with the prediction by eta, and two limits.

    ``change_lost_below``: the eta below which the error exceeds half the predicted change (a measured
    change of 0 errs by all of it), so that rounding dominates; ``order_lost_below``: below which it exceeds the exact remainder, so
    that no slope can be read (see ``crossing``). ``ratio``: median measured over predicted change.
    """
    error = _medians(measured - exact)
    known = predicted != 0
    ratio = np.nanmedian(np.where(known, measured, np.nan) / np.where(known, predicted, np.nan), axis=1)
    return {
        "error": error.tolist(),
        "ratio": ratio.tolist(),
        "sign": [float(x) for x in np.mean(np.sign(measured) == np.sign(predicted), axis=1)],
        "change_lost_below": crossing(eta, error, _medians(predicted) / 2),
        "order_lost_below": crossing(eta, error, _medians(exact - predicted)),
    }


def crossing(
    eta: Float[np.ndarray, " E"], noise: Float[np.ndarray, " E"], signal: Float[np.ndarray, " E"]
) -> float | None:
    """The eta below which ``noise`` exceeds ``signal`` at every eta of the grid; None where it does not at the smallest.

    Linear between two etas in logarithms; the largest eta when the noise is larger everywhere.
    """
    order = np.argsort(eta)
    eta, noise, signal = (np.asarray(x, np.float64)[order] for x in (eta, noise, signal))
    above = noise > signal
    if not above[0]:
        return None
    top = len(eta) if above.all() else int(np.argmin(above))  # first eta at which the signal is larger
    if top == len(eta):
        return float(eta[-1])
    with np.errstate(divide="ignore"):
        gap = np.log(signal[[top - 1, top]]) - np.log(noise[[top - 1, top]])
    if not np.isfinite(gap).all():
        return float(eta[top - 1])
    share = -gap[0] / (gap[1] - gap[0])
    return float(np.exp(np.log(eta[top - 1]) + share * (np.log(eta[top]) - np.log(eta[top - 1]))))


def _medians(x: Float[np.ndarray, "E M"]) -> Float[np.ndarray, " E"]:
    return np.median(np.abs(x), axis=1)
