"""What the very loss that trains does to other rows: its SGD step, to first order.

A step is a tuple of terms, each a plain sum over rows and tokens. So the gradient of a token loss
is ``-sum_n c_n sum_t v_nt grad log pi_nt`` with coefficients that are fixed at the current
parameters, and the predicted change of a probe row is ``eta sum_n c_n K_nj``: the kernel of the
training rows, weighted. For a policy-gradient term at ratio 1, ``c_n = w_n A_n``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.influence.gradients import Logps, predicted_change
from jaxrl.mesh import to_host
from jaxrl.models.logps import token_logps
from jaxrl.models.scoring import FORWARD
from jaxrl.rl.losses import TokenLoss
from jaxrl.rl.update import loss_and_grad
from jaxrl.types import Rows, Term

_gradient = jax.jit(partial(loss_and_grad, score=FORWARD), static_argnames=("temperature", "microbatch"))


def batch_gradient(
    model: Any,
    terms: tuple[Term, ...],
    reference: Any = None,
    *,
    temperature: float = 1.0,
    microbatch: int | None = None,
) -> Any:
    """The gradient of the summed loss of ``terms``, a pytree like ``model``. Arguments as in ``rl.update``."""
    with jax.default_matmul_precision("highest"):
        return _gradient(model, terms, reference, temperature=temperature, microbatch=microbatch)[1]


def batch_prediction(
    model: Any,
    terms: tuple[Term, ...],
    rows: Rows,
    reference: Any = None,
    *,
    temperature: float = 1.0,
    microbatch: int | None = None,
    normalise: str = "sum",
) -> Float[Array, " M"]:
    """First-order change of each row's score per unit learning rate of one SGD step on ``terms``, nats.

    One gradient and one forward-mode pass, whatever the number of rows and terms.
    """
    gradient = batch_gradient(model, terms, reference, temperature=temperature, microbatch=microbatch)
    return predicted_change(model, jax.tree.map(jnp.negative, gradient), rows, normalise=normalise)


@dataclass(frozen=True)
class Coefficients:
    """How a token loss weighs its rows: gradient ``= -sum_n row[n] sum_t token[n, t] grad log pi_nt``.

    ``row`` is in 1/nats of the loss; ``token`` is 1 on the response of rows whose tokens all weigh
    the same (every loss but per-token advantages and half-clipped rows), so that ``row[n]`` then
    multiplies the plain sum kernel.
    """

    row: Float[np.ndarray, " N"]
    token: Float[np.ndarray, "N L"]


def coefficients(model: Any, term: Term, *, logps: Logps = token_logps) -> Coefficients:
    """The coefficients of ``term`` at the current parameters.

    Raises ``ValueError`` for a loss that is no function of its tokens' log-probs (a full KL).
    """
    if type(term.loss).__call__ is TokenLoss.__call__:
        raise ValueError(
            f"loss {term.loss.tag!r}: it needs whole distributions, so it has no kernel form over rows; "
            "use batch_prediction, which takes any loss"
        )
    mask = to_host(term.batch.rows.mask())
    found = to_host(_token_coefficients(model, term, logps))
    token = np.where(mask, found.astype(np.float64), 0)
    count = np.maximum(mask.sum(axis=1), 1)
    row = token.sum(axis=1) / count
    largest = np.abs(token).max(axis=1)
    spread = np.where(mask, np.abs(token - row[:, None]), 0).max(axis=1)
    even = spread <= 8 * np.finfo(found.dtype).eps * largest
    row = np.where(even | (np.abs(row) > 0.1 * largest), row, largest)  # never divide by a mean that cancels
    scaled = token / np.where(row == 0, 1, row)[:, None]
    return Coefficients(row, np.where(even[:, None], mask, scaled).astype(found.dtype))


@partial(jax.jit, static_argnames=("logps",))
def _token_coefficients(model: Any, term: Term, logps: Logps) -> Float[Array, "N L"]:
    """Minus the derivative of the term's loss by each token's log-prob."""
    values = logps(model, term.batch.rows)
    batch = jax.tree.map(lambda x: x.astype(values.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, term.batch)

    def gain(values: Array) -> Array:
        return -jnp.sum(jnp.where(batch.weight != 0, jax.vmap(term.loss)(values, batch), 0) * batch.weight)

    return jax.grad(gain)(values)
