"""Supervised training on rows: the MSA-0 base, and fine-tuning on given solutions.

Steps run in chunks inside one compiled ``lax.scan``: batches are made on the device by a function of a
key, so a chunk needs the host only to report its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from jaxrl import keys
from jaxrl.data import synthetic
from jaxrl.errors import JaxrlError
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, init_model
from jaxrl.models.logps import token_logps
from jaxrl.train.progress import Progress
from jaxrl.types import Rows, wide

CHUNK = 100  # steps a compiled call
Batches = Callable[[Key[Array, ""], Any, int], Rows]

BASE_LR, BASE_STEPS, BASE_BATCH = 4e-3, 3000, 128
BASE_CONFIG = ModelConfig(
    vocab_size=synthetic.VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=88,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_positions=16,
    init_std=0.1,  # 0.02 is slow to leave: at 3000 steps the base then misses the guess floor
)


def train_base(
    seed: int,
    *,
    steps: int = BASE_STEPS,
    batch: int = BASE_BATCH,
    lr: float = BASE_LR,
    config: ModelConfig = BASE_CONFIG,
    quiet: bool = False,
) -> Decoder:
    """The MSA-0 base of a seed (SCIENCE D.1): Adam with a cosine schedule on fresh teacher samples.

    Initial weights, teacher and samples derive from the seed by name. Whether the result may be used is
    what ``evaluation.exact.require_gates`` decides.
    """
    return _fitted(seed, "base", synthetic.Msa0(seed).teacher(), steps, batch, lr, config, quiet)


def train_oracle(
    seed: int,
    *,
    steps: int = BASE_STEPS,
    batch: int = BASE_BATCH,
    lr: float = BASE_LR,
    config: ModelConfig = BASE_CONFIG,
    quiet: bool = False,
) -> Decoder:
    """A model that answers MSA-0 rightly by both strategies: a teacher to distil from, trained as the base is."""
    teacher = synthetic.oracle(synthetic.Msa0(seed).teacher())
    return _fitted(seed, "oracle", teacher, steps, batch, lr, config, quiet)


def _fitted(
    seed: int, name: str, teacher: Any, steps: int, batch: int, lr: float, config: ModelConfig, quiet: bool
) -> Decoder:
    root = keys.root(seed)
    return supervised(
        init_model(config, keys.at(root, name, "init")),
        synthetic.teacher_rows,
        jax.tree.map(jnp.asarray, teacher),
        keys.at(root, name, "data"),
        steps=steps,
        batch=batch,
        lr=lr,
        desc="" if quiet else f"{name} of seed {seed}",
    )


def supervised(
    model: Decoder,
    batches: Batches,
    data: Any,
    key: Key[Array, ""],
    *,
    steps: int,
    batch: int,
    lr: float,
    desc: str = "supervised",
) -> Decoder:
    """``model`` after ``steps`` Adam steps on ``batches(key, data, batch) -> Rows``; cosine from ``lr`` to 0.

    The loss is the mean negative log-probability of response tokens (nats a token). Each step's key is
    ``at(key, step)``. ``batches`` must be a module-level function, and ``data`` a pytree of arrays: runs
    that differ in data alone share one program. The given model is left as it is. ``desc`` names the
    progress bar; an empty one shows none. Raises ``JaxrlError`` when the loss is not finite.
    """
    tx = _optimiser(lr, steps)
    model = jax.tree.map(jnp.copy, model)  # the chunk below consumes its argument
    state = (model, jax.jit(tx.init)(model))
    bar = Progress(steps, desc) if desc else None
    for first in range(0, steps, CHUNK):
        count = min(CHUNK, steps - first)
        state, losses = _chunk(state, data, key, jnp.int32(first), batches=batches, tx=tx, count=count, batch=batch)
        loss = float(losses[-1])
        if not jnp.isfinite(loss):
            raise JaxrlError(f"{desc or 'supervised training'}: the loss is {loss} at step {first + count}; lower lr")
        if bar:
            bar.advance(count, loss=f"{loss:.4f}")
    if bar:
        bar.close()
    return state[0]


def nll(model: Decoder, rows: Rows) -> Float[Array, ""]:
    """Mean negative log-probability of the rows' response tokens, nats a token."""
    logps = token_logps(model, rows)
    count = jnp.sum(rows.mask()).astype(logps.dtype)
    return -jnp.sum(logps) / jnp.maximum(count, 1)


@cache
def _optimiser(lr: float, steps: int) -> optax.GradientTransformation:
    """One object for one setting, so that jit recognises it."""
    return optax.adam(optax.cosine_decay_schedule(lr, steps))


@partial(jax.jit, static_argnames=("batches", "tx", "count", "batch"), donate_argnames="state")
def _chunk(
    state: tuple[Decoder, Any],
    data: Any,
    key: Key[Array, ""],
    first: Array,
    *,
    batches: Batches,
    tx: optax.GradientTransformation,
    count: int,
    batch: int,
) -> tuple[tuple[Decoder, Any], Float[Array, " count"]]:
    def step(state: tuple[Any, Any], number: Array) -> tuple[tuple[Any, Any], Array]:
        model, opt_state = state
        rows = batches(keys.at(key, number), data, batch)
        loss, grads = jax.value_and_grad(nll)(model, rows)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, opt_state = tx.update(grads, opt_state, model)
            model = optax.apply_updates(model, updates)
        return (model, opt_state), loss.astype(wide(loss.dtype))

    return jax.lax.scan(step, state, first + jnp.arange(count, dtype=jnp.int32))
