"""Are the gradients right? Two ways of taking them, finite differences, and the score identity (SCIENCE.md C1, C2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl.influence.gradients import predicted_change, row_weights, scores
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.sweep import pair_sweep
from jaxrl.types import Rows

CHUNK = 512  # enumerated rows a backward pass


def finite_difference_error(model: Any, rows: Rows, probe: Rows, limit: int = 8) -> dict[str, float]:
    """C1: the kernel by reverse mode against forward mode and against central differences, for ``limit`` rows.

    Errors are Frobenius norms of the difference over that of the kernel: ``forward`` (at most 1e-8)
    and ``central`` (at most 1e-6). The difference quotient moves the parameters by 1e-5 in norm
    along each row's gradient. ``largest`` is the largest entry of the whole kernel.
    """
    kernel = gradient_kernel(model, rows, probe, method="chunked")
    exact = np.asarray(kernel.values)
    steps = 1e-5 / np.sqrt(np.asarray(kernel.sq_norms_a))[:limit]
    lines = [pair_sweep(model, rows[i : i + 1], np.ones(1), probe, np.array([s, -s])) for i, s in enumerate(steps)]
    forward = np.concatenate([line.kernel for line in lines])
    central = np.stack([(line.delta[0, 0] - line.delta[1, 0]) / (2 * line.eta[0]) for line in lines])
    some = exact[:limit]
    return {
        "rows": len(some),
        "forward": float(np.linalg.norm(forward - some) / np.linalg.norm(some)),
        "central": float(np.linalg.norm(central - some) / np.linalg.norm(some)),
        "largest": float(np.abs(exact).max()),
    }


def score_identity(model: Any, responses: Rows, probe: Rows, largest: float) -> dict[str, float]:
    """C2: ``max_j |sum_y pi(y) K(y, j)|`` over ``largest``, at most 1e-10 (R1).

    ``responses`` are all responses to one prompt that a sampler can return, cut-off ones included;
    ``mass`` is their total probability under the model, which must be 1 for the identity to hold.
    ``largest`` sets the scale: the largest kernel entry between sampled rows and the probe.
    """
    mass, summed = _expected_gradient(model, responses)
    error = np.abs(np.asarray(predicted_change(model, summed, probe))).max()
    return {"responses": responses.start.shape[0], "mass": float(mass), "error": float(error / largest)}


@jax.jit
def _expected_gradient(model: Any, rows: Rows) -> tuple[Float[Array, ""], Any]:
    """Total probability of the rows' responses, and ``sum_y pi(y) grad S_y``, chunk by chunk."""
    n = rows.start.shape[0]
    size = min(CHUNK, n)
    index = np.arange(-(-n // size) * size)
    real = jnp.asarray(index < n)
    filled = rows[np.where(index < n, index, 0)]

    def expected(m: Any, rows: Rows, real: Array) -> tuple[Array, Array]:
        log_p = scores(m, rows, row_weights(rows))
        p = jnp.where(real, jnp.exp(jax.lax.stop_gradient(log_p)), 0)
        return jnp.sum(p * log_p), jnp.sum(p)

    def add(total: tuple[Array, Any], chunk: tuple[Rows, Array]) -> tuple[tuple[Array, Any], None]:
        gradient, mass = jax.grad(expected, has_aux=True)(model, *chunk)
        return jax.tree.map(jnp.add, total, (mass, gradient)), None

    chunks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (filled, real))
    start = (jnp.zeros((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, model))
    return jax.lax.scan(add, start, chunks)[0]


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
    shared = allowed[np.any(same, axis=0)[allowed]]
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
