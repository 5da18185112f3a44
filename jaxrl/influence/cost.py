"""What each way of taking a kernel costs, and which one to take (KERNEL.md 1).

Floating-point operations of the products, and bytes of working memory beside the parameters. The
numbers choose between methods and tile sizes; nothing is computed with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.influence.gradients import leaf_names
from jaxrl.influence.stream import TENSOR
from jaxrl.mesh import RULES
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder
from jaxrl.models.layers import PROJECTIONS
from jaxrl.types import wide

EXPLICIT = 64 << 20  # bytes of explicit gradients below which recomputing layers saves nothing that matters
BLOCK = 32 << 20  # bytes of per-row gradients that the streamed method holds, all rows together
CHUNK = 256  # vocabulary entries at a time


@dataclass(frozen=True)
class Choice:
    """A method and the sentence that says why."""

    method: str
    why: str


def choose(size: int, itemsize: int, rows: int, memory: int, *, decoder: bool, plain: bool) -> Choice:
    """The cheapest method whose memory fits.

    ``size``: parameters; ``rows``: on both sides together. ``decoder``: the model is one of ours, whose
    layers can be streamed; ``plain``: scores are token log-probs at some temperature.
    """
    held = size * itemsize * rows
    said = f"{rows} gradients of {size:,} parameters take {human(held)}"
    if held <= min(EXPLICIT, memory):
        return Choice("reference", f"{said}: small enough to hold, and no layer is computed twice")
    if decoder and plain:
        return Choice("streamed", f"{said}: contracted layer by layer instead, for one rematerialised gradient pass")
    reason = "scores are given by `logps`" if decoder else "the model is no Decoder"
    if memory // (size * itemsize) >= min(3, rows):
        return Choice("chunked", f"{said}; {reason}, so layers cannot be streamed: tiles of what fits {human(memory)}")
    return Choice("columns", f"{said}; {reason}, and fewer than 3 gradients fit {human(memory)}: one at a time")


def ghost_leaves(config: ModelConfig, n: int, m: int, width_a: int, width_b: int) -> frozenset[str]:
    """The matrices of a layer for which products token by token cost less than forming the gradients.

    ``direct = 2 i o (N T + M T' + N M)`` against ``ghost = 2 N M T T' (i + o)``.
    """
    found = set()
    for name, (inputs, outputs) in matrix_shapes(config).items():
        direct = 2 * inputs * outputs * (n * width_a + m * width_b + n * m)
        if 2 * n * m * width_a * width_b * (inputs + outputs) < direct:
            found.add(name)
    return frozenset(found)


def matrix_shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each matrix of a layer."""
    d, f, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    assert set(shapes) == set(PROJECTIONS)
    return shapes


def row_bytes(config: ModelConfig, width: int) -> int:
    """Working memory of the streamed method a row of ``width`` tokens: layer inputs, and one layer's activations.

    Counted from compiled programs; a test holds it against them.
    """
    item = 2 if config.dtype in ("bfloat16", "float16") else wide(config.dtype).itemsize
    stream = width * config.hidden_size * (config.num_layers + 8)
    mlp = 5 * width * config.intermediate_size
    scores = 4 * config.num_heads * width * width * wide(config.dtype).itemsize // item
    return item * (stream + mlp + scores)


def tiles(n: int, m: int, fits: int, same: bool) -> tuple[int, int]:
    """Rows of either side at a time, when ``fits`` rows fit, so that as few rows as possible are passed.

    Every row of A is passed once a tile of B and the other way round. Raises ``ValueError`` when not two
    rows fit.
    """
    if fits < 2:
        raise ValueError("fits: expected room for at least two rows")
    if n <= fits and same:
        return n, m
    if n + m <= fits:
        return n, m
    sizes = range(1, min(n, fits - 1) + 1)

    def passed(a: int) -> tuple[int, int]:
        b = min(m, fits - a)
        across, down = math.ceil(n / a), math.ceil(m / b)
        return across * down * (a + b), across * down

    best = min(sizes, key=passed)
    return math.ceil(n / math.ceil(n / best)), math.ceil(m / math.ceil(m / min(m, fits - best)))


def exchange_bytes(model: Decoder, mesh: Mesh, rows: int, listed: int) -> int:
    """Bytes of per-row gradients that a device sends and receives by all-to-all for one streamed pass.

    ``rows`` on both sides, a multiple of the D devices that share them: ``item * rows * P / D``, and over
    the tensor axis as well for what that splits. ``listed`` tokens that occur (0: the whole
    vocabulary): their entries count twice more for a tied matrix, and alone for an untied embedding. The
    vocabulary's last chunk may overlap the one before, which comes on top. KERNEL.md 5.
    """
    tensor, shapes = mesh.shape["tensor"], matrix_shapes(model.config)
    numbers = 0
    for name, leaf in zip(leaf_names(model), jax.tree.leaves(model), strict=True):
        own = name.removeprefix("layers.")
        split = own in ("embed", "head") or (own in TENSOR and shapes[own][TENSOR[own] - 1] % tensor == 0)
        if name != "embed" or model.head is None or not listed:
            numbers += leaf.size // (tensor if split else 1)
    numbers += listed * model.config.hidden_size * (2 if model.head is None else 1)
    devices = math.prod(mesh.shape[name] for name in RULES["rows"])
    return wide(*(x.dtype for x in jax.tree.leaves(model))).itemsize * rows * numbers // devices


def working_memory(memory: int | None) -> int:
    """``memory``, or by default half of what the device has left, or 2 GiB where it does not say."""
    if memory is not None:
        return memory
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return 2 << 30
    return max((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) // 2, 1 << 28)


def human(size: Any) -> str:
    """Bytes as a short text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
