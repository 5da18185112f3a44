"""RL on one family of the enumerable task at a time, and what gradients said it would do (SCIENCE.md A29, C15)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrl.commands.runs import OpenedRun
from jaxrl.data.prompts import PromptPool
from jaxrl.data.synthetic import (
    FAMILIES,
    PROMPT_LENGTH,
    PROMPTS,
    RESPONSE_LENGTH,
    Msa0,
    correct_responses,
    digits,
)
from jaxrl.evaluation.exact import Exact, decompose, exact
from jaxrl.influence.batch import batch_gradient
from jaxrl.influence.check import double
from jaxrl.influence.dynamics import saved_diagonal
from jaxrl.influence.gradients import scores
from jaxrl.influence.precondition import current_rate
from jaxrl.influence.training import MEASURES, Transfer
from jaxrl.models.decoder import Decoder
from jaxrl.rl.algorithms import Algorithm, applied, kept, prepare
from jaxrl.rl.optimiser import make_optimiser
from jaxrl.train.collect import Collector
from jaxrl.train.setup import total_updates
from jaxrl.train.tasks import Msa0Task
from jaxrl.types import Graded, Rows, Term

STEPS = 10  # rollout batches on one family
FAMILY = PROMPTS // len(FAMILIES)


def family_transfer(run: OpenedRun, collector: Collector) -> Transfer:
    """Train ``STEPS`` batches on each trained family alone, from the checked checkpoint with its momentum forgotten.

    Second moments are kept: they are the metric in which the optimiser steps. Predictions, from the
    first batch alone: ``kernel`` (``sum_i w_i A_i K_ig``, SGD of rate 1), ``kernel under D`` (in the
    metric of the second moment), and ``frozen gradient``, the change that the optimiser would make if the
    gradient stayed that of the first batch, to first order.
    """
    trainer = _Trainer(run, collector)
    before = exact(trainer.model)
    weights = {"p": np.exp(before.logps), "delta_plus": np.exp(before.given_correct)}
    families = {name: family_gradients(trainer.model, w) for name, w in weights.items()}
    pools = trainer.pools()
    realised: dict[str, list[Any]] = {name: [] for name in MEASURES}
    steps: dict[str, list[Any]] = {"kernel": [], "kernel under D": [], "frozen gradient": []}
    for pool in pools.values():
        after, first = trainer.train(pool)
        for name, change in family_changes(before, exact(after)).items():
            realised[name].append(change)
        ascent = _vector(jax.tree.map(jnp.negative, first))
        steps["kernel"].append(ascent)
        steps["frozen gradient"].append(_vector(trainer.frozen(first)))
        if trainer.diagonal is not None:
            steps["kernel under D"].append(ascent * _vector(trainer.diagonal))
    return Transfer(
        trained=tuple(str(f) for f in pools),
        measured=tuple(str(f) for f in range(len(FAMILIES))),
        steps=STEPS,
        realised={name: np.stack(rows) for name, rows in realised.items()},
        predicted={name: {k: np.stack(d) @ g.T for k, d in steps.items() if d} for name, g in families.items()},
        norms={name: np.linalg.norm(g, axis=1) for name, g in families.items()},
    )


def family_changes(before: Exact, after: Exact) -> dict[str, Float[np.ndarray, " 8"]]:
    """Mean change over each family's prompts: of p, and of the log-probability of correct responses (Delta+)."""
    change = {"p": after.p - before.p, "delta_plus": decompose(before, after).change}
    return {name: x.reshape(len(FAMILIES), FAMILY).mean(axis=1) for name, x in change.items()}


def family_gradients(model: Decoder, weights: Float[np.ndarray, "320 20"]) -> Float[np.ndarray, "8 P"]:
    """Gradient of each family's mean over prompts of ``sum_y weights[x, y] log pi(y | x)``, y the correct responses.

    With the probabilities of y as weights it is that of the family's success probability.
    """
    responses = correct_responses(np.arange(PROMPTS))
    prompts = np.repeat(_prompt_tokens(), responses.shape[1], axis=0)
    tokens = np.concatenate([prompts, responses.reshape(len(prompts), -1)], axis=1).reshape(len(FAMILIES), -1, 9)
    weight = weights.reshape(len(FAMILIES), -1) / FAMILY
    return np.asarray(_family_gradients(model, jnp.asarray(tokens, jnp.int32), jnp.asarray(weight)))


