"""pass@k and what is said with it: unbiased estimates, intervals, crossings, solvable sets.

Counts are ``c`` correct of ``n`` samples a prompt; curves are over ``m`` prompts. numpy, float64.
Source: the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374); the coverage reading of
Yue et al. (arXiv 2504.13837).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrl import stats

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A mean over prompts at each k: percentile bounds of the cluster bootstrap, ``se`` = sd / sqrt(m)."""

    k: tuple[int, ...]
    value: Floats
    low: Floats
    high: Floats
    se: Floats
    prompts: int

    def at(self, k: int) -> stats.Interval:
        """The point at one k; ``ValueError`` when the curve has none."""
        if k not in self.k:
            raise ValueError(f"pass@k curve: no k={k}; it holds {list(self.k)}")
        i = self.k.index(k)
        return stats.Interval(*(float(x[i]) for x in (self.value, self.low, self.high, self.se)), self.prompts)


@dataclass(frozen=True)
class Crossover:
    """The smallest k at which a paired difference is no longer positive; infinite where there is none."""

    k: float
    low: float
    high: float
    k_max: int

    def __str__(self) -> str:
        low, k, high = (
            f"{x:.3g}" if math.isfinite(x) else f"none <= {self.k_max}" for x in (self.low, self.k, self.high)
        )
        return f"{k} [{low}, {high}]"


@dataclass(frozen=True)
class SolvableSets:
    """How many prompts were solved at least once by whom; ``p`` of McNemar's exact test."""

    both: int
    base_only: int
    new_only: int
    neither: int
    p: float


def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> Floats | float:
    """Probability that at least one of k samples is correct, estimated without bias from c of n.

    ``1 - prod_{i=n-c+1}^{n} (1 - k/i)``, which is ``1 - C(n-c, k) / C(n, k)``. Integers that broadcast;
    a float for scalars. ``ValueError`` unless ``0 <= c <= n`` and ``1 <= k <= n``: no estimate without
    bias exists beyond n. Take n >= 2k for a usable variance (at k = n it is the indicator of c > 0).
    """
    n, c, k = (_integers(name, x) for name, x in (("n", n), ("c", c), ("k", k)))
    n, c, k = np.broadcast_arrays(n, c, k)
    for wrong, message in (
        ((c < 0) | (c > n), "expected 0 <= c <= n correct samples"),
        (k < 1, "expected k >= 1"),
        (k > n, "k is larger than the number of samples n; draw at least k (better 2k) samples a prompt, or lower k"),
    ):
        if wrong.any():
            i = np.unravel_index(np.argmax(wrong), wrong.shape)
            raise ValueError(f"pass_at_k: {message}; got n={n[i]}, c={c[i]}, k={k[i]}")
    values = np.empty(n.shape)
    for n_, k_ in {*zip(n.ravel().tolist(), k.ravel().tolist(), strict=True)}:
        here = (n == n_) & (k == k_)
        factors = np.maximum(1 - k_ / np.arange(n_, 0, -1, dtype=np.float64), 0)
        values[here] = 1 - np.concatenate([[1.0], np.cumprod(factors)])[c[here]]
    return values if values.ndim else float(values)


def exact_pass_at_k(p: ArrayLike, k: ArrayLike) -> Floats | float:
    """``1 - (1 - p)^k`` where the probability p itself is known (it is biased for an estimate c/n)."""
    p, k = np.asarray(p, np.float64), np.asarray(k, np.float64)
    if np.any((p < 0) | (p > 1 + 1e-9)):
        raise ValueError(f"exact_pass_at_k: expected probabilities, got values in [{p.min()}, {p.max()}]")
    with np.errstate(divide="ignore"):
        values = -np.expm1(k * np.log1p(-np.minimum(p, 1.0)))
    return values if values.ndim else float(values)


def curve(c: ArrayLike, n: ArrayLike, ks: Sequence[int], **bootstrap: float) -> Curve:
    """pass@k over prompts from counts ``c [m]`` of ``n`` (a number or ``[m]``)."""
    c, n = np.asarray(c), np.asarray(n)
    return curve_of(pass_at_k(n[..., None], c[:, None], np.asarray(ks)), ks, **bootstrap)


def exact_curve(p: ArrayLike, ks: Sequence[int], **bootstrap: float) -> Curve:
    """pass@k over prompts from exact probabilities ``p [m]``; the interval is over prompts alone."""
    return curve_of(exact_pass_at_k(np.asarray(p)[:, None], np.asarray(ks)), ks, **bootstrap)


def curve_of(values: ArrayLike, ks: Sequence[int], *, draws: int = 2000, level: float = 0.95, seed: int = 0) -> Curve:
    """Mean over prompts of ``values [m K]``: pass@k, or paired differences of it between two models."""
    values = _matrix(values, ks)
    m = len(values)
    means = stats.resampled_sums(values, draws=draws, seed=seed) / m
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    se = values.std(axis=0, ddof=1) / math.sqrt(m) if m > 1 else np.full(len(ks), np.nan)
    return Curve(tuple(int(k) for k in ks), values.mean(axis=0), low, high, se, m)


