"""Small graded batches and models for the tests of jaxrl.rl."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.logps import token_logps
from jaxrl.types import STOP_EOS, Graded, Rollouts, Rows

PROMPT = 2  # prompt tokens of every case
VOCAB = 8


def quick_jit(function, **options):
    """``jax.jit`` that spends less on optimising a program that runs once or twice."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


SCORE = quick_jit(token_logps)

# The worked batch of SCIENCE.md B.8: 3 prompts, 4 responses each.
B8_REWARD = [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
B8_LENGTHS = [[3, 2, 4, 3], [2, 3, 4, 1], [4, 4, 2, 2]]
B8_GREEDY = [True, False, False]
B8_BASE_NLL = [[1.2, 0.8], [2.4, 3.0], [0.9, 1.5]]
B8_BASE_LENGTHS = [[3, 2], [4, 5], [2, 3]]


def rows_of(lengths, seed=0):
    """Random rows with response lengths ``lengths`` (any leading axes)."""
    lengths = jnp.asarray(lengths, jnp.int32)
    width = PROMPT + max(int(lengths.max()), 1)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (*lengths.shape, width))
    return Rows(jnp.asarray(tokens, jnp.int32), jnp.full(lengths.shape, PROMPT, jnp.int32), lengths + PROMPT)


def rollouts_of(lengths, seed=0):
    rows = rows_of(lengths, seed)
    return Rollouts(rows, jnp.zeros(rows.tokens.shape, float), jnp.full(rows.start.shape, STOP_EOS, jnp.int32))


def graded_of(reward, lengths, *, greedy=None, base_lengths=None, seed=0):
    """A graded batch in the default float dtype; binary correctness is reward 1; old log-probs are 0."""
    reward = jnp.asarray(reward, float)
    prompts = reward.shape[0]
    rollouts = rollouts_of(lengths, seed)
    base = None if base_lengths is None else rollouts_of(base_lengths, seed + 1)
    return Graded(
        rollouts=rollouts,
        uid=jnp.arange(prompts),
        reward=reward,
        correct=reward == 1,
        prefiltered=jnp.ones(prompts, bool),
        old_logps=jnp.zeros(rollouts.logps.shape, float),
        greedy_correct=None if greedy is None else jnp.asarray(greedy),
        base=base,
        base_correct=None if base is None else jnp.ones(base.stop.shape, bool),
    )


def prefiltered(algorithm, graded):
    """What the collector hands over: prompts dropped by the prefilter hold empty slots and no reward."""
    greedy = jnp.zeros(graded.uid.shape, bool) if graded.greedy_correct is None else graded.greedy_correct
    chosen = algorithm.prefilter(greedy, graded.chance, graded.matched)
    rows = graded.rollouts.rows
    rows = dataclasses.replace(rows, length=jnp.where(chosen[:, None], rows.length, rows.start))
    return dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(graded.rollouts, rows=rows),
        reward=jnp.where(chosen[:, None], graded.reward, 0),
        correct=graded.correct & chosen[:, None],
        prefiltered=chosen,
    )


def b8(**changes):
    graded = graded_of(B8_REWARD, B8_LENGTHS, greedy=B8_GREEDY, base_lengths=B8_BASE_LENGTHS)
    return dataclasses.replace(graded, **changes)


def tiny_model(seed=0, **changes):
    """A random decoder in the default float dtype; the same object for the same arguments."""
    return _tiny_model(seed, jnp.result_type(float).name, tuple(sorted(changes.items())))


@functools.cache
def _tiny_model(seed, dtype, changes):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "init_std": 0.5,
        "dtype": dtype,
    }
    config = ModelConfig(**(sizes | dict(changes)))
    return init_model(config, keys.root(seed))


def scored(model, graded, reference=None, *, noise=0.0, temperature=1.0):
    """``graded`` with the log-probs that its collector would have added; ``noise`` makes it off-policy."""
    rows = graded.rollouts.rows
    flat = SCORE(model, rows.flat(), temperature=temperature)
    old = flat.reshape(rows.tokens.shape)
    if noise:
        step = np.random.default_rng(7).normal(size=old.shape) * noise
        old = jnp.where(rows.mask(), old + jnp.asarray(step, old.dtype), 0)
    ref = None
    if reference is not None:
        ref = SCORE(reference, rows.flat(), temperature=temperature).reshape(old.shape)
    return dataclasses.replace(graded, old_logps=old, ref_logps=ref)
