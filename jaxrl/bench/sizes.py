"""What is benchmarked: one small Llama with random weights, and random rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, init_model
from jaxrl.types import Rows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Model and batch sizes. ``target``: CPU-seconds that one timing should last; short calls are repeated."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    vocab: int = 512
    width: int = 32  # tokens of a row that is scored; the second half is its response
    kernel_rows: int = 8  # on each side
    prompts: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 16
    samples: int = 8  # a prompt
    step_rows: int = 32
    microbatch: int = 8
    target: float = 0.3

    def model(self) -> Decoder:
        """A decoder that never samples its last id, so that as a stop id it ends no response."""
        config = ModelConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            max_positions=max(self.width, self.prompt_tokens + self.new_tokens),
            vocab_limit=self.vocab - 1,
        )
        return init_model(config, keys.root(0))

    def rows(self, n: int, seed: int) -> Rows:
        """``n`` random rows, half prompt and half response."""
        tokens = np.random.default_rng(seed).integers(0, self.vocab - 1, (n, self.width))
        full = jnp.full(n, self.width, jnp.int32)
        return Rows(jnp.asarray(tokens, jnp.int32), full // 2, full)


SIZES = Sizes()
