"""Fitting the order of a remainder, on the step sizes where a fit means something."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

ROUNDING = 100 * np.finfo(np.float64).eps  # of |S|: below, the difference of two scores is rounding
LINEAR = 0.1  # of the prediction: above, the next order is not yet small
DECADE = 10 * (1 - 1e-9)


class Slope(NamedTuple):
    """Slope of log median remainder against log eta; ``value`` is NaN when the window is under one decade."""

    value: float
    low: float
    high: float
    points: int
    reason: str | None


def fit_slope(
    eta: Float[np.ndarray, " E"],
    remainder: Float[np.ndarray, "E ..."],
    predicted: Float[np.ndarray, "E ..."],
    scores: Float[np.ndarray, " M"],
) -> Slope:
    """The order of ``remainder``, fitted by least squares on the window of SCIENCE.md C3.

    Medians over all entries of an eta; the window is the longest run of etas whose median remainder
    exceeds ``100 eps`` times the largest ``|S|`` and stays below a tenth of the median prediction.
    """
    order = np.argsort(eta)
    eta = np.asarray(eta)[order]
    size, expected = (
        np.median(np.abs(np.asarray(x)[order]).reshape(len(eta), -1), axis=1) for x in (remainder, predicted)
    )
    use = _longest((size > ROUNDING * np.max(np.abs(scores))) & (size < LINEAR * expected))
    if use.sum() < 2 or eta[use][-1] / eta[use][0] < DECADE:
        found = "no step size" if not use.any() else f"only {eta[use][0]:.1g} to {eta[use][-1]:.1g}"
        reason = f"the remainder lies between rounding and a tenth of the prediction at {found}; one decade is needed"
        low, high = (float(eta[use][i]) if use.any() else float("nan") for i in (0, -1))
        return Slope(float("nan"), low, high, int(use.sum()), reason)
    slope = np.polyfit(np.log(eta[use]), np.log(size[use]), 1)[0]
    return Slope(float(slope), float(eta[use][0]), float(eta[use][-1]), int(use.sum()), None)


def most_linear(predicted: Float[np.ndarray, "E ..."], remainder: Float[np.ndarray, "E ..."]) -> int:
    """Index of the eta whose median remainder is the smallest share of the median prediction."""
    flat = (np.median(np.abs(x).reshape(len(x), -1), axis=1) for x in (remainder, predicted))
    size, expected = flat
    return int(np.argmin(np.where(expected > 0, size / np.where(expected > 0, expected, 1), np.inf)))


def _longest(flags: Bool[np.ndarray, " E"]) -> Bool[np.ndarray, " E"]:
    """The longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    out = np.zeros(len(flags), bool)
    if len(edges):
        starts, stops = edges[::2], edges[1::2]
        k = int(np.argmax(stops - starts))
        out[starts[k] : stops[k]] = True
    return out