@jax.jit
def _family_gradients(model: Decoder, tokens: Array, weights: Array) -> Float[Array, "8 P"]:
    n = tokens.shape[1]
    start = jnp.full(n, PROMPT_LENGTH, jnp.int32)

    def one(part: tuple[Array, Array]) -> Array:
        rows = Rows(part[0], start, start + RESPONSE_LENGTH)
        weight = jnp.where(rows.mask(), part[1][:, None], 0)
        gradient = jax.grad(lambda m: jnp.sum(scores(m, rows, weight)))(model)
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(gradient)])

    return jax.lax.map(one, (tokens, weights))


class _Trainer:
    """Trains copies of one checkpoint, each on prompts of one family."""

    def __init__(self, run: OpenedRun, collector: Collector) -> None:
        self.run, self.collector, x = run, collector, run.experiment
        self.model, self.reference = double(run.state.model), double(run.setup.reference)
        self.critic = double(run.state.critic_model)  # stays as it is: a few updates do not outdate it
        state = double(run.state.opt_state)
        spec = x.optimiser
        if not float(current_rate(spec, state, total=total_updates(x))) > 0:  # the schedule has run out
            spec = dataclasses.replace(spec, schedule="constant", warmup=0)
        self.spec, self.opt_state, self.diagonal = spec, forget_momentum(state), saved_diagonal(spec, state)
        self.update = jax.jit(partial(_update, make_optimiser(spec, total=total_updates(x))))
        self.updates = 0

    def pools(self) -> dict[int, PromptPool]:
        """The training prompts of each family that training uses."""
        task = self.run.setup.task
        assert isinstance(task, Msa0Task)
        uid = np.asarray(task.pools["train"].uid)
        members = {f: uid[digits(uid)[0] == f] for f in np.unique(digits(uid)[0]).tolist()}
        return {f: PromptPool(_prompt_tokens()[u].tolist(), u, PROMPT_LENGTH) for f, u in members.items()}

    def train(self, pool: PromptPool) -> tuple[Decoder, Any]:
        """The model after ``STEPS`` batches of ``pool``, and the gradient of its first update (0 if there was none)."""
        task = dataclasses.replace(self.run.setup.task, pools={"train": pool})
        spec = dataclasses.replace(self.collector.spec, prompts=min(self.collector.spec.prompts, len(pool)))
        collector = dataclasses.replace(self.collector, task=task, spec=spec)
        model, opt_state, first = self.model, self.opt_state, None
        algorithm, self.updates = self.run.experiment.algorithm, 0
        for step in range(STEPS):
            collected = collector(model, self.reference, self.run.setup.root, step, self.critic)
            batches, acts = _prepare(algorithm, double(collected.graded))
            taken = [terms for terms, act in zip(batches, np.asarray(acts), strict=True) if act]
            for terms in taken * algorithm.epochs:
                gradient = self._gradient(model, terms)
                first = gradient if first is None else first
                model, opt_state = self.update(model, opt_state, gradient)
                self.updates += 1
        return model, jax.tree.map(jnp.zeros_like, model) if first is None else first

    def frozen(self, gradient: Any) -> Any:
        """The parameter change of as many updates with one gradient."""
        model, opt_state = self.model, self.opt_state
        for _ in range(self.updates):
            model, opt_state = self.update(model, opt_state, gradient)
        return jax.tree.map(jnp.subtract, model, self.model)

    def _gradient(self, model: Decoder, terms: tuple[Term, ...]) -> Any:
        return batch_gradient(
            model, terms, self.reference, temperature=self.collector.temperature, microbatch=self.spec.microbatch
        )


@partial(jax.jit, static_argnums=0)
def _prepare(algorithm: Algorithm, graded: Graded) -> tuple[tuple[tuple[Term, ...], ...], Array]:
    """The terms of each mini-batch, and which of them take a step."""
    return prepare(algorithm, graded), applied(algorithm, kept(algorithm, graded))


def forget_momentum(opt_state: Any) -> Any:
    """The state with first moments of 0; counts, second moments and schedule stay."""
    kinds = (optax.ScaleByAdamState, optax.TraceState)

    def forget(state: Any) -> Any:
        name = {optax.ScaleByAdamState: "mu", optax.TraceState: "trace"}.get(type(state))
        return state if name is None else state._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(state, name))})

    return jax.tree.map(forget, opt_state, is_leaf=lambda s: isinstance(s, kinds))


def _update(tx: optax.GradientTransformation, model: Any, opt_state: Any, gradient: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python scalars into every dtype
        change, opt_state = tx.update(gradient, opt_state, model)
        return optax.apply_updates(model, change), opt_state


def _vector(tree: Any) -> Float[np.ndarray, " P"]:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def _prompt_tokens() -> np.ndarray:
    return Msa0().tokens
