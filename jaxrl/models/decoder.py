"""One decoder for the Llama, Qwen2, Qwen3 and Mistral families.

NNX declares the parameters; after creation a model is a frozen pytree that goes through plain
``jax.*`` transformations. Never mutate one under ``jax.jit`` (the change is lost) and never close
over one (its weights become constants): pass it as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl import keys
from jaxrl.models.attention import choose_rows, platform_of, row_mask
from jaxrl.models.attention import row_attention as attend_rows
from jaxrl.models.config import ModelConfig
from jaxrl.models.layers import (
    LAYER_AXES,
    NORMS,
    Attend,
    Layers,
    attention,
    layer,
    layer_shapes,
    rms_norm,
    rope_angles,
)
from jaxrl.types import wide

OUTSIDE = ("embed", "norm", "head", "value")  # parameters that no layer holds


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final norm, (untied) head and (a critic's) value head. Make one by ``init_model`` or ``load_model``."""

    def __init__(self, config: ModelConfig, init: Any):
        self.config = config
        self.embed = nnx.Param(init("embed", (config.vocab_size, config.hidden_size)))
        self.layers = Layers(config, init)
        self.norm = nnx.Param(init("norm", (config.hidden_size,)))
        head = None if config.tied else nnx.Param(init("head", (config.hidden_size, config.vocab_size)))
        self.head = head
        self.value = nnx.Param(init("value", (config.hidden_size,))) if config.value_head else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, ``[D B C k e]``; slot ``c`` holds whatever was written there."""

    k: Float[Array, "D B C k e"]
    v: Float[Array, "D B C k e"]


def init_model(config: ModelConfig, key: Key[Array, ""]) -> Decoder:
    """A random model: normal(0, ``init_std``) matrices, unit norm gains, zero biases; float32.

    Float64 under ``jax.enable_x64``. Each parameter has its own key, named after it, so a change
    of one shape leaves the others as they were.
    """
    dtype = jnp.result_type(float)

    def init(name: str, shape: tuple[int, ...]) -> Array:
        if name in NORMS or name == "norm":
            return jnp.ones(shape, dtype)
        if name.endswith("_bias") or name == "value":
            return jnp.zeros(shape, dtype)
        return jax.random.normal(keys.at(key, name), shape, dtype) * config.init_std

    return Decoder(config, init)


def abstract_model(config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
    """The model's structure with ``jax.ShapeDtypeStruct`` leaves; nothing is allocated."""
    return Decoder(config, lambda name, shape: jax.ShapeDtypeStruct(shape, dtype))


def build(config: ModelConfig, leaves: dict[str, Any]) -> Decoder:
    """A model from its named parameters (``embed``, ``layers.q``, ...)."""
    return Decoder(config, lambda name, shape: leaves[name if name in OUTSIDE else f"layers.{name}"])


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a model."""
    shapes = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    if not config.tied:
        shapes["head"] = (config.hidden_size, config.vocab_size)
    if config.value_head:
        shapes["value"] = (config.hidden_size,)
    return shapes | {f"layers.{name}": shape for name, shape in layer_shapes(config).items()}


def param_axes(config: ModelConfig) -> Decoder:
    """The model's structure with a tuple of logical axis names in the place of every array."""
    outside = {"embed": ("vocab", "embed"), "norm": ("embed",), "head": ("embed", "vocab"), "value": ("embed",)}
    axes = outside | LAYER_AXES
    return Decoder(config, lambda name, shape: axes[name])


def with_config(model: Decoder, **changes: Any) -> Decoder:
    """The same arrays under a changed static config (compute dtype, remat, vocabulary limit)."""
    skeleton = abstract_model(dataclasses.replace(model.config, **changes))
    return jax.tree.unflatten(jax.tree.structure(skeleton), jax.tree.leaves(model))


def with_plain_attention(model: Decoder) -> Decoder:
    """The same arrays, attending in the way that forward mode and second derivatives take too."""
    config = model.config
    platform = platform_of(model.embed[...])
    fused = choose_rows(config.attention, config.dtype, config.head_dim, platform).name != "xla"
    return with_config(model, attention="xla") if fused else model


def cast(model: Decoder, dtype: Any) -> Decoder:
    """Parameters and compute in ``dtype``; for a frozen reference in bf16, or for float64 checks."""
    model = jax.tree.map(lambda x: x.astype(dtype), model)
    return with_config(model, dtype=jnp.dtype(dtype).name)


def hidden(
    model: Decoder,
    tokens: Int[Array, "N L"],
    *,
    positions: Int[Array, "N L"] | None = None,
    segments: Int[Array, "N L"] | None = None,
) -> Float[Array, "N L d"]:
    """Final-normed hidden states of right-padded rows at positions 0..L-1.

    Padding needs no mask: it lies to the right, where causal attention never looks. Rows that hold
    several sequences one after the other (``pack``) give the ``positions`` within each and the
    ``segments``: a token sees only its own segment. ``config.attention`` says by which kernel they attend.
    """
    if positions is None:
        positions = row_positions(tokens.shape)
    x, config = embed_tokens(model, tokens), model.config
    name = choose_rows(config.attention, config.dtype, config.head_dim, platform_of(x)).name
    if name == "xla":
        attend = row_attention(tokens.shape, segments)
        x, _ = _run_layers(model, x, positions, lambda extra, window: attend(window), None)
        return rms_norm(x, model.norm[...], config.norm_eps)
    for layers, window in _runs(model):

        def mix(q: Array, k: Array, v: Array, window: int | None = window) -> tuple[Array, None]:
            return attend_rows(q, k, v, segments=segments, window=window, implementation=name), None

        x, _ = _run_layers(model, x, positions, lambda extra, window, mix=mix: mix, None, layers)
    return rms_norm(x, model.norm[...], config.norm_eps)


