"""What an engine keeps on the device: rows that are being decoded, and the prompts that they continue.

``Slots`` are B rows of one capacity, each with a cache of its own; ``Store`` holds up to P prompts, their keys and
values once each, and the logits that follow them, from which any number of samples start without a forward pass.
All arrays have fixed shapes: what changes is data.

Layout, measured on the CPU: keys ``[B K H S]`` and values ``[B K S H]`` (K key-value heads of H numbers), a tuple
of one array a layer where layers are unrolled, one stacked array ``[D ...]`` where they are looped over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl.mesh import partition
from jaxrl.models.attention import decode_attention, write_token
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder
from jaxrl.types import container, wide

T = TypeVar("T")
UNROLLED = 8  # layers up to which a step is unrolled; a loop that carries the caches costs a fifth more


@container
@dataclass(frozen=True)
class Weights:
    """A policy as it decodes: the model, and its layers in the compute dtype, each apart (a tuple) where unrolled."""

    model: Decoder
    layers: Any


@container
@dataclass(frozen=True)
class Cache:
    """Keys and values: a tuple of arrays, one a layer, or one array stacked over layers."""

    k: Any
    v: Any


@container
@dataclass(frozen=True)
class Slots:
    """B rows. Row b has drawn ``count`` tokens, of at most ``limit``; ``token`` is the last one, not yet in the cache.

    ``start`` is the length of its prompt, of which ``held`` positions lie in its own cache (all of them where prompts
    are not shared, else none): slot s holds position ``s + start - held``. A row that is not ``live`` is free.
    """

    cache: Cache
    token: Int[Array, " B"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]
    start: Int[Array, " B"]
    held: Int[Array, " B"]
    live: Bool[Array, " B"]
    key: UInt[Array, "B 2"]


@container
@dataclass(frozen=True)
class Store:
    """P prompts: keys and values of their positions, their lengths, and the logits after their last token."""

    cache: Cache
    logits: Float[Array, "P V"]
    length: Int[Array, " P"]


def empty_cache(config: ModelConfig, rows: int, width: int) -> Cache:
    """A cache of zeros in the compute dtype."""
    shape = (rows, config.num_kv_heads, config.head_dim, width)
    turned = (rows, config.num_kv_heads, width, config.head_dim)
    depth = config.num_layers
    if depth <= UNROLLED:
        arrays = [tuple(jnp.zeros(s, config.dtype) for _ in range(depth)) for s in (shape, turned)]
        return Cache(*arrays)
    return Cache(jnp.zeros((depth, *shape), config.dtype), jnp.zeros((depth, *turned), config.dtype))


@partial(jax.jit, static_argnames=("config", "rows", "capacity", "mesh"))
def empty_slots(config: ModelConfig, rows: int, capacity: int, mesh: Mesh | None = None) -> Slots:
    """``rows`` free rows with room for ``capacity`` cached tokens each."""
    none = {name: jnp.zeros(rows, jnp.int32) for name in ("token", "count", "limit", "start", "held")}
    live, key = jnp.zeros(rows, bool), jnp.zeros((rows, 2), jnp.uint32)
    return placed(Slots(empty_cache(config, rows, capacity), live=live, key=key, **none), mesh)


@partial(jax.jit, static_argnames=("config", "prompts", "width", "dtype", "mesh"))
def empty_store(config: ModelConfig, prompts: int, width: int, dtype: Any, mesh: Mesh | None = None) -> Store:
    """Room for ``prompts`` prompts of up to ``width`` tokens; logits in ``dtype``."""
    scores = jnp.zeros((prompts, config.vocab_size), dtype)
    return placed(Store(empty_cache(config, prompts, width), scores, jnp.zeros(prompts, jnp.int32)), mesh)


def placed(tree: T, mesh: Mesh | None) -> T:
    """Slots or a store as they lie on a mesh: rows over data and fsdp, key-value heads and the vocabulary over tensor.

    Inside a program this is a constraint, so that what comes out lies like what went in and can take its place.
    """
    if mesh is None:
        return tree

    return jax.tree.map(jax.lax.with_sharding_constraint, tree, where(tree, mesh))


def where(tree: T, mesh: Mesh) -> T:
    """The sharding of every array of slots or a store (or of their shapes)."""

    def place(path: Any, x: Any) -> NamedSharding:
        names = [getattr(key, "name", None) for key in path]
        axes: tuple[str | None, ...] = ("rows",) + (None,) * (x.ndim - 1)
        if "cache" in names:
            axes = ("layers",) * (x.ndim - 4) + ("rows", "kv_heads", None, None)
        if "logits" in names:
            axes = ("rows", "vocab")
        return NamedSharding(mesh, partition(mesh, axes, x.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def logits_dtype(model: Decoder) -> jnp.dtype:
    """The dtype of the model's logits."""
    return wide(model.config.dtype, model.embed.dtype)


