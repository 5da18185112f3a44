"""The step that the optimiser really takes, explained by gradients (SCIENCE.md C9, C10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl.influence.batch import batch_gradient
from jaxrl.influence.gradients import predicted_change
from jaxrl.influence.precondition import current_rate, step_parts
from jaxrl.influence.sweep import LR_FACTORS, Line, line_sweep
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.stats import pearson
from jaxrl.types import Rows, Term


class Step:
    """One optimiser step, not yet taken: gradient, parameter change and learning rate.

    A schedule that has run out, as after a run's last update, is replaced by its peak rate.
    """

    def __init__(
        self,
        spec: Optimiser,
        model: Any,
        opt_state: Any,
        terms: tuple[Term, ...],
        reference: Any = None,
        *,
        total: int,
        temperature: float = 1.0,
    ) -> None:
        if not float(current_rate(spec, opt_state, total=total)) > 0:  # the schedule has run out
            spec = dataclasses.replace(spec, schedule="constant", warmup=0)
        self.spec, self.model, self.opt_state, self.total = spec, model, opt_state, total
        self.gradient = batch_gradient(model, terms, reference, temperature=temperature, microbatch=spec.microbatch)
        tx = make_optimiser(spec, total=total)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python scalars into every dtype
            self.change, _ = jax.jit(tx.update)(self.gradient, opt_state, model)
        self.lr = float(current_rate(spec, opt_state, total=total))


def step_account(step: Step, probe: Rows) -> tuple[dict[str, Any], Line]:
    """C9: what each part of the step does to the probe, and how far the first order carries.

    ``residual``: ``max_j |sum of parts - g_j . dtheta|`` over ``max_j |g_j . dtheta|``, the parts by
    formula, the step by optax. ``parts``: root mean square over probe rows (nats) and share, the
    projection on the whole prediction (shares sum to 1). ``relative_remainder``: median ``|Delta -
    prediction|`` over median ``|prediction|`` an lr, the step being proportional to lr.
    """
    parts = step_parts(step.spec, step.model, step.opt_state, step.gradient, total=step.total)
    effects = {name: _host(predicted_change(step.model, part, probe)) for name, part in parts.items()}
    whole = _host(predicted_change(step.model, step.change, probe))
    size = np.abs(whole).max()
    if not size > 0:
        raise ValueError(
            "the optimiser step moves no probe row to first order: zero gradient, momentum and decay, or lr 0"
        )
    line = line_sweep(step.model, jax.tree.map(lambda d: d / step.lr, step.change), probe, step.lr * LR_FACTORS)
    scale = np.median(np.abs(line.predicted), axis=1)
    remainder = np.median(np.abs(line.delta - line.predicted), axis=1)
    return {
        "lr": step.lr,
        "residual": float(np.abs(sum(effects.values()) - whole).max() / size),
        "parts": {name: {"rms": _rms(e), "share": float(e @ whole / (whole @ whole))} for name, e in effects.items()},
        "lr_grid": [float(x) for x in line.eta],
        "relative_remainder": [float(x) for x in remainder / scale],
    }, line


def explained(
    model: Any, later: Mapping[int, Any], probe: Rows, step: Step | None = None
) -> dict[str, dict[str, float]]:
    """C10: how much of the probe's real change ``g_j . dtheta`` explains, after 1 step and after h steps.

    ``later`` maps h to the parameters h steps after ``model``; ``step`` adds h = 1. A row: Pearson
    ``correlation``, ``explained`` (1 - sum of squared errors over sum of squares) and
    ``relative_error`` (the root of what is left).
    """
    ends = dict(later) if step is None else {1: jax.tree.map(jnp.add, model, step.change)} | dict(later)
    found = {}
    for h in sorted(ends):
        direction = jax.tree.map(lambda a, b: a.astype(b.dtype) - b, ends[h], model)
        line = line_sweep(model, direction, probe, np.ones(1))
        measured, predicted = line.delta[0], line.first
        left = float(np.sum((measured - predicted) ** 2) / np.sum(measured**2)) if measured.any() else float("nan")
        found[str(h)] = {
            "correlation": pearson(measured, predicted),
            "explained": 1 - left,
            "relative_error": float(np.sqrt(left)),
            "median_ratio": float(np.median(measured / np.where(predicted == 0, np.nan, predicted))),
        }
    return found


def against_sgd(change: Float[np.ndarray, " M"], sgd: Float[np.ndarray, " M"]) -> dict[str, float]:
    """C9: the optimiser's real changes against the plain-gradient prediction: Pearson r and sign agreement."""
    return {"correlation": pearson(change, sgd), "sign": float(np.mean(np.sign(change) == np.sign(sgd)))}


def _host(x: Any) -> Float[np.ndarray, " M"]:
    return np.asarray(x, np.float64)


def _rms(x: Float[np.ndarray, " M"]) -> float:
    return float(np.sqrt(np.mean(x**2)))