def row_positions(shape: tuple[int, ...]) -> Int[Array, "N L"]:
    """0..L-1 in every row."""
    return jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)


def row_attention(
    shape: tuple[int, ...], segments: Int[Array, "N L"] | None = None
) -> Callable[[Int[Array, ""] | None], Attend]:
    """Causal attention of whole rows: ``attend(window)`` is what ``layer`` takes.

    Within a segment positions are consecutive, so a window can be measured in slots.
    """
    n, width = shape
    causal = row_mask(n, width, segments)
    t = jnp.arange(width, dtype=jnp.int32)

    def attend(window: Array | None) -> Attend:
        near = causal if window is None else causal & (t[:, None] - t[None, :] < window)[None]
        return lambda q, k, v: (attention(q, k, v, near), None)

    return attend


def init_cache(model: Decoder, batch: int, slots: int) -> Cache:
    """An empty cache in the compute dtype."""
    c = model.config
    shape = (c.num_layers, batch, slots, c.num_kv_heads, c.head_dim)
    return Cache(jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype))


def extend(
    model: Decoder,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    cache: Cache,
    slot: Int[Array, ""],
    key_valid: Bool[Array, "B C"],
) -> tuple[Float[Array, "B S d"], Cache]:
    """Write S tokens at slots ``slot .. slot+S-1`` and return their hidden states.

    A query attends to valid slots up to its own. Slots of one row must hold consecutive positions
    (left padding keeps that), so that a sliding window can be measured in slots. Prefill is one
    call with the whole prompt, decoding one call a token.
    """
    slots = cache.k.shape[2]
    slot = jnp.asarray(slot, jnp.int32)
    query_slot = slot + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    key_slot = jnp.arange(slots, dtype=jnp.int32)
    seen = (query_slot[:, None] >= key_slot[None, :])[None] & key_valid[:, None, :]
    zero = jnp.zeros((), jnp.int32)

    def attend(layer_cache: Cache, window: Array | None) -> Any:
        mask = seen if window is None else seen & (query_slot[:, None] - key_slot[None, :] < window)[None]

        def run(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
            at = (zero, slot, zero, zero)
            new = Cache(
                jax.lax.dynamic_update_slice(layer_cache.k, k, at), jax.lax.dynamic_update_slice(layer_cache.v, v, at)
            )
            return attention(q, new.k, new.v, mask), new

        return run

    x, cache = _run_layers(model, embed_tokens(model, tokens), positions, attend, cache)
    return rms_norm(x, model.norm[...], model.config.norm_eps), cache


def logits(model: Decoder, states: Float[Array, "*B d"], temperature: float | Array = 1.0) -> Float[Array, "*B V"]:
    """Next-token logits over temperature, in at least float32; ids from ``vocab_limit`` on are minus infinity."""
    weight = model.embed[...].T if model.head is None else model.head[...]
    dtype = wide(states.dtype, weight.dtype)
    out = jnp.einsum("...d,dv->...v", states.astype(dtype), weight.astype(dtype))
    out = out / jnp.asarray(temperature, dtype)
    limit = model.config.vocab_limit
    if limit is None or limit == model.config.vocab_size:
        return out
    known = (jnp.arange(out.shape[-1]) < limit).reshape((1,) * (out.ndim - 1) + (-1,))
    return jnp.where(known, out, -jnp.inf)


def embed_tokens(model: Decoder, tokens: Int[Array, "B S"]) -> Float[Array, "B S d"]:
    """The rows of the embedding, in the compute dtype."""
    # gather, then cast: the gradient of a token that occurs often is then summed in the masters' dtype
    return model.embed[...][tokens].astype(model.config.dtype)


def layer_windows(config: ModelConfig) -> Int[Array, " D"] | None:
    """One sliding window a layer, to be scanned with the layers; None when no layer has one."""
    if all(w is None for w in config.windows):
        return None
    unlimited = jnp.iinfo(jnp.int32).max
    return jnp.asarray([w or unlimited for w in config.windows], jnp.int32)


def _runs(model: Decoder) -> list[tuple[Layers, int | None]]:
    """The layers, cut where the sliding window changes: fused kernels take it as a number, not as data."""
    windows = model.config.windows or (None,) * model.config.num_layers
    cuts = [i for i in range(1, len(windows)) if windows[i] != windows[i - 1]]
    if not cuts:
        return [(model.layers, windows[0])]
    bounds = [0, *cuts, len(windows)]
    return [(jax.tree.map(lambda x, a=a, b=b: x[a:b], model.layers), windows[a]) for a, b in pairwise(bounds)]


def _run_layers(
    model: Decoder, x: Array, positions: Array, make_attend: Any, extra: Any, layers: Layers | None = None
) -> tuple[Array, Any]:
    """Scan the stacked layers. ``make_attend(extra_of_layer, window) -> attend``.

    ``layers``: some of them, whose ``make_attend`` knows their window.
    """
    config = model.config
    angles = rope_angles(positions, config, x.dtype)

    def body(x: Array, xs: tuple[Any, Any, Any]) -> tuple[Array, Any]:
        p, extra, window = xs
        return layer(p, x, angles, config, make_attend(extra, window))

    xs = (model.layers, extra, layer_windows(config)) if layers is None else (layers, extra, None)
    return jax.lax.scan(_remat(body, config.remat), x, xs)


def _remat(body: Any, remat: str) -> Any:
    policies = jax.checkpoint_policies
    keep = {
        "names": policies.save_only_these_names("qkv", "attention_out"),
        "dots": policies.dots_with_no_batch_dims_saveable,
        "full": policies.nothing_saveable,
    }
    return body if remat == "none" else jax.checkpoint(body, policy=keep[remat], prevent_cse=False)
