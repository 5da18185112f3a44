"""The streamed kernel from the host's side: row tiles, the mesh, and what to say when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxrl.errors import OutOfMemory
from jaxrl.influence.blocks import Consumer, row_devices
from jaxrl.influence.cost import BLOCK, CHUNK, ghost_leaves, human, row_bytes, tiles
from jaxrl.influence.explicit import Blocks, Found
from jaxrl.influence.factors import Side
from jaxrl.influence.gradients import leaf_names
from jaxrl.influence.gram import Contract
from jaxrl.influence.sides import rounded, side_of, token_entries
from jaxrl.influence.stream import Plan, stream
from jaxrl.mesh import AXES, to_host, to_mesh
from jaxrl.models.decoder import Decoder, with_config
from jaxrl.models.layers import PROJECTIONS
from jaxrl.types import Packed, Rows


@dataclass(frozen=True)
class Streaming:
    """One kernel to stream. ``sides``: rows with weights and temperature, one of them when both are the same.

    ``ghost``: None for the cost rule, else all or no matrices token by token. ``dense``: head and embedding
    of a tied matrix over the whole vocabulary, None for the cheaper way. ``block``: bytes of per-row gradients
    at a time, an eighth of ``memory`` at most. ``chunk``: vocabulary entries at a time.
    """

    model: Decoder
    sides: tuple[tuple[Rows | Packed, Array, float], ...]
    metric: Decoder | None
    blocks: Blocks
    memory: int
    ghost: bool | None = None
    dense: bool | None = None
    block: int = BLOCK
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", min(self.block, max(self.memory // 8, 1)))
        # layers are always recomputed and attend plainly: models that differ in their policy for that share one program
        object.__setattr__(self, "model", with_config(self.model, remat="none", attention="xla"))

    @property
    def size(self) -> tuple[int, int]:
        return len(self.sides[0][0].start), len(self.sides[-1][0].start)

    @property
    def same(self) -> bool:
        return len(self.sides) == 1

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the parameters lie on; None for one device."""
        sharding = getattr(jax.tree.leaves(self.model)[0], "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.mesh.axis_names == AXES:
            return sharding.mesh
        return None

    def widths(self) -> tuple[int, int]:
        """Tokens of a row after the cut, on both sides."""
        found = [
            rows.tokens.shape[1]
            if isinstance(rows, Packed)
            else rounded(int(np.asarray(rows.length).max()), rows.tokens.shape[1])
            for rows, *_ in self.sides
        ]
        return found[0], found[-1]

    def contract(self, same: bool | None = None) -> Contract:
        """How products are taken: token by token where that is cheaper, which needs one device and no metric."""
        n, m = self.size
        simple = self.mesh is None and self.metric is None
        ghost = ghost_leaves(self.model.config, n, m, *self.widths()) if self.ghost is None and simple else frozenset()
        if self.ghost:
            ghost = frozenset(PROJECTIONS)
        slots = tuple(zip(leaf_names(self.model), self.blocks[1], strict=True))
        return Contract(self.mesh, self.block, self.same if same is None else same, slots, len(self.blocks[0]), ghost)


def streamed(job: Streaming) -> Found:
    """The kernel by the lockstep reverse scan, in as few row tiles as ``memory`` allows.

    Raises ``ValueError`` when two rows do not fit, ``OutOfMemory`` naming a tile size when the device gives up.
    """
    n, m = job.size
    tile_a, tile_b = tile_sizes(job)
    names = job.blocks[0]
    out, norms = np.zeros((len(names), n, m)), (np.zeros(n), np.zeros(m))
    for a, rows_a in row_tiles(job.sides[0], tile_a):
        for b, rows_b in row_tiles(job.sides[-1], tile_b):
            sides = (rows_a,) if job.same and (tile_a, tile_b) == (n, m) else (rows_a, rows_b)
            values, sq_a, sq_b = run(job, sides, job.contract(len(sides) == 1))
            out[:, a, b] = values[:, : a.stop - a.start, : b.stop - b.start]
            norms[0][a], norms[1][b] = sq_a[: a.stop - a.start], sq_b[: b.stop - b.start]
    return out, norms


def tile_sizes(job: Streaming) -> tuple[int, int]:
    """Rows of either side at a time. A packed side is one tile: its rows hold several sequences."""
    n, m = job.size
    devices = row_devices(job.mesh)
    each = row_bytes(job.model.config, max(job.widths())) // devices
    fits = (job.memory - 2 * job.block) // max(each, 1)
    if any(isinstance(rows, Packed) for rows, *_ in job.sides):
        held = [(rows.tokens if isinstance(rows, Packed) else rows.start).shape[0] for rows, *_ in job.sides]
        if sum(held) > max(fits, 0):
            raise ValueError(
                f"memory: packed rows are taken at once, and {sum(held)} rows need memory={memory_for(sum(held), each)}; "
                "give that, or unpack them (`jaxrl.models.packing.unpack`), which are worked through in tiles"
            )
        return n, m
    if fits < 2:
        raise ValueError(
            f"memory: {human(job.memory)} hold {max(fits, 0)} rows of {max(job.widths())} tokens at {human(each)} each "
            f"beside blocks of {human(2 * job.block)}; two are needed: memory={memory_for(2, each)} is enough"
        )
    return tiles(n, m, int(fits), job.same)


def memory_for(rows: int, each: int) -> int:
    """The least ``memory`` in which ``rows`` rows of ``each`` bytes fit beside the blocks."""
    return min(-(-4 * rows * each // 3) + 8, rows * each + 2 * BLOCK)


def row_tiles(side: tuple[Any, Array, float], size: int) -> Iterator[tuple[slice, tuple[Any, Array, float]]]:
    """Slices of a side; the last tile is filled up with the last row."""
    rows, weights, temperature = side
    n = len(rows.start)
    if size == n:
        yield slice(0, n), side
        return
    for low in range(0, n, size):
        index = np.minimum(np.arange(low, low + size), n - 1)
        yield slice(low, min(low + size, n)), (rows[index], weights[index], temperature)


def run(job: Streaming, sides: tuple[tuple[Any, Array, float], ...], consumer: Consumer) -> Any:
    """One pass over a tile; numpy arrays on every process. Raises ``OutOfMemory``."""
    try:
        return to_host(jax.block_until_ready(stream(*arguments(job, sides, consumer))))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        rows = [len(side[0].start) for side in sides]
        a, b = (max(1, -(-x // 2)) for x in (rows[0], rows[-1]))
        each = row_bytes(job.model.config, max(job.widths()))
        raise OutOfMemory(
            f"the device has no room for {rows[0]} x {rows[-1]} rows of {max(job.widths())} tokens (about "
            f"{human(each * sum(rows))}); tiles of {a} x {b} take half: memory={memory_for(a + b, each)}"
        ) from error


def arguments(
    job: Streaming, sides: tuple[tuple[Any, Array, float], ...], consumer: Consumer | None = None
) -> tuple[Any, ...]:
    """What ``stream`` takes for these sides: on the mesh, with rows filled up to what its devices divide."""
    consumer = consumer or job.contract()
    plain = tuple(side_of(to_host(rows), to_host(weights), temperature) for rows, weights, temperature in sides)
    entries, listed, ids = listing(job, plain, consumer)
    if consumer.mesh is not None:
        filled = [_filled(side, entry, consumer) for side, entry in zip(plain, entries, strict=True)]
        plain, entries = zip(*filled, strict=True)
    plan = Plan(consumer, vocabulary_chunk(job, consumer), listed)
    return job.model, plain, entries, ids, job.metric, plan


def vocabulary_chunk(job: Streaming, consumer: Consumer) -> int:
    """Vocabulary entries at a time; on a mesh a multiple of its devices, which share a chunk."""
    chunk = min(job.chunk, job.model.config.vocab_size)
    if consumer.mesh is None:
        return chunk
    return max(consumer.mesh.size, chunk // consumer.mesh.size * consumer.mesh.size)


def listing(job: Streaming, sides: tuple[Side, ...], consumer: Consumer) -> tuple[tuple[Array, ...], int, Array | None]:
    """Every token's entry, entries at a time, and the list of tokens that occur (None: the whole vocabulary)."""
    vocab, tied = job.model.config.vocab_size, job.model.head is None
    entries, ids = token_entries(sides, vocab)
    dense = job.dense if job.dense is not None else 2 * len(ids) > vocab
    if tied and dense:
        return tuple(side.by_sequence(side.tokens) for side in sides), 0, None
    at_once = consumer.padded(min(job.chunk, len(ids)))
    short = -len(ids) % at_once
    return entries, at_once, jnp.pad(ids, (0, short), constant_values=vocab)


def _filled(side: Side, entry: Array, consumer: Consumer) -> tuple[Side, Array]:
    """Rows of weight 0 up to a multiple of the devices that share rows, everything on the mesh."""
    short = -side.count % consumer.row_devices

    def more(x: Array) -> Array:
        return jnp.concatenate([x, jnp.zeros_like(x, shape=(short, *x.shape[1:]))]) if short and x.ndim else x

    if side.index is not None:
        raise ValueError("rows: packed rows are for one device; unpack them (`jaxrl.models.packing.unpack`) on a mesh")
    side, entry = jax.tree.map(more, (side, entry))
    return to_mesh(consumer.mesh, to_host((side, entry)))
