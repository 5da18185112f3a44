"""Sampling n responses from one prefill of a prompt, against n prefills of the same prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from jaxrl import keys
from jaxrl.bench.sizes import Sizes
from jaxrl.bench.timing import Row, interleaved, middle
from jaxrl.models.decoder import Decoder
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Temperature
from jaxrl.types import Prompts

SHARED, COPIES = "one prefill, n samples", "n prefills, one sample each"


def sampling(sizes: Sizes, repeats: int) -> list[Row]:
    """Tokens sampled a CPU-second; ``ratio`` is over the copies. Every response runs to its full length."""
    model = sizes.model()
    tokens = np.random.default_rng(3).integers(0, sizes.vocab - 1, (sizes.prompts, sizes.prompt_tokens))
    cases = {
        COPIES: partial(_sample, sizes, model, _prompts(np.repeat(tokens, sizes.samples, axis=0)), 1),
        SHARED: partial(_sample, sizes, model, _prompts(tokens), sizes.samples),
    }
    sampled = sizes.prompts * sizes.samples * sizes.new_tokens
    seconds = interleaved(cases, repeats=repeats, target=sizes.target)
    speed = {name: sampled / taken for name, taken in seconds.items()}
    return [
        {"case": name, "tokens/CPU-second": float(np.median(fast)), "ratio": middle(fast / speed[COPIES])}
        for name, fast in speed.items()
    ]


def _prompts(tokens: np.ndarray) -> Prompts:
    count, width = tokens.shape
    return Prompts(tokens.astype(np.int32), np.full(count, width, np.int32), np.arange(count, dtype=np.int32))


def _sample(sizes: Sizes, model: Decoder, prompts: Prompts, n: int) -> Any:
    return generate(
        model,
        prompts,
        Temperature(),
        n=n,
        key=keys.root(0),
        max_new_tokens=sizes.new_tokens,
        stop_ids=[sizes.vocab - 1],
    )
