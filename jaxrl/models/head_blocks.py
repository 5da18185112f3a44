"""How the head's matrix is taken block by block, on one device or split over a mesh.

On a mesh (``jaxrl.mesh``) a device holds some of the positions, and of the matrix some entries and a share of their
width. A block is gathered over its width alone and sums over entries are combined at the end: what crosses devices is
the matrix once a pass, and never a logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl.mesh import RULES, partition
from jaxrl.types import wide

PARTS = 32  # blocks of a large vocabulary: 4,748 entries of 151,936
SMALLEST = 1024  # entries of a block at least
ROWS = RULES["rows"]
POSITIONS, MATRIX = "positions", "matrix"  # what an array is split like


def block_size(entries: int) -> int:
    """Entries at a time: a 32nd, but not so few that a loop costs more than it saves."""
    return min(entries, max(-(-entries // PARTS), SMALLEST))


@dataclass(frozen=True)
class Blocks:
    """A matrix of ``size`` entries (on this device), ``limit`` of all known, taken ``block`` at a time.

    ``tied``: ``[V d]`` rather than ``[d V]``. ``entries`` and ``width`` are the axes of ``mesh`` that split it, if any.
    """

    size: int
    limit: int
    tied: bool
    block: int
    mesh: Mesh | None = None
    entries: str | None = None
    width: str | None = None

    @classmethod
    def of(cls, matrix: Array, limit: int | None, tied: bool, block: int | None, mesh: Mesh | None) -> Blocks:
        v, d = matrix.shape if tied else matrix.shape[::-1]
        limit = v if limit is None else min(limit, v)
        if mesh is None or mesh.size == 1:
            return cls(v, limit, tied, min(block or block_size(v), v))
        entries, width = partition(mesh, ("vocab", "embed"), (v, d))
        size = v if entries is None else v // mesh.shape[entries]
        return cls(size, limit, tied, min(block or block_size(size), size), mesh, entries, width)

    @property
    def axis(self) -> int:
        """Of the matrix: that of its entries."""
        return 0 if self.tied else 1

    @property
    def count(self) -> int:
        """Blocks that hold a known entry."""
        return -(-(self.limit if self.entries is None else self.size) // self.block)

    def first(self) -> Array | int:
        """The id of this device's first entry."""
        return 0 if self.entries is None else (jax.lax.axis_index(self.entries) * self.size).astype(jnp.int32)

    def at(self, i: Array) -> Array:
        """Where block i begins. The last is moved back so as to end with the matrix."""
        return jnp.minimum(i * self.block, self.size - self.block).astype(jnp.int32)

    def known(self, i: Array) -> Bool[Array, "1 block"] | None:
        """Which entries of block i count: an earlier block has had some, others are above the limit. None for all."""
        parts = 1 if self.mesh is None or self.entries is None else self.mesh.shape[self.entries]
        if (
            (self.limit % self.block == 0)
            if parts == 1
            else (self.size % self.block == 0 and self.limit == parts * self.size)
        ):
            return None
        index = self.at(i) + jnp.arange(self.block, dtype=jnp.int32)
        return ((index >= i * self.block) & (index < self.limit - self.first()))[None]

    def hit(self, i: Array, token: Int[Array, " N"]) -> Bool[Array, "N block"]:
        """Which entry of block i is the token."""
        return (token - self.first() - self.at(i))[:, None] == jnp.arange(self.block, dtype=jnp.int32)[None]

    def take(self, matrix: Array, i: Array) -> Array:
        """Block i, in its whole width."""
        part = self._cut(matrix, i)
        return part if self.width is None else jax.lax.all_gather(part, self.width, axis=1 - self.axis, tiled=True)

    def logits(self, states: Float[Array, "N d"], part: Array) -> Float[Array, "N block"]:
        return dot(states, part, (1, 1 - self.axis))

    def top(self, x: Array) -> Array:
        """The largest over all entries, given that over this device's."""
        return x if self.entries is None else jax.lax.pmax(x, self.entries)

    def total(self, x: Array) -> Array:
        """The sum over all entries, given that over this device's."""
        return x if self.entries is None else jax.lax.psum(x, self.entries)

    def pull(
        self, states: Float[Array, "N d"], matrix: Array, cotangent: Callable[[Array, Array], Array]
    ) -> tuple[Array, Array]:
        """Gradients of states and matrix, given ``cotangent(i, logits of block i)`` by those logits."""
        dtype = wide(states.dtype, matrix.dtype)

        def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            by_states, by_matrix = carry
            part, known = self.take(matrix, i), self.known(i)
            dz = cotangent(i, self.logits(states, part))
            dz = dz if known is None else jnp.where(known, dz, 0)
            by_states = by_states + dot(dz, part.astype(dtype), (1, self.axis))
            pair = (dz, states.astype(dtype)) if self.tied else (states.astype(dtype), dz)
            more = dot(*pair, (0, 0))
            if self.width is not None:
                more = jax.lax.psum_scatter(more, self.width, scatter_dimension=1 - self.axis, tiled=True)
            more = self._cut(by_matrix, i) + more.astype(matrix.dtype)
            return by_states, jax.lax.dynamic_update_slice_in_dim(by_matrix, more, self.at(i), self.axis)

        # an entry is written by one block, which sums over all N (a second adds 0): nothing is rounded twice
        start = (jnp.zeros(states.shape, dtype), jnp.zeros_like(matrix))
        by_states, by_matrix = jax.lax.fori_loop(0, self.count, body, start)
        if self.mesh is not None:
            by_matrix = jax.lax.psum(by_matrix, tuple(axis for axis in ROWS if axis != self.width))
        return self.total(by_states).astype(states.dtype), by_matrix

    def run(self, function: Callable[..., Any], arrays: Sequence[Any], like: Sequence[str], made: Sequence[str]) -> Any:
        """``function(*arrays)``, on every device's part where there is a mesh.

        ``like`` and ``made`` say how arguments and results (a tuple) are split: by ``POSITIONS`` or as the ``MATRIX``.
        """
        if self.mesh is None:
            return function(*arrays)
        matrix = (self.entries, self.width) if self.tied else (self.width, self.entries)
        specs = {POSITIONS: PartitionSpec(ROWS), MATRIX: PartitionSpec(*matrix)}
        n = next(len(x) for x, kind in zip(arrays, like, strict=True) if kind == POSITIONS)
        short = -n % math.prod(self.mesh.shape[axis] for axis in ROWS)

        def fill(x: Array) -> Array:
            return jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)])

        given = [x if kind == MATRIX else jax.tree.map(fill, x) for x, kind in zip(arrays, like, strict=True)]
        split = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(specs[kind] for kind in like),
            out_specs=tuple(specs[kind] for kind in made),
            check_vma=False,
        )
        return tuple(x if kind == MATRIX else x[:n] for x, kind in zip(split(*given), made, strict=True))

    def _cut(self, matrix: Array, i: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(matrix, self.at(i), self.block, self.axis)


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contraction of one axis of each, accumulated in at least float32."""
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=wide(a.dtype, b.dtype))
