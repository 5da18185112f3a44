"""The streamed kernel: one backward pass of both sides in lockstep, gradients consumered as they appear.

The forward pass keeps the inputs of the layers only. The reverse scan recomputes one layer for all
rows of both sides, forms the per-row gradients of its parameters in blocks, adds their products to
the kernel and drops them. So the whole costs one rematerialised gradient pass over the same rows
plus ``2 N M P`` operations, and never holds more than a block of per-row gradients. KERNEL.md 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl.influence import head as heads
from jaxrl.influence.blocks import Consumer, Place
from jaxrl.influence.factors import Factor, Side, final_norm, layer_factors
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, embed_tokens, layer_windows, param_axes, row_attention
from jaxrl.models.layers import layer, rope_angles
from jaxrl.types import wide

# Which axis of a matrix (inputs, outputs) the mesh's tensor axis splits, as in ``mesh.RULES``.
TENSOR = {"q": 2, "k": 2, "v": 2, "o": 1, "gate": 2, "up": 2, "down": 1}


@dataclass(frozen=True)
class Plan:
    """What is fixed before compilation: what becomes of the gradients, and vocabulary entries at a time.

    ``listed``: how many entries of the list of occurring tokens to take at a time; 0 goes over the
    whole vocabulary once more.
    """

    consumer: Consumer
    chunk: int
    listed: int


@partial(jax.jit, static_argnames=("plan",))
def stream(
    model: Decoder,
    sides: tuple[Side, ...],
    entries: tuple[Int[Array, "N W"], ...],
    occurring: Int[Array, " U"] | None,
    metric: Decoder | None,
    plan: Plan,
) -> Any:
    """What the plan's consumer makes of the gradients: of a kernel, blocks ``[K N M]`` and squared norms.

    One entry of ``sides`` for a kernel of rows with themselves. ``entries``: for every token the entry
    of ``occurring`` that it is (its id, when that is None). ``metric``: a positive diagonal.
    """
    with jax.default_matmul_precision("highest"):
        return plan.consumer.finish(_stream(model, sides, entries, occurring, metric, plan))


def _stream(model: Decoder, sides: Any, entries: Any, occurring: Any, metric: Any, plan: Plan) -> Any:
    consumer, tied = plan.consumer, model.head is None
    n, m = sides[0].count, sides[-1].count
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    sums = consumer.start(n, m, dtype)

    axes = layer_axes(model.config)
    inputs, last = zip(*(_forward(model, side, consumer, axes) for side in sides), strict=True)
    states = consumer.by_rows([final_norm(model, x, side) for x, side in zip(last, sides, strict=True)])
    scored = tuple(heads.score(model, side, h, consumer, plan.chunk) for side, h in zip(sides, states, strict=True))
    name = "head" if not tied else "embed" if plan.listed else None
    back, sums = heads.head(model, scored, sums, consumer, metric, plan.chunk, name)

    pulled = [final_norm(model, x, side, ct) for x, side, ct in zip(last, sides, back, strict=True)]
    cotangents, gains = consumer.by_rows(tuple(zip(*pulled, strict=True)))
    of_norm = None if metric is None else metric.norm[...]
    sums = consumer.vector(sums, Place("norm"), gains, of_norm)

    cotangents, sums = _layers(model, sides, inputs, cotangents, sums, consumer, metric, axes)

    embedded = tuple(
        heads.Embedded(side.by_sequence(ct).astype(wide(ct.dtype)), entry)
        for side, ct, entry in zip(sides, cotangents, entries, strict=True)
    )
    if plan.listed:
        return heads.occurring(model, scored, embedded, occurring, sums, consumer, metric, plan.listed)
    return heads.tied_dense(model, scored, embedded, sums, consumer, metric, plan.chunk)


def layer_axes(config: ModelConfig) -> Any:
    """The logical axes of one layer's parameters, as ``param_axes`` without the axis of the layers."""
    return jax.tree.map(lambda axes: axes[1:], param_axes(config).layers, is_leaf=lambda x: isinstance(x, tuple))


def _forward(model: Decoder, side: Side, consumer: Consumer, axes: Any) -> tuple[Array, Array]:
    """The input of every layer ``[D R L d]``, and what comes out of the last ``[R L d]``."""
    attend = row_attention(side.tokens.shape, side.segments)
    x = consumer.by_rows(embed_tokens(model, side.tokens))
    angles = rope_angles(side.positions, model.config, x.dtype)

    def body(x: Array, xs: tuple[Any, Any]) -> tuple[Array, Array]:
        p, window = xs
        out = layer(consumer.whole(p, axes), x, angles, model.config, attend(window))[0]
        return consumer.by_rows(out), x

    last, inputs = jax.lax.scan(body, x, (model.layers, layer_windows(model.config)))
    return inputs, last


def _layers(
    model: Decoder, sides: Any, inputs: Any, cotangents: Any, sums: Any, consumer: Consumer, metric: Any, axes: Any
) -> tuple[tuple[Array, ...], Any]:
    """The reverse scan over layers: cotangents of the embedding's outputs, and the sums with all layers added."""
    config = model.config

    def body(carry: tuple[Any, Any], xs: Any) -> tuple[Any, None]:
        cotangents, sums = carry
        p, window, diagonal, number, *x = xs
        p = consumer.whole(p, axes)
        found = [layer_factors(config, p, window, *args) for args in zip(sides, x, cotangents, strict=True)]
        for name in found[0][1]:
            factors = tuple(f[name] for _, f in found)
            sums = _parameter(consumer, sums, name, factors, diagonal, number)
        return (consumer.by_rows(tuple(back for back, _ in found)), sums), None

    diagonal = None if metric is None else metric.layers
    number = jnp.arange(config.num_layers, dtype=jnp.int32)
    xs = (model.layers, layer_windows(config), diagonal, number, *inputs)
    return jax.lax.scan(body, (cotangents, sums), xs, reverse=True)[0]


def _parameter(
    consumer: Consumer, sums: Any, name: str, factors: tuple[Factor, ...], diagonal: Any, number: Array
) -> Any:
    """Add the products of one parameter of one layer."""
    place = Place(f"layers.{name}", number)
    metric = None if diagonal is None else getattr(diagonal, name)[...]
    if factors[0].gain or factors[0].a is None:
        flat = None if metric is None else metric.reshape(-1)
        return consumer.vector(sums, place, tuple(f.vector() for f in factors), flat)
    if name in consumer.ghost:
        return consumer.tokenwise(sums, place, factors)
    shape = (factors[0].a.shape[-1], factors[0].b.shape[-1])
    place = Place(f"layers.{name}", number, 0, (shape[1], 1))
    return consumer.matrix(sums, place, factors, None if metric is None else metric.reshape(shape), TENSOR[name])
