"""Dot products of per-row gradients, one block of one parameter at a time.

A block is ``[N r c]``: r x c entries of every row's gradient of one parameter, formed, contracted and
dropped. On a mesh the rows' blocks are exchanged once (all-to-all: from "all entries of my rows" to
"my entries of all rows"), each device multiplies its slice, and the partial sums meet in one psum at
the very end. KERNEL.md 1 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxrl.influence.blocks import HIGHEST, ROWS, Consumer, Place
from jaxrl.influence.factors import Factor
from jaxrl.types import container, wide


@container
@dataclass(frozen=True)
class Sums:
    """What has been added up so far, one part a device (``S`` of them), ``K`` blocks of the kernel."""

    values: Float[Array, "S K N M"]
    sq_a: Float[Array, "S N"]
    sq_b: Float[Array, "S M"]


@dataclass(frozen=True)
class Contract(Consumer):
    """How blocks become sums. ``same``: both sides are the same rows, and only one is computed.

    ``slots``: for every parameter the block of the kernel, of ``count``, that it adds to, one index or one
    a layer. ``tokens``: matrices of layers whose products are taken token by token instead ("ghost").
    """

    same: bool
    slots: tuple[tuple[str, int | tuple[int, ...]], ...]
    count: int
    tokens: frozenset[str] = frozenset()

    @property
    def ghost(self) -> frozenset[str]:
        return self.tokens

    def start(self, n: int, m: int, dtype: Any) -> Sums:
        devices = 1 if self.mesh is None else self.mesh.size
        return Sums(*(jnp.zeros((devices, *shape), dtype) for shape in ((self.count, n, m), (n,), (m,))))

    def finish(self, sums: Sums) -> tuple[Float[Array, "K N M"], Float[Array, " N"], Float[Array, " M"]]:
        """Blocks of the kernel and the squared norms, over all devices: the one psum."""
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), (sums.values, sums.sq_a, sums.sq_b))

    def slot(self, place: Place) -> Any:
        """Which of the kernel's blocks a parameter (of a layer) adds to."""
        at = dict(self.slots)[place.name]
        return at if isinstance(at, int) else jnp.asarray(np.array(at, np.int32))[place.layer]

    def explicit(
        self, sums: Sums, place: Place, blocks: tuple[Array, ...], metric: Array | None, tensor: int | None = None
    ) -> Sums:
        return self._add(_products, sums, place, blocks, metric, tensor)

    def cross(
        self, sums: Sums, place: Place, first: tuple[Array, ...], second: tuple[Array, ...], metric: Array | None
    ) -> Sums:
        return self._add(_cross_products, sums, place, (*first, *second), metric, None)

    def _add(
        self, part: Any, sums: Sums, place: Place, blocks: tuple[Array, ...], metric: Any, tensor: int | None
    ) -> Sums:
        part, slot = partial(part, same=self.same), self.slot(place)
        if self.mesh is None:
            return _added(sums, slot, [x[None] for x in part(blocks, metric)])
        return _added(sums, slot, _exchanged(part, self.mesh, blocks, metric, tensor))

    def tokenwise(self, sums: Sums, place: Place, factors: tuple[Factor, ...]) -> Sums:
        """Add ``sum_{t,t'} (a_t . a'_t')(b_t . b'_t')``: no gradient is formed ("ghost")."""
        one, other = factors[0], factors[-1]

        def against(a: Array, b: Array, rows: Factor) -> Array:
            left = jnp.einsum("ti,msi->mts", a, rows.inputs, precision=HIGHEST, preferred_element_type=dtype)
            right = jnp.einsum("to,mso->mts", b, rows.b, precision=HIGHEST, preferred_element_type=dtype)
            return jnp.sum(left * right, axis=(1, 2))

        def itself(ab: tuple[Array, Array]) -> Array:
            return against(*ab, Factor(ab[0][None], ab[1][None]))[0]

        dtype = wide(one.b.dtype)
        values = jax.lax.map(lambda ab: against(*ab, other), (one.a, one.b))
        squares = [jnp.diagonal(values)] * 2 if self.same else [jax.lax.map(itself, (f.a, f.b)) for f in (one, other)]
        return _added(sums, self.slot(place), [x[None] for x in (values, *squares)])


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
