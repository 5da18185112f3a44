"""The top of the kernel's spectrum without the kernel (KERNEL.md 1 and 7).

``K v`` is one gradient, of ``sum_i v_i phi_i``, and one directional derivative along it: the cost of
about two training steps on the N rows, whatever N. All of ``K`` costs less while N is below about
six times the row length; beyond that, or when only the largest eigenvalues are asked for, use this.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxrl.influence.gradients import Logps, need_finite, need_rows, predicted_change, row_weights, scores
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows, wide


class Spectrum(NamedTuple):
    """The largest eigenvalues, descending; unit eigenvectors as columns; ``|K u - lambda u|`` of each pair.

    An eigenvalue of ``K`` lies within ``residuals[i]`` of ``eigenvalues[i]``.
    """

    eigenvalues: Float[np.ndarray, " k"]
    eigenvectors: Float[np.ndarray, "N k"]
    residuals: Float[np.ndarray, " k"]


def kernel_vector(
    model: Any,
    rows: Rows,
    v: Float[Array, " N"],
    *,
    normalise: str = "sum",
    weights: Array | None = None,
    chunk: int | None = None,
    logps: Logps = token_logps,
) -> Float[Array, " N"]:
    """``K v`` for the kernel of ``rows`` with themselves, ``K_ij = <grad phi_i, grad phi_j>``.

    Holds one gradient and the activations of ``chunk`` rows (default: all). ``normalise``, ``weights``
    and ``logps`` are those of ``gradient_kernel``. Raises ``ValueError`` when there are no rows or ``v``
    is not one number a row.
    """
    need_rows(rows, "rows", model)
    if jnp.shape(v) != rows.start.shape:
        raise ValueError(f"v: expected one number a row, shape {rows.start.shape}, got {jnp.shape(v)}")
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    return _product(model, rows, row_weights(rows, normalise, weights), jnp.asarray(v).astype(dtype), chunk, logps)


def top_spectrum(
    model: Any,
    rows: Rows,
    k: int,
    *,
    steps: int | None = None,
    key: Key[Array, ""],
    normalise: str = "sum",
    weights: Array | None = None,
    chunk: int | None = None,
    logps: Logps = token_logps,
) -> Spectrum:
    """The ``k`` largest eigenvalues of the kernel of ``rows`` with themselves, by Lanczos.

    ``steps`` kernel-vector products (default ``2 k + 20``, at most N) from a random start by ``key``,
    with full reorthogonalisation on the host in double precision: ``steps * N`` numbers twice over.
    The residuals come from the products themselves, so they hold their rounding too; where they are
    too large, raise ``steps``. Other arguments as in ``kernel_vector``.

    Raises ``ValueError`` unless ``1 <= k <= steps <= N``.
    """
    need_finite(model)
    need_rows(rows, "rows", model)
    n = rows.start.shape[0]
    if not 1 <= k <= n:
        raise ValueError(f"k: expected 1 to {n} eigenvalues, one a row at most, got {k}")
    steps = min(n, 2 * k + 20) if steps is None else steps
    if not k <= steps <= n:
        raise ValueError(f"steps: expected {k} (k) to {n} (the rows), got {steps}")
    product = partial(kernel_vector, model, rows, normalise=normalise, weights=weights, chunk=chunk, logps=logps)
    basis, images = np.zeros((n, steps)), np.zeros((n, steps))
    for i in range(steps):
        fresh = np.asarray(jax.random.normal(jax.random.fold_in(key, i), (n,)), np.float64)
        # a direction that K sends into the span so far says nothing new: go on from a random one
        basis[:, i] = _orthonormal(images[:, max(i - 1, 0)], fresh, basis[:, :i])
        images[:, i] = np.asarray(product(jnp.asarray(basis[:, i])), np.float64)
    small = basis.T @ images
    values, mixing = np.linalg.eigh((small + small.T) / 2)
    values, mixing = values[::-1][:k], mixing[:, ::-1][:, :k]
    vectors = basis @ mixing
    return Spectrum(values, vectors, np.linalg.norm(images @ mixing - vectors * values, axis=0))


def _orthonormal(x: np.ndarray, fresh: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """The part of ``x`` outside of ``basis`` at length 1; of ``fresh`` where ``x`` has none beyond rounding."""
    for candidate in (x, fresh):
        size = np.linalg.norm(candidate)
        for _ in range(2):  # once more removes what rounding left
            candidate = candidate - basis @ (basis.T @ candidate)
        left = np.linalg.norm(candidate)
        if left > 1e-12 * size:
            break
    return candidate / left


@partial(jax.jit, static_argnames=("chunk", "logps"))
def _product(model: Any, rows: Rows, weights: Array, v: Array, chunk: int | None, logps: Logps) -> Float[Array, " N"]:
    """One program for every vector."""
    n = rows.start.shape[0]
    size = n if chunk is None else min(chunk, n)
    index = jnp.arange(-(-n // size) * size)
    # the last pass is filled up with a row that counts 0
    v = jnp.where(index < n, v[jnp.minimum(index, n - 1)], 0).reshape(-1, size)
    index = jnp.minimum(index, n - 1).reshape(-1, size)

    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
        at, v = part
        gradient = jax.grad(lambda m: jnp.dot(v, scores(m, rows[at], weights[at], logps).astype(v.dtype)))(model)
        return jax.tree.map(jnp.add, total, gradient), None

    gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, model), (index, v))
    return predicted_change(model, gradient, rows, weights=weights, chunk=chunk, logps=logps)
