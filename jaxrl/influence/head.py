"""Head and embedding of the streamed kernel, a few vocabulary entries at a time.

The gradient by a logit is ``b_tv = w_t (1[y_t = v] - p_tv) / temperature``. Logits exist for one chunk of
the vocabulary only, ``[N T chunk]``: a first pass finds the log-partition, a second the cotangent of
the hidden states and (by default) the head's Gram matrix.

A tied matrix is one parameter: its gradient is that of the head plus that of the embedding, which is
there only after the backward pass through all layers. Embedding gradients live on tokens that occur,
so the missing products <H, E'> + <E, H'> + <E, E'> are formed on those alone; when most of the
vocabulary occurs, the head's gradient is formed again instead and both are added before one product.
KERNEL.md 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.influence.blocks import HIGHEST, Consumer, Place
from jaxrl.influence.factors import Side
from jaxrl.models.decoder import Decoder
from jaxrl.types import container, wide


@container
@dataclass(frozen=True)
class Scored:
    """The head's view of one side: states where scored tokens are predicted from, and their log-partition."""

    states: Float[Array, "N T d"]
    lse: Float[Array, "N T"]
    target: Int[Array, "N T"]
    scale: Float[Array, "N T"]  # weight over temperature
    temperature: Float[Array, ""]

    def logits(self, weight: Float[Array, "v d"], known: Array) -> Float[Array, "N T v"]:
        """Logits of some vocabulary entries over temperature; minus infinity where not ``known``."""
        dtype = wide(self.states.dtype, weight.dtype)
        out = jnp.einsum("ntd,vd->ntv", self.states.astype(dtype), weight.astype(dtype)) / self.temperature.astype(
            dtype
        )
        return jnp.where(known[None, None], out, -jnp.inf)

    def cotangent(self, weight: Float[Array, "v d"], ids: Int[Array, " v"], known: Array) -> Float[Array, "N T v"]:
        """``w_t (1[y_t = v] - p_tv) / temperature`` for the entries ``ids``; 0 where not ``known``."""
        logits = self.logits(weight, known)
        hit = (self.target[:, :, None] == ids[None, None]) & known[None, None]
        p = jnp.exp(logits - self.lse[:, :, None].astype(logits.dtype))
        return (hit.astype(logits.dtype) - p) * self.scale[:, :, None].astype(logits.dtype)

    def gradient(self, cotangent: Float[Array, "N T v"]) -> Float[Array, "N v d"]:
        """The head's per-row gradient of those entries."""
        states = self.states.astype(cotangent.dtype)
        return jnp.einsum("ntv,ntd->nvd", cotangent, states, precision=HIGHEST)


def vocabulary(model: Decoder, consumer: Consumer, start: Any, size: int) -> tuple[Array, Array, Array]:
    """Rows ``start .. start+size`` of the head as ``[size d]``, their ids, and which of them count.

    The last chunk is moved back so as to end at the vocabulary's end; what an earlier chunk has had
    does not count again, nor do ids from ``vocab_limit`` on.
    """
    total = model.config.vocab_size
    limit = model.config.vocab_limit or total
    at = jnp.minimum(start, total - size).astype(jnp.int32)
    ids = at + jnp.arange(size, dtype=jnp.int32)
    weight = consumer.whole(entries(model, ids, consumer), ("vocab", "embed"))
    return weight, ids, (ids >= start) & (ids < limit)


def entries_place(model: Decoder, name: str, first: Array) -> Place:
    """Where a block ``[N v d]`` of the vocabulary from entry ``first`` on lies in ``embed [V d]`` or ``head [d V]``."""
    c = model.config
    if name == "embed":
        return Place(name, None, first * c.hidden_size, (c.hidden_size, 1))
    return Place(name, None, first, (1, c.vocab_size))


def entries(tree: Decoder, ids: Int[Array, " v"], consumer: Consumer) -> Float[Array, "v d"]:
    """Rows ``ids`` of the head of a model, or of a pytree like it, each split as the head's rows are.

    Taken by index: a slice along the vocabulary, which the tensor axis splits, would gather all of it every time.
    """
    if tree.head is None:
        rows = tree.embed[...].at[ids].get(mode="clip")
    else:
        rows = tree.head[...].at[:, ids].get(mode="clip").T
    return consumer.held(rows, (None, "embed"))


def score(model: Decoder, side: Side, states: Float[Array, "N T d"], consumer: Consumer, chunk: int) -> Scored:
    """Pass one: the log-partition of every scored position, by running maximum and sum."""
    dtype = wide(states.dtype, model.embed[...].dtype)
    scale = side.weight.astype(dtype) / side.temperature.astype(dtype)
    scored = Scored(states, jnp.zeros(scale.shape, dtype), side.target, scale, side.temperature)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = carry
        weight, _, known = vocabulary(model, consumer, i * chunk, chunk)
        logits = scored.logits(weight, known)
        new = jnp.maximum(top, jnp.max(logits, axis=-1))
        return new, total * jnp.exp(top - new) + jnp.sum(jnp.exp(logits - new[:, :, None]), axis=-1)

    # the lowest finite number: a chunk without known ids must give 0 and not NaN
    start = (jnp.full(scale.shape, jnp.finfo(dtype).min, dtype), jnp.zeros(scale.shape, dtype))
    top, total = jax.lax.fori_loop(0, chunks(model, chunk), body, start)
    return Scored(states, top + jnp.log(total), side.target, scale, side.temperature)


