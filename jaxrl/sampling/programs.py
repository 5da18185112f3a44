"""The compiled programs of the engine: prefill, admission, a chunk of decode steps, and moving rows.

Shapes are fixed by the engine; prompts, lengths, temperatures, keys and stop ids are data. The randomness of a token
is ``f(key, uid, sample index, position in the response)`` and every operation but the matrix products is row by row,
so that at fixed shapes a row's tokens do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl import keys
from jaxrl.mesh import partition
from jaxrl.models.attention import merge, prefix_attention
from jaxrl.models.decoder import Decoder, embed_tokens, logits, param_axes, row_attention, row_positions
from jaxrl.models.layers import layer, rms_norm, rope_angles
from jaxrl.sampling.slots import (
    UNROLLED,
    Slots,
    Store,
    Weights,
    attend_rows,
    copy_rows,
    each_layer,
    get,
    logits_dtype,
    placed,
    put,
    put_rows,
)
from jaxrl.sampling.strategies import Strategy


class Drawn(NamedTuple):
    """What a chunk drew. Row b drew ``count[b]`` tokens, the first entries of its line; ``live``: it is not at its end."""

    token: Int[Array, "B C"]
    logp: Float[Array, "B C"]
    count: Int[Array, " B"]
    live: Bool[Array, " B"]


class Sharing(NamedTuple):
    """Which rows continue which stored prompt: ``member[p]`` are rows (B: nobody), ``place[b] = p * m + j`` its inverse."""

    member: Int[Array, "P m"]
    place: Int[Array, " B"]


def weights_of(model: Decoder, mesh: Mesh | None = None) -> Weights:
    """The policy as steps take it: layers in the compute dtype, the very numbers that training computes with.

    Apart where steps are unrolled (slices inside the loop would be copied at every step). On a mesh what is split
    over ``fsdp`` is gathered once here, not at every step. Where nothing has to change the caller's arrays are used.
    """
    config = model.config
    if mesh is not None:
        model = jax.device_put(model, gathered(model, mesh))
    if config.num_layers <= UNROLLED:
        return Weights(model, _apart(model.layers, dtype=config.dtype, depth=config.num_layers))
    same = all(x.dtype == jnp.dtype(config.dtype) for x in jax.tree.leaves(model.layers))
    return Weights(model, model.layers if same else _cast(model.layers, dtype=config.dtype))


def gathered(model: Decoder, mesh: Mesh) -> Any:
    """Where parameters (or their shapes) lie while decoding: whole along ``fsdp``, split over ``tensor`` as ever."""

    def place(axes: tuple[str, ...], x: Any) -> NamedSharding:
        whole = [None if axis == "embed" else axis for axis in axes]
        return NamedSharding(mesh, partition(mesh, whole, x.shape))

    return jax.tree.map(place, param_axes(model.config), model, is_leaf=lambda x: isinstance(x, tuple))


def of_one_layer(stacked: NamedSharding) -> NamedSharding:
    """Where a layer of a stacked parameter lies."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))


@partial(jax.jit, static_argnames="dtype")
def _cast(layers: Any, *, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), layers)


@partial(jax.jit, static_argnames=("dtype", "depth"))
def _apart(layers: Any, *, dtype: str, depth: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(lambda x, i=i: x[i].astype(dtype), layers) for i in range(depth))


@partial(jax.jit, static_argnames="mesh", donate_argnames="store")
def prefill(
    weights: Weights,
    store: Store,
    tokens: Int[Array, "R W"],
    length: Int[Array, " R"],
    place: Int[Array, " R"],
    *,
    mesh: Mesh | None = None,
) -> Store:
    """Run R right-padded prompts once and keep them at ``place`` of the store (P: dropped); last logits only."""
    model = weights.model
    config = model.config
    attend = row_attention(tokens.shape)
    x = embed_tokens(model, tokens)
    angles = rope_angles(row_positions(tokens.shape), config, x.dtype)

    def body(carry: Any, p: Any, index: Any, window: Any) -> Any:
        x, cache = carry

        def keep(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return attend(window)(q, k, v)[0], (k, v)

        x, (k, v) = layer(p, x, angles, config, keep)
        return x, put_rows(cache, index, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), place)

    x, cache = each_layer(weights, (x, store.cache), body)
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]
    scores = logits(model, rms_norm(last, model.norm[...], config.norm_eps))
    after = store.logits.at[place].set(scores, mode="drop")
    return placed(Store(cache, after, store.length.at[place].set(length, mode="drop")), mesh)


