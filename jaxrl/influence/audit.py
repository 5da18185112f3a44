"""What the paper's lower bound says about the kernel, and what it cannot say (SCIENCE.md C4, C6 to C8).

Eq. 4 of arXiv 2510.02230 reads ``|Delta| / (eta C) <= |K|`` with C the largest advantage of a group. For
one pair and SGD its tightness is ``|A| / C`` to first order: a property of the rewards, not of K. For
a batch it bounds the largest kernel entry of a probe row and their weighted mean, never one entry.
Plain numpy on the arrays of a sweep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl.influence.slopes import most_linear
from jaxrl.influence.sweep import Line, Pairs
from jaxrl.stats import partial_spearman, spearman

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SIGN_ETA = 1e-3


def advantage_bound(group_size: int) -> float:
    """``C = (G - 1) / sqrt(G)``: the largest ``|A|`` of a z-scored group of G (ddof 1)."""
    if group_size < 2:
        raise ValueError(f"group_size: expected at least 2 responses a prompt, got {group_size}")
    return (group_size - 1) / float(np.sqrt(group_size))


def pair_audit(pairs: Pairs, bound_c: float) -> dict[str, Any]:
    """C4: the bound on single pairs, at the step size where the first order explains most.

    ``tightness``: quantiles of ``q = |Delta| / (eta C |K|)`` over pairs with A != 0; ``violations``:
    share with q > 1, also a |A| level; ``fit_slope`` and ``fit_r2``: q regressed on ``|A| / C``
    (theory: 1 and 1); ``silent_max``: the largest ``|Delta|`` of a row with A = 0 (theory: 0).
    """
    active = pairs.advantage != 0
    predicted, delta = pairs.predicted[:, active], pairs.delta[:, active]
    e = most_linear(predicted, delta - predicted)
    size = np.abs(pairs.kernel[active])
    known = size > 0
    q = np.abs(delta[e])[known] / (pairs.eta[e] * bound_c * size[known])
    share = np.broadcast_to(np.abs(pairs.advantage[active])[:, None] / bound_c, size.shape)[known]
    levels = {f"{level:.6g}": float(np.mean(q[share == level] > 1)) for level in np.unique(share)}
    slope, r2 = _regression(share, q)
    return {
        "eta": float(pairs.eta[e]),
        "pairs": int(q.size),
        "violations": float(np.mean(q > 1)),
        "violations_by_share": levels,
        "tightness": [float(x) for x in np.quantile(q, QUANTILES)],
        "fit_slope": slope,
        "fit_r2": r2,
        "silent_rows": int(np.sum(~active)),
        "silent_max": float(np.abs(pairs.delta[:, ~active]).max(initial=0.0)),
    }


def batch_audit(
    line: Line,
    kernel: Float[np.ndarray, "N M"],
    weight: Float[np.ndarray, " N"],
    weight_advantage: Float[np.ndarray, " N"],
    norms: Float[np.ndarray, " M"],
    bound_c: float,
) -> dict[str, Any]:
    """C6, C7 and C8: the bound on a whole batch, at the step size where the first order explains most.

    ``lb = |Delta| / (eta C sum|w|)`` of each probe row against the largest, the weighted mean and
    every single ``|K|`` of its training rows; ``norms [M]`` are the probe's gradient norms. Rows that
    pull nothing (weight or advantage 0) are left out, which makes every bound tighter.
    """
    e = most_linear(line.predicted, line.delta - line.predicted)
    used = weight_advantage != 0
    share = np.abs(weight[used]) / np.abs(weight[used]).sum()
    size, parts = np.abs(kernel[used]), weight_advantage[used, None] * kernel[used]
    bound = np.abs(line.delta[e]) / (line.eta[e] * bound_c * np.abs(weight[used]).sum())
    largest, mean = size.max(axis=0), share @ size
    signed = parts.sum(axis=0)
    return {
        "eta": float(line.eta[e]),
        "probes": int(bound.size),
        "violations_max": float(np.mean(bound > largest)),
        "violations_mean": float(np.mean(bound > mean)),
        "violations_single": float(np.mean(bound[None] > size)),
        "tightness_max": [float(x) for x in np.quantile(bound / largest, QUANTILES)],
        "tightness_mean": [float(x) for x in np.quantile(bound / mean, QUANTILES)],
        "cancellation": float(np.median(np.abs(signed) / np.abs(parts).sum(axis=0))),
        "spearman_mean": spearman(bound, mean),
        "spearman_max": spearman(bound, largest),
        "spearman_norm": spearman(bound, norms),
        "partial_mean_given_norm": partial_spearman(bound, mean, norms),
        "sign_mean_kernel": _agreement(line.delta[e], kernel[used].mean(axis=0)),
        "sign_prediction": _agreement(line.delta[e], signed),
    }


def order_audit(line: Line) -> dict[str, Any]:
    """C5: an eta's median relative remainder and sign agreement; ``sign_agreement`` is that at 1e-3 or the next below."""
    scale = np.median(np.abs(line.predicted), axis=1)
    remainder = np.median(np.abs(line.delta - line.predicted), axis=1)
    signs = [_agreement(delta, line.first) for delta in line.delta]
    small = line.eta <= SIGN_ETA * (1 + 1e-9)
    at = int(np.argmax(np.where(small, line.eta, -np.inf)))
    return {
        "eta": [float(x) for x in line.eta],
        "relative_remainder": [float(x) for x in remainder / np.where(scale > 0, scale, np.nan)],
        "sign_by_eta": signs,
        "sign_agreement": signs[at],
        "sign_agreement_below": float(np.min(np.array(signs)[small])),
    }


def naive_violations(
    measured: Float[np.ndarray, " M"],
    lr: float,
    kernel: Float[np.ndarray, "N M"],
    weight: Float[np.ndarray, " N"],
    bound_c: float,
) -> float:
    """C9: share of probe rows whose mean bound breaks when Eq. 4 is read with ``eta = lr`` under Adam."""
    size = np.abs(weight)
    return float(np.mean(np.abs(measured) / (lr * bound_c) > size @ np.abs(kernel)))


def _agreement(a: Float[np.ndarray, " M"], b: Float[np.ndarray, " M"]) -> float:
    return float(np.mean(np.sign(a) == np.sign(b)))


def _regression(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Least-squares slope with intercept, and R^2; NaN when x is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    if not dx.any() or not dy.any():
        return float("nan"), float("nan")
    slope = (dx @ dy) / (dx @ dx)
    return float(slope), float(slope**2 * (dx @ dx) / (dy @ dy))
