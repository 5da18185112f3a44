"""Dot products of per-row gradients, one block of one parameter at a time.

A block is ``[N r c]``: r x c entries of every row's gradient of one parameter, formed, contracted and
dropped. On a mesh the rows' blocks are exchanged once (all-to-all: from "all entries of my rows" to
"my entries of all rows"), each device multiplies its slice, and the partial sums meet in one psum at
the very end. KERNEL.md 1 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl.influence.factors import Factor
from jaxrl.mesh import RULES, partition
from jaxrl.types import container, wide

HIGHEST = jax.lax.Precision.HIGHEST
ROWS = ("data", "fsdp")


@container
@dataclass(frozen=True)
class Sums:
    """What has been added up so far, one part a device (``S`` of them), ``K`` blocks of the kernel."""

    values: Float[Array, "S K N M"]
    sq_a: Float[Array, "S N"]
    sq_b: Float[Array, "S M"]

    @classmethod
    def zero(cls, devices: int, blocks: int, n: int, m: int, dtype: Any) -> Sums:
        """Nothing yet."""
        return cls(*(jnp.zeros((devices, *shape), dtype) for shape in ((blocks, n, m), (n,), (m,))))

    def total(self) -> tuple[Float[Array, "K N M"], Float[Array, " N"], Float[Array, " M"]]:
        """Over all devices: the one psum."""
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), (self.values, self.sq_a, self.sq_b))


@dataclass(frozen=True)
class Contract:
    """How blocks become sums. ``same``: both sides are the same rows, and only one is computed.

    ``mesh``: None on one device. ``block``: bytes that the blocks of all rows may take at once.
    ``slots``: for every parameter the block of the kernel that it adds to, one index or one a layer.
    ``ghost``: parameters of layers whose products are taken token by token instead.
    """

    same: bool
    mesh: Mesh | None
    block: int
    slots: tuple[tuple[str, int | tuple[int, ...]], ...]
    ghost: frozenset[str] = field(default_factory=frozenset)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def row_devices(self) -> int:
        """Devices that rows are split over."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in ROWS)

    def by_rows(self, tree: Any) -> Any:
        """Arrays held by rows and by nothing else. Left alone, the partitioner splits hidden states like weights."""
        if self.mesh is None:
            return tree
        rows = NamedSharding(self.mesh, PartitionSpec(ROWS))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), tree)

    def whole(self, tree: Any, axes: Any) -> Any:
        """Parameters gathered over the axes that split rows, as a layer needs them; the tensor axis stays split.

        ``axes``: for every array the names of its logical axes.
        """
        if self.mesh is None:
            return tree

        def gather(axes: tuple[str | None, ...], x: Array) -> Array:
            kept = [None if name is None or set(RULES[name]) & set(ROWS) else name for name in axes]
            spec = partition(self.mesh, kept, x.shape)
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(gather, axes, tree, is_leaf=lambda x: isinstance(x, tuple))

    def slot(self, name: str, layer: Int[Array, ""] | None) -> Any:
        """Where a parameter (of a layer) adds to the kernel's blocks."""
        at = dict(self.slots)[name]
        return at if isinstance(at, int) else jnp.asarray(np.array(at, np.int32))[layer]

    def explicit(
        self, sums: Sums, slot: Any, blocks: tuple[Array, ...], metric: Array | None, tensor: int | None = None
    ) -> Sums:
        """Add the products of explicit gradients ``[N r c]`` (and ``[M r c]``), weighted by ``metric [r c]``.

        ``tensor``: which axis of the block the mesh's tensor axis splits, if any.
        """
        return self._add(_products, sums, slot, blocks, metric, tensor)

    def cross(
        self, sums: Sums, slot: Any, first: tuple[Array, ...], second: tuple[Array, ...], metric: Array | None
    ) -> Sums:
        """Complete the products of gradients ``first + second`` when those of ``first`` alone have been added."""
        return self._add(_cross_products, sums, slot, (*first, *second), metric, None)

    def _add(
        self, part: Any, sums: Sums, slot: Any, blocks: tuple[Array, ...], metric: Any, tensor: int | None
    ) -> Sums:
        part = partial(part, same=self.same)
        if self.mesh is None:
            return _added(sums, slot, [x[None] for x in part(blocks, metric)])
        return _added(sums, slot, _exchanged(part, self.mesh, blocks, metric, tensor))

    def matrix(
        self, sums: Sums, slot: Any, factors: tuple[Factor, ...], metric: Array | None, tensor: int | None = None
    ) -> Sums:
        """Add the products of ``sum_t a_t b_t^T``, formed in blocks along the axis that is not split."""
        if tensor == 1:  # inputs are split over the tensor axis: walk along the outputs instead
            factors = tuple(Factor(f.b, f.a) for f in factors)
            metric, tensor = None if metric is None else metric.T, 2
        rows, size = sum(f.a.shape[0] for f in factors), wide(factors[0].a.dtype).itemsize
        inputs, outputs = factors[0].a.shape[-1], factors[0].b.shape[-1]
        step = self.block // max(1, rows * outputs * size // self.row_devices)
        step = self.padded(max(1, min(step, inputs)))
        count = -(-inputs // step)
        if count == 1:
            short = self.padded(inputs) - inputs
            return self._outer(sums, slot, [(_wider(f.a, short), f.b) for f in factors], _taller(metric, short), tensor)
        step = self.padded(-(-inputs // count))
        short = step * count - inputs
        left, metric = [_wider(f.a, short) for f in factors], _taller(metric, short)

        def body(i: Array, sums: Sums) -> Sums:
            at = (i * step).astype(jnp.int32)
            some = [jax.lax.dynamic_slice_in_dim(a, at, step, axis=2) for a in left]
            scale = None if metric is None else jax.lax.dynamic_slice_in_dim(metric, at, step, axis=0)
            return self._outer(sums, slot, [(a, f.b) for a, f in zip(some, factors, strict=True)], scale, tensor)

        return jax.lax.fori_loop(0, count, body, sums)

    def _outer(self, sums: Sums, slot: Any, pairs: list[tuple[Array, Array]], metric: Any, tensor: Any) -> Sums:
        dtype = wide(pairs[0][0].dtype)
        blocks = [jnp.einsum("nti,nto->nio", a, b, precision=HIGHEST, preferred_element_type=dtype) for a, b in pairs]
        return self.explicit(sums, slot, tuple(blocks), metric, tensor)

    def vector(self, sums: Sums, slot: Any, vectors: tuple[Array, ...], metric: Array | None) -> Sums:
        """Add the products of per-row gradients ``[N c]`` of a bias or a gain."""
        short = self.padded(vectors[0].shape[1]) - vectors[0].shape[1]
        blocks = tuple(jnp.pad(v, [(0, 0), (0, short)])[:, :, None] for v in vectors)
        return self.explicit(sums, slot, blocks, None if metric is None else _taller(metric[:, None], short))

    def tokenwise(self, sums: Sums, slot: Any, factors: tuple[Factor, ...]) -> Sums:
        """Add ``sum_{t,t'} (a_t . a'_t')(b_t . b'_t')``: no gradient is formed ("ghost")."""
        one, other = factors[0], factors[-1]

        def against(a: Array, b: Array, rows: Factor) -> Array:
            left = jnp.einsum("ti,msi->mts", a, rows.a, precision=HIGHEST, preferred_element_type=dtype)
            right = jnp.einsum("to,mso->mts", b, rows.b, precision=HIGHEST, preferred_element_type=dtype)
            return jnp.sum(left * right, axis=(1, 2))

        def itself(ab: tuple[Array, Array]) -> Array:
            return against(*ab, Factor(ab[0][None], ab[1][None]))[0]

        dtype = wide(one.a.dtype)
        values = jax.lax.map(lambda ab: against(*ab, other), (one.a, one.b))
        squares = [jnp.diagonal(values)] * 2 if self.same else [jax.lax.map(itself, (f.a, f.b)) for f in (one, other)]
        return _added(sums, slot, [x[None] for x in (values, *squares)])

    def padded(self, length: int) -> int:
        """``length`` rounded up to what the devices that share rows divide."""
        return -(-length // self.row_devices) * self.row_devices


def _products(blocks: tuple[Array, ...], metric: Array | None, same: bool) -> tuple[Array, Array, Array]:
    """Gram matrix and squared norms of blocks ``[N r c]``."""
    weighted = [g if metric is None else g * metric.astype(g.dtype)[None] for g in blocks]
    a, b = blocks[0].reshape(blocks[0].shape[0], -1), weighted[-1].reshape(weighted[-1].shape[0], -1)
    gram = jnp.matmul(a, b.T, precision=HIGHEST)
    if same:
        return gram, jnp.diagonal(gram), jnp.diagonal(gram)
    return gram, *(jnp.sum(g * w, axis=(1, 2)) for g, w in zip(blocks, weighted, strict=True))


def _cross_products(blocks: tuple[Array, ...], metric: Array | None, same: bool) -> tuple[Array, Array, Array]:
    """Products of ``h + e`` less those of ``h``: ``<h + e, e'> + <e, h'>``; ``blocks`` are all h, then all e."""
    half = len(blocks) // 2
    h, e = blocks[:half], blocks[half:]
    first = _products((h[0] + e[0], e[-1]), metric, same=False)[0]
    gram = first + _products((e[0], h[-1]), metric, same=False)[0]
    if same:
        return gram, jnp.diagonal(gram), jnp.diagonal(gram)
    scale = jnp.ones((1, 1, 1), h[0].dtype) if metric is None else metric.astype(h[0].dtype)[None]
    return gram, *(jnp.sum((2 * x + y) * y * scale, axis=(1, 2)) for x, y in zip(h, e, strict=True))


def _exchanged(part: Any, mesh: Mesh, blocks: tuple[Array, ...], metric: Array | None, tensor: int | None) -> Any:
    """``part`` of every device's slice of the entries, for all rows; results ``[devices ...]``."""
    split: list[Any] = [None, None]
    if tensor is not None and mesh.shape["tensor"] > 1 and blocks[0].shape[tensor] % mesh.shape["tensor"] == 0:
        split[tensor - 1] = "tensor"
    everywhere = split == [None, None]

    def local(blocks: tuple[Array, ...], metric: Array | None) -> tuple[Array, ...]:
        mine = tuple(jax.lax.all_to_all(g, ROWS, split_axis=1, concat_axis=0, tiled=True) for g in blocks)
        found = part(mine, metric)
        if everywhere:  # every device along the tensor axis has found the same
            first = jax.lax.axis_index("tensor") == 0
            found = tuple(jnp.where(first, x, jnp.zeros((), x.dtype)) for x in found)
        return tuple(x[None] for x in found)

    # entries are split over the row axes after the exchange; of the block's own axes the first is cut
    cut = (split[0], *ROWS) if split[0] else ROWS
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            tuple(PartitionSpec(ROWS, *split) for _ in blocks),
            None if metric is None else PartitionSpec(cut, split[1]),
        ),
        out_specs=PartitionSpec((*ROWS, "tensor")),
        check_vma=False,
    )
    return run(blocks, metric)


def _added(sums: Sums, slot: Any, found: Any) -> Sums:
    gram, sq_a, sq_b = found
    return Sums(sums.values.at[:, slot].add(gram), sums.sq_a + sq_a, sums.sq_b + sq_b)


def _wider(x: Array, short: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, short)]) if short else x


def _taller(metric: Array | None, short: int) -> Array | None:
    return metric if metric is None or not short else jnp.pad(metric, [(0, short), (0, 0)])
