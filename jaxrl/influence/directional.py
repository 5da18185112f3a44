"""Directional derivatives of row scores by reverse mode alone (KERNEL.md 4).

Attention kernels and lean heads are often ``custom_vjp``, which forward mode refuses. So every place
where a parameter acts, ``a W``, becomes ``a W + s_j (a D)`` with one scalar ``s_j`` a row; the gradient
with respect to ``s`` at 0 is ``<D, grad phi_j>`` for all rows at once. At 0 the sum is ``a W`` itself,
so ``a D`` is formed only in the backward pass, where the cotangent of ``a W`` is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.influence.gradients import checked_temperature, need_rows, row_weights, unit_tangent
from jaxrl.models.decoder import (
    Decoder,
    embed_tokens,
    layer_windows,
    logits,
    row_attention,
    row_positions,
    with_config,
)
from jaxrl.models.layers import NORMS, PROJECTIONS, Attend, layer, rms_norm, rope_angles
from jaxrl.types import Rows, wide

# ``attend(shape of the tokens)(window of a layer) -> attention``: how whole rows attend, see ``row_attention``.
RowAttention = Callable[[tuple[int, ...]], Callable[[Array | None], Attend]]
CHUNK = 128  # positions a head call


def reverse_change(
    model: Decoder,
    direction: Any,
    rows: Rows,
    *,
    normalise: str = "sum",
    weights: Array | None = None,
    temperature: float | Array = 1.0,
    chunk: int | None = None,
    attend: RowAttention | None = None,
) -> Float[Array, " M"]:
    """First-order change of each row's score when ``direction`` is added to the parameters, nats.

    The same number as ``predicted_change``, which is cheaper (two forward passes against four) and takes
    any model, but needs forward mode: use this where attention has only a reverse rule. ``attend`` is
    that attention (default: the decoder's own); ``chunk`` bounds the rows of a pass; the other
    arguments are those of ``predicted_change`` and ``token_logps``. Layers and head are rematerialised.

    Raises ``ValueError`` when there are no rows or a leaf of ``direction`` does not fit, ``TypeError``
    when the model is not a decoder.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a Decoder, got {type(model).__name__}; use predicted_change for other models")
    need_rows(rows, "rows", model)
    tangent, scale = unit_tangent(model, direction)
    temperature = jnp.asarray(checked_temperature(temperature), jnp.result_type(float))
    weights = row_weights(rows, normalise, weights)
    slopes = _slopes(model, tangent, rows, weights, temperature, chunk, attend or row_attention)
    return slopes * scale.astype(slopes.dtype)


@partial(jax.jit, static_argnames=("chunk", "attend"))
def _slopes(
    model: Decoder,
    tangent: Decoder,
    rows: Rows,
    weights: Array,
    temperature: Array,
    chunk: int | None,
    attend: RowAttention,
) -> Float[Array, " M"]:
    """The gradient with respect to ``s`` at 0, ``chunk`` rows a pass; the last pass is filled up with a row."""
    # the limit is minus infinity in the logits, which a slope of 0 must not meet
    tangent = with_config(tangent, vocab_limit=None)

    def of(part: tuple[Rows, Array]) -> Array:
        s = jnp.zeros(part[1].shape[0], wide(*(x.dtype for x in jax.tree.leaves(model))))
        with jax.default_matmul_precision("highest"):
            return jax.grad(lambda s: _total(s, model, tangent, *part, temperature, attend))(s)

    n = rows.start.shape[0]
    if chunk is None or chunk >= n:
        return of((rows, weights))
    count = -(-n // chunk)
    index = jnp.minimum(jnp.arange(count * chunk), n - 1).reshape(count, chunk)
    return jax.lax.map(lambda i: of((rows[i], weights[i])), index).reshape(-1)[:n]


def _total(
    s: Float[Array, " N"],
    model: Decoder,
    tangent: Decoder,
    rows: Rows,
    weights: Float[Array, "N L"],
    temperature: Array,
    attend: RowAttention,
) -> Float[Array, ""]:
    """The sum of all scores with ``s`` at work wherever a parameter acts."""
    config = model.config
    x = embed_tokens(model, rows.tokens)
    x = _nudged(_embedding, s, x, rows.tokens, tangent.embed[...])
    angles, windowed = rope_angles(row_positions(rows.tokens.shape), config, x.dtype), attend(rows.tokens.shape)

    def body(x: Array, xs: tuple[Any, Any, Array | None]) -> tuple[Array, None]:
        p, d, window = xs
        return layer(p, x, angles, config, windowed(window), tap=_layer_tap(s, d))[0], None

    whole = jax.checkpoint(body, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    x, _ = jax.lax.scan(whole, x, (model.layers, tangent.layers, layer_windows(config)))

    def final(name: str, inputs: Array, out: Array) -> Array:
        return _nudged(_gain, s, out, inputs, tangent.norm[...])

    states = rms_norm(x, model.norm[...], config.norm_eps, final)
    return _head(s, model, tangent, states, rows.tokens, weights, temperature)


def _head(
    s: Array,
    model: Decoder,
    tangent: Decoder,
    states: Float[Array, "N L d"],
    tokens: Int[Array, "N L"],
    weights: Float[Array, "N L"],
    temperature: Array,
) -> Float[Array, ""]:
    """Weighted log-probabilities, ``CHUNK`` positions at a time: all logits never exist at once."""
    n, steps = tokens.shape[0], tokens.shape[1] - 1
    size = max(min(CHUNK, steps), 1)
    count = -(-steps // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - steps)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n, count, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def part(states: Array, token: Array, weight: Array) -> Array:
        out = logits(model, states, temperature)
        out = _nudged(_logits, s, out, (states, temperature), tangent)
        lp = jnp.take_along_axis(jax.nn.log_softmax(out, axis=-1), token[..., None], axis=-1)[..., 0]
        return jnp.sum(lp * weight.astype(lp.dtype))

    xs = split(states[:, :-1]), split(tokens[:, 1:]), split(weights[:, 1:])
    return jnp.sum(jax.lax.map(lambda x: part(*x), xs))


# ---------------------------------------------------------------- where a parameter acts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nudged(act: Callable[[Any, Any], Array], s: Array, out: Array, inputs: Any, tangent: Any) -> Array:
    """``out + s_j act(inputs, tangent)`` at s = 0: the value of ``out``, with a gradient for ``s``."""
    return out


def _forward(act: Any, s: Array, out: Array, inputs: Any, tangent: Any) -> tuple[Array, tuple[Array, Any, Any]]:
    return out, (s, inputs, tangent)


def _backward(act: Any, kept: tuple[Array, Any, Any], cotangent: Array) -> tuple[Array, Array, None, None]:
    """``s`` scales what ``inputs`` do there, so at 0 no cotangent reaches them."""
    s, inputs, tangent = kept
    moved = cotangent.astype(s.dtype) * act(inputs, tangent).astype(s.dtype)
    return jnp.sum(moved, axis=tuple(range(1, moved.ndim))), cotangent, None, None


_nudged.defvjp(_forward, _backward)


def _layer_tap(s: Array, d: Any) -> Callable[[str, Array, Array], Array]:
    """The tap of one layer with the direction's slice ``d``."""

    def tap(name: str, inputs: Array, out: Array) -> Array:
        weight = getattr(d, name)[...]
        if name in NORMS:
            return _nudged(_gain, s, out, inputs, weight)
        bias = getattr(d, f"{name}_bias")
        return _nudged(
            partial(_project, PROJECTIONS[name]), s, out, inputs, (weight, None if bias is None else bias[...])
        )

    return tap


def _project(equation: str, inputs: Array, tangent: tuple[Array, Array | None]) -> Array:
    weight, bias = tangent
    out = jnp.einsum(equation, inputs, weight.astype(inputs.dtype), preferred_element_type=wide(inputs.dtype))
    return out if bias is None else out + bias.astype(out.dtype)[None, None]


def _gain(inputs: Array, gain: Array) -> Array:
    return inputs * gain.astype(inputs.dtype).reshape((1,) * (inputs.ndim - 1) + (-1,))


def _embedding(tokens: Array, table: Array) -> Array:
    return table[tokens]


def _logits(inputs: tuple[Array, Array], tangent: Decoder) -> Array:
    return logits(tangent, *inputs)
