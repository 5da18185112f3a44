"""Token log-probabilities: one function for policy, old policy, reference, probe and kernel.

Hidden states go through the head in chunks of positions, each rematerialised in the backward pass,
so that ``[rows, T, V]`` never exists. Log-softmax runs in at least float32, temperature and
vocabulary limit are applied inside. Nothing here is a ``custom_vjp``: forward mode works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.models.decoder import Decoder, hidden, logits
from jaxrl.types import Rows, check_shapes, is_concrete

CHUNK = 128  # positions a head call; memory is rows * CHUNK * V


def token_logps(
    model: Decoder, rows: Rows, *, temperature: float | Array = 1.0, chunk: int = CHUNK
) -> Float[Array, "N L"]:
    """``log pi(tokens[t] | tokens[<t])`` in nats at response positions, 0 elsewhere.

    Entry ``t`` speaks of token ``t``. At least float32; float64 when the parameters are. Outside of jax's
    transformations the arguments are checked: ``ValueError`` for rows that ``check_shapes`` refuses, ids outside
    the vocabulary, and a temperature that is not above 0.
    """
    check_scored(model, rows, temperature)

    def score(states: tuple[Array, ...], token: Array) -> Array:
        lp = jax.nn.log_softmax(logits(model, states[0], temperature), axis=-1)
        return _pick(lp, token)

    return _masked(rows, _over_chunks(score, (hidden(model, rows.tokens),), rows, chunk))


def token_scores(
    model: Decoder, rows: Rows, *, temperature: float | Array = 1.0, chunk: int = CHUNK
) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
    """Log-probability of each response token and entropy of the distribution it was drawn from, nats."""
    check_scored(model, rows, temperature)

    def score(states: tuple[Array, ...], token: Array) -> tuple[Array, Array]:
        lp = jax.nn.log_softmax(logits(model, states[0], temperature), axis=-1)
        return _pick(lp, token), -jnp.sum(_p_times(lp, lp), axis=-1)

    lp, entropy = _over_chunks(score, (hidden(model, rows.tokens),), rows, chunk)
    return _masked(rows, lp), _masked(rows, entropy)


def token_entropy(model: Decoder, rows: Rows, *, temperature: float | Array = 1.0) -> Float[Array, "N L"]:
    """Entropy of the next-token distribution at each response position, nats; 0 elsewhere."""
    return token_scores(model, rows, temperature=temperature)[1]


def token_kl(
    reference: Decoder, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0, chunk: int = CHUNK
) -> Float[Array, "N L"]:
    """``sum_v p_ref log(p_ref / p_model)`` at each response position, nats; 0 elsewhere.

    The forward KL of ``full`` estimators: on rows drawn from the reference, the sum over a row is an
    unbiased estimate of ``KL(pi_ref || pi_model)`` with less variance than ``nll``. No gradient
    reaches the reference.
    """
    check_scored(model, rows, temperature)

    def score(states: tuple[Array, ...], token: Array) -> Array:
        ref = jax.lax.stop_gradient(jax.nn.log_softmax(logits(reference, states[0], temperature), axis=-1))
        new = jax.nn.log_softmax(logits(model, states[1], temperature), axis=-1)
        # both are -inf above the vocabulary limit, where the difference must count as 0
        gap = jnp.where(jnp.isneginf(ref), 0, ref - jnp.where(jnp.isneginf(ref), 0, new))
        return jnp.sum(jnp.exp(ref) * gap, axis=-1)

    states = (jax.lax.stop_gradient(hidden(reference, rows.tokens)), hidden(model, rows.tokens))
    return _masked(rows, _over_chunks(score, states, rows, chunk))


def check_scored(model: Decoder, rows: Rows, temperature: float | Array) -> None:
    """What jax itself would answer with a clamped index or a NaN; values are out of sight in a transformation."""
    if is_concrete(temperature) and not np.all(np.asarray(temperature) > 0):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    if is_concrete(rows):
        check_shapes(rows, vocab_size=model.config.vocab_size)


def _pick(lp: Array, token: Array) -> Array:
    return jnp.take_along_axis(lp, token[..., None], axis=-1)[..., 0]


def _p_times(lp: Array, value: Array) -> Array:
    """``p * value`` with 0 log 0 = 0."""
    dead = jnp.isneginf(lp)
    return jnp.where(dead, 0, jnp.exp(lp) * jnp.where(dead, 0, value))


def _masked(rows: Rows, values: Float[Array, "N L"]) -> Float[Array, "N L"]:
    return jnp.where(rows.mask(), values, jnp.zeros((), values.dtype))


def _over_chunks(score: Callable[..., Any], states: tuple[Array, ...], rows: Rows, chunk: int) -> Any:
    """``score`` at every position, in chunks of positions; index t gets what position t-1 predicts."""
    n, width = rows.tokens.shape
    steps = width - 1
    size = max(min(chunk, steps), 1)  # a row of one token predicts nothing: no chunk at all
    count = -(-steps // size)
    pad = count * size - steps

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n, count, size, *x.shape[2:]), 1, 0)

    xs = (tuple(split(s[:, :-1]) for s in states), split(rows.tokens[:, 1:]))
    out = jax.lax.map(jax.checkpoint(lambda x: score(*x)), xs)

    def join(y: Array) -> Array:
        y = jnp.moveaxis(y, 0, 1).reshape(n, count * size)[:, :steps]
        return jnp.pad(y, [(0, 0), (1, 0)])

    return jax.tree.map(join, out)
