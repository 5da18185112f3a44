"""Several sequences in one row: less padding for the same tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.types import Packed, Rows


def pack(rows: Rows, width: int | None = None) -> Packed:
    """First-fit packing of ``rows [N]`` into rows of ``width`` tokens (default: the rows' own width).

    Sequences are placed longest first, each in the first row with room, so the number of rows R
    depends on the lengths. Runs on the host. Raises ``ValueError`` when a sequence is longer than ``width``.
    """
    tokens, start, length = (np.asarray(x) for x in (rows.tokens, rows.start, rows.length))
    width = tokens.shape[1] if width is None else width
    if len(length) and length.max() > width:
        raise ValueError(f"width: row {int(length.argmax())} holds {length.max()} tokens, which exceed {width}")
    row, offset = first_fit(length, width)
    count = int(row.max()) + 1 if len(row) else 0
    out, position, segment = (np.full((count, width), fill, np.int32) for fill in (0, 0, -1))
    number = np.zeros(count, np.int32)
    for i in np.lexsort((offset, row)):
        place = (row[i], slice(offset[i], offset[i] + length[i]))
        out[place], position[place] = tokens[i, : length[i]], np.arange(length[i])
        segment[place] = number[row[i]]
        number[row[i]] += 1
    arrays = (out, position, segment, row, offset, start.astype(np.int32), length.astype(np.int32))
    return Packed(*(jnp.asarray(x) for x in arrays))


def first_fit(
    length: Int[np.ndarray, " N"], width: int, most: int | None = None
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Row and offset of each sequence: longest first, in the first row of ``width`` tokens with room.

    ``most``: sequences a row at most. With ``most`` of at least ``width // m`` for sequences of at most m tokens
    no more rows are used than if all had m.
    """
    used: list[int] = []
    held: list[int] = []
    row, offset = np.zeros(len(length), np.int32), np.zeros(len(length), np.int32)
    limit = len(length) if most is None else most
    for i in np.argsort(-length, kind="stable"):
        size = int(length[i])
        at = next((r for r, filled in enumerate(used) if filled + size <= width and held[r] < limit), len(used))
        if at == len(used):
            used.append(0)
            held.append(0)
        row[i], offset[i] = at, used[at]
        used[at], held[at] = used[at] + size, held[at] + 1
    return row, offset


def slots(packed: Packed, width: int) -> Int[Array, "N W"]:
    """Where token t of each sequence lies in the flattened ``[R * L]`` rows; ``R * L`` beyond its end."""
    t = jnp.arange(width, dtype=jnp.int32)[None]
    flat = packed.row[:, None] * packed.tokens.shape[1] + packed.offset[:, None] + t
    return jnp.where(t < packed.length[:, None], flat, packed.tokens.size)


def take(values: Float[Array, "R L *C"], index: Int[Array, "N W"]) -> Float[Array, "N W *C"]:
    """Per-token ``values`` of packed rows, one sequence a row; 0 beyond a sequence's end."""
    flat = values.reshape(-1, *values.shape[2:])
    return flat.at[index].get(mode="fill", fill_value=0)


def unpack(packed: Packed, width: int | None = None) -> Rows:
    """The sequences as right-padded rows, ``width`` tokens wide (default: the packed width)."""
    width = packed.tokens.shape[1] if width is None else width
    return Rows(take(packed.tokens, slots(packed, width)), packed.start, packed.length)