class Admission(NamedTuple):
    """Up to m new rows: where they go (B: nowhere), their stored prompt, name (uid, index) and most tokens."""

    row: Int[Array, " m"]
    prompt: Int[Array, " m"]
    uid: Int[Array, " m"]
    index: Int[Array, " m"]
    limit: Int[Array, " m"]


@partial(jax.jit, static_argnames="mesh", donate_argnames="slots")
def admit(
    slots: Slots,
    store: Store,
    new: Admission,
    strategy: Strategy,
    key: Key[Array, ""],
    stops: Int[Array, " K"],
    copies: Bool[Array, ""],
    *,
    mesh: Mesh | None = None,
) -> tuple[Slots, Drawn]:
    """Start rows from the stored logits of their prompts: no forward pass. Their first tokens are drawn here.

    ``key`` is the step's key; ``copies`` also copies the prompt into the row's own cache (prompts are not shared).
    """
    row_key = jax.vmap(keys.at, (None, 0, 0))(key, new.uid, new.index)
    number = _uniform(row_key, jnp.zeros_like(new.limit), store.logits.dtype)
    token, logp = strategy(store.logits[new.prompt], number)
    live = (new.limit > 1) & ~_ends(token, stops)
    length = store.length[new.prompt]
    fields = {
        "token": token,
        "count": jnp.ones_like(token),
        "limit": new.limit,
        "start": length,
        "held": jnp.where(copies, length, 0),
        "live": live,
        "key": jax.random.key_data(row_key),
    }
    put_in = {name: getattr(slots, name).at[new.row].set(value, mode="drop") for name, value in fields.items()}
    cache = jax.lax.cond(copies, lambda c: copy_rows(c, new.row, store.cache, new.prompt), lambda c: c, slots.cache)
    drawn = Drawn(token[:, None], logp[:, None], jnp.ones_like(token), live)
    return placed(replace(slots, cache=cache, **put_in), mesh), drawn


@partial(jax.jit, static_argnames=("steps", "mesh"), donate_argnames="slots")
def decode(
    weights: Weights,
    slots: Slots,
    store: Store | None,
    sharing: Sharing | None,
    strategy: Strategy,
    stops: Int[Array, " K"],
    wanted: Int[Array, ""],
    *,
    steps: int,
    mesh: Mesh | None = None,
) -> tuple[Slots, Drawn]:
    """Up to ``steps`` tokens for every live row with room in its cache.

    Ends early when no row can go on, or when ``wanted`` rows have ended in this chunk (someone waits for them). With
    ``store`` and ``sharing`` rows attend to their stored prompt as one product a prompt, without them to their own
    cache alone.
    """
    rows = slots.token.shape[0]
    capacity = _capacity(slots)
    dtype = logits_dtype(weights.model)
    key = jax.random.wrap_key_data(slots.key, impl="threefry2x32")
    ahead = slots.count[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
    numbers = jax.vmap(lambda k, t: _uniform(jnp.broadcast_to(k, t.shape), t, dtype))(key, ahead)
    before = jnp.sum(slots.live, dtype=jnp.int32)

    def going(s: Slots) -> Bool[Array, " B"]:
        return s.live & (s.held + s.count <= capacity)

    def cond(state: tuple[Array, Slots, Array, Array]) -> Array:
        i, s, _, _ = state
        return (i < steps) & jnp.any(going(s)) & (before - jnp.sum(s.live, dtype=jnp.int32) < wanted)

    def body(state: tuple[Array, Slots, Array, Array]) -> tuple[Array, Slots, Array, Array]:
        i, s, tokens, logps = state
        go = going(s)
        scores, cache = _forward(weights, s, store, sharing)
        token, logp = strategy(scores, jax.lax.dynamic_index_in_dim(numbers, i, axis=1, keepdims=False))
        count = jnp.where(go, s.count + 1, s.count)
        ended = go & (_ends(token, stops) | (count >= s.limit))
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, i, axis=1)
        logps = jax.lax.dynamic_update_index_in_dim(logps, logp, i, axis=1)
        # a row that pauses, its cache being full, writes the same token again at the next step: nothing changes
        s = replace(s, cache=cache, token=jnp.where(go, token, s.token), count=count, live=s.live & ~ended)
        return i + 1, s, tokens, logps

    empty = jnp.zeros((rows, steps), jnp.int32), jnp.zeros((rows, steps), dtype)
    _, after, tokens, logps = jax.lax.while_loop(cond, body, (jnp.int32(0), slots, *empty))
    return placed(after, mesh), Drawn(tokens, logps, after.count - slots.count, after.live)


