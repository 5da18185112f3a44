"""Count sketches of per-row gradients: kernels across steps and runs from a few numbers a row (KERNEL.md 7).

Every coordinate of the parameters has a bucket ``h`` and a sign ``s``; the sketch of a gradient is
``S_b = sum_{p: h(p) = b} s(p) g_p``. The product of two sketches made by one hash is an unbiased
estimate of the product of the gradients, with variance at most ``(K_ii K_jj + K_ij^2) / size``.

The hash is a function of the seed, the parameter's name, the layer and the coordinate's place within
that layer's parameter. No table is stored and no tiling enters, so blocks of gradients can be added
as they stream by, and sketches of other steps and runs of the same architecture fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.errors import nearest
from jaxrl.influence.cost import choose, working_memory
from jaxrl.influence.gradients import (
    Logps,
    at_temperature,
    checked_temperature,
    leaf_names,
    need_finite,
    need_rows,
    row_gradients,
    row_weights,
)
from jaxrl.influence.hashing import check_size, leaf_seed, sketch_block
from jaxrl.influence.sketching import streamed_sketch
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows, container, wide

SEED = 0  # the one hash of every run that names no other
METHODS = ("auto", "streamed", "chunked")
NORMAL_95 = 1.959963984540054


@container
@dataclass(frozen=True)
class Sketch:
    """Sketches of N rows' gradients. ``sq_norms`` are exact; ``normalise`` is ``sum``, ``tok`` or ``weights``.

    ``parameters`` is the number of coordinates that were hashed.
    """

    values: Float[Array, "N size"]
    sq_norms: Float[Array, " N"]
    seed: int = field(metadata={"static": True})
    normalise: str = field(metadata={"static": True})
    parameters: int = field(metadata={"static": True})

    @property
    def size(self) -> int:
        """Numbers a row."""
        return self.values.shape[1]

    def attributes(self) -> dict[str, Any]:
        """What is stored beside ``values``, with JSON's own types."""
        return {
            "seed": self.seed,
            "size": self.size,
            "normalise": self.normalise,
            "parameters": self.parameters,
            "sq_norms": np.asarray(self.sq_norms).tolist(),
        }

    @classmethod
    def of(cls, values: Float[np.ndarray, "N size"], attributes: Mapping[str, Any]) -> Sketch:
        """A stored sketch; ``KeyError`` when an attribute is missing."""
        norms = np.asarray(attributes["sq_norms"], values.dtype)
        return cls(values, norms, *(attributes[name] for name in ("seed", "normalise", "parameters")))


