"""Devices: the mesh, the rules that place logical axes on it, and arrays between host and mesh.

A mesh has three axes. ``data`` splits rows and repeats parameters, ``fsdp`` splits rows and
parameters, ``tensor`` splits heads, the MLP and the vocabulary. This is the only module that knows
how many processes there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import UsageError, nearest

AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that split it; () repeats it everywhere.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "position": (),
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
}


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over ``devices`` (all by default); at most one size is -1 and takes what is left.

    Raises ``UsageError`` when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
        raise UsageError(f"mesh: expected positive sizes, at most one of them -1 (what is left); got {said}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not free and fixed != len(devices)):
        raise UsageError(
            f"mesh: {said} needs {'a multiple of ' if free else ''}{fixed} devices, but there are {len(devices)}; "
            f"change a size, or set one of them to -1"
        )
    if free:
        sizes[free[0]] = len(devices) // fixed
    # Explicit axes, the default, make an embedding lookup an error.
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def partition(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How an array with these logical axes is split; None is an axis that never is.

    A dimension that its mesh axes do not divide is repeated instead: three key-value heads on
    ``tensor=2`` are held whole by both devices.
    """
    if len(axes) != len(shape):
        raise ValueError(f"expected one logical axis a dimension, got axes {tuple(axes)} for shape {tuple(shape)}")
    split: list[Any] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; {nearest(axis, RULES)}")
        onto = () if axis is None else RULES[axis]
        parts = math.prod(mesh.shape[name] for name in onto)
        split.append(None if not onto or size % parts else onto if len(onto) > 1 else onto[0])
    return PartitionSpec(*split)


def shardings(mesh: Mesh, axes_tree: Any, tree: Any) -> Any:
    """The sharding of every array of ``tree`` (or ``jax.ShapeDtypeStruct``).

    ``axes_tree`` has the same structure with a tuple of logical axis names in the place of each
    array, as ``jaxrl.models.decoder.param_axes`` gives it.
    """

    def place(axes: tuple[str | None, ...], x: Any) -> NamedSharding:
        return NamedSharding(mesh, partition(mesh, axes, x.shape))

    return jax.tree.map(place, axes_tree, tree, is_leaf=lambda x: isinstance(x, tuple))


def shard_tree(mesh: Mesh, axes_tree: Any, tree: Any) -> Any:
    """``tree`` with every array moved to where ``shardings`` puts it."""
    return jax.device_put(tree, shardings(mesh, axes_tree, tree))


def state_shardings(mesh: Mesh, state: Any, params: Any, param_shardings: Any) -> Any:
    """Shardings of an optimiser state: like the parameters where it mirrors them, repeated elsewhere.

    ``state`` may be abstract (``jax.eval_shape(tx.init, params)``). Give the result to ``jax.jit``
    as ``out_shardings``: without it ``jax.jit(tx.init)`` repeats Adam's moments on every device.
    """
    structure = jax.tree.structure(params)

    def mirrors(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    return jax.tree.map(lambda x: param_shardings if mirrors(x) else replicated(mesh), state, is_leaf=mirrors)


def replicated(mesh: Mesh) -> NamedSharding:
    """Held whole by every device."""
    return NamedSharding(mesh, PartitionSpec())


def to_mesh(mesh: Mesh, tree: Any, axes: Sequence[str | None] = ("rows",)) -> Any:
    """Host arrays, the same on every process, as global arrays.

    The leading dimensions follow ``axes`` and the others are repeated. Rows that the mesh does not
    divide are repeated on every device.
    """

    def place(x: Any) -> jax.Array:
        names = tuple(axes[: np.ndim(x)]) + (None,) * (np.ndim(x) - len(axes))
        return jax.device_put(x, NamedSharding(mesh, partition(mesh, names, np.shape(x))))

    return jax.tree.map(place, tree)


def to_host(tree: Any) -> Any:
    """Global arrays as numpy arrays; every process must call it, and each gets everything."""

    def fetch(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def process_index() -> int:
    """Which process this is, 0 up."""
    return jax.process_index()


def process_count() -> int:
    """How many processes share the mesh."""
    return jax.process_count()


def is_main() -> bool:
    """True on the one process that writes files."""
    return process_index() == 0
