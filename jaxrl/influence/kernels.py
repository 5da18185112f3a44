"""The exact gradient kernel between two sets of rows (SCIENCE.md A.4, KERNEL.md 1).

``K_ij = <grad phi_i, grad phi'_j>`` over all parameters, tied ones counted once. Several methods behind
one function, equal to rounding: ``streamed`` for decoders of any size, the explicit ones for small
models and for models that are not decoders (``jaxrl.influence.explicit``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl.errors import nearest
from jaxrl.influence import explicit, tiling
from jaxrl.influence.cost import BLOCK, Choice, choose, human, working_memory
from jaxrl.influence.explicit import Blocks, Found, Job
from jaxrl.influence.gradients import (
    Logps,
    at_temperature,
    checked_temperature,
    fitted,
    leaf_names,
    need_finite,
    need_rows,
    row_weights,
)
from jaxrl.influence.noise import NOISE_ROWS, noise_floor
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_logps
from jaxrl.models.packing import unpack
from jaxrl.types import Kernel, Packed, Rows, is_concrete, wide

METHODS = ("auto", "reference", "columns", "chunked", "streamed", "ghost")
BLOCKS = ("total", "layer", "leaf")


def gradient_kernel(
    model: Any,
    rows_a: Rows | Packed,
    rows_b: Rows | Packed,
    *,
    normalise: str = "sum",
    weights: Array | tuple[Array | None, Array | None] | None = None,
    method: str = "auto",
    precondition: Any = None,
    blocks: str = "total",
    temperature: float | tuple[float, float] = 1.0,
    memory: int | None = None,
    noise: int | None = None,
    logps: Logps | tuple[Logps, Logps] = token_logps,
) -> Kernel:
    """Gradient dot products between the scores of ``rows_a`` (N) and ``rows_b`` (M).

    ``normalise``: ``sum`` (sequence log-probability, nats) or ``tok`` (its mean over response
    tokens). ``weights``: per-token weights ``[N, L]`` of ``rows_a`` instead, or a pair for both
    sides; those of the training loss (``jaxrl.influence.batch.coefficients``) make ``sum_i K_ij`` the
    predicted change. ``precondition``: a positive diagonal D, a pytree like the parameters, for
    ``g_i^T D g_j``; norms and cosines are then in that metric too. ``blocks``: ``layer`` or
    ``leaf`` also returns the parts that sum to ``values``. ``temperature``: of the log-probs, for
    both sides or as a pair.

    ``method``: ``auto`` takes the cheapest that fits, and ``Kernel.why`` says which and why.
    ``streamed`` contracts gradients layer by layer (decoders; on the mesh that the parameters lie
    on); ``ghost`` does so token by token for all matrices of the layers; ``reference``, ``chunked`` and
    ``columns`` hold explicit gradients and take any pytree with ``logps(model, rows)``, for both sides
    or as a pair. ``memory``: bytes of working memory beside the parameters, by default half of what
    the device has left, or 2 GiB where it does not say. ``noise``: how many rows of either side are
    computed a second time, in float32 and another way, for the noise floor (default 2; 0 in double precision).

    Raises ``ValueError`` for an unknown name (with the nearest), for no rows, for rows without response
    tokens, for parameters that are not finite, for a wrong ``precondition``, or when ``memory`` is too
    small; ``OutOfMemory`` when the device is.
    """
    for name, value, known in (("method", method, METHODS), ("blocks", blocks, BLOCKS)):
        if value not in known:
            raise ValueError(f"{name}: {nearest(value, known)}, got {value!r}")
    need_finite(model)
    given = (_here(rows_a), _here(rows_b))
    if noise is not None and noise < 0:
        raise ValueError(f"noise: expected a number of rows, 0 or more, got {noise}")
    pair = tuple(weights) if isinstance(weights, tuple | list) else (weights, None)
    heat = tuple(temperature) if isinstance(temperature, tuple | list) else (temperature, temperature)
    heat = (checked_temperature(heat[0]), checked_temperature(heat[1]))
    scorers = logps if isinstance(logps, tuple) else (logps, logps)
    sides = _Sides(given, pair, heat, scorers, normalise, given[0] is given[1])
    return _kernel(model, sides, method, precondition, blocks, working_memory(memory), noise)


@dataclass(frozen=True)
class _Sides:
    """Both sides as they were asked for: rows, weights, temperatures and scorers."""

    given: tuple[Rows | Packed, Rows | Packed]
    weights: tuple[Array | None, Array | None]
    temperature: tuple[float, float]
    logps: tuple[Logps, Logps]
    normalise: str
    one: bool

    @property
    def plain(self) -> bool:
        """Scored by ``token_logps``."""
        return self.logps == (token_logps, token_logps)

    @property
    def same(self) -> bool:
        """Both sides are the same rows with the same scores."""
        return (
            self.one
            and all(x[0] is x[1] or x[0] == x[1] for x in (self.temperature, self.logps))
            and self.weights[0] is self.weights[1]
        )

    def held(self) -> list[str]:
        """What is not differentiated."""
        return [f"weights of rows_{side}" for side, w in zip("ab", self.weights, strict=True) if w is not None]

    def job(self, model: Any, metric: Any, blocks: str, memory: int) -> Job:
        """The same for explicit methods, with packed rows laid out one by one. Raises ``ValueError``."""
        rows = tuple(unpack(r) if isinstance(r, Packed) else r for r in self.given)
        for name, side in zip(("rows_a", "rows_b"), rows, strict=True):
            need_rows(side, name, model, responses=True)
        if not self.plain and self.temperature != (1.0, 1.0):
            raise ValueError(f"temperature: {self.temperature} has no meaning beside `logps`; let that apply it")
        leaves = jax.tree.leaves(model)
        return Job(
            model=model,
            sides=tuple((r, row_weights(r, self.normalise, w)) for r, w in zip(rows, self.weights, strict=True)),
            logps=tuple(at_temperature(t) for t in self.temperature) if self.plain else self.logps,
            diagonal=None if metric is None else _checked_diagonal(model, metric),
            blocks=_block_index(model, blocks),
            fits=memory // (sum(x.size for x in leaves) * wide(*(x.dtype for x in leaves)).itemsize),
            same=self.same,
        )


def _kernel(model: Any, sides: _Sides, method: str, metric: Any, blocks: str, memory: int, noise: int | None) -> Kernel:
    """Choose, compute, and say how."""
    job, decoder, leaves = sides.job(model, metric, blocks, memory), isinstance(model, Decoder), jax.tree.leaves(model)
    size, dtype = sum(x.size for x in leaves), wide(*(x.dtype for x in leaves))
    choice = Choice(method, "asked for")
    if method == "auto":
        choice = choose(size, dtype.itemsize, sum(job.size), memory, decoder=decoder, plain=sides.plain)
    parts, norms, how = _computed(job, choice, sides, memory, decoder and sides.plain)
    if noise is None:
        noise = 0 if dtype == jnp.float64 else NOISE_ROWS
    held, total = sides.held(), parts.sum(axis=0)
    return Kernel(
        values=jnp.asarray(total, dtype),
        method=choice.method,
        dtype=dtype.name,
        normalise="weights" if held else sides.normalise,
        sq_norms_a=jnp.asarray(norms[0], dtype),
        sq_norms_b=jnp.asarray(norms[1], dtype),
        blocks=None if blocks == "total" else _named(job.blocks[0], parts, dtype),
        noise=noise_floor(job, choice.method, total, norms, noise) if noise else None,
        held_fixed=tuple(held if metric is None else [*held, "precondition"]),
        compute=model.config.dtype if decoder else dtype.name,
        why="; ".join(x for x in (choice.why, how) if x),
    )


def compiled_kernel(
    model: Decoder, rows_a: Rows, rows_b: Rows, *, memory: int | None = None, block: int = BLOCK
) -> Any:
    """The streamed method's program for these rows, as ``jax.stages.Compiled``: memory and operations, nothing run."""
    sides = tuple((to_host(rows), row_weights(rows), 1.0) for rows in (rows_a, rows_b))
    job = tiling.Streaming(model, sides, None, _block_index(model, "total"), working_memory(memory), block=block)
    return tiling.stream.lower(*tiling.arguments(job, job.sides)).compile()


