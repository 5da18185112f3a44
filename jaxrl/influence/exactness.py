"""Are the gradients right? Two ways of taking them, finite differences, and the score identity (SCIENCE.md C1, C2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl.influence.gradients import one_gradient, predicted_change, row_weights, scores
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.types import Rows

CHUNK = 512  # enumerated rows a backward pass
SAMPLED = 32  # enumerated rows whose kernel sets the scale of the identity


def finite_difference_error(model: Any, rows: Rows, probe: Rows) -> dict[str, float]:
    """C1: the kernel by ``vmap(grad)`` against that by forward mode, and against central differences.

    Errors are Frobenius norms of the difference over that of the kernel: ``columns`` (at most
    1e-8) and ``central`` (at most 1e-6). The difference quotient moves the parameters by 1e-5 in
    norm along each row's gradient.
    """
    kernel = gradient_kernel(model, rows, probe, method="reference")
    exact = np.asarray(kernel.values)
    columns = np.asarray(gradient_kernel(model, rows, probe, method="columns").values)
    weights, steps = row_weights(rows), 1e-5 / np.sqrt(np.asarray(kernel.sq_norms_a))
    central = np.stack([np.asarray(_central(model, rows[i], weights[i], s, probe)) for i, s in enumerate(steps)])
    size = np.linalg.norm(exact)
    return {
        "rows": len(exact),
        "columns": float(np.linalg.norm(columns - exact) / size),
        "central": float(np.linalg.norm(central - exact) / size),
    }


@jax.jit
def _central(model: Any, row: Rows, weight: Array, step: Array, probe: Rows) -> Float[Array, " M"]:
    gradient = one_gradient(model, row, weight)
    weights = row_weights(probe)
    up, down = (scores(jax.tree.map(lambda p, g: p + s * step * g, model, gradient), probe, weights) for s in (1, -1))  # noqa: B023
    return (up - down) / (2 * step)


def score_identity(model: Any, responses: Rows, probe: Rows) -> dict[str, float]:
    """C2: ``max_j |sum_y pi(y) K(y, j)|`` over ``max |K|``, at most 1e-10 (R1).

    ``responses`` are all responses to one prompt that a sampler can return, cut-off ones included;
    ``mass`` is their total probability under the model, which must be 1 for the identity to hold.
    The scale is the largest entry between evenly spaced responses and the probe.
    """
    log_p = _row_scores(model, responses)
    p = jnp.exp(log_p)
    summed = _weighted_gradient(model, responses, p)
    pick = np.unique(np.linspace(0, len(p) - 1, SAMPLED).astype(int))
    scale = np.abs(np.asarray(gradient_kernel(model, responses[pick], probe).values)).max()
    error = np.abs(np.asarray(predicted_change(model, summed, probe))).max()
    return {"responses": len(p), "mass": float(p.sum()), "error": float(error / scale)}


def _chunks(rows: Rows, *more: Array) -> tuple[Any, ...]:
    """Leading axis [Y] -> [chunks, CHUNK]; the end is filled with row 0 and zeros."""
    n = rows.start.shape[0]
    size = min(CHUNK, n)
    index = np.arange(-(-n // size) * size)
    real = jnp.asarray(index < n)
    index = np.where(index < n, index, 0)
    filled = [jnp.where(real, x[index], jnp.zeros((), x.dtype)) for x in more]
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (rows[index], *filled))


@jax.jit
def _row_scores(model: Any, rows: Rows) -> Float[Array, " Y"]:
    n = rows.start.shape[0]
    (chunks,) = _chunks(rows)
    return jax.lax.map(lambda r: scores(model, r, row_weights(r)), chunks).reshape(-1)[:n]


@jax.jit
def _weighted_gradient(model: Any, rows: Rows, weight: Array) -> Any:
    """The gradient of ``sum_y weight_y S_y``, chunk by chunk."""

    def add(total: Any, chunk: tuple[Rows, Array]) -> tuple[Any, None]:
        rows, weight = chunk
        part = jax.grad(lambda m: jnp.sum(weight * scores(m, rows, row_weights(rows))))(model)
        return jax.tree.map(jnp.add, total, part), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, model), _chunks(rows, weight))[0]


def chosen_rows(
    train: Rows, probe: Rows, counted: Bool[np.ndarray, " M"], limit: int
) -> tuple[Rows, Rows, Bool[np.ndarray, "n m"]]:
    """Up to ``limit`` training and probe rows, and which pairs of them share their prompt.

    Training rows are spread evenly over those with a response. Up to half of the probe rows share
    a prompt with one of them, where the probe has such rows; the rest are spread evenly. Raises
    ``ValueError`` when a side has no row with a response.
    """
    live = np.flatnonzero(np.asarray(train.response_length()) > 0)
    allowed = np.flatnonzero(counted)
    for name, rows in (("training batch", live), ("probe", allowed)):
        if not len(rows):
            raise ValueError(f"the {name} has no row with a finished response; the check needs at least one")
    rows = _spread(live, limit)
    same = _same_prompt(train[rows], probe)
    shared = allowed[same.any(axis=0)[allowed]]
    first = _spread(shared, limit // 2)
    others = np.setdiff1d(allowed, first)
    picked = np.sort(np.concatenate([first, _spread(others, limit - len(first))]))
    return _device(train[rows]), _device(probe[picked]), same[:, picked]


def _spread(items: np.ndarray, limit: int) -> np.ndarray:
    """At most ``limit`` of ``items``, evenly spaced, in order."""
    if len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]


def _device(rows: Rows) -> Rows:
    return jax.tree.map(jnp.asarray, rows)


def _same_prompt(a: Rows, b: Rows) -> Bool[np.ndarray, "n m"]:
    """Whether two rows hold the same prompt tokens."""
    prompts = [
        [tuple(t[:s].tolist()) for t, s in zip(np.asarray(rows.tokens), np.asarray(rows.start), strict=True)]
        for rows in (a, b)
    ]
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts[0] + prompts[1]))}
    left, right = (np.array([number[p] for p in side]) for side in prompts)
    return left[:, None] == right[None, :]