def get(cache: Cache, layer: Any) -> tuple[Array, Array]:
    """Keys and values of one layer."""
    if isinstance(cache.k, tuple):
        return cache.k[layer], cache.v[layer]
    return (
        jax.lax.dynamic_index_in_dim(cache.k, layer, keepdims=False),
        jax.lax.dynamic_index_in_dim(cache.v, layer, keepdims=False),
    )


def put(cache: Cache, layer: Any, k: Float[Array, "B K H"], v: Float[Array, "B K H"], slot: Int[Array, " B"]) -> Cache:
    """Write one token a row at its own slot; a slot outside the cache is dropped."""
    if not isinstance(cache.k, tuple):
        return Cache(*write_token(k, v, cache.k, cache.v, slot, layer=layer))
    new_k, new_v = write_token(k, v, cache.k[layer], cache.v[layer], slot)
    return Cache(_replaced(cache.k, layer, new_k), _replaced(cache.v, layer, new_v))


def attend_rows(
    cache: Cache, layer: Any, q: Float[Array, "B h e"], length: Int[Array, " B"], first: Int[Array, " B"] | None
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """One query a row against its slots ``first <= s < length``: output and log-sum-exp, see ``decode_attention``."""
    if not isinstance(cache.k, tuple):
        return decode_attention(q, cache.k, cache.v, length, first=first, layer=layer)
    return decode_attention(q, cache.k[layer], cache.v[layer], length, first=first)


def put_rows(cache: Cache, layer: Any, k: Array, v: Array, row: Int[Array, " R"]) -> Cache:
    """Write whole rows, from slot 0 on (``k [R K H W]``, ``v [R K W H]``); a row outside the cache is dropped."""
    width = k.shape[-1]
    if isinstance(cache.k, tuple):
        new_k = cache.k[layer].at[row, :, :, :width].set(k, mode="drop")
        new_v = cache.v[layer].at[row, :, :width].set(v, mode="drop")
        return Cache(_replaced(cache.k, layer, new_k), _replaced(cache.v, layer, new_v))
    return Cache(
        cache.k.at[layer, row, :, :, :width].set(k, mode="drop"),
        cache.v.at[layer, row, :, :width].set(v, mode="drop"),
    )


def copy_rows(to: Cache, into: Int[Array, " R"], source: Cache, row: Int[Array, " R"]) -> Cache:
    """Copy rows between caches, as much of them as both have room for; a target outside is dropped."""
    axis = 0 if isinstance(to.k, tuple) else 1
    before = (slice(None),) * axis

    def one(to: Array, source: Array, length: int) -> Array:
        width = min(to.shape[length], source.shape[length])
        cut: list[Any] = [slice(None)] * to.ndim
        cut[length] = slice(width)
        part = source[(*before, row)][tuple(cut)]
        cut[axis] = into
        return to.at[tuple(cut)].set(part, mode="drop")

    k = jax.tree.map(lambda a, b: one(a, b, a.ndim - 1), to.k, source.k)
    v = jax.tree.map(lambda a, b: one(a, b, a.ndim - 2), to.v, source.v)
    return Cache(k, v)


def each_layer(weights: Weights, carry: T, body: Callable[[T, Any, Any, Any], T]) -> T:
    """``carry = body(carry, parameters, layer, window)`` over the layers; ``window`` is None where no layer has one."""
    windows = weights.model.config.windows
    if isinstance(weights.layers, tuple):
        for i, p in enumerate(weights.layers):
            carry = body(carry, p, i, windows[i] if windows else None)
        return carry
    unlimited = jnp.iinfo(jnp.int32).max
    limits = None if all(w is None for w in windows) else jnp.asarray([w or unlimited for w in windows], jnp.int32)

    def step(i: Array, carry: T) -> T:
        p = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), weights.layers)
        return body(carry, p, i, None if limits is None else limits[i])

    return jax.lax.fori_loop(0, weights.model.config.num_layers, step, carry)


def _replaced(arrays: tuple[Array, ...], at: int, new: Array) -> tuple[Array, ...]:
    return (*arrays[:at], new, *arrays[at + 1 :])