def _computed(
    job: Job, choice: Choice, asked: _Sides, memory: int, streams: bool
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], str]:
    """Blocks, squared norms, and what the method has to say of how it went about it."""
    if choice.method not in ("streamed", "ghost"):
        found: Found = {"reference": explicit.reference, "chunked": explicit.chunked, "columns": explicit.columns}[
            choice.method
        ](job)
        return *found, ""
    if not streams:
        raise ValueError(
            f"method {choice.method!r} takes a Decoder scored by token_logps; for other models use 'auto', "
            "'reference', 'chunked' or 'columns'"
        )
    if choice.method == "ghost" and job.diagonal is not None:
        raise ValueError("method 'ghost' forms no gradients, so a diagonal `precondition` has no place; use 'streamed'")
    sides = tuple(
        (to_host(r), to_host(w), t) for r, (_, w), t in zip(asked.given, job.sides, asked.temperature, strict=True)
    )
    streaming = tiling.Streaming(
        job.model, sides[: 1 if job.same else 2], job.diagonal, job.blocks, memory,
        ghost=True if choice.method == "ghost" else None,
    )  # fmt: skip
    if choice.method == "ghost" and streaming.mesh is not None:
        raise ValueError("method 'ghost' is for one device; use 'streamed' for a model that lies on a mesh")
    return *tiling.streamed(streaming), _how(streaming)


