"""A small decoder in double precision with rows of several prompts, for the influence tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.influence.gradients import one_gradient, row_weights, scores
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, cast, init_model
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

VOCAB = 12


def small_model(seed: int = 0, dtype: str = "float64", **changes) -> Decoder:
    """About 4,000 parameters; weights large enough that its predictions are far from uniform."""
    shape = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 8, "init_std": 0.25,
    }  # fmt: skip
    config = ModelConfig(**(shape | changes))
    return _init(config, jax.random.key(seed), dtype)


@partial(jax.jit, static_argnums=(0, 2))
def _init(config, key, dtype):
    return cast(init_model(config, key), dtype)


jitted_logps = jax.jit(token_logps)


def some_rows(n: int, seed: int = 0, prompts: int = 4, width: int = 8) -> Rows:
    """Rows of ``prompts`` prompts in turn, with three prompt tokens and 1 to ``width - 3`` response tokens."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(99).integers(0, VOCAB, (prompts, 3))
    tokens = rng.integers(0, VOCAB, (n, width))
    tokens[:, :3] = shared[np.arange(n) % prompts]
    length = 3 + rng.integers(1, width - 2, n)
    return Rows(*(jnp.asarray(x, jnp.int32) for x in (tokens, np.full(n, 3), length)))


def flat(tree) -> np.ndarray:
    """All leaves of a pytree in one vector."""
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


@jax.jit
def _gradients_one_by_one(model, rows, weights):
    return jax.lax.map(lambda x: one_gradient(model, *x), (rows, weights))


def gradient_matrix(model, rows: Rows, weights=None) -> np.ndarray:
    """One flattened gradient a row, computed one row at a time."""
    weights = row_weights(rows) if weights is None else weights
    gradients = _gradients_one_by_one(model, rows, weights)
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(gradients)], axis=1)


@jax.jit
def row_scores(model, rows: Rows):
    """Summed log-probability of each row's response."""
    return scores(model, rows, row_weights(rows))


def along(model, direction, step: float):
    """The model moved by ``step`` times a pytree."""
    return jax.tree.map(lambda p, d: p + step * d, model, direction)
