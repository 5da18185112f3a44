"""What the kernel is benchmarked on: a small Llama with random weights, and random rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, init_model
from jaxrl.types import Rows


@dataclass(frozen=True, kw_only=True)
class KernelSize:
    """The model and the rows of one kernel benchmark: a tied Llama with query, key and value biases.

    Heads of ``head_dim`` over ``kv_heads`` shared ones, and an MLP 2.75 times as wide as the stream.
    Each count in ``rows`` is a benchmark of its own, with as many rows on either side. All rows are
    of the full ``width``; all their tokens but the first are the response, so that the head works
    everywhere, or the second half (``response``: ``all`` or ``half``).
    """

    hidden: int
    layers: int
    vocab: int
    width: int
    rows: tuple[int, ...]
    head_dim: int = 64
    kv_heads: int = 2
    response: str = "all"

    def config(self) -> ModelConfig:
        """The architecture."""
        return ModelConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=11 * self.hidden // 4,
            num_layers=self.layers,
            num_heads=self.hidden // self.head_dim,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qkv_bias=True,
            max_positions=self.width,
        )

    def model(self) -> Decoder:
        """Random weights, single precision."""
        return init_model(self.config(), keys.root(0))

    def sides(self, n: int) -> tuple[Rows, Rows]:
        """Two sets of ``n`` rows; as in text, the r-th most common token is as common as 1/r."""
        draw, rank = np.random.default_rng(1), np.arange(1, self.vocab + 1)
        tokens = draw.choice(self.vocab, (2, n, self.width), p=1 / rank / np.sum(1 / rank))
        full = np.full(n, self.width, np.int32)
        start = full // 2 if self.response == "half" else np.ones_like(full)
        a, b = (Rows(jnp.asarray(side, jnp.int32), jnp.asarray(start), jnp.asarray(full)) for side in tokens)
        return a, b


KERNEL_SIZES = {
    "XS": KernelSize(hidden=128, layers=2, vocab=512, width=32, rows=(8,)),
    "S": KernelSize(hidden=256, layers=4, vocab=4096, width=128, rows=(16, 32)),
    "M": KernelSize(hidden=512, layers=8, vocab=8192, width=256, rows=(8, 16)),
}