@partial(jax.jit, static_argnames="mesh", donate_argnames=("to", "source"))
def move(
    to: Slots, source: Slots, into: Int[Array, " R"], row: Int[Array, " R"], *, mesh: Mesh | None = None
) -> tuple[Slots, Slots]:
    """Move rows between slots of other capacities or numbers; ``into`` beyond ``to`` is dropped.

    Returns both, the moved rows free in ``source``.
    """
    moved = {
        name: getattr(to, name).at[into].set(getattr(source, name)[row], mode="drop")
        for name in ("token", "count", "limit", "start", "held", "live", "key")
    }
    gone = jnp.where(into < to.token.shape[0], row, source.token.shape[0])
    rest = replace(source, live=source.live.at[gone].set(False, mode="drop"))
    to = replace(to, cache=copy_rows(to.cache, into, source.cache, row), **moved)
    return placed(to, mesh), placed(rest, mesh)


def _forward(weights: Weights, s: Slots, store: Store | None, sharing: Sharing | None) -> tuple[Array, Any]:
    """Logits after each row's last token, and the caches with that token in them."""
    model = weights.model
    config = model.config
    position = s.start + s.count - 1
    slot = s.held + s.count - 1
    x = embed_tokens(model, s.token[:, None])
    angles = rope_angles(position[:, None], config, x.dtype)

    def body(carry: Any, p: Any, index: Any, window: Any) -> Any:
        x, cache = carry
        oldest = None if window is None else position + 1 - window

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            new = put(cache, index, k[:, 0], v[:, 0], slot)
            first = None if oldest is None else oldest - (s.start - s.held)
            own = attend_rows(new, index, q[:, 0], jnp.where(s.live, slot + 1, 0), first)
            if store is None or sharing is None:
                return own[0][:, None].astype(q.dtype), new
            shared = _prompt_attention(q[:, 0], get(store.cache, index), store.length, sharing, oldest)
            return merge(*own, *shared)[:, None].astype(q.dtype), new

        return layer(p, x, angles, config, attend)

    x, cache = each_layer(weights, (x, s.cache), body)
    return logits(model, rms_norm(x[:, 0], model.norm[...], config.norm_eps)), cache


def _prompt_attention(
    q: Float[Array, "B h e"], kv: tuple[Array, Array], length: Array, sharing: Sharing, oldest: Array | None
) -> tuple[Float[Array, "B h e"], Float[Array, "B h"]]:
    """Attention to the stored prompts: queries are gathered by prompt, so that each prompt is one product."""
    member, place = sharing
    at = jnp.minimum(member, q.shape[0] - 1)  # nobody's place computes a copy that no row reads
    out, lse = prefix_attention(q[at], *kv, length, first=None if oldest is None else oldest[at])
    return out.reshape(-1, *out.shape[2:])[place], lse.reshape(-1, lse.shape[2])[place]


def _capacity(slots: Slots) -> int:
    k = slots.cache.k
    return (k[0] if isinstance(k, tuple) else k).shape[-1]


def _ends(token: Int[Array, " B"], stops: Int[Array, " K"]) -> Bool[Array, " B"]:
    return jnp.any(token[:, None] == stops[None, :], axis=1)


def _uniform(key: Key[Array, " m"], t: Int[Array, " m"], dtype: Any) -> Float[Array, " m"]:
    """The number in [0, 1) that draws token ``t`` of each row."""
    return jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t), (), dtype))(key, t)
