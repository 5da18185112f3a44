"""The least time that a known accelerator needs: by the bytes it must read and the operations it must do.

Peaks are the makers' figures for one chip, memory bandwidth and dense bfloat16. They bound everything from
below, so a fraction of the bound says how much a better program could still win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxrl.bench.workloads import Workload
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import param_shapes


@dataclass(frozen=True)
class Peak:
    """Bytes a second from memory, operations a second."""

    bandwidth: float
    flops: float


# By the beginning of jax's `device_kind`; the longer name is the closer one.
PEAKS = {
    "NVIDIA H200": Peak(4.8e12, 989e12),
    "NVIDIA H100": Peak(3.35e12, 989e12),
    "TPU v5 lite": Peak(0.819e12, 197e12),
    "TPU v5e": Peak(0.819e12, 197e12),
    "TPU v5": Peak(2.765e12, 459e12),
    "TPU v6 lite": Peak(1.64e12, 918e12),
    "TPU v6e": Peak(1.64e12, 918e12),
}


def peak(kind: str) -> Peak | None:
    """The peaks of a device, or None where they are not known (and on every CPU)."""
    known = [name for name in PEAKS if kind.startswith(name)]
    return PEAKS[max(known, key=len)] if known else None


def multiplied(config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: all but the embedding, which a tied head multiplies again."""
    count = sum(math.prod(shape) for shape in param_shapes(config).values())
    return count if config.tied else count - config.vocab_size * config.hidden_size


def rollout_seconds(config: ModelConfig, work: Workload, device: Peak, itemsize: int = 2) -> float:
    """The least time for all requests of a workload: each prompt once, then decoding."""
    tokens, heads = work.prompts * work.width, config.num_heads * config.head_dim * config.num_layers
    prefill = 2 * multiplied(config) * tokens + 2 * heads * tokens * work.width
    return prefill / device.flops + decode_seconds(config, work, device, itemsize)


def decode_seconds(config: ModelConfig, work: Workload, device: Peak, itemsize: int = 2) -> float:
    """The least time to decode all responses, every slot full from the first step to the last.

    A step reads all weights once, the keys and values of each prompt once for all its samples, and those of
    each response; a token attends to all tokens before it.
    """
    wanted = work.lengths().astype(np.int64)
    slots, tokens = min(work.slots, wanted.size), int(wanted.sum())
    steps = max(math.ceil(tokens / slots), int(wanted.max()))
    own = int((wanted * (wanted + 1) // 2).sum())  # keys of responses, over all steps
    stored = int((wanted.max(axis=1) * work.width).sum())  # keys of prompts, read while a sample of them is alive
    heads = config.num_heads * config.head_dim * config.num_layers
    key_bytes = 2 * itemsize * config.num_kv_heads * config.head_dim * config.num_layers
    moved = steps * multiplied(config) * itemsize + (own + stored) * key_bytes
    done = 2 * multiplied(config) * tokens + 4 * heads * (own + tokens * work.width)
    return max(moved / device.bandwidth, done / device.flops)


def step_seconds(config: ModelConfig, length: np.ndarray, device: Peak) -> float:
    """The least time for forward and backward pass over rows of ``length`` tokens: six operations a parameter and token.

    Attention is causal. What is computed again to save memory is not counted: this over the time taken is the MFU.
    """
    heads = config.num_heads * config.head_dim * config.num_layers
    length = length.astype(np.int64)
    return (6 * multiplied(config) * int(length.sum()) + 6 * heads * int((length**2).sum())) / device.flops
