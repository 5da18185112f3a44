"""One optimiser step, as a pure function of state and terms.

A step is a tuple of terms, each a plain sum over its own rows, so any split into micro-batches
gives the same gradient up to rounding. Jit with ``STATIC`` static and ``state`` donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl.mean import Mean
from jaxrl.models.passes import Passes
from jaxrl.models.scoring import REVERSE, Scorer
from jaxrl.rl.losses import TokenLoss, weighted_sum
from jaxrl.types import Batch, Term, TrainState, wide

STATIC = ("tx", "temperature", "microbatch", "score")  # arguments of ``update``


def loss_and_grad(
    model: Any,
    terms: tuple[Term, ...],
    reference: Any,
    *,
    temperature: float,
    microbatch: int | None = None,
    score: Scorer = REVERSE,
    layouts: Sequence[Passes] | None = None,
) -> tuple[Float[Array, " terms"], Any]:
    """The loss of each term (nats times weight) and the gradient of their sum.

    ``reference`` is the base model, or None when no term needs one; no gradient reaches it.
    ``temperature`` is the rollouts'. ``microbatch``: rows a forward and backward pass; the last
    chunk is filled with a copy of row 0 at weight 0. ``score``: how log-probs are got. ``layouts`` packs
    every term's rows instead, in passes of its own. Gradients are summed in at least float32 and come as a tree
    like ``model``.
    """
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, wide(p.dtype)), model)
    losses = []
    for i, term in enumerate(terms):
        one = partial(_value_and_grad, model, term.loss, reference, temperature)
        if layouts is None:
            loss, grads = _term_grad(partial(one, score), term.batch, grads, microbatch)
        else:
            loss, grads = _packed_grad(one, term.batch, grads, layouts[i])
        losses.append(loss)
    return jnp.stack(losses), grads


def update(
    state: TrainState,
    terms: tuple[Term, ...],
    reference: Any,
    *,
    tx: optax.GradientTransformation,
    temperature: float,
    microbatch: int | None = None,
    score: Scorer = REVERSE,
    layouts: Sequence[Passes] | None = None,
) -> tuple[TrainState, dict[str, Mean]]:
    """One optimiser step on ``terms``. ``state.step`` counts rollout batches and is left to the loop.

    Metrics: ``policy/loss`` and ``policy/loss_<tag>`` a loss piece; ``optim/grad_norm`` before
    clipping; ``optim/update_norm``, the norm of the change that the parameters really took; and
    ``optim/param_changed``, the share of parameters whose stored value changed at all.
    """
    terms, metrics = refreshed(state.model, terms, reference, temperature=temperature, score=score)
    losses, grads = loss_and_grad(
        state.model, terms, reference, temperature=temperature, microbatch=microbatch, score=score, layouts=layouts
    )
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python scalars into every dtype
        steps, opt_state = tx.update(grads, state.opt_state, state.model)
        model = optax.apply_updates(state.model, steps)
    metrics |= {"policy/loss": Mean.scalar(jnp.sum(losses))}
    for term, loss in zip(terms, losses, strict=True):
        name = f"policy/loss_{term.loss.tag}"
        metrics[name] = Mean.scalar(loss + metrics[name].total if name in metrics else loss)
    metrics |= {"optim/grad_norm": Mean.scalar(_norm(grads))} | _change(state.model, model)
    return dataclasses.replace(state, model=model, opt_state=opt_state), metrics


def refreshed(
    model: Any, terms: tuple[Term, ...], reference: Any, *, temperature: float, score: Scorer
) -> tuple[tuple[Term, ...], dict[str, Mean]]:
    """``terms`` with what their losses fix by the current policy, without gradient, and metrics of it."""
    metrics: dict[str, Mean] = {}
    found = []
    for term in terms:
        if term.loss.refreshes:
            batch, more = jax.lax.stop_gradient(
                term.loss.refresh(model, reference, term.batch, temperature=temperature, score=score)
            )
            term, metrics = Term(batch, term.loss), metrics | more
        found.append(term)
    return tuple(found), metrics


def _term_grad(
    one: Callable[[Batch], tuple[Array, Any]], batch: Batch, grads: Any, microbatch: int | None
) -> tuple[Float[Array, ""], Any]:
    """The loss of one term, and ``grads`` plus its gradient."""

    def add(carry: tuple[Array, Any], batch: Batch) -> tuple[tuple[Array, Any], None]:
        return _added(carry, one(batch)), None

    start = (jnp.zeros((), wide(batch.weight.dtype)), grads)
    n = batch.weight.shape[0]
    if microbatch is None or microbatch >= n:
        return add(start, batch)[0]
    return jax.lax.scan(add, start, _chunks(batch, microbatch))[0]


def _packed_grad(
    one: Callable[[Scorer, Batch], tuple[Array, Any]], batch: Batch, grads: Any, passes: Passes
) -> tuple[Float[Array, ""], Any]:
    """As ``_term_grad``, from packed rows. How many passes run is data: no derivative goes through this loop."""

    def add(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        part = passes[i]
        some = part.select(batch)
        some = dataclasses.replace(some, weight=jnp.where(part.live[:, None], some.weight, 0))
        return _added(carry, one(part, some))

    start = (jnp.zeros((), wide(batch.weight.dtype)), grads)
    return jax.lax.fori_loop(0, passes.count, add, start)


def _added(total: tuple[Array, Any], more: tuple[Array, Any]) -> tuple[Array, Any]:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _value_and_grad(
    model: Any, loss: TokenLoss, reference: Any, temperature: float, score: Scorer, batch: Batch
) -> tuple[Float[Array, ""], Any]:
    def value(model: Any) -> Array:
        return weighted_sum(model, reference, batch, loss, temperature=temperature, score=score)

    return jax.value_and_grad(value)(model)


def _chunks(batch: Batch, size: int) -> Batch:
    """Leading axis [N] -> [chunks, size]; the last chunk ends in copies of row 0 that weigh nothing."""
    n = batch.weight.shape[0]
    at = jnp.arange(-(-n // size) * size)
    real = at < n
    batch = jax.tree.map(lambda x: x[jnp.where(real, at, 0)], batch)
    keep = real.reshape((-1,) + (1,) * (batch.weight.ndim - 1))
    batch = dataclasses.replace(batch, weight=jnp.where(keep, batch.weight, 0))
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)


def _norm(tree: Any) -> Float[Array, ""]:
    """Global L2 norm, in at least float32."""
    leaves = [jnp.sum(jnp.square(x.astype(wide(x.dtype)))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(leaves)))


def _change(before: Any, after: Any) -> dict[str, Mean]:
    delta = jax.tree.map(lambda a, b: b.astype(wide(b.dtype)) - a.astype(wide(a.dtype)), before, after)
    moved = [jnp.sum((d != 0).astype(jnp.float32)) for d in jax.tree.leaves(delta)]
    size = sum(d.size for d in jax.tree.leaves(delta))
    return {
        "optim/update_norm": Mean.scalar(_norm(delta)),
        "optim/param_changed": Mean(jnp.sum(jnp.stack(moved)), jnp.asarray(size, jnp.float32)),
    }
