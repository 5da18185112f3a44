"""Means that add up: a metric is a (total, count) pair until the moment it is printed."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.types import wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A monoid: ``Mean(a, n) + Mean(b, m) == Mean(a + b, n + m)``.

    Merging is exact whatever the split into micro-batches, devices or processes, which a mean of
    means is not. ``value`` is NaN when nothing was counted: a missing mean is not zero.
    """

    total: Float[Array, ""]
    count: Float[Array, ""]

    @classmethod
    def of(cls, values: Array, mask: Array | None = None) -> Mean:
        """Total and count of ``values`` where ``mask`` (same shape) is set."""
        values = jnp.asarray(values)
        dtype = wide(values.dtype)
        values = values.astype(dtype)
        weight = jnp.ones(values.shape, dtype) if mask is None else jnp.asarray(mask).astype(dtype)
        return cls(jnp.sum(jnp.where(weight != 0, values, 0) * weight), jnp.sum(weight))

    @classmethod
    def scalar(cls, value: Array | float) -> Mean:
        """One observation."""
        value = jnp.asarray(value)
        value = value.astype(wide(value.dtype))
        return cls(value, jnp.ones((), value.dtype))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def __radd__(self, other: int | Mean) -> Mean:
        return self if isinstance(other, int) else other + self

    @property
    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


def masked_sum(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Sum of ``values`` where ``mask``; safe when the rest is NaN or infinite."""
    return jnp.sum(jnp.where(mask, values, jnp.zeros((), values.dtype)), axis=axis)


def masked_mean(values: Array, mask: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Mean of ``values`` where ``mask``; 0 where the mask is empty."""
    count = jnp.sum(mask, axis=axis).astype(values.dtype)
    return masked_sum(values, mask, axis) / jnp.maximum(count, jnp.ones((), values.dtype))
