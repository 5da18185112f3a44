"""Sampling of n responses a prompt with a key-value cache.

Prompts are prefilled once each and their cache is shared out to the n samples. Inside, prompts
are padded on the left so that all rows decode at one slot; what comes out is right-padded rows.
Randomness: the key of a row is ``at(key, "rollout", step, uid, g)``, of a token that folded with
its index, so it never depends on neighbours, padding or batch shape. No cache outlives a call, so
none can be stale after a weight change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl import keys
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Cache, Decoder, extend, init_cache, logits
from jaxrl.sampling.strategies import Strategy
from jaxrl.types import STOP_EOS, STOP_LENGTH, Prompts, Rollouts, Rows, wide

UID_LIMIT = 2**31  # uids are i32 on the device


def generate(
    model: Decoder,
    prompts: Prompts | Sequence[Sequence[int]],
    strategy: Strategy,
    *,
    n: int,
    key: Key[Array, ""],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    uids: Sequence[int] | None = None,
    step: int = 0,
    first: int = 0,
) -> Rollouts:
    """Sample ``n`` responses to each prompt.

    ``prompts`` are token id lists or right-padded ``Prompts``; ``uids`` (default: the ``Prompts``'
    own, or positions) name the prompts in the random keys: two prompts with one uid share their
    random numbers. ``first`` is the index of the first sample, so that samples ``n`` and up can be
    added later. A response ends with the first id of ``stop_ids``, which it includes, or after
    ``max_new_tokens``. One program is compiled for each shape of prompts, ``n``, ``max_new_tokens``, number of stop
    ids and class of strategy.

    Returns ``Rollouts`` with rows ``[P n]`` of width ``S + max_new_tokens`` (S: the padded prompt
    width), log-probabilities of the sampled distribution, and stop reasons. Token ids off a row are 0.

    Raises ``ValueError`` for an empty prompt, ``n`` or ``max_new_tokens`` below 1, no stop ids, ids
    outside the vocabulary, and a prompt that leaves no room in ``config.max_positions``.
    """
    prompts = as_prompts(prompts, uids)
    _check(model, prompts, n, max_new_tokens, stop_ids)
    stops = np.asarray(sorted(set(stop_ids)), np.int32)
    prompts = _on_device(prompts)
    size = {"n": n, "count": max_new_tokens, "dtype": _head_dtype(model)}
    numbers = uniforms(key, prompts.uid, np.int32(step), np.int32(first), **size)
    return _generate(model, prompts, numbers, stops, strategy)


def _head_dtype(model: Decoder) -> jnp.dtype:
    """The dtype of the model's logits."""
    return wide(model.config.dtype, model.embed.dtype)


def as_prompts(prompts: Prompts | Sequence[Sequence[int]], uids: Sequence[int] | None = None) -> Prompts:
    """Token lists as right-padded ``Prompts``; ``Prompts`` pass through (with other uids if given).

    Raises ``ValueError`` when the number of uids is not that of the prompts, or one is outside i32.
    """
    if not isinstance(prompts, Prompts):
        width = max((len(p) for p in prompts), default=0)
        tokens = np.zeros((len(prompts), width), np.int32)
        for i, p in enumerate(prompts):
            tokens[i, : len(p)] = p
        length = np.asarray([len(p) for p in prompts], np.int32)
        prompts = Prompts(tokens, length, np.arange(len(prompts), dtype=np.int32))
    if uids is None:
        return prompts
    if len(uids) != len(prompts.length):
        raise ValueError(f"uids: {len(uids)} given for {len(prompts.length)} prompts")
    wide_uids = np.asarray(uids, np.int64)
    if wide_uids.size and not (wide_uids.min() >= 0 and wide_uids.max() < UID_LIMIT):
        raise ValueError(f"uids: expected integers from 0 to {UID_LIMIT - 1}, got {wide_uids.min()}..{wide_uids.max()}")
    return Prompts(prompts.tokens, prompts.length, wide_uids.astype(np.int32))


