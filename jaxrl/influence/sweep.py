"""Steps of many sizes along known directions: what really happens beside the first and second order (SCIENCE.md C3, C5).

The model moves to ``theta + eta d`` for a grid of ``eta``, every probe row is scored again, and the
two derivatives along ``d`` are taken once at ``theta``. One compiled program serves all directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.influence.gradients import Logps, one_gradient, row_weights, scores
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

# Half decades; pairs reach lower because a single row moves more than a batch mean.
PAIR_ETAS = 10.0 ** np.arange(-2, -7.25, -0.5)
BATCH_ETAS = 10.0 ** np.arange(-1, -6.25, -0.5)
LR_FACTORS = 10.0 ** np.arange(1, -4.25, -0.5)

# |A| of groups of eight: all equal, 1 of 8, half right, and the rare side of 2 of 8 and 1 of 8.
STRATA = (0.0, 0.353553, -0.353553, 0.5, -0.5, 1.5, 2.474867)


@dataclass(frozen=True)
class Line:
    """Probe scores along one direction: changes ``[E, M]`` at ``eta [E]``, and both derivatives at 0, nats."""

    eta: Float[np.ndarray, " E"]
    delta: Float[np.ndarray, "E M"]
    first: Float[np.ndarray, " M"]
    second: Float[np.ndarray, " M"]  # d^T H d: the second-order term is eta^2 / 2 of it
    scores: Float[np.ndarray, " M"]

    @property
    def predicted(self) -> Float[np.ndarray, "E M"]:
        return self.eta[:, None] * self.first

    @property
    def curvature(self) -> Float[np.ndarray, "E M"]:
        """The second-order term alone."""
        return self.eta[:, None] ** 2 / 2 * self.second


@dataclass(frozen=True)
class Pairs:
    """One training row moves one probe row: ``theta + eta A_n g_n``. Arrays as ``check/pairs.npz`` holds them."""

    eta: Float[np.ndarray, " E"]
    delta: Float[np.ndarray, "E N M"]
    kernel: Float[np.ndarray, "N M"]
    advantage: Float[np.ndarray, " N"]
    second_order: Float[np.ndarray, "E N M"]
    scores: Float[np.ndarray, " M"]

    @property
    def predicted(self) -> Float[np.ndarray, "E N M"]:
        return self.eta[:, None, None] * (self.advantage[:, None] * self.kernel)


def line_sweep(
    model: Any, direction: Any, probe: Rows, eta: Float[np.ndarray, " E"], *, logps: Logps = token_logps
) -> Line:
    """Move ``model`` along ``direction`` (a pytree like it) by every ``eta`` and score ``probe`` (sum log-probs)."""
    eta = np.asarray(eta, np.float64)
    found = _line(model, direction, probe, jnp.asarray(eta, _dtype(model)), logps)
    return Line(eta, *(np.asarray(x, np.float64) for x in found))


def pair_sweep(
    model: Any,
    train: Rows,
    advantage: Float[np.ndarray, " N"],
    probe: Rows,
    eta: Float[np.ndarray, " E"] = PAIR_ETAS,
    *,
    logps: Logps = token_logps,
    progress: Callable[[int, int], None] | None = None,
) -> Pairs:
    """Every training row alone against every probe row. ``progress(done, of)`` is called after each row."""
    eta, advantage = np.asarray(eta, np.float64), np.asarray(advantage, np.float64)
    weights = row_weights(train)
    rows, kernel, curvature, at_zero = [], [], [], None
    for n, a in enumerate(advantage):
        out = _row_line(
            model, train[n], weights[n], jnp.asarray(a, _dtype(model)), probe, jnp.asarray(eta, _dtype(model)), logps
        )
        delta, first, second, at_zero = (np.asarray(x, np.float64) for x in out)
        rows.append(delta)
        kernel.append(first)
        curvature.append((eta[:, None] * a) ** 2 / 2 * second)
        if progress is not None:
            progress(n + 1, len(advantage))
    return Pairs(eta, np.stack(rows, 1), np.stack(kernel), advantage, np.stack(curvature, 1), at_zero)


def stratified(n: int) -> Float[np.ndarray, " n"]:
    """``n`` advantages, in turn those that binary groups of eight produce (both signs of the common ones)."""
    return np.resize(np.array(STRATA), n)


@partial(jax.jit, static_argnames=("logps",))
def _line(model: Any, direction: Any, probe: Rows, eta: Array, logps: Logps) -> tuple[Array, ...]:
    one = jnp.ones((), eta.dtype)
    return _along(model, direction, one, probe, eta, logps)


@partial(jax.jit, static_argnames=("logps",))
def _row_line(
    model: Any, row: Rows, weight: Array, advantage: Array, probe: Rows, eta: Array, logps: Logps
) -> tuple[Array, ...]:
    """As ``_line`` along the row's gradient, stepping ``eta * advantage``; derivatives without the advantage."""
    return _along(model, one_gradient(model, row, weight, logps=logps), advantage, probe, eta, logps)


def _along(
    model: Any, direction: Any, scale: Array, probe: Rows, eta: Array, logps: Logps
) -> tuple[Float[Array, "E M"], Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    weights = row_weights(probe)

    def phi(m: Any) -> Array:
        return scores(m, probe, weights, logps)

    def moved(step: Array) -> Array:
        return phi(jax.tree.map(lambda p, d: p + (step * d).astype(p.dtype), model, direction))

    def slope(m: Any) -> tuple[Array, Array]:
        return jax.jvp(phi, (m,), (direction,))

    (_, first), (_, second) = jax.jvp(slope, (model,), (direction,))
    # the unmoved scores by the same compiled body, so that a step of size 0 changes exactly nothing
    found = jax.lax.map(moved, jnp.concatenate([jnp.zeros(1, eta.dtype), eta * scale]))
    return found[1:] - found[:1], first, second, found[0]


def _dtype(model: Any) -> Any:
    return jax.tree.leaves(model)[0].dtype
