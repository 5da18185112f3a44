"""Rows that move nothing although their kernel is large: groups whose rewards are all equal (SCIENCE.md C11).

An advantage is a difference within a group, so a group that is all right or all wrong has advantage
exactly 0. Its gradients may overlap with a probe's as much as any other's; the step does not contain
them. A change of 0 therefore says nothing about a kernel entry.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl.influence.batch import batch_gradient
from jaxrl.influence.sweep import line_sweep
from jaxrl.types import Rows, Term

LISTED = 20


def silent_rows(term: Term) -> Bool[np.ndarray, " N"]:
    """Rows whose advantage is 0 on every response token."""
    return ~np.any((np.asarray(term.batch.advantage) != 0) & np.asarray(term.batch.rows.mask()), axis=1)


def silent_audit(
    model: Any,
    term: Term,
    probe: Rows,
    kernel: Float[np.ndarray, "N M"],
    weight_advantage: Float[np.ndarray, " N"],
    norms: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " M"]],
    *,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """C11: how many rows of the batch are silent, how large their kernel is, and that they move nothing.

    Every row of ``term`` has a response; ``weight_advantage`` is what the loss multiplies each kernel
    row with, ``norms`` are of the gradients on both sides. ``change`` is the largest change of a
    probe row after a step of size 1 on the silent rows alone, ``contribution`` the largest ``|w A K|``
    of a silent pair: both must be 0. ``large_pairs``: silent pairs with ``|K|`` above the median of
    the other rows' pairs. ``pairs`` lists those with the largest ``|K|``.
    """
    silent = silent_rows(term)
    step = jax.tree.map(jnp.negative, batch_gradient(model, (_only(term, silent),), temperature=temperature))
    size, effect = np.abs(kernel), weight_advantage[:, None] * kernel
    usual = float(np.median(size[~silent])) if not silent.all() else float("nan")
    quiet = [bool(silent[group].all()) for group in _groups(term.batch.rows)]
    return {
        "rows": len(silent),
        "silent_rows": int(silent.sum()),
        "share_of_rollouts": float(silent.mean()),
        "groups": len(quiet),
        "silent_groups": sum(quiet),
        "change": float(np.abs(line_sweep(model, step, probe, np.ones(1)).delta).max()),
        "contribution": float(np.abs(effect[silent]).max(initial=0.0)),
        "silent_pairs": int(silent.sum()) * kernel.shape[1],
        "median_other": usual,
        "large_pairs": int(np.sum(size[silent] > usual)),
        "pairs": _largest(silent, kernel, effect, norms),
    }


def _largest(
    silent: Bool[np.ndarray, " N"],
    kernel: Float[np.ndarray, "N M"],
    effect: Float[np.ndarray, "N M"],
    norms: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " M"]],
) -> list[dict[str, float]]:
    """The silent pairs with the largest ``|K|``: batch row, probe row, ``K``, cosine, and ``w A K``."""
    rows = np.flatnonzero(silent)
    order = np.argsort(-np.abs(kernel[rows]), axis=None, kind="stable")[:LISTED]
    found = []
    for i, j in zip(rows[order // kernel.shape[1]], order % kernel.shape[1], strict=True):
        scale = norms[0][i] * norms[1][j]
        cosine = kernel[i, j] / scale if scale > 0 else 0.0
        pair = {"row": int(i), "probe": int(j), "K": kernel[i, j], "cosine": cosine, "change": effect[i, j]}
        found.append({name: value if isinstance(value, int) else float(value) for name, value in pair.items()})
    return found


def _groups(rows: Rows) -> list[Bool[np.ndarray, " N"]]:
    """Which rows answer each prompt."""
    tokens, start = np.asarray(rows.tokens), np.asarray(rows.start)
    prompts = [tuple(t[:s].tolist()) for t, s in zip(tokens, start, strict=True)]
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    group = np.array([number[prompt] for prompt in prompts])
    return [group == i for i in range(len(number))]


def _only(term: Term, keep: Bool[np.ndarray, " N"]) -> Term:
    """The term with weight 0 on all other rows: its shape, and so its compiled program, stays."""
    weight = jnp.where(jnp.asarray(keep)[:, None], term.batch.weight, 0)
    return Term(dataclasses.replace(term.batch, weight=weight), term.loss)
