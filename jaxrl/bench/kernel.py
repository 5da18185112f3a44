"""The gradient kernel by each method, against one gradient pass over the same rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.bench.sizes import Sizes
from jaxrl.bench.timing import Row, against, interleaved
from jaxrl.influence.gradients import row_weights, scores
from jaxrl.influence.kernels import METHODS, gradient_kernel
from jaxrl.types import Rows

BASELINE = "gradient pass"


def kernel(sizes: Sizes, repeats: int) -> list[Row]:
    """``ratio``: how many gradient passes over all N + M rows the kernel between them costs."""
    model = sizes.model()
    a, b = sizes.rows(sizes.kernel_rows, 1), sizes.rows(sizes.kernel_rows, 2)
    both = jax.tree.map(lambda *x: jnp.concatenate(x), a, b)
    cases = {BASELINE: partial(_gradient, model, both)}
    for method in METHODS:
        if method != "auto":  # one of the others
            cases[method] = partial(_values, model, a, b, method)
    return against(interleaved(cases, repeats=repeats, target=sizes.target), BASELINE, "ratio")


@jax.jit
def _gradient(model: Any, rows: Rows) -> Any:
    weights = row_weights(rows)
    return jax.grad(lambda m: jnp.sum(scores(m, rows, weights)))(model)


def _values(model: Any, a: Rows, b: Rows, method: str) -> jax.Array:
    return gradient_kernel(model, a, b, method=method).values
