"""Intervals and tests: the prompt is the cluster within a run, the seed is the unit between runs.

numpy only, in float64. Nothing here knows what the numbers mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EXACT_FLIPS = 20  # up to 2^20 sign vectors are enumerated
_RANDOM_FLIPS = 100_000
_BLOCK = 1 << 22  # bootstrap weights held at once

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its bounds and standard error; ``n`` is the number of independent units behind it."""

    value: float
    low: float
    high: float
    se: float
    n: int


def by_prompt(values: ArrayLike, uid: ArrayLike, mask: ArrayLike | None = None) -> tuple[Floats, Floats]:
    """``(totals [m], counts [m])`` of ``values [n]`` over the prompts in ``uid [n]``, in order of uid.

    A prompt whose values are all masked out stays, with count 0: it belongs to the probe.
    """
    values, uid = np.asarray(values, np.float64), np.asarray(uid)
    keep = np.ones(values.shape, bool) if mask is None else np.asarray(mask, bool)
    if not values.shape == uid.shape == keep.shape or values.ndim != 1:
        raise ValueError(
            f"by_prompt: expected values, uid and mask of one length, got {values.shape}, {uid.shape} and {keep.shape}"
        )
    prompts, index = np.unique(uid, return_inverse=True)
    totals = np.bincount(index, np.where(keep, values, 0), len(prompts))
    return totals, np.bincount(index, keep.astype(np.float64), len(prompts))


def cluster_ratio(totals: ArrayLike, counts: ArrayLike) -> tuple[float, float]:
    """``theta = sum S_x / sum N_x`` over prompts, and its cluster-robust standard error.

    ``SE = sqrt(m/(m-1) * sum (S_x - theta N_x)^2) / sum N_x``; m counts the prompts with N_x = 0 too.
    NaN where nothing was counted; the error is NaN for a single prompt.
    """
    totals, counts = np.asarray(totals, np.float64), np.asarray(counts, np.float64)
    m, count = len(totals), counts.sum()
    if not count:
        return math.nan, math.nan
    theta = totals.sum() / count
    if m < 2:
        return float(theta), math.nan
    return float(theta), float(np.sqrt(m / (m - 1) * np.sum((totals - theta * counts) ** 2)) / count)


def cluster_bootstrap(
    values: ArrayLike, uid: ArrayLike | None = None, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Mean of ``values [n]`` with a percentile interval from resampling prompts with all their values.

    ``uid [n]`` names the prompt of each value; without it each value is a prompt of its own. ``se`` is
    the standard deviation of the bootstrap means.
    """
    values = np.asarray(values, np.float64)
    totals, counts = by_prompt(values, np.arange(len(values)) if uid is None else uid)
    return bootstrap_ratio(totals, counts, draws=draws, level=level, seed=seed)


def bootstrap_ratio(
    totals: ArrayLike, counts: ArrayLike, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """``sum S_x / sum N_x`` with a percentile interval over resampled prompts."""
    totals, counts = np.asarray(totals, np.float64), np.asarray(counts, np.float64)
    if totals.shape != counts.shape or totals.ndim != 1 or not len(totals):
        raise ValueError(f"bootstrap: expected one total and one count a prompt, got {totals.shape} and {counts.shape}")
    sums = resampled_sums(np.stack([totals, counts], 1), draws=draws, seed=seed)
    counted = sums[:, 1] > 0
    ratios = sums[counted, 0] / sums[counted, 1]
    value = cluster_ratio(totals, counts)[0]
    if not len(ratios):
        return Interval(value, math.nan, math.nan, math.nan, len(totals))
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), float(ratios.std()), len(totals))


def resampled_sums(values: ArrayLike, *, draws: int = 2000, seed: int = 0) -> Floats:
    """Sums of ``values [m K]`` over ``draws`` resamples of its rows with replacement, ``[draws K]``.

    One stream a seed: two calls with equal m, draws and seed resample the same rows, so that their
    differences are paired.
    """
    values = np.asarray(values, np.float64)
    m, rng = len(values), np.random.default_rng(seed)
    step = max(1, _BLOCK // m)
    sizes = [min(step, draws - start) for start in range(0, draws, step)]
    return np.concatenate([rng.multinomial(m, np.full(m, 1 / m), size) @ values for size in sizes])


def sign_flip_test(differences: ArrayLike, *, seed: int = 0) -> float:
    """Two-sided p of "the differences are symmetric about 0", by the mean over all sign flips.

    Exact up to 20 differences; beyond, over 100,000 random flips, the observed one among them.
    """
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or not len(d):
        raise ValueError(f"sign_flip_test: expected one difference a seed, got shape {d.shape}")
    observed = abs(d.sum())
    slack = 1e-12 * np.abs(d).sum()  # the same sum in another order
    if len(d) > _EXACT_FLIPS:
        signs = 2.0 * np.random.default_rng(seed).integers(0, 2, (_RANDOM_FLIPS, len(d))) - 1
        return float((1 + np.sum(np.abs(signs @ d) >= observed - slack)) / (1 + _RANDOM_FLIPS))
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return float(np.mean(np.abs(sums) >= observed - slack))


def paired_t(differences: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of paired differences, one a seed, with Student's t interval."""
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or len(d) < 2:
        raise ValueError(f"paired_t: expected at least 2 differences, got shape {d.shape}")
    mean, se = float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d)))
    half = t_quantile((1 + level) / 2, len(d) - 1) * se
    return Interval(mean, mean - half, mean + half, se, len(d))


def t_cdf(t: float, dof: int) -> float:
    """P(T <= t) of Student's t with an integer number of degrees of freedom (Abramowitz & Stegun 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(dof))
    sin, cos = math.sin(theta), math.cos(theta)
    term, total = (cos, 0.0) if dof % 2 else (1.0, 0.0)
    for i in range(3 if dof % 2 else 2, dof + 1, 2):
        total += term
        term *= cos * cos * (i - 1) / i
    central = 2 / math.pi * (theta + sin * total) if dof % 2 else sin * total
    return 0.5 + central / 2


def t_quantile(p: float, dof: int) -> float:
    """The t with ``t_cdf(t, dof) = p``, for 0.5 <= p < 1."""
    low, high = 0.0, 1.0
    while t_cdf(high, dof) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, dof) < p else (low, middle)
    return (low + high) / 2


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Correlation of two series; NaN where one is constant."""
    x, y = (np.asarray(v, np.float64) - np.mean(np.asarray(v, np.float64)) for v in (x, y))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else math.nan


def ranks(x: ArrayLike) -> Floats:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, index, counts = np.unique(np.asarray(x, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[index]


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Correlation of the ranks."""
    return pearson(ranks(x), ranks(y))


def partial_spearman(x: ArrayLike, y: ArrayLike, z: ArrayLike) -> float:
    """Rank correlation of x and y given z: ``(r_xy - r_xz r_yz) / sqrt((1 - r_xz^2)(1 - r_yz^2))``."""
    xy, xz, yz = spearman(x, y), spearman(x, z), spearman(y, z)
    rest = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / math.sqrt(rest) if rest > 0 else math.nan


def pair_differences(series: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """``(series[j] - series[i], j - i)`` over all pairs of checkpoints i < j."""
    series = np.asarray(series, np.float64)
    i, j = np.triu_indices(len(series), 1)
    return series[j] - series[i], j - i


def effective_sample_size(weights: ArrayLike) -> float:
    """``(sum w)^2 / sum w^2``: how many equal weights would be worth as much."""
    w = np.asarray(weights, np.float64)
    square = float(np.sum(w * w))
    return float(w.sum()) ** 2 / square if square else 0.0
