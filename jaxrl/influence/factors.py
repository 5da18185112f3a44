"""Per-row gradients of a decoder as factors: what each parameter acts on, and the cotangent of what it gives.

A row's gradient of a matrix is ``sum_t a_t b_t^T`` with ``a`` the inputs and ``b`` the cotangents of
the outputs (of a bias ``sum_t b_t``, of a norm gain ``sum_t a_t * b_t`` over the normed inputs). One
backward pass through one layer gives ``a`` and ``b`` of all its parameters for all rows at once, and
nothing in it mixes rows. KERNEL.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.models.decoder import Decoder, row_attention
from jaxrl.models.layers import PROJECTIONS, layer, rms_norm, rope_angles
from jaxrl.models.packing import take
from jaxrl.types import container, wide


@container
@dataclass(frozen=True)
class Side:
    """One side of a kernel as the model sees it: R rows of tokens that hold N sequences.

    ``index [N W]`` says where a sequence's tokens lie in the flattened ``[R * L]`` rows (``R * L``
    beyond its end) when rows are packed; None when row i is sequence i. ``place [N T]`` is where the
    T scored tokens of a sequence are predicted from, flattened when packed and within the row when
    not; unused entries have weight 0.
    """

    tokens: Int[Array, "R L"]
    positions: Int[Array, "R L"]
    segments: Int[Array, "R L"] | None
    index: Int[Array, "N W"] | None
    place: Int[Array, "N T"]
    target: Int[Array, "N T"]
    weight: Float[Array, "N T"]
    temperature: Float[Array, ""]

    @property
    def count(self) -> int:
        return self.target.shape[0]

    def by_sequence(self, values: Float[Array, "R L *C"]) -> Float[Array, "N W *C"]:
        """Per-token values with one sequence a row; 0 beyond a packed sequence's end."""
        return values if self.index is None else take(values, self.index)

    def scored(self, values: Float[Array, "R L d"]) -> Float[Array, "N T d"]:
        """Per-token values where the scored tokens are predicted from."""
        if self.index is not None:
            return take(values, self.place)
        return jnp.take_along_axis(values, self.place[:, :, None], axis=1)


@container
@dataclass(frozen=True)
class Factor:
    """Inputs ``a [N W i]`` and cotangents ``b [N W o]`` of a parameter; ``a`` is None for a bias.

    A gain has ``a`` and ``b`` of one shape, and its gradient is their product summed over tokens.
    """

    a: Float[Array, "N W i"] | None
    b: Float[Array, "N W o"]
    gain: bool = field(default=False, metadata={"static": True})

    @property
    def inputs(self) -> Float[Array, "N W i"]:
        """``a`` of a matrix or a gain."""
        assert self.a is not None, "a bias acts on nothing"
        return self.a

    def vector(self) -> Float[Array, "N o"]:
        """The per-row gradient of a bias or a gain, accumulated in at least float32."""
        dtype = wide(self.b.dtype)
        b = self.b.astype(dtype)
        return jnp.sum(b if self.a is None else self.a.astype(dtype) * b, axis=1)


def layer_factors(
    config: Any, p: Any, window: Any, side: Side, x: Float[Array, "R L d"], ct: Float[Array, "R L d"]
) -> tuple[Float[Array, "R L d"], dict[str, Factor]]:
    """Recompute one layer at its inputs ``x`` and pull ``ct`` back: the inputs' cotangent, and all factors."""
    attend = row_attention(side.tokens.shape, side.segments)(window)
    angles = rope_angles(side.positions, config, x.dtype)

    def run(x: Array, zeros: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        seen: dict[str, Array] = {}

        def tap(name: str, inputs: Array, out: Array) -> Array:
            seen[name] = inputs
            return out + zeros[name]

        return layer(p, x, angles, config, attend, tap)[0], seen

    zeros = _zeros(config, p, x, angles, attend)
    _, pull, inputs = jax.vjp(run, x, zeros, has_aux=True)
    back, cotangents = pull(ct)
    return back, _named(p, side, inputs, cotangents)


def _zeros(config: Any, p: Any, x: Array, angles: Any, attend: Any) -> dict[str, Array]:
    """A zero for every tapped output."""
    shapes: dict[str, Any] = {}

    def tap(name: str, inputs: Array, out: Array) -> Array:
        shapes[name] = jax.ShapeDtypeStruct(out.shape, out.dtype)
        return out

    jax.eval_shape(lambda x, p: layer(p, x, angles, config, attend, tap)[0], x, p)
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}


def _named(p: Any, side: Side, inputs: dict[str, Array], cotangents: dict[str, Array]) -> dict[str, Factor]:
    """Factors by parameter name; heads and head dimensions flattened."""
    factors = {}
    for name, ct in cotangents.items():
        a, b = side.by_sequence(inputs[name]), side.by_sequence(ct)
        if name in PROJECTIONS:
            a, b = (x.reshape(*x.shape[:2], -1) for x in (a, b))
            factors[name] = Factor(a, b)
            if getattr(p, f"{name}_bias") is not None:
                factors[f"{name}_bias"] = Factor(None, b)
        else:  # a gain shared by all heads: heads are further positions of it
            a, b = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (a, b))
            factors[name] = Factor(a, b, gain=True)
    return factors


def final_norm(model: Decoder, x: Float[Array, "R L d"], side: Side, ct: Float[Array, "N T d"] | None = None) -> Any:
    """The normed states where scored tokens are predicted from; with ``ct`` also what it pulls back.

    Returns ``states`` or ``(cotangent of x, per-row gradient of the gain [N d])``.
    """
    gain, eps = model.norm[...], model.config.norm_eps
    if ct is None:
        return side.scored(rms_norm(x, gain, eps))

    def run(x: Array, zero: Array) -> tuple[Array, Array]:
        seen: list[Array] = []

        def tap(name: str, inputs: Array, out: Array) -> Array:
            seen.append(inputs)
            return out + zero

        states = side.scored(rms_norm(x, gain, eps, tap))
        return states.astype(ct.dtype), seen[0]

    _, pull, unit = jax.vjp(run, x, jnp.zeros_like(x), has_aux=True)
    back, b = pull(ct)
    return back, Factor(side.by_sequence(unit), side.by_sequence(b), gain=True).vector()
