"""The parts of one decoder layer: norms, rotary positions, attention and the gated MLP.

A layer is a function of its own parameters and a residual stream ``x [B S d]``. How queries meet
keys is passed in as ``attend(q, k, v) -> (out, extra)``, so that training, prefill and decoding
run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.config import Llama3Rope, ModelConfig
from jaxrl.types import wide

Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
# ``tap(name, inputs, out) -> out`` sees every place where a parameter acts: its name, what it acts on and what
# comes out, bias included. For a norm gain ``inputs`` are the normed values. Gradients of single rows and
# directional derivatives are read off there.
Tap = Callable[[str, Array, Array], Array]

# Logical axis names of every stacked layer parameter. "layers" is the scanned axis.
LAYER_AXES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("layers", "embed"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "k": ("layers", "embed", "kv_heads", "head_dim"),
    "v": ("layers", "embed", "kv_heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "mlp_norm": ("layers", "embed"),
    "gate": ("layers", "embed", "mlp"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "q_bias": ("layers", "heads", "head_dim"),
    "k_bias": ("layers", "kv_heads", "head_dim"),
    "v_bias": ("layers", "kv_heads", "head_dim"),
    "o_bias": ("layers", "embed"),
    "gate_bias": ("layers", "mlp"),
    "up_bias": ("layers", "mlp"),
    "down_bias": ("layers", "embed"),
    "q_norm": ("layers", "head_dim"),
    "k_norm": ("layers", "head_dim"),
}
# How each matrix of a layer acts on its inputs.
PROJECTIONS = {
    "q": "bsd,dhe->bshe",
    "k": "bsd,dhe->bshe",
    "v": "bsd,dhe->bshe",
    "o": "bshe,hed->bsd",
    "gate": "bsd,df->bsf",
    "up": "bsd,df->bsf",
    "down": "bsf,fd->bsd",
}
NORMS = frozenset({"attn_norm", "mlp_norm", "q_norm", "k_norm"})


def layer_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each layer parameter that ``c`` has, stacked over layers."""
    d, f, h, k, e = c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,), "q": (d, h, e), "k": (d, k, e), "v": (d, k, e), "o": (h, e, d),
        "mlp_norm": (d,), "gate": (d, f), "up": (d, f), "down": (f, d),
    }  # fmt: skip
    if c.qkv_bias:
        shapes |= {"q_bias": (h, e), "k_bias": (k, e), "v_bias": (k, e)}
    if c.o_bias:
        shapes |= {"o_bias": (d,)}
    if c.mlp_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    if c.qk_norm:
        shapes |= {"q_norm": (e,), "k_norm": (e,)}
    return {name: (c.num_layers, *shape) for name, shape in shapes.items()}


class Layers(nnx.Module):
    """Parameters of all layers, stacked on a leading axis; absent ones are None."""

    def __init__(self, config: ModelConfig, init: Callable[[str, tuple[int, ...]], Array]):
        shapes = layer_shapes(config)
        for name in LAYER_AXES:
            setattr(self, name, nnx.Param(init(name, shapes[name])) if name in shapes else None)


def untapped(name: str, inputs: Array, out: Array) -> Array:
    """The tap that looks at nothing."""
    return out


def rms_norm(
    x: Float[Array, "*B d"], gain: Float[Array, " d"], eps: float, tap: Tap = untapped, name: str = "norm"
) -> Float[Array, "*B d"]:
    """Root-mean-square norm, computed in at least float32, returned in ``x``'s dtype."""
    y = x.astype(wide(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    unit = (y * scale).astype(x.dtype)
    return tap(name, unit, unit * gain.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,)))


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Rope | None) -> Float[Array, " half"]:
    """Angular frequency of each rotated pair, radians a token; llama3 scaling as published."""
    exponent = jnp.arange(0, head_dim, 2).astype(jnp.result_type(float)) / head_dim
    freq = 1.0 / (theta**exponent)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    old = scaling.original_max_position
    smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * freq / scaling.factor + smooth * freq
    stretched = jnp.where(wavelength > old / scaling.low_freq_factor, freq / scaling.factor, blended)
    return jnp.where(wavelength < old / scaling.high_freq_factor, freq, stretched)


def rotate(x: Float[Array, "B S h e"], cos: Float[Array, "B S 1 half"], sin: Array) -> Float[Array, "B S h e"]:
    """Rotary embedding in the half-split layout of Hugging Face checkpoints."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_angles(positions: Int[Array, "B S"], config: ModelConfig, dtype: Any) -> tuple[Array, Array]:
    """Cosine and sine of the rotation of each position, ``[B S 1 head_dim/2]``."""
    freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angle = positions.astype(freq.dtype)[:, :, None, None] * freq[None, None, None, :]
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def attention(
    q: Float[Array, "B S h e"], k: Float[Array, "B C k e"], v: Float[Array, "B C k e"], mask: Bool[Array, "B S C"]
) -> Float[Array, "B S h e"]:
    """Grouped-query softmax attention; scores and softmax in at least float32.

    A query that may see nothing (a padded slot) returns 0, not NaN.
    """
    b, s, h, e = q.shape
    groups = k.shape[2]
    q = q.reshape(b, s, groups, h // groups, e)
    dtype = wide(q.dtype)
    scores = jnp.einsum("bsgre,bcge->bgrsc", q, k, preferred_element_type=dtype) / math.sqrt(e)
    mask = mask[:, None, None, :, :]
    scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), jnp.zeros((), dtype))
    out = jnp.einsum("bgrsc,bcge->bsgre", weights.astype(v.dtype), v)
    return out.reshape(b, s, h, e)


def layer(
    p: Layers,
    x: Float[Array, "B S d"],
    angles: tuple[Array, Array],
    config: ModelConfig,
    attend: Attend,
    tap: Tap = untapped,
) -> tuple[Float[Array, "B S d"], Any]:
    """One pre-norm decoder layer; returns the new residual stream and what ``attend`` gave beside it."""

    def project(name: str, x: Array) -> Array:
        return tap(name, x, _project(x, getattr(p, name), getattr(p, f"{name}_bias"), PROJECTIONS[name]))

    def norm(name: str, x: Array) -> Array:
        return rms_norm(x, getattr(p, name)[...], config.norm_eps, tap, name)

    y = norm("attn_norm", x)
    q, k, v = (project(name, y) for name in "qkv")
    if config.qk_norm:
        q, k = norm("q_norm", q), norm("k_norm", k)
    q, k = rotate(q, *angles), rotate(k, *angles)
    q, k, v = (checkpoint_name(t, "qkv") for t in (q, k, v))
    mixed, extra = attend(q, k, v)
    x = x + checkpoint_name(project("o", mixed), "attention_out")
    y = norm("mlp_norm", x)
    return x + project("down", jax.nn.silu(project("gate", y)) * project("up", y)), extra


def _project(x: Array, weight: nnx.Param, bias: nnx.Param | None, equation: str) -> Array:
    out = jnp.einsum(equation, x, weight[...].astype(x.dtype))
    if bias is None:
        return out
    return out + bias[...].astype(x.dtype)[(None, None)]
