"""A batch packed for training: several sequences in a row, a few rows a pass, every shape fixed beforehand.

The host places sequences by first fit; the device runs only the passes that hold something. Shapes do not follow
the lengths but buckets of them, so that few programs serve all steps. A loss keeps seeing unpacked rows: ``PackedRows``
scores them from packed ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl.mesh import to_mesh
from jaxrl.models.decoder import Decoder, hidden
from jaxrl.models.packing import first_fit
from jaxrl.models.scoring import ByBlocks
from jaxrl.types import Rows, container

MOST = 32  # sequences a packed row at most, unless more of full length fit
PARTS = 8  # buckets of the number of scored positions a row


@container
@dataclass(frozen=True)
class PackedRows(ByBlocks):
    """The scorer of one pass: R packed rows of W tokens that hold up to K sequences each.

    It is called with the ``R * K`` sequences unpacked, as ``index`` picks them, and reads their width off them.
    """

    tokens: Int[Array, "R W"]
    position: Int[Array, "R W"]  # within its sequence
    segment: Int[Array, "R W"]  # which sequence of the row; -1 on padding
    index: Int[Array, "R K"]  # which row of the batch; -1 where there is none
    slot: Int[Array, "R H"]  # where the states lie that predict response tokens; W where there is none
    place: Int[Array, "R H"]  # where in the row's [K L] the predicted tokens are; K * L where there is none
    mesh: Mesh | None = field(default=None, metadata={"static": True})

    def states(self, model: Decoder, rows: Rows) -> Float[Array, "P d"]:
        found = self.by_rows(hidden(model, self.tokens, positions=self.position, segments=self.segment))
        picked = jnp.take_along_axis(found, self.slot[:, :, None], axis=1, mode="clip")
        return picked.reshape(-1, found.shape[-1])

    def targets(self, rows: Rows) -> Int[Array, " P"]:
        return jnp.take_along_axis(self.tokens, self.slot + 1, axis=1, mode="clip").reshape(-1)

    def spread(self, values: Float[Array, " P"], rows: Rows) -> Float[Array, "N L"]:
        count = self.index.shape[1] * rows.tokens.shape[1]

        def one(values: Array, place: Array) -> Array:
            return jnp.zeros(count, values.dtype).at[place].set(values, mode="drop", unique_indices=True)

        return jax.vmap(one)(values.reshape(self.place.shape), self.place).reshape(rows.tokens.shape)

    def select(self, tree: Any) -> Any:
        """Those rows of arrays ``[N ...]`` that the pass holds, ``[R * K ...]``; any row where there is none."""
        at = jnp.maximum(self.index.reshape(-1), 0)
        return jax.tree.map(lambda x: x[at], tree)

    @property
    def live(self) -> Bool[Array, " RK"]:
        """Where there is a sequence."""
        return self.index.reshape(-1) >= 0


@container
@dataclass(frozen=True)
class Passes:
    """C passes, stacked, of which the first ``count`` hold sequences. Made by ``plan_passes``."""

    rows: PackedRows
    count: Int[Array, ""]

    def on(self, mesh: Mesh) -> Passes:
        """The same, on a mesh: rows split over its devices."""
        there = to_mesh(mesh, self, (None, "rows"))
        return replace(there, rows=replace(there.rows, mesh=mesh))

    def __getitem__(self, i: Array) -> PackedRows:
        return jax.tree.map(lambda x: x[i], self.rows)


def plan_passes(
    rows: Rows, used: Bool[np.ndarray, " N"], *, width: int, at_once: int | None = None, devices: int = 1
) -> Passes:
    """Pack the ``used`` rows of ``[N L]`` into rows of ``width`` tokens, ``at_once`` of them a pass. On the host.

    Rows that are not used, or have no response, are left out. ``at_once`` None puts all into one pass, of a number
    of rows from buckets that are at most a quarter apart; else there are as many passes as the longest sequences
    would need, and the number of those that run is data. ``devices``: the number that the rows of a pass are split
    over. The scored positions of a row are an eighth, two eighths, ... of ``width``.

    Raises ``ValueError`` when rows are wider than ``width`` or ``at_once`` is no multiple of ``devices``.
    """
    tokens, start, length = (np.asarray(x) for x in (rows.tokens, rows.start, rows.length))
    n, longest = tokens.shape
    if longest > width:
        raise ValueError(f"packing.width: rows of up to {longest} tokens do not fit into {width}")
    if at_once is not None and at_once % devices:
        raise ValueError(f"microbatch: {at_once} packed rows cannot be split over {devices} devices")
    full = width // longest
    most = max(full, min(MOST, width // 2))
    chosen = np.flatnonzero(np.asarray(used) & (length > start))
    row, offset = first_fit(length[chosen], width, most)
    held = int(row.max()) + 1 if len(row) else 0
    worst = -(-n // full)
    wanted = _bucket(max(held, 1)) if at_once is None else min(at_once, worst)
    size = devices * -(-wanted // devices)
    count = 1 if at_once is None else -(-worst // size)
    packed = _fill(tokens, start, length, chosen, row, offset, (count * size, width, most))
    packed = jax.tree.map(lambda x: x.reshape(count, size, x.shape[1]), packed)
    return Passes(packed, np.int32(-(-held // size)))


def _fill(
    tokens: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    chosen: np.ndarray,
    row: np.ndarray,
    offset: np.ndarray,
    shape: tuple[int, int, int],
) -> PackedRows:
    """The arrays of all packed rows, of which some may stay empty."""
    count, width, most = shape
    scored = np.bincount(row, weights=(length - start)[chosen], minlength=1)
    step = -(-width // PARTS)
    positions = max(-(-int(scored.max()) // step), 1) * step
    out, position, segment = (np.full((count, width), fill, np.int32) for fill in (0, 0, -1))
    index = np.full((count, most), -1, np.int32)
    slot = np.full((count, positions), width, np.int32)
    place = np.full((count, positions), most * tokens.shape[1], np.int32)
    number, filled = np.zeros(count, int), np.zeros(count, int)
    for at in np.lexsort((offset, row)):
        i, r, o = chosen[at], row[at], offset[at]
        k, h, size = number[r], filled[r], length[i] - start[i]
        span = slice(o, o + length[i])
        out[r, span], position[r, span], segment[r, span] = tokens[i, : length[i]], np.arange(length[i]), k
        t = np.arange(start[i], length[i])
        slot[r, h : h + size], place[r, h : h + size] = o + t - 1, k * tokens.shape[1] + t
        index[r, k] = i
        number[r], filled[r] = k + 1, h + size
    return PackedRows(out, position, segment, index, slot, place)


def _bucket(count: int) -> int:
    """The next of 1, 2, ..., 8, 10, 12, 14, 16, 20, ...: four to a power of two."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step


def packed_logps(
    model: Decoder, rows: Rows, passes: Passes, *, temperature: float | Array = 1.0
) -> Float[Array, "N L"]:
    """Log-probs of the rows that ``passes`` hold, nats; 0 in the others and off the response."""

    def add(i: Array, out: Array) -> Array:
        part = passes[i]
        found = part(model, part.select(rows), temperature=temperature)
        at = jnp.where(part.live, part.index.reshape(-1), rows.tokens.shape[0])
        return out.at[at].set(found, mode="drop")

    like = jax.eval_shape(lambda: passes[0](model, passes[0].select(rows), temperature=temperature))
    return jax.lax.fori_loop(0, passes.count, add, jnp.zeros(rows.tokens.shape, like.dtype))