def _how(job: tiling.Streaming) -> str:
    """Tiles, matrices taken token by token, and the mesh, where there is something to say."""
    said, (n, m), (a, b) = [], job.size, tiling.tile_sizes(job)
    contract = job.contract()
    if (a, b) != (n, m):
        said.append(f"tiles of {a} x {b} rows within {human(job.memory)}")
    if contract.ghost:
        said.append(f"token by token for {', '.join(sorted(contract.ghost))}")
    if contract.mesh is not None:
        said.append("on a mesh of " + " x ".join(f"{name}={size}" for name, size in contract.mesh.shape.items()))
    return "; ".join(said)


def _here(rows: Rows | Packed) -> Any:
    """Rows that several processes hold a part of, whole; others as they are."""
    parts = [x for x in jax.tree.leaves(rows) if isinstance(x, jax.Array) and is_concrete(x)]
    return rows if all(x.is_fully_addressable for x in parts) else to_host(rows)


def _named(names: tuple[str, ...], parts: np.ndarray, dtype: Any) -> dict[str, Array]:
    return {name: jnp.asarray(part, dtype) for name, part in zip(names, parts, strict=True)}


def _block_index(model: Any, blocks: str) -> Blocks:
    """Which block each leaf belongs to; leaves under ``layers`` are stacked over their first axis."""
    names: dict[str, int] = {}
    index: list[int | tuple[int, ...]] = []
    for leaf, value in zip(leaf_names(model), jax.tree.leaves(model), strict=True):
        if blocks == "layer" and leaf.startswith("layers.") and not isinstance(model, Decoder):
            index.append(names.setdefault(".".join(leaf.split(".")[:2]), len(names)))  # layers.0.w: not stacked
        elif blocks == "layer" and leaf.startswith("layers."):
            index.append(tuple(names.setdefault(f"layers.{d}", len(names)) for d in range(value.shape[0])))
        else:
            index.append(names.setdefault("total" if blocks == "total" else leaf, len(names)))
    return tuple(names), tuple(index)


def _checked_diagonal(model: Any, precondition: Any) -> Any:
    """``precondition`` in the model's structure and dtypes; every entry must be positive and finite."""
    diagonal = fitted(model, precondition, "precondition")
    for name, leaf in zip(leaf_names(diagonal), jax.tree.leaves(diagonal), strict=True):
        if not bool(jnp.all((leaf > 0) & jnp.isfinite(leaf))):
            raise ValueError(f"precondition: {name} has entries that are not positive and finite; a metric needs both")
    return jax.tree.map(lambda d, p: jnp.asarray(d).astype(p.dtype), diagonal, model)
