"""Where an optimiser step comes from: an exact additive account of the parameter change (SCIENCE.md C.0, C9).

Adam's step is not ``lr`` times the gradient, so the plain kernel does not predict it. With
``D = 1 / (sqrt(v_hat) + eps)``, ``v_hat`` taken *after* this step and bias-corrected,

    current   -lr (1 - b1) / (1 - b1^t) D g          the gradient as it came
    clip      -lr (1 - b1) / (1 - b1^t) D (s - 1) g  what clipping by the global norm took away, s its factor
    momentum  -lr b1 / (1 - b1^t) D m                the gradients of earlier steps
    decay     -lr lambda theta                       decoupled weight decay

add up to the change of every parameter. SGD has the same parts with D = 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl.rl.optimiser import Optimiser, learning_rate

PARTS = ("current", "clip", "momentum", "decay")


def step_parts(spec: Optimiser, model: Any, opt_state: Any, gradient: Any, *, total: int) -> dict[str, Any]:
    """The four parts of the coming step, each a pytree like the parameters; their sum is the step.

    ``opt_state`` is the state *before* the step, ``gradient`` that of the loss before clipping,
    ``total`` the run's number of updates, which the schedule needs. Computed in the parameters'
    dtype. Raises ``ValueError`` when the state was not made by ``make_optimiser(spec)``.
    """
    lr, scale, diagonal, moment = _terms(spec, model, opt_state, gradient, total)
    shrink = _clip_factor(spec, gradient)
    return {
        "current": jax.tree.map(lambda d, g: -scale * d * g, diagonal, gradient),
        "clip": jax.tree.map(lambda d, g: -scale * d * (shrink - 1) * g, diagonal, gradient),
        "momentum": jax.tree.map(lambda d, m: -lr * d * m, diagonal, moment),
        "decay": jax.tree.map(lambda p: -lr * spec.weight_decay * p, model),
    }


def preconditioner(spec: Optimiser, model: Any, opt_state: Any, gradient: Any, *, total: int) -> Any:
    """The diagonal P > 0 with which this step acts on the current gradient: ``current = -P g``.

    As ``precondition`` of ``gradient_kernel`` it makes ``sum_i w_i A_i K_ij`` the current batch's part
    of the predicted change. Arguments as in ``step_parts``.
    """
    _, scale, diagonal, _ = _terms(spec, model, opt_state, gradient, total)
    return jax.tree.map(lambda d: scale * d, diagonal)


def current_rate(spec: Optimiser, opt_state: Any, *, total: int) -> Float[Array, ""]:
    """The learning rate of the coming step."""
    return learning_rate(spec, _state(opt_state, optax.ScaleByScheduleState).count, total=total)


def step_sum(parts: dict[str, Any]) -> Any:
    """The parameter change: the sum of all parts."""
    return jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts.values())


def _terms(
    spec: Optimiser, model: Any, opt_state: Any, gradient: Any, total: int
) -> tuple[Float[Array, ""], Float[Array, ""], Any, Any]:
    """Rate, rate of the current gradient, the diagonal D, and the past's share of the moment over its correction."""
    dtype = jax.tree.leaves(model)[0].dtype
    lr = current_rate(spec, opt_state, total=total).astype(dtype)
    if spec.type == "sgd":
        ones = jax.tree.map(jnp.ones_like, model)
        if not spec.momentum:
            return lr, lr, ones, jax.tree.map(jnp.zeros_like, model)
        trace = _state(opt_state, optax.TraceState).trace
        return lr, lr, ones, jax.tree.map(lambda m: spec.momentum * m.astype(dtype), trace)
    adam = _state(opt_state, optax.ScaleByAdamState)
    t = (adam.count + 1).astype(dtype)
    # optax rounds 1 - b to the parameters' dtype; b ** t is taken there too
    first, second = (1 - jnp.asarray(b, dtype) ** t for b in (spec.b1, spec.b2))
    shrink = _clip_factor(spec, gradient)

    def diagonal(v: Array, g: Array) -> Array:
        after = spec.b2 * v.astype(dtype) + (1 - spec.b2) * (shrink * g) ** 2
        return 1 / (jnp.sqrt(after / second) + spec.eps)

    moment = jax.tree.map(lambda m: spec.b1 * m.astype(dtype) / first, adam.mu)
    return lr, lr * (1 - spec.b1) / first, jax.tree.map(diagonal, adam.nu, gradient), moment


def _clip_factor(spec: Optimiser, gradient: Any) -> Float[Array, ""]:
    """``min(1, clip / |g|)``; 1 without clipping."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
    one = jnp.ones((), norm.dtype)
    return one if spec.clip is None else jnp.where(norm < spec.clip, one, spec.clip / jnp.where(norm > 0, norm, one))


def _state(opt_state: Any, kind: type[Any]) -> Any:
    """The only state of type ``kind`` in a chain of transformations."""
    found = [s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, kind)) if isinstance(s, kind)]
    if len(found) != 1:
        raise ValueError(
            f"opt_state: expected one {kind.__name__}, found {len(found)}; is it the state of make_optimiser for this spec?"
        )
    return found[0]