def _on_device(prompts: Prompts) -> Prompts:
    """The prompts in i32, where they are if they are placed already."""
    return jax.tree.map(lambda x: x if getattr(x, "dtype", None) == np.int32 else jnp.asarray(x, jnp.int32), prompts)


def _check(model: Decoder, prompts: Prompts, n: int, max_new: int, stop_ids: Sequence[int]) -> None:
    length, tokens = to_host((prompts.length, prompts.tokens))
    if length.size == 0 or length.min() < 1:
        which = np.flatnonzero(length < 1).tolist() if length.size else "all"
        raise ValueError(f"prompts: expected at least one token each; empty at {which}")
    if length.max() > tokens.shape[1]:
        raise ValueError(f"prompts: length {length.max()} is beyond the width of {tokens.shape[1]} tokens")
    if n < 1 or max_new < 1:
        raise ValueError(f"generate: expected n >= 1 and max_new_tokens >= 1, got {n} and {max_new}")
    if not len(stop_ids):
        raise ValueError("stop_ids: expected at least one id; take it from the generation config or the tokenizer")
    vocab, room = model.config.vocab_size, model.config.max_positions
    used = tokens[np.arange(tokens.shape[1])[None, :] < length[:, None]]
    for name, ids in (("prompts", used), ("stop_ids", np.asarray(stop_ids))):
        if ids.min() < 0 or ids.max() >= vocab:
            wrong = ids[(ids < 0) | (ids >= vocab)][0]
            raise ValueError(
                f"{name}: id {wrong} is outside the vocabulary of {vocab}; is this the model's own tokenizer?"
            )
    if length.max() + max_new > room:
        raise ValueError(
            f"prompts: prompt {int(length.argmax())} has {length.max()} tokens and max_new_tokens is {max_new}, "
            f"beyond the model's context of {room}; shorten one of them"
        )


@partial(jax.jit, static_argnames=("n", "count", "dtype"))
def uniforms(
    key: Key[Array, ""],
    uid: Int[Array, " P"],
    step: int | Array = 0,
    first: int | Array = 0,
    *,
    n: int,
    count: int,
    dtype: Any,
) -> Float[Array, "P n T"]:
    """The numbers in [0, 1) that draw tokens 0..count-1 of samples ``first .. first+n-1`` of each prompt.

    A program of its own, so that models and strategies of one shape share its compilation.
    """
    row_keys = keys.per_row(keys.at(key, "rollout", step), uid, n, first)

    def one(key: Key[Array, ""], t: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, t), (), dtype)

    token = jax.vmap(one, (None, 0))
    return jax.vmap(jax.vmap(token, (0, None)), (0, None))(row_keys, jnp.arange(count, dtype=jnp.int32))


@jax.jit
def _generate(
    model: Decoder, prompts: Prompts, uniform: Float[Array, "P n T"], stops: Int[Array, " K"], strategy: Strategy
) -> Rollouts:
    n, max_new = uniform.shape[1:]
    first_logits, cache = _prefill(model, prompts, max_new - 1)
    rows = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), (prompts.tokens, prompts.length, first_logits))
    tokens, start, first_logits = rows
    cache = jax.tree.map(lambda x: jnp.repeat(x, n, axis=1), cache)
    prompt = _Prompt(cache, first_logits, start, prompts.tokens.shape[1])
    out = _decode(model, prompt, uniform.reshape(-1, max_new), stops, strategy)
    stop = jnp.where(out.done, STOP_EOS, STOP_LENGTH).astype(jnp.int32)
    rollouts = Rollouts(*_assemble(tokens, start, out), stop)
    return jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]), rollouts)


class _Prompt(NamedTuple):
    """What decoding starts from. Prompts end at slot ``width - 1``."""

    cache: Cache
    logits: Float[Array, "N V"]
    length: Int[Array, " N"]
    width: int