def split_half_se(correct: ArrayLike, k: int) -> float:
    """Standard error of mean pass@k on a fixed benchmark: sampling noise alone, prompts not resampled.

    ``correct [m n]`` holds the samples' verdicts. ``SE^2 = m^-2 sum (u1 - u2)^2 / 4`` over the estimates
    u1, u2 of the two halves, so k <= n/2: the variance of their mean.
    """
    correct = np.asarray(correct, bool)
    m, half = correct.shape[0], correct.shape[1] // 2
    if k > half:
        raise ValueError(f"split_half_se: k={k} needs n >= {2 * k} samples a prompt, got {correct.shape[1]}")
    first, second = (pass_at_k(half, part.sum(1), k) for part in (correct[:, :half], correct[:, half : 2 * half]))
    return float(np.sqrt(np.sum((first - second) ** 2) / 4) / m)


def crossover(
    new: ArrayLike, base: ArrayLike, ks: Sequence[int], *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Crossover:
    """Where the base overtakes: the smallest k with mean ``new - base <= 0``, interpolated in log k.

    ``new`` and ``base`` are pass@k ``[m K]`` on the same prompts in the same order. Bounds are
    percentiles over resampled prompts, in which "none up to k_max" counts as infinite.
    """
    difference = _matrix(new, ks) - _matrix(base, ks)
    means = stats.resampled_sums(difference, draws=draws, seed=seed)
    crossings = np.array([_first_crossing(row, ks) for row in means])
    low, high = np.quantile(crossings, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return Crossover(_first_crossing(difference.mean(axis=0), ks), float(low), float(high), int(ks[-1]))


def delta_se(base_pass_k: ArrayLike, new_pass_1: ArrayLike) -> tuple[float, float]:
    """Sampling efficiency gap ``pass@k(base) - pass@1(new)``, paired by prompt: ``(mean, sd / sqrt(m))``."""
    gap = np.asarray(base_pass_k, np.float64) - np.asarray(new_pass_1, np.float64)
    return float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap))) if len(gap) > 1 else math.nan


def solvable_sets(c_base: ArrayLike, c_new: ArrayLike) -> SolvableSets:
    """Prompts by whether any of the samples was right, base against new (equal n for both)."""
    base, new = np.asarray(c_base) > 0, np.asarray(c_new) > 0
    base_only, new_only = int((base & ~new).sum()), int((~base & new).sum())
    return SolvableSets(
        int((base & new).sum()), base_only, new_only, int((~base & ~new).sum()), mcnemar(base_only, new_only)
    )


def mcnemar(a: int, b: int) -> float:
    """Exact two-sided p of "discordant pairs fall either way equally often"."""
    n = a + b
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(a, b) + 1)) / 2**n)


def clopper_pearson(c: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided bounds of a proportion from c of n; for c = 0 the upper one is ``1 - (alpha/2)^(1/n)``."""
    if not 0 <= c <= n or n < 1:
        raise ValueError(f"clopper_pearson: expected 0 <= c <= n and n >= 1, got c={c}, n={n}")
    tail = (1 - level) / 2
    high = 1.0 if c == n else _bisect(lambda p: _binomial_cdf(c, n, p) > tail)
    low = 0.0 if c == 0 else 1 - _bisect(lambda q: _binomial_cdf(n - c, n, q) > tail)
    return low, high


def accuracy_histogram(c: ArrayLike, n: int) -> NDArray[np.int64]:
    """Prompts in 12 bins: {0}, (0, .1], ..., (.8, .9], (.9, 1), {1} of c/n. Compare at equal n only."""
    c = _integers("c", c)
    bins = np.minimum(-(-10 * c // n), 10)
    return np.bincount(np.where(c == 0, 0, np.where(c == n, 11, bins)), minlength=12)


def _first_crossing(difference: Floats, ks: Sequence[int]) -> float:
    below = np.flatnonzero(difference <= 0)
    if not len(below):
        return math.inf
    i = below[0]
    if i == 0:
        return float(ks[0])
    above, under = difference[i - 1], difference[i]
    share = above / (above - under)
    return float(ks[i - 1] * (ks[i] / ks[i - 1]) ** share)


def _binomial_cdf(c: int, n: int, p: float) -> float:
    if p <= 0 or p >= 1:
        return 1.0 if p <= 0 or c >= n else 0.0
    i = np.arange(c + 1)
    log_choose = math.lgamma(n + 1) - np.array([math.lgamma(j + 1) + math.lgamma(n - j + 1) for j in i])
    return float(np.exp(log_choose + i * math.log(p) + (n - i) * math.log1p(-p)).sum())


def _bisect(holds: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def _integers(name: str, x: ArrayLike) -> NDArray[np.int64]:
    x = np.asarray(x)
    if x.dtype.kind not in "iub":
        raise ValueError(f"pass_at_k: {name} counts samples; expected integers, got {x.dtype}")
    return x.astype(np.int64)


def _matrix(values: ArrayLike, ks: Sequence[int]) -> Floats:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or values.shape[1] != len(ks) or not len(values):
        raise ValueError(f"pass@k curve: expected values of shape [prompts, {len(ks)}], got {values.shape}")
    return values
