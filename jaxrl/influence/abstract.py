"""What the streamed kernel takes, as shapes: enough to compile its program, and not one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.influence.blocks import Consumer
from jaxrl.influence.cost import BLOCK, CHUNK
from jaxrl.influence.factors import Side
from jaxrl.influence.gradients import leaf_names
from jaxrl.influence.sides import rounded
from jaxrl.influence.stream import Plan
from jaxrl.influence.tiling import Streaming, vocabulary_chunk
from jaxrl.mesh import partition, shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, abstract_model, param_axes
from jaxrl.types import Rows


def abstract_parameters(config: ModelConfig, mesh: Mesh, dtype: Any) -> Decoder:
    """The parameters as shapes, placed as in training."""
    model = abstract_model(config, jnp.dtype(dtype))
    place = shardings(mesh, param_axes(config), model)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), model, place)


def abstract_job(
    config: ModelConfig,
    mesh: Mesh,
    *,
    n: int,
    m: int,
    width: int,
    scored: int | None = None,
    param_dtype: Any = "float32",
    block: int = BLOCK,
    chunk: int = CHUNK,
) -> Streaming:
    """A kernel of n rows with m others, all ``width`` tokens long with ``scored`` of them at most (default: all
    but the first) on the response. In one tile, whatever memory that takes.

    Raises ``ValueError`` for sizes that no rows have.
    """
    scored = width - 1 if scored is None else scored
    if min(n, m) < 1 or width < 2 or not 1 <= scored < width:
        raise ValueError(
            f"expected n and m of at least 1, a width of at least 2 tokens and 1 to width - 1 of them scored; "
            f"got n={n}, m={m}, width={width}, scored={scored}"
        )
    model = abstract_parameters(config, mesh, param_dtype)

    def side(rows: int) -> tuple[Rows, Any, float]:
        length = np.full(rows, width, np.int32)  # lengths are read on the host
        tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        return Rows(tokens, length - scored, length), jax.ShapeDtypeStruct((rows, width), jnp.result_type(float)), 1.0

    total = (("total",), (0,) * len(leaf_names(model)))
    return Streaming(model, (side(n), side(m)), None, total, 1 << 62, block=block, chunk=chunk)


def abstract_arguments(job: Streaming, listed: int | None = None) -> tuple[Any, ...]:
    """``tiling.arguments`` as shapes. ``listed``: how many different tokens occur on both sides together.

    By default as many as there are tokens, or the whole vocabulary if that is less; 0 goes over all of it.
    """
    consumer, vocab = job.contract(), job.model.config.vocab_size
    sides, entries = zip(*(_side(job, rows, consumer) for rows, *_ in job.sides), strict=True)
    bound = min(sum(rows.tokens.size for rows, *_ in job.sides), vocab)
    size = rounded_list(min(listed or bound, bound), vocab)
    dense = job.dense if job.dense is not None else listed == 0 or 2 * size > vocab
    ids, at_once = None, 0
    if not (dense and job.model.head is None):
        at_once = consumer.padded(min(job.chunk, size))
        ids = jax.ShapeDtypeStruct((-(-size // at_once) * at_once,), jnp.int32)  # on no device in particular
    return job.model, sides, entries, ids, None, Plan(consumer, vocabulary_chunk(job, consumer), at_once)


def rounded_list(count: int, vocab: int) -> int:
    """The length of the list of tokens that occur, as ``sides.token_entries`` makes it."""
    return min(-(-count // 64) * 64, vocab)


def _side(job: Streaming, rows: Rows, consumer: Consumer) -> tuple[Side, jax.ShapeDtypeStruct]:
    """One side and its tokens' entries, rows filled up to what the devices divide."""
    count, width = consumer.padded(len(rows.start)), rows.tokens.shape[1]
    scored = rounded(int((rows.length - rows.start).max()), max(width - 1, 1))

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        if consumer.mesh is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        spec = partition(consumer.mesh, ("rows", None)[: len(shape)], shape) if shape else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(consumer.mesh, spec))

    number = jnp.result_type(float)
    tokens, target, weight = array(count, width), array(count, scored), array(count, scored, dtype=number)
    return Side(tokens, tokens, None, None, target, target, weight, array(dtype=number)), tokens
