"""What a kernel says beyond its size: how entangled and how many-dimensional gradients are (SCIENCE.md A.4).

Magnitude and structure are different things: multiplying all gradients by a number changes trace
and norms, and leaves cosines and ranks alone. Plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.stats import Interval, resampled_sums

Labels = Sequence[object] | np.ndarray


def structure(values: Float[np.ndarray, "n n"], *, uid: Int[np.ndarray, " n"] | None = None) -> dict[str, float]:
    """Metrics of a symmetric kernel ``G G^T`` of one set of rows with itself.

    ``offdiag_mass``: share of ``sum |K|`` off the diagonal. ``mean_cos``, ``mean_abs_cos``,
    ``negative``: over off-diagonal pairs. ``erank`` (exp of the spectrum's entropy), ``stable``
    (``sum / max``), ``participation`` (``(sum)^2 / sum of squares``), ``top_share``: of the
    eigenvalues of K; ``erank_cos``: of the cosine matrix, over n. ``trace``: mean squared gradient
    norm (trace / n); ``median_norm``. With ``uid`` also the cosine blocks of ``blocks``. Rank
    metrics depend on n: compare only equal n.

    Raises ``ValueError`` for a kernel that is not square or not symmetric.
    """
    k = _symmetric(values)
    n, diagonal = len(k), np.diag(k)
    cosine = cosines(k)
    spectrum = np.maximum(np.linalg.eigvalsh(k), 0)
    total, off = np.abs(k).sum(), ~np.eye(n, dtype=bool)
    metrics = {
        "offdiag_mass": float(np.abs(k[off]).sum() / total) if total > 0 else 0.0,
        **_pairs(cosine, off),
        "erank": effective_rank(spectrum),
        "erank_cos": _erank_share(cosine),
        "stable": float(spectrum.sum() / spectrum.max()) if spectrum.max() > 0 else 0.0,
        "participation": float(spectrum.sum() ** 2 / np.sum(spectrum**2)) if spectrum.max() > 0 else 0.0,
        "top_share": float(spectrum.max() / spectrum.sum()) if spectrum.max() > 0 else 0.0,
        "trace": float(diagonal.mean()),
        "median_norm": float(np.median(np.sqrt(np.maximum(diagonal, 0)))),
    }
    return metrics if uid is None else metrics | blocks(cosine, uid, uid)


def blocks(
    cosine: Float[np.ndarray, "n m"], uid_a: Int[np.ndarray, " n"], uid_b: Int[np.ndarray, " m"]
) -> dict[str, float]:
    """Cosines of pairs with the same prompt and of pairs across prompts, ``same/...`` and ``cross/...``.

    Some same-prompt pairs are negative by force: a prompt's gradients, weighted by probability, sum to
    zero (R3). So the two blocks are never pooled. NaN for a block without pairs; when both sides
    are the same rows the diagonal is left out.
    """
    cosine, uid_a, uid_b = np.asarray(cosine, np.float64), np.asarray(uid_a), np.asarray(uid_b)
    same = uid_a[:, None] == uid_b[None, :]
    off = np.ones(cosine.shape, bool)
    if len(uid_a) == len(uid_b) and np.array_equal(uid_a, uid_b):
        off = ~np.eye(len(uid_a), dtype=bool)
    parts = {"same": same & off, "cross": ~same}
    return {f"{name}/{key}": value for name, pick in parts.items() for key, value in _pairs(cosine, pick).items()}


def label_pairs(labels_a: Labels, labels_b: Labels | None = None) -> dict[str, Bool[np.ndarray, "n m"]]:
    """Which entries of a kernel belong to each pair of labels, ``{"correct/wrong": bool[n, m], ...}``, by name.

    A row labelled ``""`` is in no block, and a block without entries is left out. ``labels_b`` None: both
    sides are the same rows; then the diagonal is in no block, and ``a/b`` and ``b/a`` are one,
    whose mask holds every pair twice.
    """
    a = _named(labels_a)
    b = a if labels_b is None else _named(labels_b)
    masks: dict[str, np.ndarray] = {}
    for x in sorted(set(a) - {""}):
        for y in sorted(set(b) - {""}):
            pick = (a == x)[:, None] & (b == y)[None, :]
            if labels_b is None:
                if y < x:
                    continue
                pick = (pick | pick.T) & ~np.eye(len(a), dtype=bool)
            if pick.any():
                masks[f"{x}/{y}"] = pick
    return masks


def block_interval(
    values: Float[np.ndarray, "n m"],
    pick: Bool[np.ndarray, "n m"],
    uid_a: Int[np.ndarray, " n"],
    uid_b: Int[np.ndarray, " m"] | None = None,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of the picked entries with a 95 % percentile interval over resampled prompts.

    A prompt drawn w times weighs w in each pair with another prompt and in pairs of its own rows: two
    copies of one prompt are never paired, as their cosine of 1 would be one of a row with itself.
    ``n`` of the result counts the prompts that take part; with fewer than two there is no interval (NaN).
    """
    uid_a = np.asarray(uid_a)
    uid_b = uid_a if uid_b is None else np.asarray(uid_b)
    prompts = np.unique(np.concatenate([uid_a, uid_b]))
    left, right = ((uid[:, None] == prompts[None, :]).astype(np.float64) for uid in (uid_a, uid_b))
    sums, counts = (left.T @ np.where(pick, x, 0.0) @ right for x in (np.asarray(values, np.float64), 1.0))
    taking = int(np.sum((counts.sum(axis=0) > 0) | (counts.sum(axis=1) > 0)))
    value, none = float(sums.sum() / counts.sum()) if taking else float("nan"), float("nan")
    if taking < 2:
        return Interval(value, none, none, none, taking)
    weight = _drawn(len(prompts), draws, seed)
    total, count = _resampled(sums, weight), _resampled(counts, weight)
    means = total[count > 0] / count[count > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(value, float(low), float(high), float(means.std()), taking)


def erank_interval(
    cosine: Float[np.ndarray, "n n"], uid: Int[np.ndarray, " n"], *, draws: int = 50, seed: int = 0
) -> Interval:
    """``erank(C) / n`` with a 95 % interval from random halves of the prompts.

    Halves, not resamples with replacement: a repeated row has cosine 1 with its copy and lowers every
    rank. The spread over halves is that of the whole set where variances fall as 1 / prompts. Compare
    equal n only.
    """
    cosine, uid = np.asarray(cosine, np.float64), np.asarray(uid)
    prompts, rng = np.unique(uid), np.random.default_rng(seed)
    value, half = _erank_share(cosine), len(prompts) // 2
    if half < 1:
        return Interval(value, float("nan"), float("nan"), float("nan"), len(prompts))
    found = []
    for _ in range(draws):
        rows = np.flatnonzero(np.isin(uid, rng.choice(prompts, half, replace=False)))
        found.append(_erank_share(cosine[np.ix_(rows, rows)]))
    se = float(np.std(found) * np.sqrt(half / (len(prompts) - half)))
    return Interval(value, value - 1.96 * se, value + 1.96 * se, se, len(prompts))


def null_erank(
    sq_norms: Float[np.ndarray, " n"], parameters: int, *, draws: int = 5, seed: int = 0
) -> dict[str, float]:
    """Mean ``erank`` and ``erank_cos`` (over n) of gradients with these norms and random directions.

    Gram matrices of Gaussian directions in ``parameters`` dimensions, by Bartlett's decomposition of
    the Wishart distribution. Raises ``ValueError`` for fewer parameters than rows.
    """
    norms = np.sqrt(np.maximum(np.asarray(sq_norms, np.float64), 0))
    n, rng = len(norms), np.random.default_rng(seed)
    if parameters < n:
        raise ValueError(f"parameters: {n} random directions need at least as many dimensions, got {parameters}")
    kernels, shares = [], []
    for _ in range(draws):
        root = np.tril(rng.standard_normal((n, n)), -1)
        root[np.diag_indices(n)] = np.sqrt(rng.chisquare(parameters - np.arange(n)))
        cosine = cosines(root @ root.T)
        shares.append(_erank_share(cosine))
        kernels.append(effective_rank(np.maximum(np.linalg.eigvalsh(norms[:, None] * cosine * norms[None, :]), 0)))
    return {"erank": float(np.mean(kernels)), "erank_cos": float(np.mean(shares))}


def cosines(values: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """The kernel over both norms; 0 for a row without gradient."""
    norm = np.sqrt(np.maximum(np.diag(values), 0))
    scale = np.outer(norm, norm)
    return np.where(scale > 0, values / np.where(scale > 0, scale, 1), 0)


def effective_rank(spectrum: Float[np.ndarray, " n"]) -> float:
    """``exp`` of the entropy of the spectrum as a distribution; 0 for a zero spectrum."""
    total = spectrum.sum()
    if not total > 0:
        return 0.0
    share = spectrum[spectrum > 0] / total
    return float(np.exp(-np.sum(share * np.log(share))))


def _erank_share(cosine: Float[np.ndarray, "n n"]) -> float:
    """The effective rank of a cosine matrix over its size."""
    return effective_rank(np.maximum(np.linalg.eigvalsh(cosine), 0)) / len(cosine)


def _resampled(table: Float[np.ndarray, "p p"], weight: Float[np.ndarray, "B p"]) -> Float[np.ndarray, " B"]:
    """Sums of a prompt-by-prompt table in which prompt p was drawn ``weight[b, p]`` times."""
    own = np.diag(table)
    return np.einsum("bp,bp->b", weight @ (table - np.diag(own)), weight) + weight @ own


@cache
def _drawn(prompts: int, draws: int, seed: int) -> Float[np.ndarray, "B p"]:
    """How often each prompt is drawn in each resample: the same for every block of one probe."""
    return resampled_sums(np.eye(prompts), draws=draws, seed=seed)


def _named(labels: Labels) -> np.ndarray:
    return np.array([str(label) for label in np.asarray(labels).tolist()], dtype=object)


def _pairs(cosine: Float[np.ndarray, "n m"], pick: Bool[np.ndarray, "n m"]) -> dict[str, float]:
    chosen = cosine[pick]
    if not chosen.size:
        return {"mean_cos": float("nan"), "mean_abs_cos": float("nan"), "negative": float("nan")}
    return {
        "mean_cos": float(chosen.mean()),
        "mean_abs_cos": float(np.abs(chosen).mean()),
        "negative": float(np.mean(chosen < 0)),
    }


def _symmetric(values: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    k = np.asarray(values, np.float64)
    if k.ndim != 2 or k.shape[0] != k.shape[1] or not len(k):
        raise ValueError(f"kernel: expected the square kernel of rows with themselves, got shape {k.shape}")
    if np.abs(k - k.T).max() > 1e-4 * np.abs(k).max():
        raise ValueError("kernel: not symmetric; were both sides the same rows with the same weights?")
    return (k + k.T) / 2
