"""From rows to what the streamed kernel reads: scored positions side by side, tokens that occur, widths in steps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.influence.factors import Side
from jaxrl.models.packing import slots
from jaxrl.types import Packed, Rows

STEP = 16  # widths are rounded up to a multiple, so that other rows of much the same length need no new program


def side_of(rows: Rows | Packed, weights: Float[Array, "N W"], temperature: float) -> Side:
    """The tokens as the model reads them, cut after the last counted one, and the scored positions side by side."""
    start, length = np.asarray(rows.start), np.asarray(rows.length)
    count = len(start)
    width = rounded(int(length.max()), rows.tokens.shape[1])
    scored = rounded(int((length - start).max()), max(width - 1, 1))
    t = start[:, None] + np.arange(scored)[None]  # the tokens that are scored
    real = t < length[:, None]
    token = np.minimum(t, weights.shape[1] - 1)
    weight = jnp.where(jnp.asarray(real), jnp.take_along_axis(jnp.asarray(weights), jnp.asarray(token), axis=1), 0)
    row = np.arange(count)[:, None]
    if isinstance(rows, Packed):
        flat = np.asarray(rows.row)[:, None] * rows.tokens.shape[1] + np.asarray(rows.offset)[:, None] + t
        target = np.asarray(rows.tokens).reshape(-1)[np.where(real, flat, 0)]
        place = np.where(real, flat - 1, rows.tokens.size)
        tokens, positions, segments = rows.tokens, rows.position, rows.segment
        index = slots(rows, width)
    else:
        used = np.arange(width)[None] < length[:, None]  # what stands in padding may be no token at all
        tokens = np.where(used, np.asarray(rows.tokens)[:, :width], 0)
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
        target = np.asarray(rows.tokens)[row, np.where(real, t, 0)]
        place = np.where(real, t - 1, 0)
        segments, index = None, None
    whole = [jnp.asarray(x, jnp.int32) for x in (tokens, positions, place, target)]
    return Side(whole[0], whole[1], segments, index, whole[2], whole[3], weight, jnp.asarray(temperature, weight.dtype))


def rounded(length: int, limit: int) -> int:
    """``length`` rounded up to a multiple of ``STEP``, at most ``limit``."""
    return min(-(-max(length, 1) // STEP) * STEP, limit)


def token_entries(sides: tuple[Side, ...], vocab: int) -> tuple[tuple[Int[Array, "N W"], ...], Int[Array, " U"]]:
    """Which token ids occur on either side, in rising order, and for every token its entry in that list.

    The list is filled up with ``vocab`` to a multiple of 64, at most ``vocab`` entries. Tokens beyond a
    sequence's end get an entry past the list.
    """
    tokens = [np.asarray(side.by_sequence(side.tokens)) for side in sides]
    ends = [None if side.index is None else np.asarray(side.index) >= side.tokens.size for side in sides]
    ids = np.unique(np.concatenate([x.ravel() for x in tokens]))
    size = min(-(-len(ids) // 64) * 64, vocab)
    listed = np.full(size, vocab, np.int32)
    listed[: len(ids)] = ids
    found = [np.searchsorted(ids, x) for x in tokens]
    found = [x if end is None else np.where(end, size, x) for x, end in zip(found, ends, strict=True)]
    return tuple(jnp.asarray(x, jnp.int32) for x in found), jnp.asarray(listed)