def head(
    model: Decoder,
    scored: tuple[Scored, ...],
    sums: Any,
    consumer: Consumer,
    metric: Decoder | None,
    chunk: int,
    name: str | None,
) -> tuple[tuple[Float[Array, "N T d"], ...], Any]:
    """Pass two: cotangents of the states, and the products of the head's gradients under ``name`` (None: not yet)."""

    def body(i: Array, carry: tuple[tuple[Array, ...], Any]) -> tuple[tuple[Array, ...], Any]:
        back, sums = carry
        weight, ids, known = vocabulary(model, consumer, i * chunk, chunk)
        cotangents = [s.cotangent(weight, ids, known) for s in scored]
        back = consumer.by_rows(
            tuple(
                b + jnp.einsum("ntv,vd->ntd", ct, weight.astype(ct.dtype))
                for b, ct in zip(back, cotangents, strict=True)
            )
        )
        if name is not None:
            blocks = tuple(s.gradient(ct) for s, ct in zip(scored, cotangents, strict=True))
            sums = consumer.explicit(
                sums, entries_place(model, name, ids[0]), blocks, _some(metric, ids, consumer), tensor=1
            )
        return back, sums

    zero = tuple(jnp.zeros(s.states.shape, s.scale.dtype) for s in scored)
    return jax.lax.fori_loop(0, chunks(model, chunk), body, (zero, sums))


def tied_dense(
    model: Decoder,
    scored: tuple[Scored, ...],
    embedded: tuple[Embedded, ...],
    sums: Any,
    consumer: Consumer,
    metric: Decoder | None,
    chunk: int,
) -> Any:
    """Pass three over the whole vocabulary: head and embedding gradients added before one product."""

    def body(i: Array, sums: Any) -> Any:
        weight, ids, known = vocabulary(model, consumer, i * chunk, chunk)
        first = ids >= i * chunk  # ids above the vocabulary limit occur in prompts
        blocks = tuple(
            s.gradient(s.cotangent(weight, ids, known))
            + e.rows(ids[0], chunk) * first[None, :, None].astype(e.ct.dtype)
            for s, e in zip(scored, embedded, strict=True)
        )
        return consumer.explicit(
            sums, entries_place(model, "embed", ids[0]), blocks, _some(metric, ids, consumer), tensor=1
        )

    return jax.lax.fori_loop(0, chunks(model, chunk), body, sums)


@container
@dataclass(frozen=True)
class Embedded:
    """Cotangents ``ct [N W d]`` of the embedding's outputs, and the ``entry [N W]`` of a list that each token is."""

    ct: Float[Array, "N W d"]
    entry: Int[Array, "N W"]

    def rows(self, start: Any, size: int) -> Float[Array, "N size d"]:
        """The embedding's per-row gradient of entries ``start .. start+size``."""
        at = self.entry - jnp.asarray(start, jnp.int32)
        at = jnp.where((at >= 0) & (at < size), at, size)  # a negative index would count from the end
        zero = jnp.zeros((size, self.ct.shape[-1]), self.ct.dtype)
        # row by row, so that a partitioned program scatters each device's own rows
        return jax.vmap(lambda at, ct: zero.at[at].add(ct, mode="drop"))(at, self.ct)


def occurring(
    model: Decoder,
    scored: tuple[Scored, ...],
    embedded: tuple[Embedded, ...],
    ids: Int[Array, " U"],
    sums: Any,
    consumer: Consumer,
    metric: Decoder | None,
    chunk: int,
) -> Any:
    """Products of embedding gradients on the tokens ``ids`` that occur (padded with the vocabulary's size).

    A tied matrix also gets the cross products with the head's gradients, whose own product ``head`` has taken.
    """
    limit = model.config.vocab_limit or model.config.vocab_size

    def body(i: Array, sums: Any) -> Any:
        at = (i * chunk).astype(jnp.int32)
        some = jax.lax.dynamic_slice_in_dim(ids, at, chunk)
        place = Place("embed", None, some * model.config.hidden_size, (0, 1))
        scale = None
        if metric is not None:
            scale = consumer.held(metric.embed[...].at[some].get(mode="fill", fill_value=0), (None, "embed"))
        of_embedding = tuple(e.rows(at, chunk) for e in embedded)
        if model.head is not None:
            return consumer.explicit(sums, place, of_embedding, scale)
        weight = consumer.whole(model.embed[...].at[some].get(mode="fill", fill_value=0), (None, "embed"))
        of_head = tuple(s.gradient(s.cotangent(weight, some, some < limit)) for s in scored)
        return consumer.cross(sums, place, of_head, of_embedding, scale)

    return jax.lax.fori_loop(0, ids.shape[0] // chunk, body, sums)


def chunks(model: Decoder, chunk: int) -> int:
    """How many chunks cover the vocabulary."""
    return -(-model.config.vocab_size // chunk)


def _some(metric: Decoder | None, ids: Int[Array, " v"], consumer: Consumer) -> Array | None:
    return None if metric is None else entries(metric, ids, consumer)
