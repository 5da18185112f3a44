"""Why the mean square change of the probe grew: longer steps, longer gradients, or alignment (SCIENCE.md C14).

To first order a step changes row j by ``g_j . dtheta``, so the mean square change is the product of the
squared size of the step, the mean squared gradient norm and the mean squared cosine between them;
two factors make that exact. Their logarithms add up, and so do those of what changed between steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

PARTS = ("update", "norms", "cosine", "coupling", "remainder")


def attribution(
    change: Float[np.ndarray, "T M"],
    first: Float[np.ndarray, "T M"],
    sq_norms: Float[np.ndarray, "T M"],
    update_sq: Float[np.ndarray, " T"],
) -> dict[str, Any]:
    """C14: ``log mean Delta^2`` at every step as a sum of five logarithms, and what each added from step to step.

    ``change`` is measured, ``first = g_j . dtheta`` (nats), ``sq_norms = |g_j|^2``, ``update_sq =
    |dtheta|^2``. ``update``: ``log |dtheta|^2``; ``norms``: ``log mean |g|^2``; ``cosine``: ``log mean
    cos^2``; ``coupling``: ``log`` of ``mean(|g|^2 cos^2)`` over the product of both means (rows with
    longer gradients being better aligned); ``remainder``: ``log(mean Delta^2 / mean first^2)``, what the
    first order leaves. ``parts [5 T]`` sum to ``total [T]`` up to ``residual``; ``steps [5 T-1]`` are their
    differences. ``largest_cos2`` must not exceed 1: norms, step and prediction are of one model.

    Raises ``ValueError`` where a step moved nothing, which has no logarithm.
    """
    change, first, sq_norms = (np.asarray(x, np.float64) for x in (change, first, sq_norms))
    update_sq = np.asarray(update_sq, np.float64)
    moved = np.mean(change**2, axis=1)
    for name, size in (("change", moved), ("first", np.mean(first**2, axis=1)), ("update_sq", update_sq)):
        if not (size > 0).all():
            raise ValueError(f"{name}: entry {int(np.argmin(size > 0))} is 0 on every row; leave such steps out")
    scale = sq_norms * update_sq[:, None]
    cos2 = np.divide(first**2, scale, out=np.zeros_like(first), where=scale > 0)
    norms, cosine = sq_norms.mean(axis=1), cos2.mean(axis=1)
    explained = np.mean(first**2, axis=1)
    factors = (update_sq, norms, cosine, explained / (update_sq * norms * cosine), moved / explained)
    parts, total = np.log(np.stack(factors)), np.log(moved)
    return {
        "total": total.tolist(),
        "parts": {name: part.tolist() for name, part in zip(PARTS, parts, strict=True)},
        "steps": {name: np.diff(part).tolist() for name, part in zip(PARTS, parts, strict=True)},
        "growth": {
            name: float(part[-1] - part[0]) for name, part in zip((*PARTS, "total"), (*parts, total), strict=True)
        },
        "residual": float(np.abs(parts.sum(axis=0) - total).max()),
        "largest_cos2": float(cos2.max()),
        "rows": change.shape[1],
    }