def sketch_kernel(a: Sketch, b: Sketch) -> tuple[Float[Array, "N M"], Float[Array, "N M"], Float[Array, "N M"]]:
    """Estimates of ``K_ij = <grad phi_i, grad phi'_j>`` and the ends of their 95 % intervals.

    The intervals are normal, from the variance's upper bound with the estimate in the place of ``K_ij``;
    they are of single entries, and entries of one row err together. Raises ``ValueError`` naming what
    differs when the sketches were not made by the same hash of the same kind of score.
    """
    for name in ("seed", "size", "normalise", "parameters"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            raise ValueError(
                f"sketches differ in {name}, {one!r} and {other!r}; only those of one hash can be combined"
            )
    dtype = wide(a.values.dtype, b.values.dtype)
    (left, norms_a), (right, norms_b) = ((jnp.asarray(x, dtype) for x in (y.values, y.sq_norms)) for y in (a, b))
    values = jnp.matmul(left, right.T, precision=jax.lax.Precision.HIGHEST)
    norms = norms_a[:, None] * norms_b[None, :]
    margin = NORMAL_95 * jnp.sqrt((norms + jnp.minimum(values**2, norms)) / a.size)
    return values, values - margin, values + margin


def gradient_sketch(
    model: Any,
    rows: Rows,
    *,
    size: int,
    seed: int = SEED,
    normalise: str = "sum",
    weights: Array | None = None,
    temperature: float = 1.0,
    method: str = "auto",
    memory: int | None = None,
    logps: Logps = token_logps,
) -> Sketch:
    """Sketches of the gradients of ``rows``, ``size`` numbers each in at least float32.

    ``method``: ``streamed`` (a decoder, layer by layer), ``chunked`` (explicit gradients, a tile of rows at a
    time) or ``auto`` as in ``gradient_kernel``, whose arguments the others are. Raises ``ValueError`` when there
    are no rows, one has no response, or ``size`` is below 1.
    """
    need_finite(model)
    need_rows(rows, "rows", model, responses=True)
    check_size(size)
    temperature = checked_temperature(temperature)
    if logps is not token_logps and temperature != 1:
        raise ValueError(f"temperature: {temperature} has no meaning beside `logps`; let that apply it")
    if method not in METHODS:
        raise ValueError(f"method: {nearest(method, METHODS)}, got {method!r}")
    weight = row_weights(rows, normalise, weights)
    said = normalise if weights is None else "weights"
    leaves, memory = jax.tree.leaves(model), working_memory(memory)
    n, parameters = rows.start.shape[0], sum(x.size for x in leaves)
    item, streams = wide(*(x.dtype for x in leaves)).itemsize, isinstance(model, Decoder) and logps is token_logps
    if method == "streamed" and not streams:
        raise ValueError("method 'streamed' takes a Decoder scored by token_logps; for other models use 'chunked'")
    if method == "auto" and choose(parameters, item, n, memory, decoder=streams, plain=streams).method == "streamed":
        method = "streamed"
    if method == "streamed":
        found = streamed_sketch(model, rows, weight, size=size, seed=seed, temperature=temperature, memory=memory)
        return Sketch(*found, seed, said, parameters)
    if logps is token_logps:
        logps = at_temperature(temperature)
    tile = min(n, max(1, memory // (parameters * item)))
    found = []
    for low in range(0, n, tile):
        index = np.minimum(np.arange(low, low + tile), n - 1)  # one program: the last tile is filled up with a row
        found.append(to_host(_tile(model, rows[index], weight[index], size, seed, logps)))
    values, norms = (np.concatenate(x)[:n] for x in zip(*found, strict=True))
    return Sketch(values, norms, seed, said, parameters)


@partial(jax.jit, static_argnames=("size", "seed", "logps"))
def _tile(
    model: Any, rows: Rows, weights: Array, size: int, seed: int, logps: Logps
) -> tuple[Float[Array, "n size"], Float[Array, " n"]]:
    gradients = row_gradients(model, rows, weights, logps)
    dtype = wide(*(x.dtype for x in jax.tree.leaves(model)))
    squares = (jnp.sum(jnp.square(x.astype(dtype)), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(gradients))
    return sketch_gradients(gradients, seed, size), sum(squares, jnp.zeros(rows.start.shape, dtype))


def sketch_gradients(gradients: Any, seed: int, size: int) -> Float[Array, "N size"]:
    """The sketch of whole per-row gradients, a pytree like the model with a leading axis N.

    Leaves under ``layers`` are stacked over their next axis.
    """
    leaves = jax.tree.leaves(gradients)
    n, dtype = leaves[0].shape[0], wide(*(x.dtype for x in leaves))
    total = jnp.zeros((n, size), dtype)
    for name, leaf in zip(leaf_names(gradients), leaves, strict=True):
        part = partial(sketch_block, leaf_seed=leaf_seed(seed, name), size=size)
        if not name.startswith("layers."):
            total = total + part(leaf.reshape(n, 1, -1)).astype(dtype)
            continue

        def body(total: Array, xs: tuple[Array, Array], part: Any = part) -> tuple[Array, None]:
            block, layer = xs
            return total + part(block.reshape(n, 1, -1), layer=layer).astype(dtype), None

        depth = leaf.shape[1]
        total, _ = jax.lax.scan(body, total, (jnp.moveaxis(leaf, 1, 0), jnp.arange(depth, dtype=jnp.int32)))
    return total
