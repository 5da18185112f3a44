"""Blocks of per-row gradients on their way to what consumes them: which parameter, where in it, and how they are formed.

A block is ``[N r c]``: r x c entries of every row's gradient of one parameter. It is formed, handed to a
``Consumer`` (kernel sums, sketches) and dropped, so that never more than a block exists.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxrl.influence.factors import Factor
from jaxrl.mesh import RULES, shardings
from jaxrl.types import wide

HIGHEST = jax.lax.Precision.HIGHEST
ROWS = RULES["rows"]


@dataclass(frozen=True)
class Place:
    """Where a block lies: entry ``[i, j]`` has flat index ``offset + i * strides[0] + j * strides[1]``.

    ``layer``: which one, for parameters under ``layers.``, whose indices count within the layer. An
    ``offset [r]`` holds the index of every row's first entry instead.
    """

    name: str
    layer: Int[Array, ""] | None = None
    offset: Int[Array, ...] | int = 0
    strides: tuple[int, int] = (1, 0)

    def moved(self, rows: Int[Array, ""]) -> Place:
        """The place ``rows`` further along the block's first axis."""
        return dataclasses.replace(self, offset=self.offset + rows * self.strides[0])


def row_devices(mesh: Mesh | None) -> int:
    """Devices of a mesh that rows are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in ROWS)


@dataclass(frozen=True)
class Consumer(ABC):
    """What blocks are handed to. ``mesh``: None on one device. ``block``: bytes that all rows' blocks may take.

    A consumer starts from ``start``, folds blocks in by ``explicit`` and ``cross``, and ``finish`` gives what
    it found.
    """

    mesh: Mesh | None
    block: int

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return row_devices(self.mesh)

    def by_rows(self, tree: Any) -> Any:
        """Arrays held by rows and by nothing else. Left alone, the partitioner splits hidden states like weights."""
        if self.mesh is None:
            return tree
        rows = NamedSharding(self.mesh, PartitionSpec(ROWS))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), tree)

    def whole(self, tree: Any, axes: Any) -> Any:
        """Parameters gathered over the axes that split rows, as a layer needs them; the tensor axis stays split.

        ``axes``: for every array the names of its logical axes. Pieces of a parameter are held split first
        (``held``): the partitioner gathers what an operation reads, which for a slice is all of the parameter.
        """

        def gathered(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
            return tuple(None if name is None or set(RULES[name]) & set(ROWS) else name for name in axes)

        kept = jax.tree.map(gathered, axes, is_leaf=lambda x: isinstance(x, tuple))
        return self.held(self.held(tree, axes), kept)

    def held(self, tree: Any, axes: Any) -> Any:
        """Arrays split as the mesh keeps parameters with these logical axes."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, shardings(self.mesh, axes, tree))

    @property
    def ghost(self) -> frozenset[str]:
        """Matrices of a layer that are consumed by ``tokenwise`` instead, without forming gradients."""
        return frozenset()

    @abstractmethod
    def start(self, n: int, m: int, dtype: Any) -> Any:
        """Nothing consumed yet, for n and m rows."""

    @abstractmethod
    def explicit(
        self, sums: Any, place: Place, blocks: tuple[Array, ...], metric: Array | None, tensor: int | None = None
    ) -> Any:
        """Fold in explicit gradients ``[N r c]`` (and ``[M r c]``), weighted by ``metric [r c]``.

        ``tensor``: which axis of the block the mesh's tensor axis splits, if any.
        """

    @abstractmethod
    def cross(
        self, sums: Any, place: Place, first: tuple[Array, ...], second: tuple[Array, ...], metric: Array | None
    ) -> Any:
        """Complete gradients ``first + second`` when ``first`` alone has been folded in."""

    def tokenwise(self, sums: Any, place: Place, factors: tuple[Factor, ...]) -> Any:
        """Fold in a matrix's gradients by their factors alone, for the matrices of ``ghost``."""
        raise TypeError(f"{type(self).__name__} consumes gradients, not factors: {place.name} is none of its `ghost`")

    @abstractmethod
    def finish(self, sums: Any) -> Any:
        """What all blocks gave."""

    def matrix(
        self, sums: Any, place: Place, factors: tuple[Factor, ...], metric: Array | None, tensor: int | None = None
    ) -> Any:
        """Fold in ``sum_t a_t b_t^T``, formed in blocks along the axis that is not split."""
        if tensor == 1:  # inputs are split over the tensor axis: walk along the outputs instead
            factors = tuple(Factor(f.b, f.inputs) for f in factors)
            metric, tensor = None if metric is None else metric.T, 2
            place = dataclasses.replace(place, strides=place.strides[::-1])
        rows, size = sum(f.inputs.shape[0] for f in factors), wide(factors[0].inputs.dtype).itemsize
        inputs, outputs = factors[0].inputs.shape[-1], factors[0].b.shape[-1]
        step = self.block // max(1, rows * outputs * size // self.row_devices)
        step = self.padded(max(1, min(step, inputs)))
        count = -(-inputs // step)
        if count == 1:
            short = self.padded(inputs) - inputs
            return self._outer(
                sums, place, [(_wider(f.inputs, short), f.b) for f in factors], _taller(metric, short), tensor
            )
        step = self.padded(-(-inputs // count))
        short = step * count - inputs
        left, metric = [_wider(f.inputs, short) for f in factors], _taller(metric, short)

        def body(i: Array, sums: Any) -> Any:
            at = (i * step).astype(jnp.int32)
            some = [jax.lax.dynamic_slice_in_dim(a, at, step, axis=2) for a in left]
            scale = None if metric is None else jax.lax.dynamic_slice_in_dim(metric, at, step, axis=0)
            return self._outer(
                sums, place.moved(at), [(a, f.b) for a, f in zip(some, factors, strict=True)], scale, tensor
            )

        return jax.lax.fori_loop(0, count, body, sums)

    def _outer(self, sums: Any, place: Place, pairs: list[tuple[Array, Array]], metric: Any, tensor: Any) -> Any:
        dtype = wide(pairs[0][0].dtype)
        blocks = [jnp.einsum("nti,nto->nio", a, b, precision=HIGHEST, preferred_element_type=dtype) for a, b in pairs]
        return self.explicit(sums, place, tuple(blocks), metric, tensor)

    def vector(self, sums: Any, place: Place, vectors: tuple[Array, ...], metric: Array | None) -> Any:
        """Fold in per-row gradients ``[N c]`` of a bias or a gain."""
        short = self.padded(vectors[0].shape[1]) - vectors[0].shape[1]
        blocks = tuple(jnp.pad(v, [(0, 0), (0, short)])[:, :, None] for v in vectors)
        return self.explicit(sums, place, blocks, None if metric is None else _taller(metric[:, None], short))

    def padded(self, length: int) -> int:
        """``length`` rounded up to what the devices that share rows divide."""
        return -(-length // self.row_devices) * self.row_devices


def _wider(x: Array, short: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, short)]) if short else x


def _taller(metric: Array | None, short: int) -> Array | None:
    return metric if metric is None or not short else jnp.pad(metric, [(0, short), (0, 0)])
