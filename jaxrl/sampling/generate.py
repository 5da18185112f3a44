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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxrl import keys
from jaxrl.models.decoder import Cache, Decoder, extend, init_cache, logits
from jaxrl.sampling.strategies import Strategy
from jaxrl.types import STOP_EOS, STOP_LENGTH, Prompts, Rollouts, Rows, wide


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
    own, or positions) name the prompts in the random keys; ``first`` is the index of the first
    sample, so that samples ``n`` and up can be added later. A response ends with the first id of
    ``stop_ids``, which it includes, or after ``max_new_tokens``.

    Returns ``Rollouts`` with rows ``[P n]`` of width ``S + max_new_tokens`` (S: the padded prompt
    width), log-probabilities of the sampled distribution, and stop reasons.

    Raises ``ValueError`` for an empty prompt, ``n`` or ``max_new_tokens`` below 1, no stop ids, and
    a prompt that leaves no room in ``config.max_positions``.
    """
    prompts = as_prompts(prompts, uids)
    _check(model, prompts, n, max_new_tokens, stop_ids)
    row_keys = keys.per_row(keys.at(key, "rollout", step), prompts.uid, first + n)[:, first:]
    stops = jnp.asarray(sorted(set(stop_ids)), jnp.int32)
    return _generate(model, prompts, row_keys, stops, strategy=strategy, max_new=max_new_tokens)


def as_prompts(prompts: Prompts | Sequence[Sequence[int]], uids: Sequence[int] | None = None) -> Prompts:
    """Token lists as right-padded ``Prompts``; ``Prompts`` pass through (with other uids if given)."""
    if not isinstance(prompts, Prompts):
        width = max((len(p) for p in prompts), default=0)
        tokens = np.zeros((len(prompts), width), np.int32)
        for i, p in enumerate(prompts):
            tokens[i, : len(p)] = p
        length = np.asarray([len(p) for p in prompts], np.int32)
        prompts = Prompts(tokens, length, np.arange(len(prompts), dtype=np.int32))
    if uids is not None:
        if len(uids) != len(prompts.length):
            raise ValueError(f"uids: {len(uids)} given for {len(prompts.length)} prompts")
        prompts = Prompts(prompts.tokens, prompts.length, np.asarray(uids, np.int32))
    return jax.tree.map(jnp.asarray, prompts)


def _check(model: Decoder, prompts: Prompts, n: int, max_new: int, stop_ids: Sequence[int]) -> None:
    length = np.asarray(prompts.length)
    if length.size == 0 or length.min() < 1:
        which = np.flatnonzero(length < 1).tolist() if length.size else "all"
        raise ValueError(f"prompts: expected at least one token each; empty at {which}")
    if n < 1 or max_new < 1:
        raise ValueError(f"generate: expected n >= 1 and max_new_tokens >= 1, got {n} and {max_new}")
    if not len(stop_ids):
        raise ValueError("stop_ids: expected at least one id; take it from the generation config or the tokenizer")
    room = model.config.max_positions
    if length.max() + max_new > room:
        raise ValueError(
            f"prompts: prompt {int(length.argmax())} has {length.max()} tokens and max_new_tokens is {max_new}, "
            f"beyond the model's context of {room}; shorten one of them"
        )


@partial(jax.jit, static_argnames=("strategy", "max_new"))
def _generate(
    model: Decoder,
    prompts: Prompts,
    row_keys: Key[Array, "P n"],
    stops: Int[Array, " K"],
    *,
    strategy: Strategy,
    max_new: int,
) -> Rollouts:
    p, n = row_keys.shape
    width = prompts.tokens.shape[1]
    first_logits, cache, valid = _prefill(model, prompts, width + max_new)
    repeat = lambda x, axis: jnp.repeat(x, n, axis=axis)
    cache = jax.tree.map(lambda x: repeat(x, 1), cache)
    response, logps, stop, counted = _decode(
        model,
        repeat(first_logits, 0),
        cache,
        repeat(valid, 0),
        repeat(prompts.length, 0),
        row_keys.reshape(-1),
        stops,
        strategy=strategy,
        max_new=max_new,
        width=width,
    )
    rows, logps = _assemble(repeat(prompts.tokens, 0), repeat(prompts.length, 0), response, logps, counted)
    shape = lambda x: x.reshape(p, n, *x.shape[1:])
    return Rollouts(jax.tree.map(shape, rows), shape(logps), shape(stop))


def _prefill(model: Decoder, prompts: Prompts, slots: int) -> tuple[Float[Array, "P V"], Cache, Array]:
    """Left-align the prompts and run them once; logits of the last position only."""
    p, width = prompts.tokens.shape
    pad = width - prompts.length
    index = jnp.arange(width, dtype=jnp.int32)[None, :] - pad[:, None]
    tokens = jnp.take_along_axis(prompts.tokens, jnp.maximum(index, 0), axis=1)
    slot = jnp.arange(slots, dtype=jnp.int32)
    valid = slot[None, :] >= pad[:, None]
    cache = init_cache(model, p, slots)
    states, cache = extend(model, tokens, jnp.maximum(index, 0), cache, jnp.int32(0), valid)
    return logits(model, states[:, -1]), cache, valid


def _decode(
    model: Decoder,
    first_logits: Float[Array, "N V"],
    cache: Cache,
    valid: Array,
    length: Int[Array, " N"],
    row_keys: Key[Array, " N"],
    stops: Int[Array, " K"],
    *,
    strategy: Strategy,
    max_new: int,
    width: int,
) -> tuple[Int[Array, "N T"], Float[Array, "N T"], Int[Array, " N"], Int[Array, " N"]]:
    """Response tokens, their log-probabilities, stop reasons and response lengths.

    Sample until every row has stopped. The loop carries the logits of the token to draw next."""
    rows = first_logits.shape[0]
    dtype = wide(first_logits.dtype)

    def draw(t: Array, scores: Array, tokens: Array, logps: Array, done: Array) -> tuple[Array, ...]:
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, t)
        token, logp = strategy(scores, step_keys)
        token = jnp.where(done, 0, token)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (jnp.int32(0), t))
        logps = jax.lax.dynamic_update_slice(logps, jnp.where(done, 0, logp)[:, None], (jnp.int32(0), t))
        return token, tokens, logps, done | jnp.any(token[:, None] == stops[None, :], axis=1)

    def body(carry: Any) -> Any:
        t, scores, cache, tokens, logps, done, counted = carry
        token, tokens, logps, now_done = draw(t, scores, tokens, logps, done)
        counted = jnp.where(done, counted, t + 1)
        states, cache = extend(model, token[:, None], (length + t)[:, None], cache, width + t, valid)
        return t + 1, logits(model, states[:, 0]), cache, tokens, logps, now_done, counted

    start = (
        jnp.int32(0),
        first_logits,
        cache,
        jnp.zeros((rows, max_new), jnp.int32),
        jnp.zeros((rows, max_new), dtype),
        jnp.zeros(rows, bool),
        jnp.zeros(rows, jnp.int32),
    )
    # the last draw needs no forward pass after it, so the loop stops one short
    carry = jax.lax.while_loop(lambda c: (c[0] < max_new - 1) & ~jnp.all(c[5]), body, start)
    t, scores, _, tokens, logps, done, counted = carry
    _, tokens, logps, now_done = draw(t, scores, tokens, logps, done)
    counted = jnp.where(done, counted, t + 1)
    stop = jnp.where(now_done, STOP_EOS, STOP_LENGTH).astype(jnp.int32)
    return tokens, logps, stop, counted


def _assemble(
    prompt: Int[Array, "N S"], start: Array, response: Int[Array, "N T"], logps: Float[Array, "N T"], counted: Array
) -> tuple[Rows, Float[Array, "N L"]]:
    """Move each response to where its prompt ends."""
    width = prompt.shape[1] + response.shape[1]
    t = jnp.arange(width, dtype=jnp.int32)[None, :]
    rows = Rows(jnp.pad(prompt, [(0, 0), (0, response.shape[1])]), start, start + counted)
    index = jnp.clip(t - start[:, None], 0, response.shape[1] - 1)
    mask = rows.mask()
    tokens = jnp.where(
        mask, jnp.take_along_axis(response, index, axis=1), jnp.where(t < start[:, None], rows.tokens, 0)
    )
    moved = jnp.where(mask, jnp.take_along_axis(logps, index, axis=1), 0)
    return Rows(tokens, rows.start, rows.length), moved