class _Decoded(NamedTuple):
    """State of the loop: ``logits`` are of the token to draw at index ``t``."""

    t: Int[Array, ""]
    logits: Float[Array, "N V"]
    cache: Cache
    tokens: Int[Array, "N T"]
    logps: Float[Array, "N T"]
    length: Int[Array, " N"]
    done: Bool[Array, " N"]


def _prefill(model: Decoder, prompts: Prompts, room: int) -> tuple[Float[Array, "P V"], Cache]:
    """Run the prompts once, padded on the left; logits of the last position, and a cache with ``room`` more slots."""
    p, width = prompts.tokens.shape
    index = jnp.arange(width, dtype=jnp.int32)[None, :] - (width - prompts.length)[:, None]
    position = jnp.maximum(index, 0)
    tokens = jnp.take_along_axis(prompts.tokens, position, axis=1)
    states, cache = extend(model, tokens, position, init_cache(model, p, width), jnp.int32(0), index >= 0)
    more = [(0, 0), (0, 0), (0, room), (0, 0), (0, 0)]
    return logits(model, states[:, -1]), jax.tree.map(lambda x: jnp.pad(x, more), cache)


def _decode(
    model: Decoder,
    prompt: _Prompt,
    uniform: Float[Array, "N T"],
    stops: Int[Array, " K"],
    strategy: Strategy,
) -> _Decoded:
    """Sample until every row has stopped or holds T tokens."""
    rows, max_new = uniform.shape
    slot = jnp.arange(prompt.width + max_new - 1, dtype=jnp.int32)
    valid = slot[None, :] >= (prompt.width - prompt.length)[:, None]

    def draw(s: _Decoded) -> _Decoded:
        token, logp = strategy(s.logits, jax.lax.dynamic_index_in_dim(uniform, s.t, axis=1, keepdims=False))
        token, logp = (jnp.where(s.done, jnp.zeros((), x.dtype), x) for x in (token, logp))
        at = (jnp.int32(0), s.t)
        return s._replace(
            tokens=jax.lax.dynamic_update_slice(s.tokens, token[:, None], at),
            logps=jax.lax.dynamic_update_slice(s.logps, logp[:, None], at),
            length=jnp.where(s.done, s.length, s.t + 1),
            done=s.done | jnp.any(token[:, None] == stops[None, :], axis=1),
        )

    def body(s: _Decoded) -> _Decoded:
        s = draw(s)
        token = jax.lax.dynamic_slice_in_dim(s.tokens, s.t, 1, axis=1)
        position = (prompt.length + s.t)[:, None]
        states, cache = extend(model, token, position, s.cache, prompt.width + s.t, valid)
        return s._replace(t=s.t + 1, logits=logits(model, states[:, 0]), cache=cache)

    start = _Decoded(
        t=jnp.int32(0),
        logits=prompt.logits,
        cache=prompt.cache,
        tokens=jnp.zeros((rows, max_new), jnp.int32),
        logps=jnp.zeros((rows, max_new), prompt.logits.dtype),
        length=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
    )
    # the last draw needs no forward pass after it, so the loop stops one short
    return draw(jax.lax.while_loop(lambda s: (s.t < max_new - 1) & ~jnp.all(s.done), body, start))


def _assemble(prompt: Int[Array, "N S"], start: Int[Array, " N"], out: _Decoded) -> tuple[Rows, Float[Array, "N L"]]:
    """Move each response to where its prompt ends."""
    new = out.tokens.shape[1]
    t = jnp.arange(prompt.shape[1] + new, dtype=jnp.int32)[None, :]
    rows = Rows(jnp.pad(prompt, [(0, 0), (0, new)]), start, start + out.length)
    mask = rows.mask()
    index = jnp.clip(t - start[:, None], 0, new - 1)
    tokens, logps = (jnp.where(mask, jnp.take_along_axis(x, index, axis=1), 0) for x in (out.tokens, out.logps))
    tokens = jnp.where(t < start[:, None], rows.tokens, tokens)
    return Rows(tokens, rows.start, rows.length), logps
