"""Training on one family, what happens to the others, and whether the kernel said so (SCIENCE.md A29, C15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxrl.stats import pearson


def transfer_scores(
    realised: Float[np.ndarray, "F G"],
    predicted: Mapping[str, Float[np.ndarray, "F G"]],
    norms: Float[np.ndarray, " G"],
    own: Bool[np.ndarray, "F G"],
    in_units: Sequence[str] = (),
) -> dict[str, Any]:
    """How well each prediction explains ``realised[f, g]``, the change on family g after training on f alone.

    Out of sample: a trained family's row is predicted with a line fitted on the rows of the others
    (``fitted``), against the mean of those rows. Beside the given predictions: ``family means`` (the
    mean of column g over the other rows) and ``gradient norm`` (a line in ``norms``, the gradient norm of
    family g). ``as it is`` takes a prediction that is named ``in_units`` itself, without a line. ``own`` is True where f is g;
    ``across`` scores the other cells alone, fitted on them alone.
    """
    given = dict(predicted)
    norm = np.broadcast_to(np.asarray(norms, np.float64), realised.shape)
    places = {"all": np.ones(realised.shape, bool), "across": ~np.asarray(own, bool)}
    found: dict[str, Any] = {name: {} for name in (*given, "family means", "gradient norm")}
    for where, pick in places.items():
        for name, x in (given | {"family means": _column_means(realised, pick), "gradient norm": norm}).items():
            found[name][where] = {
                "fitted": out_of_sample(realised, x, pick, line=name != "family means"),
                "as it is": _r2(realised, x, pick) if name in in_units else None,
                "correlation": pearson(realised[pick], x[pick]),
            }
    return found


def out_of_sample(
    y: Float[np.ndarray, "F G"], x: Float[np.ndarray, "F G"], pick: Bool[np.ndarray, "F G"], *, line: bool = True
) -> float:
    """``1 - SSE / SST`` over rows left out in turn; SST is about the mean of the rows that were fitted.

    ``line``: fit ``y = a + b x`` on the other rows; otherwise x is the prediction. NaN with fewer than two rows.
    """
    if len(y) < 2:
        return float("nan")
    error = spread = 0.0
    for f in range(len(y)):
        rest = pick.copy()
        rest[f] = False
        here = np.zeros_like(pick)
        here[f] = pick[f]
        guess = _line(x[rest], y[rest], x[here]) if line else x[here]
        error += float(np.sum((y[here] - guess) ** 2))
        spread += float(np.sum((y[here] - y[rest].mean()) ** 2))
    return 1 - error / spread if spread > 0 else float("nan")


def _line(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The least-squares line through (x, y), evaluated; the mean of y where x is constant."""
    dx = x - x.mean()
    slope = float(dx @ (y - y.mean()) / (dx @ dx)) if dx.any() else 0.0
    return y.mean() + slope * (at - x.mean())


def _r2(y: np.ndarray, x: np.ndarray, pick: Bool[np.ndarray, "F G"]) -> float:
    """``1 - SSE / SST`` of x as it is, SST about the mean of y."""
    spread = float(np.sum((y[pick] - y[pick].mean()) ** 2))
    return 1 - float(np.sum((y[pick] - x[pick]) ** 2)) / spread if spread > 0 else float("nan")


def _column_means(y: Float[np.ndarray, "F G"], pick: Bool[np.ndarray, "F G"]) -> Float[np.ndarray, "F G"]:
    """Each column's mean over the picked cells of the other rows; the mean of all those where there are none."""
    total, count = np.sum(y * pick, axis=0) - y * pick, np.sum(pick, axis=0) - pick
    rest = (np.sum(y * pick) - np.sum(y * pick, axis=1)) / np.maximum(pick.sum() - pick.sum(axis=1), 1)
    return np.where(count > 0, total / np.maximum(count, 1), rest[:, None])
