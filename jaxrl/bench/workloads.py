"""What ``rollout`` and ``step`` are measured on: a small Qwen2 with random weights, and random tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, build, param_shapes
from jaxrl.models.hf import save_model
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

MODEL = "model"  # the folder beside a world


@dataclass(frozen=True, kw_only=True)
class Qwen2:
    """A tied Qwen2: ``hidden`` wide, with an MLP of ``mlp`` (default four times that). Single precision."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    mlp: int | None = None

    def config(self) -> ModelConfig:
        """The architecture."""
        return ModelConfig(
            family="qwen2",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp or 4 * self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            qkv_bias=True,
            max_positions=self.positions,
        )

    def model(self) -> Decoder:
        """Normal random parameters; gains around one, and biases that are not zero, so that a lost one is seen."""
        draw = np.random.default_rng(0)
        leaves = {}
        for name, shape in param_shapes(self.config()).items():
            x = draw.normal(0, 0.02, shape).astype(np.float32)
            leaves[name] = jnp.asarray(x + 1 if name.endswith("norm") else x)
        return build(self.config(), leaves)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one rollout benchmark: ``n`` samples of each of ``prompts`` random prompts of ``width`` tokens.

    Responses are of exactly ``new`` tokens, or, with a ``mean``, of lognormal lengths from 1 to ``new`` (log-scale
    deviation 1, ``mean`` before the cut). No stop id is ever drawn. ``slots`` rows are decoded at once: fewer than
    there are samples, and static batches are needed.
    """

    prompts: int
    width: int
    n: int
    new: int
    mean: float | None = None
    slots: int = 64

    def tokens(self, vocab: int) -> np.ndarray:
        """Prompts, i32[P, S]; the last id is left out, which stops responses."""
        return np.random.default_rng(1).integers(0, vocab - 1, (self.prompts, self.width)).astype(np.int32)

    def lengths(self) -> np.ndarray:
        """Tokens of every response, i32[P, n]."""
        if self.mean is None:
            return np.full((self.prompts, self.n), self.new, np.int32)
        drawn = np.random.default_rng(2).lognormal(np.log(self.mean) - 0.5, 1.0, (self.prompts, self.n))
        return np.clip(np.rint(drawn), 1, self.new).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """Rows of one GRPO step: ``prompts`` x ``n`` responses with advantages and old log-probabilities.

    Lengths as in ``Workload``. Old log-probabilities are the model's own with normal noise of deviation 0.1, so that
    ratios are not one, some are clipped, and the loss is no difference of equal numbers.
    """

    prompts: int
    width: int
    n: int
    new: int
    mean: float | None = None

    def arrays(self, model: Decoder, exact: bool = True) -> dict[str, np.ndarray]:
        """``exact=False`` takes all tokens for equally probable, which a random model nearly says, and computes nothing.

        ``tokens`` i32[N, L], ``start`` and ``length`` i32[N], ``advantage`` f32[N], ``old_logps`` f32[N, L]."""
        work = Workload(prompts=self.prompts, width=self.width, n=self.n, new=self.new, mean=self.mean)
        draw, rows = np.random.default_rng(3), self.prompts * self.n
        prompts = np.repeat(work.tokens(model.config.vocab_size), self.n, axis=0)
        response = draw.integers(0, model.config.vocab_size - 1, (rows, self.new))
        tokens = np.concatenate([prompts, response], axis=1).astype(np.int32)
        start = np.full(rows, self.width, np.int32)
        length = start + work.lengths().reshape(-1)
        tokens = np.where(np.arange(tokens.shape[1]) < length[:, None], tokens, 0).astype(np.int32)
        reward = draw.normal(size=(self.prompts, self.n))
        advantage = (reward - reward.mean(1, keepdims=True)) / reward.std(1, keepdims=True)
        scored = Rows(*(jnp.asarray(x) for x in (tokens, start, length)))
        uniform = np.full(tokens.shape, -np.log(model.config.vocab_size))
        old = np.asarray(jax.jit(token_logps)(model, scored)) if exact else uniform
        old = np.where(np.asarray(scored.mask()), old + draw.normal(0, 0.1, old.shape), 0)
        return {
            "tokens": tokens,
            "start": start,
            "length": length,
            "advantage": advantage.reshape(-1).astype(np.float32),
            "old_logps": old.astype(np.float32),
        }


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A model with the workloads of ``rollout`` and the batches of ``step`` by name. ``target``: as in ``compare``.

    ``dtype`` is computed in, ``remat`` is the training step's, ``microbatch`` the rows of its micro-batches,
    ``peer_microbatch`` of the peers'.
    """

    model: Qwen2
    rollout: Mapping[str, Workload]
    step: Mapping[str, GivenBatch]
    target: float
    dtype: str = "float32"
    remat: str = "none"
    microbatch: int = 8
    peer_microbatch: int = 4


