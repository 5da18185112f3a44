"""Attention by platform: whole rows, one new token a row, and many rows that continue one stored prompt.

Every kind is one function with several implementations, which give the same numbers up to rounding:

    xla      everywhere, in every dtype, the only one with forward mode and second derivatives
    cudnn    NVIDIA GPUs, bfloat16 and float16: cuDNN's fused kernels through ``jax.nn.dot_product_attention``
    jax      the same call compiled by XLA: the twin of ``cudnn`` that runs anywhere, for tests
    splash   TPUs, whole rows: jax's splash attention
    pallas   TPUs, one token a row: a kernel that reads only the filled tiles of a cache (``ragged``)

``auto`` takes the fused one of the platform where it can (``choose_rows``, ``choose_decode``). A cache holds keys as
``[B K e S]`` and values as ``[B K S e]`` (K key-value heads of e numbers, S slots). Parts of one softmax are computed
apart, each with the log-sum-exp of its scores, and joined by ``merge``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.errors import nearest
from jaxrl.mesh import AXES, partition
from jaxrl.models.layers import attention
from jaxrl.types import wide

ROWS = ("xla", "jax", "cudnn", "splash")
DECODE = ("xla", "jax", "cudnn", "pallas")
INTERPRET = False  # tests run TPU kernels in Pallas's interpreter, which is for any platform and slow


class Choice(NamedTuple):
    """An implementation, and why it was taken."""

    name: str
    reason: str


def choose_rows(implementation: str, dtype: Any, head_dim: int, platform: str) -> Choice:
    """How whole rows attend: ``implementation``, or for ``auto`` what suits the platform, dtype and head_dim.

    Raises ``ValueError`` for a name that is none.
    """
    if implementation != "auto":
        return _named(implementation, ROWS)
    dtype = jnp.dtype(dtype)
    if platform == "tpu":
        return _tpu("splash", dtype)
    if platform != "gpu":
        return Choice("xla", f"no fused kernel for the platform {platform!r}")
    if "cuda" not in jax.devices()[0].client.platform_version:
        return Choice("xla", "cuDNN is for NVIDIA GPUs")
    if dtype not in (jnp.bfloat16, jnp.float16):
        return Choice("xla", f"cuDNN takes bfloat16 and float16, not {dtype.name}")
    if head_dim % 8 or head_dim > 128:
        return Choice("xla", f"cuDNN takes head_dim up to 128 in steps of 8, not {head_dim}")
    return Choice("cudnn", "an NVIDIA GPU in half precision")


def choose_decode(implementation: str, dtype: Any, slots: int, platform: str) -> Choice:
    """How one token a row attends to ``slots`` cached ones, as ``choose_rows``."""
    if implementation != "auto":
        return _named(implementation, DECODE)
    if platform == "gpu":
        return Choice("xla", "cuDNN wants head_dim last in the keys too: a copy of the cache at every step")
    if platform != "tpu":
        return Choice("xla", f"no fused kernel for the platform {platform!r}")
    from jaxrl.models.ragged import tile_of

    if tile_of(slots) is None:
        return Choice("xla", f"no tile divides a cache of {slots} slots; take a multiple of 128")
    return _tpu("pallas", jnp.dtype(dtype))


def platform_of(x: Array) -> str:
    """Where ``x`` is computed on: the mesh in its type says it, also ahead of time; else the default backend."""
    return getattr(getattr(_mesh_of(x), "abstract_device", None), "platform", None) or jax.default_backend()


def _named(name: str, known: Sequence[str]) -> Choice:
    if name not in known:
        raise ValueError(f"attention: {nearest(name, ('auto', *known))}, got {name!r}")
    return Choice(name, "asked for")


def _tpu(name: str, dtype: Any) -> Choice:
    if dtype == jnp.float64:
        return Choice("xla", "TPU kernels compute in float32, not float64")
    return Choice(name, "a TPU")


def _mesh_of(x: Array) -> Any:
    return getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)


def row_attention(
    q: Float[Array, "B S h e"],
    k: Float[Array, "B S K e"],
    v: Float[Array, "B S K e"],
    *,
    segments: Int[Array, "B S"] | None = None,
    window: int | Array | None = None,
    implementation: str = "auto",
) -> Float[Array, "B S h e"]:
    """Causal attention of whole rows; a token sees its own segment, and of it the ``window`` last tokens, itself included.

    Segments lie one after the other in a row. Only ``xla`` takes a ``window`` that is data, forward mode, float64.
    Raises ``ValueError`` for a name that is none and for what the implementation named cannot do.
    """
    name = choose_rows(implementation, q.dtype, q.shape[3], platform_of(q)).name
    if name == "xla":
        return attention(q, k, v, row_mask(q.shape[0], q.shape[1], segments, window))
    if window is not None and not isinstance(window, int):
        raise ValueError(f"attention: {name} needs a window that is a number, not an array; use 'xla'")
    if name in ("cudnn", "jax"):
        return _fused_rows(q, k, v, segments, window, name)
    from jaxrl.models.splash import splash_rows  # Pallas is loaded where it is used

    run = partial(splash_rows, window=window, interpret=INTERPRET)
    axes = [("rows", None, "heads", None), *[("rows", None, "kv_heads", None)] * 2]
    if segments is None:
        return _on_mesh(run, axes, axes[:1], q, k, v)
    return _on_mesh(run, [*axes, ("rows", None)], axes[:1], q, k, v, segments)


def row_mask(
    rows: int, width: int, segments: Int[Array, "B S"] | None = None, window: int | Array | None = None
) -> Bool[Array, "B S S"]:
    """Which token sees which. Within a segment positions are consecutive, so a window can be measured in slots."""
    t = jnp.arange(width, dtype=jnp.int32)
    seen = jnp.broadcast_to((t[:, None] >= t[None, :])[None], (rows, width, width))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    return seen if window is None else seen & (t[:, None] - t[None, :] < window)[None]


def _fused_rows(q: Array, k: Array, v: Array, segments: Array | None, window: int | None, name: str) -> Array:
    if name == "cudnn":
        _need_half(q.dtype)
    width = q.shape[1]
    mask = None
    if segments is not None:
        if width % 2:  # cuDNN's gradient with a mask takes an even number of tokens
            q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
            segments = jnp.pad(segments, ((0, 0), (0, 1)), constant_values=-1)
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),  # tokens to the left of the query's own
        implementation="cudnn" if name == "cudnn" else "xla",
    )
    return out[:, :width]


def _need_half(dtype: Any) -> None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"attention: cudnn takes bfloat16 and float16, got {jnp.dtype(dtype).name}; use 'xla'")


def _on_mesh(run: Callable[..., Any], axes: Sequence[Any], out_axes: Sequence[Any], *arrays: Array) -> Any:
    """``run`` on every device's part of arrays that lie on a mesh: the partitioner cannot split a kernel.

    ``out_axes`` are the logical axes of the results: those of ``arrays[0]`` decide how each is split.
    """
    mesh = _mesh_of(arrays[0])
    if mesh is None or tuple(mesh.axis_names) != AXES or mesh.size == 1 or mesh.are_all_axes_manual:
        return run(*arrays)
    shapes = [x.shape for x in arrays]
    split = partition(mesh, axes[1], shapes[1])  # query heads are split only where key-value heads can be
    heads = "kv_heads" in axes[1] and split[axes[1].index("kv_heads")] is not None
    kept = [tuple(None if not heads and a in ("heads", "kv_heads") else a for a in names) for names in axes]
    kept += [(None,)] * (len(arrays) - len(kept))  # the number of a layer
    specs = [partition(mesh, names, shape) for names, shape in zip(kept, shapes, strict=True)]
    place = dict(zip(kept[0], specs[0], strict=True))
    results = tuple(jax.sharding.PartitionSpec(*(place.get(a) for a in names)) for names in out_axes)
    out_specs = results[0] if len(results) == 1 else results
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)(*arrays)


def decode_attention(
    q: Float[Array, "B h e"],
    k: Float[Array, "*D B K e S"],
    v: Float[Array, "*D B K S e"],
    length: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """One query a row against the row's cache: slots ``first <= s < length`` (first: 0), of ``layer`` where stacked.

    Returns the output and the log-sum-exp of the scores (nats), both in at least float32: scores, softmax and sums
    are accumulated there (of ``cudnn`` and ``jax`` the output has q's rounding). A row that sees nothing gives 0 and
    minus infinity. Slots that are not seen must hold finite numbers. ``cudnn`` takes no ``first``.

    Raises ``ValueError`` for a name that is none and for what the implementation named cannot do.
    """
    name = choose_decode(implementation, q.dtype, v.shape[-2], platform_of(q)).name
    if name == "pallas":
        from jaxrl.models.ragged import ragged_attention

        first = jnp.zeros_like(length) if first is None else first
        axes = [("rows", "heads", None), *_cache_axes(layer), ("rows",), ("rows",)]
        length = jnp.minimum(length, v.shape[-2])  # the kernel reads what it is told to
        run = partial(ragged_attention, interpret=INTERPRET)
        return _on_mesh(run, axes, [axes[0], axes[0][:2]], q, k, v, length, first, *_number(layer))
    if layer is not None:
        k, v = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k, v))
    if name == "xla":
        out, lse = prefix_attention(q[:, None], k, v, length, first=None if first is None else first[:, None])
        return out[:, 0], lse[:, 0]
    return _fused_decode(q, k, v, jnp.minimum(length, v.shape[2]), first, name)


def write_token(
    new_k: Float[Array, "B K e"],
    new_v: Float[Array, "B K e"],
    k: Float[Array, "*D B K e S"],
    v: Float[Array, "*D B K S e"],
    slot: Int[Array, " B"],
    *,
    layer: Int[Array, ""] | int | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "*D B K e S"], Float[Array, "*D B K S e"]]:
    """The caches with one token a row at its slot, of ``layer`` where stacked; a slot outside is dropped.

    Belongs to ``decode_attention`` of the same ``implementation``: see ``ragged``.
    """
    name = choose_decode(implementation, new_k.dtype, v.shape[-2], platform_of(new_k)).name
    if name == "pallas":
        from jaxrl.models import ragged

        axes = [*[("rows", "kv_heads", None)] * 2, *_cache_axes(layer), ("rows",)]
        run = partial(ragged.write_token, interpret=INTERPRET)
        return _on_mesh(run, axes, axes[2:4], new_k, new_v, k, v, slot, *_number(layer))
    at = (jnp.arange(slot.shape[0]),) if layer is None else (layer, jnp.arange(slot.shape[0]))
    every = slice(None)
    return (
        k.at[(*at, every, every, slot)].set(new_k, mode="drop", unique_indices=True),
        v.at[(*at, every, slot)].set(new_v, mode="drop", unique_indices=True),
    )


def _cache_axes(layer: Any) -> list[tuple[str | None, ...]]:
    return [(*(() if layer is None else (None,)), "rows", "kv_heads", None, None)] * 2


def _number(layer: Any) -> tuple[Array, ...]:
    return () if layer is None else (jnp.asarray(layer, jnp.int32).reshape(1),)


def _fused_decode(q: Array, k: Array, v: Array, length: Array, first: Array | None, name: str) -> tuple[Array, Array]:
    if first is not None:
        raise ValueError(f"attention: {name} decodes without sliding windows; use 'xla'")
    if name == "cudnn":
        _need_half(q.dtype)
        # the public function rounds the log-sum-exp to q's dtype: in bfloat16 up to 0.03 nats at 10
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        out, lse = dot_product_attention(
            q[:, :, None],
            k.swapaxes(2, 3),
            v,
            q_seqlen=jnp.ones_like(length),
            kv_seqlen=length,
            scale=1 / math.sqrt(q.shape[2]),
            mask_type=MaskType.PADDING,
            qkv_layout="BNTH",
            return_residual=True,
        )
        out, lse = out[:, :, 0], lse[:, :, 0]
    else:
        out, lse = jax.nn.dot_product_attention(
            q[:, None],
            k.transpose(0, 3, 1, 2),
            v.swapaxes(1, 2),
            key_value_seq_lengths=length,
            implementation="xla",
            return_residual=True,
        )
        out, lse = out[:, 0], lse[:, 0]
    dtype, seen = wide(q.dtype), (length > 0)[:, None]
    out = jnp.where(seen[..., None], out.astype(dtype), jnp.zeros((), dtype))
    return out, jnp.where(seen, lse.astype(dtype), -jnp.inf)


def prefix_attention(
    q: Float[Array, "P m h e"],
    k: Float[Array, "P K e S"],
    v: Float[Array, "P K S e"],
    length: Int[Array, " P"],
    *,
    first: Int[Array, "P m"] | None = None,
) -> tuple[Float[Array, "P m h e"], Float[Array, "P m h"]]:
    """Many queries of each stored prompt against its keys, as one matrix product a prompt and key-value head.

    Query (p, j) sees slots ``first[p, j] <= s < length[p]``. Returns what ``decode_attention`` returns.
    """
    p, m, h, e = q.shape
    groups, slots = v.shape[1], v.shape[2]
    dtype = wide(q.dtype)
    grouped = q.reshape(p, m, groups, h // groups, e)
    scores = jnp.einsum("pmgre,pges->pgmrs", grouped, k, preferred_element_type=dtype) / math.sqrt(e)
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None, :]
    seen = slot < length[:, None, None]
    if first is not None:
        seen = seen & (slot >= first[:, :, None])
    weights, total, lse, empty = _softmax(scores, seen[:, None, :, None, :])
    # in the product's own order: in any other the CPU has no product of bfloat16 into float32
    out = jnp.einsum("pgmrs,pgse->pgmre", weights.astype(v.dtype), v, preferred_element_type=dtype)
    out = jnp.where(empty[..., None], jnp.zeros((), dtype), out / total[..., None]).transpose(0, 2, 1, 3, 4)
    return out.reshape(p, m, h, e), lse.transpose(0, 2, 1, 3).reshape(p, m, h)


def merge(
    out_a: Float[Array, "*B h e"],
    lse_a: Float[Array, "*B h"],
    out_b: Float[Array, "*B h e"],
    lse_b: Float[Array, "*B h"],
) -> Float[Array, "*B h e"]:
    """Attention to the union of two disjoint sets of keys, from attention to each: the weights are ``exp(lse)``.

    An empty part (0 and minus infinity) changes nothing; two empty parts give 0.
    """
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    a, b = jnp.exp(lse_a - top)[..., None], jnp.exp(lse_b - top)[..., None]
    total = a + b
    return (out_a * a + out_b * b) / jnp.where(total > 0, total, jnp.ones_like(total))


def _softmax(scores: Float[Array, "*B S"], seen: Bool[Array, "*B S"]) -> tuple[Array, Array, Array, Array]:
    """Weights before normalisation, their sum, the log-sum-exp of the seen scores, and where nothing is seen."""
    low: Any = jnp.finfo(scores.dtype).min
    scores = jnp.where(seen, scores, low)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])  # 0 where unseen, unless all are: then 1, and the result is discarded
    total = jnp.sum(weights, axis=-1)
    empty = top == low
    return weights, total, jnp.where(empty, -jnp.inf, top + jnp.log(total)), empty
