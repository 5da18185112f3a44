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
from jaxrl.types import Rows, check_shapes, is_concrete, wide

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
    return _token_kl(reference, model, rows, temperature, chunk, lambda ref, new: (ref, new))


def token_reverse_kl(
    model: Decoder, reference: Decoder, rows: Rows, *, temperature: float | Array = 1.0, chunk: int = CHUNK
) -> Float[Array, "N L"]:
    """``sum_v p_model log(p_model / p_ref)`` at each response position, nats; 0 elsewhere.

    Prefixes are taken as they are: on rows drawn from the model the gradient is that of the conditional KLs alone,
    not of how the model moves the prefixes. No gradient reaches the reference.
    """
    return _token_kl(reference, model, rows, temperature, chunk, lambda ref, new: (new, ref))


def _token_kl(
    reference: Decoder,
    model: Decoder,
    rows: Rows,
    temperature: float | Array,
    chunk: int,
    order: Callable[[Array, Array], tuple[Array, Array]],
) -> Float[Array, "N L"]:
    """``sum_v p log(p / q)``; ``order`` makes p and q of the reference and the model."""
    check_scored(model, rows, temperature)
    check_divergence(reference, model)

    def score(states: tuple[Array, ...], token: Array) -> Array:
        ref = jax.lax.stop_gradient(jax.nn.log_softmax(logits(reference, states[0], temperature), axis=-1))
        new = jax.nn.log_softmax(logits(model, states[1], temperature), axis=-1)
        p, q = order(ref, new)
        # both are -inf above the vocabulary limit, where the difference must count as 0
        return jnp.sum(_p_times(p, p - jnp.where(jnp.isneginf(p), 0, q)), axis=-1)

    states = (jax.lax.stop_gradient(hidden(reference, rows.tokens)), hidden(model, rows.tokens))
    return _masked(rows, _over_chunks(score, states, rows, chunk))


def token_values(model: Decoder, rows: Rows) -> Float[Array, "N L"]:
    """What a critic says of the state before token ``t`` (its prefix), at response positions; 0 elsewhere.

    In the rewards' unit. Raises ``ValueError`` for a model without a value head.
    """
    check_scored(model, rows, 1.0)
    found = state_values(model, hidden(model, rows.tokens)[:, :-1])
    return _masked(rows, jnp.pad(found, [(0, 0), (1, 0)]))


def state_values(model: Decoder, states: Float[Array, "*B d"]) -> Float[Array, "*B"]:
    """The value head on hidden states, in at least float32. Raises ``ValueError`` for a model without one."""
    if model.value is None:
        raise ValueError("values: expected a model with a value head (ModelConfig.value_head), got one without")
    value = model.value[...]
    dtype = wide(states.dtype, value.dtype)
    return jnp.einsum("...d,d->...", states.astype(dtype), value.astype(dtype))


def check_divergence(reference: Decoder, model: Decoder) -> None:
    """Raises ``ValueError`` unless both models speak of the same entries of one vocabulary."""
    ours, theirs = ((m.config.vocab_size, m.config.vocab_limit or m.config.vocab_size) for m in (model, reference))
    if ours != theirs:
        raise ValueError(
            f"a KL between next-token distributions: expected a reference (or teacher) with the model's vocabulary of "
            f"{ours[0]} entries, {ours[1]} of them known, got {theirs[0]} and {theirs[1]}"
        )


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
