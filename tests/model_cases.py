"""Small decoders and rows for the model tests."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models import decoder, logps
from jaxrl.models.config import Llama3Rope, ModelConfig
from jaxrl.models.decoder import Decoder, build, init_model, param_shapes
from jaxrl.types import Rows

VOCAB = 40
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=64, init_std=0.25,
)  # fmt: skip
PLAIN = ModelConfig(**SIZES)
# everything that could tell positions, slots or parameters apart
FULL = ModelConfig(
    **SIZES, family="qwen3", tied=False, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, windows=(None, 4),
    rope_scaling=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16),
)  # fmt: skip

# compiled once a shape for all tests
hidden, extend = jax.jit(decoder.hidden), jax.jit(decoder.extend)
token_logps, token_scores, token_kl = (
    jax.jit(f, static_argnames="chunk") for f in (logps.token_logps, logps.token_scores, logps.token_kl)
)
gradient = jax.jit(jax.grad(lambda model, rows: logps.token_logps(model, rows).sum()))


def largest(tree_a, tree_b) -> float:
    """The largest absolute difference between two pytrees."""
    return max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (tree_a, tree_b)), strict=True))


def some_model(config: ModelConfig = FULL, seed: int = 0) -> Decoder:
    """Random everywhere: biases are not zero and norm gains not one."""
    model = init_model(config, keys.root(seed))
    rng = keys.at(keys.root(seed), "jitter")
    leaves, structure = jax.tree.flatten(model)
    leaves = [x + 0.1 * jax.random.normal(keys.at(rng, i), x.shape, x.dtype) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def every_row(width: int = 6, seed: int = 0, vocab: int = VOCAB) -> Rows:
    """One row for every ``1 <= start <= length <= width``, empty responses and full rows included."""
    spans = [(start, length) for start in range(1, width + 1) for length in range(start, width + 1)]
    tokens = np.random.default_rng(seed).integers(0, vocab, (len(spans), width))
    start, length = np.asarray(spans).T
    return Rows(*(jnp.asarray(x, jnp.int32) for x in (tokens, start, length)))


def table_model(log_probs: np.ndarray) -> Decoder:
    """A decoder whose next-token distribution depends on the last token alone: row ``i`` of ``log_probs``.

    Layers add nothing, token ``i`` is embedded as unit vector ``i``, and the head holds the table.
    """
    vocab = log_probs.shape[0]
    width = vocab + vocab % 2
    config = ModelConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=width, tied=False, norm_eps=1e-30,
    )  # fmt: skip
    leaves = {name: np.zeros(shape) for name, shape in param_shapes(config).items()}
    leaves["embed"] = np.eye(vocab, width)
    leaves["norm"] = np.full(width, width**-0.5)
    leaves["head"][:vocab] = log_probs
    return build(config, {name: jnp.asarray(value, jnp.result_type(float)) for name, value in leaves.items()})
