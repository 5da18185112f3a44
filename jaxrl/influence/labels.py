"""Kernels by what is known of their rows: cosines within and across labels, and the order to draw them in.

Plain numpy. A label is anything that compares equal; None says that nothing is known, and pairs
with such a row are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

FEW = 3  # distinct labels up to which every pair of labels gets a line of its own


def label_blocks(
    cosine: Float[np.ndarray, "n m"], a: Sequence[Any], b: Sequence[Any], *, itself: bool
) -> dict[str, dict[str, float]]:
    """Cosines of pairs with the ``same`` label and of pairs ``cross`` labels, and with few labels of each pair of them.

    Each has ``pairs``, ``mean_cos``, ``mean_abs_cos`` and ``negative`` (a share); blocks without pairs are left out.
    ``itself``: both sides are the same rows, so that every pair counts once and no row with itself.
    """
    cosine = np.asarray(cosine, np.float64)
    values = list(dict.fromkeys([v for v in (*a, *b) if v is not None]))
    left, right = _numbered(a, values), _numbered(b, values)
    counts = (left[:, None] >= 0) & (right[None, :] >= 0)
    if itself:
        counts &= np.triu(np.ones(cosine.shape, bool), 1)
    same = left[:, None] == right[None, :]
    picks = {"same": counts & same, "cross": counts & ~same}
    if 1 < len(values) <= FEW:
        picks |= {
            f"{x}, {y}": counts & _between(left, right, i, j, either=itself)
            for i, x in enumerate(values)
            for j, y in enumerate(values)
            if not (itself and j < i)
        }
    return {name: _summary(cosine[pick]) for name, pick in picks.items() if pick.any()}


def label_order(labels: Sequence[Any], *more: Sequence[Any]) -> Int[np.ndarray, " n"]:
    """Indices that bring equal labels together, in order of first appearance; within them by ``more``, then as given."""
    ranks = [_numbered(values, list(dict.fromkeys(values))) for values in (labels, *more)]
    return np.lexsort(ranks[::-1])


def _numbered(labels: Sequence[Any], values: list[Any]) -> Int[np.ndarray, " n"]:
    """The place of each label among ``values``, -1 where it is not there."""
    place = {value: i for i, value in enumerate(values)}
    return np.array([place.get(label, -1) for label in labels], np.int64)


def _between(
    left: Int[np.ndarray, " n"], right: Int[np.ndarray, " m"], i: int, j: int, *, either: bool
) -> Bool[np.ndarray, "n m"]:
    found = (left == i)[:, None] & (right == j)[None, :]
    return found | ((left == j)[:, None] & (right == i)[None, :]) if either else found


def _summary(chosen: Float[np.ndarray, " k"]) -> dict[str, float]:
    return {
        "pairs": len(chosen),
        "mean_cos": float(chosen.mean()),
        "mean_abs_cos": float(np.abs(chosen).mean()),
        "negative": float(np.mean(chosen < 0)),
    }
