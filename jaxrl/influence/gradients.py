"""Gradients of row scores, and what a parameter change does to the scores to first and second order.

The score of a row is ``phi_i = sum_t w_it log pi(y_it | ...)``, in nats: ``w`` is the response mask
(``sum``), the mask over the response length (``tok``), or any per-token weights. Matmuls run at the
highest precision whatever the platform's default, because kernels are differences of large numbers.

A model is any pytree of arrays together with ``logps(model, rows) -> [N, L]``; the default is the
decoder's ``token_logps``, which forward mode can differentiate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.errors import nearest
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Decoder, with_plain_attention
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows, check_shapes, is_concrete, wide

Logps = Callable[[Any, Rows], Array]
NORMALISE = ("sum", "tok")


def row_weights(rows: Rows, normalise: str = "sum", weights: Array | None = None) -> Float[Array, "N L"]:
    """Per-token weights of a row's score, 0 off the response.

    ``weights [N, L]`` replaces what ``normalise`` would give: 1 (``sum``) or one over the number of
    response tokens (``tok``). Raises ``ValueError`` for an unknown ``normalise`` or another shape.
    """
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != rows.tokens.shape:
            raise ValueError(f"weights: expected one a token, shape {rows.tokens.shape}, got {weights.shape}")
        if is_concrete(weights) and not bool(jnp.all(jnp.isfinite(weights))):
            raise ValueError("weights: they hold NaN or infinity, which every product with their rows would take on")
        weights = weights.astype(wide(weights.dtype))
        return jnp.where(rows.mask(), weights, jnp.zeros((), weights.dtype))
    if normalise not in NORMALISE:
        raise ValueError(f"normalise: {nearest(normalise, NORMALISE)}, got {normalise!r}")
    mask = rows.mask().astype(jnp.result_type(float))
    if normalise == "sum":
        return mask
    return mask / jnp.maximum(rows.response_length(), 1).astype(mask.dtype)[:, None]


def need_finite(model: Any) -> None:
    """``ValueError`` naming the first parameter that holds NaN or infinity."""
    if not is_concrete(model):
        return
    finite = np.asarray(to_host(_finite(jax.tree.leaves(model))))
    if not finite.all():
        bad = [name for name, ok in zip(leaf_names(model), finite, strict=True) if not ok]
        raise ValueError(f"model: {bad[0]} holds NaN or infinity ({len(bad)} of {len(finite)} parameters do)")


@jax.jit
def _finite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])


def checked_temperature(temperature: float | Array) -> float:
    """A temperature as a number; ``ValueError`` unless it is finite and above 0."""
    value = float(temperature)
    if not 0 < value < math.inf:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    return value


@cache
def at_temperature(temperature: float) -> Logps:
    """``token_logps`` at a temperature: one function a value, so that compiled programs are found again."""
    return token_logps if temperature == 1.0 else partial(token_logps, temperature=temperature)


def scores(model: Any, rows: Rows, weights: Float[Array, "N L"], logps: Logps = token_logps) -> Float[Array, " N"]:
    """``sum_t weights * log-prob`` of each row, nats. A decoder attends without fused kernels: they have no forward mode."""
    model = with_plain_attention(model) if isinstance(model, Decoder) else model
    with jax.default_matmul_precision("highest"):
        values = logps(model, rows)
    return jnp.sum(values * weights.astype(values.dtype), axis=-1)


def row_gradients(model: Any, rows: Rows, weights: Float[Array, "N L"], logps: Logps = token_logps) -> Any:
    """The gradient of every row's score: a pytree like ``model`` with a leading axis N.

    Holds N times the parameters; ``gradient_kernel`` calls it on tiles of rows.
    """
    return jax.vmap(partial(one_gradient, logps=logps), (None, 0, 0))(model, rows, weights)


def one_gradient(model: Any, row: Rows, weight: Float[Array, " L"], *, logps: Logps = token_logps) -> Any:
    """The gradient of the score of one row (no leading axis), a pytree like ``model``."""
    row = jax.tree.map(lambda x: x[None], row)
    return jax.grad(lambda m: scores(m, row, weight[None], logps)[0])(model)


def predicted_change(
    model: Any,
    direction: Any,
    rows: Rows,
    *,
    normalise: str = "sum",
    weights: Array | None = None,
    chunk: int | None = None,
    logps: Logps = token_logps,
) -> Float[Array, " M"]:
    """First-order change of each row's score when ``direction`` is added to the parameters, nats.

    ``direction`` is a pytree like the parameters, at any scale: it is brought to O(1) for the
    tangent and the result is scaled back, so that steps of 1e-9 lose nothing. One forward-mode
    pass; ``chunk`` bounds the rows of a pass, ``weights`` are per-token weights instead of
    ``normalise``. A row without response tokens changes by 0. Attention or heads that only have a
    reverse rule (fused kernels) refuse forward mode: ``directional.reverse_change`` gives the same there.

    Raises ``ValueError`` when there are no rows or a leaf of ``direction`` does not fit.
    """
    need_rows(rows, "rows", model)
    tangent, scale = unit_tangent(model, direction)
    first = _directional(model, tangent, rows, row_weights(rows, normalise, weights), logps, chunk, 1)
    return first * scale.astype(first.dtype)


def second_order(
    model: Any,
    direction: Any,
    rows: Rows,
    *,
    normalise: str = "sum",
    weights: Array | None = None,
    chunk: int | None = None,
    logps: Logps = token_logps,
) -> Float[Array, " M"]:
    """``d^T H_j d / 2`` of each row's score along ``direction``, nats: the term after ``predicted_change``.

    ``H_j`` is the Hessian of row j's score; one forward-over-forward pass, no Hessian is formed.
    """
    need_rows(rows, "rows", model)
    tangent, scale = unit_tangent(model, direction)
    curvature = _directional(model, tangent, rows, row_weights(rows, normalise, weights), logps, chunk, 2)
    return curvature * jnp.square(scale).astype(curvature.dtype) / 2


@jax.jit
def parameter_change(after: Any, before: Any) -> Any:
    """``after - before`` of two pytrees of masters, in at least float32: what ``predicted_change`` takes.

    Taken of parameters in a compute dtype, the difference would miss most of a small update.
    """
    return jax.tree.map(lambda a, b: a.astype(wide(a.dtype)) - b.astype(wide(b.dtype)), after, before)


@partial(jax.jit, static_argnames=("logps", "chunk", "order"))
def _directional(
    model: Any, tangent: Any, rows: Rows, weights: Array, logps: Logps, chunk: int | None, order: int
) -> Float[Array, " M"]:
    """The first or second derivative of every score along ``tangent``."""

    def along(rows: Rows, weights: Array) -> Array:
        def first(m: Any) -> Array:
            return jax.jvp(lambda q: scores(q, rows, weights, logps), (m,), (tangent,))[1]

        return first(model) if order == 1 else jax.jvp(first, (model,), (tangent,))[1]

    n = rows.start.shape[0]
    if chunk is None or chunk >= n:
        return along(rows, weights)

    def one(row: Rows, weight: Array) -> Array:
        return along(jax.tree.map(lambda x: x[None], row), weight[None])[0]

    return jax.lax.map(lambda x: one(*x), (rows, weights), batch_size=chunk)


@jax.jit
def _scaled(leaves: list[Array]) -> tuple[list[Array], Array]:
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
    scale = jnp.where(largest > 0, largest, jnp.ones((), largest.dtype))
    return [x / scale for x in leaves], scale


def unit_tangent(model: Any, direction: Any) -> tuple[Any, Float[Array, ""]]:
    """``direction`` over its largest absolute entry, in the parameters' dtypes, and that entry."""
    direction = fitted(model, direction, "direction")
    dtype = wide(*(x.dtype for x in jax.tree.leaves(direction)))
    leaves, scale = _scaled([jnp.asarray(x).astype(dtype) for x in jax.tree.leaves(direction)])
    leaves = [d.astype(p.dtype) for d, p in zip(leaves, jax.tree.leaves(model), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves), scale


def leaf_names(tree: Any) -> list[str]:
    """Dotted names of the leaves in order: ``embed``, ``layers.q``, ..."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return [path.removesuffix(".value") for path in paths]


def fitted(model: Any, tree: Any, name: str) -> Any:
    """``tree`` in the structure of ``model``; ``ValueError`` naming the leaf that is missing or misshapen."""
    have, want = leaf_names(tree), leaf_names(model)
    for leaf in want:
        if leaf not in have:
            raise ValueError(f"{name}: the parameter {leaf!r} is missing; give a pytree like the model")
    for leaf in have:
        if leaf not in want:
            raise ValueError(f"{name}: the model has no parameter {leaf!r}; {nearest(leaf, want)}")
    leaves = dict(zip(have, jax.tree.leaves(tree), strict=True))
    for leaf, value in zip(want, jax.tree.leaves(model), strict=True):
        if leaves[leaf].shape != value.shape:
            raise ValueError(f"{name}: {leaf} has shape {leaves[leaf].shape}, the model's is {value.shape}")
    return jax.tree.unflatten(jax.tree.structure(model), [leaves[leaf] for leaf in want])


def need_rows(rows: Rows, name: str, model: Any, *, responses: bool = False) -> None:
    """``ValueError`` when ``rows`` is empty, malformed, or (``responses``) holds a row without a response token."""
    if rows.start.ndim != 1:
        raise ValueError(f"{name}: expected rows with one leading axis, got {rows.start.shape}; use rows.flat()")
    if rows.start.shape[0] == 0:
        raise ValueError(f"{name}: there are no rows; give at least one")
    if not is_concrete(rows):
        return
    check_shapes(rows, vocab_size=model.config.vocab_size if isinstance(model, Decoder) else None)
    if not responses:
        return
    limit = model.config.vocab_limit if isinstance(model, Decoder) else None
    if limit is not None and bool(jnp.any(rows.mask() & (rows.tokens >= limit))):
        row, at = np.argwhere(np.asarray(rows.mask() & (rows.tokens >= limit)))[0]
        raise ValueError(
            f"{name}: row {row} is scored on id {rows.tokens[row, at]}, which the vocabulary limit of {limit} excludes: "
            "its probability is 0 and has no gradient"
        )
    empty = jnp.flatnonzero(rows.response_length() == 0)
    if empty.size:
        raise ValueError(
            f"{name}: row {int(empty[0])} has no response token ({empty.size} of {rows.start.shape[0]} rows have none); "
            "its score is constant and its gradient 0, so leave such rows out"
        )
