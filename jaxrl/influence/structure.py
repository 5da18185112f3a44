"""What a kernel says beyond its size: how entangled and how many-dimensional gradients are (SCIENCE.md A.4).

Magnitude and structure are different things: multiplying all gradients by a number changes trace
and norms, and leaves cosines and ranks alone. Plain numpy.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int


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
        "erank_cos": effective_rank(np.maximum(np.linalg.eigvalsh(cosine), 0)) / n,
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
