"""Steps of many sizes along known directions: what really happens beside the first and second order (SCIENCE.md C3, C5).

The model moves to ``theta + eta d`` for a grid of ``eta``, every probe row is scored again, and the
two derivatives along ``d`` are taken once at ``theta``. Three compiled programs (a row's gradient, both
derivatives, a move) serve all directions and step sizes.
"""

from __future__ import annotations

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
    first, second = (_host(x) for x in _derivatives(model, direction, probe, logps))
    # the unmoved scores by the same program, so that a step of size 0 changes exactly nothing
    found = np.stack([moved_scores(model, direction, e, probe, logps=logps) for e in (0.0, *eta)])
    return Line(eta, found[1:] - found[:1], first, second, found[0])


def moved_scores(
    model: Any, direction: Any, eta: float, probe: Rows, *, logps: Logps = token_logps
) -> Float[np.ndarray, " M"]:
    """Summed log-prob of every probe row at ``theta + eta d``, in the parameters' own arithmetic."""
    return _host(_moved(model, direction, np.float64(eta), probe, logps))  # one type of number: one program


def pair_sweep(
    model: Any,
    train: Rows,
    advantage: Float[np.ndarray, " N"],
    probe: Rows,
    eta: Float[np.ndarray, " E"] = PAIR_ETAS,
    *,
    logps: Logps = token_logps,
) -> Pairs:
    """Every training row alone against every probe row."""
    eta, advantage = np.asarray(eta, np.float64), np.asarray(advantage, np.float64)
    weights = row_weights(train)
    lines = []
    for n, a in enumerate(advantage):
        gradient = _gradient(model, train[n], weights[n], logps=logps)
        lines.append(line_sweep(model, gradient, probe, eta * a, logps=logps))
    return Pairs(
        eta,
        np.stack([line.delta for line in lines], axis=1),
        np.stack([line.first for line in lines]),
        advantage,
        np.stack([line.curvature for line in lines], axis=1),
        lines[0].scores,
    )


def stratified(n: int) -> Float[np.ndarray, " n"]:
    """``n`` advantages, in turn those that binary groups of eight produce (both signs of the common ones)."""
    return np.resize(np.array(STRATA), n)


_gradient = partial(jax.jit, static_argnames=("logps",))(one_gradient)


@partial(jax.jit, static_argnames=("logps",))
def _moved(model: Any, direction: Any, step: float, probe: Rows, logps: Logps) -> Float[Array, " M"]:
    """Probe scores after a step along ``direction``."""
    moved = jax.tree.map(lambda p, d: p + jnp.asarray(step, d.dtype) * d, model, direction)
    return scores(moved, probe, row_weights(probe), logps)


@partial(jax.jit, static_argnames=("logps",))
def _derivatives(
    model: Any, direction: Any, probe: Rows, logps: Logps
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """First and second derivative of every probe score along ``direction``."""
    weights = row_weights(probe)

    def slope(m: Any) -> Array:
        return jax.jvp(lambda q: scores(q, probe, weights, logps), (m,), (direction,))[1]

    return jax.jvp(slope, (model,), (direction,))


def _host(x: Array) -> Float[np.ndarray, " M"]:
    return np.asarray(x, np.float64)
