"""Sketches of per-row gradients from the streamed pass: no gradient of a row exists as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.influence import tiling
from jaxrl.influence.blocks import Consumer, Place
from jaxrl.influence.cost import working_memory
from jaxrl.influence.hashing import leaf_seed, sketch_block
from jaxrl.models.decoder import Decoder
from jaxrl.types import Packed, Rows, container, wide


@container
@dataclass(frozen=True)
class Sketched:
    """Sketches so far, and squared norms."""

    values: Float[Array, "N size"]
    squares: Float[Array, " N"]


@dataclass(frozen=True)
class SketchRows(Consumer):
    """Adds blocks to the sketches of their rows. Sketches are linear: parts of one gradient need no cross terms."""

    seed: int = 0
    size: int = 1

    def start(self, n: int, m: int, dtype: Any) -> Sketched:
        return Sketched(jnp.zeros((n, self.size), dtype), jnp.zeros(n, dtype))

    def explicit(
        self, sums: Sketched, place: Place, blocks: tuple[Array, ...], metric: Array | None, tensor: int | None = None
    ) -> Sketched:
        return self._added(sums, place, blocks[0], jnp.sum(jnp.square(blocks[0]), axis=(1, 2)))

    def cross(
        self, sums: Sketched, place: Place, first: tuple[Array, ...], second: tuple[Array, ...], metric: Array | None
    ) -> Sketched:
        squares = jnp.sum((2 * first[0] + second[0]) * second[0], axis=(1, 2))
        return self._added(sums, place, second[0], squares)

    def finish(self, sums: Sketched) -> Sketched:
        return sums

    def _added(self, sums: Sketched, place: Place, block: Array, squares: Array) -> Sketched:
        part = sketch_block(
            block,
            leaf_seed=leaf_seed(self.seed, place.name),
            layer=0 if place.layer is None else place.layer,
            offset=place.offset,
            strides=place.strides,
            size=self.size,
        )
        return Sketched(sums.values + part.astype(sums.values.dtype), sums.squares + squares)


def streamed_sketch(
    model: Decoder,
    rows: Rows | Packed,
    weights: Float[Array, "N W"],
    *,
    size: int,
    seed: int,
    temperature: float = 1.0,
    memory: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sketches ``[N size]`` and squared norms of the gradients of ``rows`` scored by ``weights``, in row tiles."""
    job = tiling.Streaming(model, ((rows, weights, temperature),), None, (("total",), ()), working_memory(memory))
    n = job.size[0]
    values = np.zeros((n, size), wide(model.embed[...].dtype))
    squares = np.zeros(n, values.dtype)
    consumer = SketchRows(job.mesh, job.block, seed, size)
    for at, tile in tiling.row_tiles(job.sides[0], tiling.tile_sizes(job)[0]):
        found = tiling.run(job, (tile,), consumer)
        values[at], squares[at] = (x[: at.stop - at.start] for x in (found.values, found.squares))
    return values, squares
