"""The engine's programs compiled ahead of time, from shapes alone: what they will need before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.decoder import Decoder
from jaxrl.sampling import programs
from jaxrl.sampling.engine import SlotSpec
from jaxrl.sampling.schedule import Asked, Reserve, shapes
from jaxrl.sampling.slots import Weights, empty_slots, empty_store, logits_dtype, where
from jaxrl.sampling.strategies import Strategy


def compile_engine(
    model: Decoder,
    spec: SlotSpec,
    *,
    prompts: int,
    width: int,
    n: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    strategy: Strategy,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """``prefill`` and ``decode`` (of the largest pool) for a step's rollouts, as jax's compiled objects.

    ``model`` holds ``jax.ShapeDtypeStruct`` leaves. Arguments of ``decode`` are the policy, the stored prompts and
    the rows' caches, so their memory is in its analysis.
    """
    samples = [(g, max_new_tokens) for g in range(n)]
    asked = [Asked(p, np.zeros(width, np.int32), samples) for p in range(prompts)]
    size = shapes(asked, spec, Reserve(prompts, width, max_new_tokens))
    config = model.config
    weights = _weights(model, mesh)
    dtype = logits_dtype(model)
    store = _lying(jax.eval_shape(lambda: empty_store(config, size.prompts, size.width, dtype)), mesh)
    slots = _lying(jax.eval_shape(lambda: empty_slots(config, size.slots, size.capacities[-1])), mesh)
    stops = _i32(len(set(stop_ids)))
    sharing = None
    if size.share:
        sharing = programs.Sharing(_i32(size.prompts, size.group), _i32(size.slots))
    rows = size.prefill
    prefill = programs.prefill.lower(weights, store, _i32(rows, size.width), _i32(rows), _i32(rows), mesh=mesh)
    given = (store if size.share else None, sharing, strategy, stops, _i32())
    decode = programs.decode.lower(weights, slots, *given, steps=size.chunk, mesh=mesh)
    return {"prefill": prefill.compile(), "decode": decode.compile()}


def _weights(model: Decoder, mesh: Mesh | None) -> Weights:
    """The shapes of a policy as it decodes, where they lie on the mesh."""
    weights = jax.eval_shape(programs.weights_of, model)
    if mesh is None:
        return weights
    whole = programs.gathered(model, mesh)
    if not isinstance(weights.layers, tuple):
        return Weights(_at(weights.model, whole), _at(weights.layers, whole.layers))
    apart = jax.tree.map(programs.of_one_layer, whole.layers)
    return Weights(_at(weights.model, whole), tuple(_at(layer, apart) for layer in weights.layers))


def _at(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _lying(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else _at(tree, where(tree, mesh))


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
