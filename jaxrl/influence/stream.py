"""The streamed kernel: one backward pass of both sides in lockstep, gradients contracted as they appear.

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
from jaxrl.influence.factors import Factor, Side, final_norm, layer_factors
from jaxrl.influence.gram import Contract, Sums
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, embed_tokens, layer_windows, param_axes, row_attention
from jaxrl.models.layers import layer, rope_angles
from jaxrl.types import wide

# Which axis of a matrix (inputs, outputs) the mesh's tensor axis splits, as in ``mesh.RULES``.
TENSOR = {"q": 2, "k": 2, "v": 2, "o": 1, "gate": 2, "up": 2, "down": 1}


@dataclass(frozen=True)
class Plan:
    """What is fixed before compilation: how products are formed, and vocabulary entries at a time.

    ``listed``: how many entries of the list of occurring tokens to take at a time; 0 goes over the
    whole vocabulary once more.
    """

    contract: Contract
    blocks: int
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
) -> tuple[Array, Array, Array]:
    """Blocks of the kernel ``[K N M]`` and the squared norms of both sides.

    One entry of ``sides`` for a kernel of rows with themselves. ``entries``: for every token the entry
    of ``occurring`` that it is (its id, when that is None). ``metric``: a positive diagonal.
    """
    with jax.default_matmul_precision("highest"):
        return _stream(model, sides, entries, occurring, metric, plan).total()


def _stream(model: Decoder, sides: Any, entries: Any, occurring: Any, metric: Any, plan: Plan) -> Sums:
    contract, tied = plan.contract, model.head is None
    n, m = sides[0].count, sides[-1].count
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    sums = Sums.zero(contract.devices, plan.blocks, n, m, dtype)

    axes = layer_axes(model.config)
    inputs, last = zip(*(_forward(model, side, contract, axes) for side in sides), strict=True)
    states = contract.by_rows([final_norm(model, x, side) for x, side in zip(last, sides, strict=True)])
    scored = tuple(heads.score(model, side, h, contract, plan.chunk) for side, h in zip(sides, states, strict=True))
    name = "head" if not tied else "embed" if plan.listed else None
    back, sums = heads.head(model, scored, sums, contract, metric, plan.chunk, name)

    pulled = [final_norm(model, x, side, ct) for x, side, ct in zip(last, sides, back, strict=True)]
    cotangents, gains = contract.by_rows(tuple(zip(*pulled, strict=True)))
    of_norm = None if metric is None else metric.norm[...]
    sums = contract.vector(sums, contract.slot("norm", None), gains, of_norm)

    cotangents, sums = _layers(model, sides, inputs, cotangents, sums, contract, metric, axes)

    embedded = tuple(
        heads.Embedded(side.by_sequence(ct).astype(wide(ct.dtype)), entry)
        for side, ct, entry in zip(sides, cotangents, entries, strict=True)
    )
    if plan.listed:
        return heads.occurring(model, scored, embedded, occurring, sums, contract, metric, plan.listed)
    return heads.tied_dense(model, scored, embedded, sums, contract, metric, plan.chunk)


def layer_axes(config: ModelConfig) -> Any:
    """The logical axes of one layer's parameters, as ``param_axes`` without the axis of the layers."""
    return jax.tree.map(lambda axes: axes[1:], param_axes(config).layers, is_leaf=lambda x: isinstance(x, tuple))


def _forward(model: Decoder, side: Side, contract: Contract, axes: Any) -> tuple[Array, Array]:
    """The input of every layer ``[D R L d]``, and what comes out of the last ``[R L d]``."""
    attend = row_attention(side.tokens.shape, side.segments)
    x = contract.by_rows(embed_tokens(model, side.tokens))
    angles = rope_angles(side.positions, model.config, x.dtype)

    def body(x: Array, xs: tuple[Any, Any]) -> tuple[Array, Array]:
        p, window = xs
        out = layer(contract.whole(p, axes), x, angles, model.config, attend(window))[0]
        return contract.by_rows(out), x

    last, inputs = jax.lax.scan(body, x, (model.layers, layer_windows(model.config)))
    return inputs, last


def _layers(
    model: Decoder, sides: Any, inputs: Any, cotangents: Any, sums: Sums, contract: Contract, metric: Any, axes: Any
) -> tuple[tuple[Array, ...], Sums]:
    """The reverse scan over layers: cotangents of the embedding's outputs, and the sums with all layers added."""
    config = model.config

    def body(carry: tuple[Any, Sums], xs: Any) -> tuple[Any, None]:
        cotangents, sums = carry
        p, window, diagonal, number, *x = xs
        p = contract.whole(p, axes)
        found = [layer_factors(config, p, window, *args) for args in zip(sides, x, cotangents, strict=True)]
        for name in found[0][1]:
            factors = tuple(f[name] for _, f in found)
            sums = _parameter(contract, sums, name, factors, diagonal, number)
        return (contract.by_rows(tuple(back for back, _ in found)), sums), None

    diagonal = None if metric is None else metric.layers
    number = jnp.arange(config.num_layers, dtype=jnp.int32)
    xs = (model.layers, layer_windows(config), diagonal, number, *inputs)
    return jax.lax.scan(body, (cotangents, sums), xs, reverse=True)[0]


def _parameter(
    contract: Contract, sums: Sums, name: str, factors: tuple[Factor, ...], diagonal: Any, number: Array
) -> Sums:
    """Add the products of one parameter of one layer."""
    slot = contract.slot(f"layers.{name}", number)
    metric = None if diagonal is None else getattr(diagonal, name)[...]
    if factors[0].gain or factors[0].a is None:
        flat = None if metric is None else metric.reshape(-1)
        return contract.vector(sums, slot, tuple(f.vector() for f in factors), flat)
    if name in contract.ghost:
        return contract.tokenwise(sums, slot, factors)
    shape = (factors[0].a.shape[-1], factors[0].b.shape[-1])
    return contract.matrix(sums, slot, factors, None if metric is None else metric.reshape(shape), TENSOR[name])
