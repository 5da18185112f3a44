"""Random keys named by what they are for.

One root key a run. ``at(root, "rollout", step, uid, g)`` is the key of one rollout: a pure
function of its arguments, so that the randomness of a sample never depends on batch composition,
padding, micro-batches, devices or processes.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key


def root(seed: int) -> Key[Array, ""]:
    """The root key of a run. Threefry: the same stream on every platform."""
    return jax.random.key(seed, impl="threefry2x32")


def at(key: Key[Array, ""], *parts: str | int | Array) -> Key[Array, ""]:
    """Fold names (by a stable hash) and integers into ``key``, in order."""
    for part in parts:
        data = zlib.crc32(part.encode()) if isinstance(part, str) else part
        key = jax.random.fold_in(key, data)
    return key


def per_row(key: Key[Array, ""], uid: Int[Array, " P"], n: int, first: int | Array = 0) -> Key[Array, "P n"]:
    """One key a (prompt, sample index): ``at(key, uid[p], g)`` for ``first <= g < first + n``."""
    grid = jax.vmap(jax.vmap(at, (None, None, 0)), (None, 0, None))
    return grid(key, jnp.asarray(uid), jnp.arange(n, dtype=jnp.int32) + first)