FULL = Scale(
    model=Qwen2(hidden=256, layers=4, heads=8, kv_heads=2, vocab=4096, positions=512),
    rollout={
        "plain": Workload(prompts=64, width=32, n=1, new=128),
        "shared": Workload(prompts=4, width=256, n=16, new=64),
        "refill": Workload(prompts=32, width=32, n=8, new=128, mean=32),
    },
    step={
        "full": GivenBatch(prompts=8, width=32, n=8, new=96),
        "ragged": GivenBatch(prompts=8, width=32, n=8, new=128, mean=32),
    },
    target=1.0,
    microbatch=4,  # of 2, 4, 8 and 16 our fastest on one core; the peers' was not searched for
    peer_microbatch=8,
)
QUICK = Scale(
    model=Qwen2(hidden=64, layers=2, heads=4, kv_heads=2, vocab=512, positions=128),
    rollout={
        "plain": Workload(prompts=8, width=8, n=1, new=16, slots=8),
        "shared": Workload(prompts=2, width=32, n=4, new=8, slots=8),
        "refill": Workload(prompts=4, width=8, n=4, new=16, mean=4, slots=8),
    },
    step={
        "full": GivenBatch(prompts=2, width=8, n=4, new=16),
        "ragged": GivenBatch(prompts=2, width=8, n=4, new=24, mean=6),
    },
    target=0.1,
    microbatch=4,
)
ACCELERATOR = Scale(  # the shape of Qwen2.5-Math-1.5B
    model=Qwen2(hidden=1536, layers=28, heads=12, kv_heads=2, vocab=151936, positions=4096, mlp=8960),
    rollout={
        "plain": Workload(prompts=64, width=256, n=1, new=512),
        "shared": Workload(prompts=4, width=512, n=64, new=512, slots=256),
        "refill": Workload(prompts=128, width=150, n=8, new=3072, mean=684, slots=256),
    },
    step={
        "full": GivenBatch(prompts=8, width=150, n=8, new=874),
        "ragged": GivenBatch(prompts=8, width=150, n=8, new=3072, mean=684),
    },
    target=1.0,
    dtype="bfloat16",
    remat="full",
)
SCALES = {"full": FULL, "quick": QUICK, "accelerator": ACCELERATOR}


def write_given(folder: Path, model: Decoder, arrays: Mapping[str, np.ndarray], **config: Any) -> Path:
    """``world.npz`` in ``folder`` with ``arrays`` and ``config``, and the model as a Hugging Face folder beside it.

    Returns the file. Its config has ``model``, that folder, beside what is given here.
    """
    if not (folder / MODEL).exists():
        save_model(model, folder / MODEL)
    file = folder / "world.npz"
    np.savez(file, **arrays, config=np.array(json.dumps({"model": str(folder / MODEL), **config})))
    return file


def root() -> Any:
    """The random key of our own cases."""
    return keys.root(0)
