"""From prompts to ``Rollouts`` through an engine: the right-padded table that training and evaluation take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxrl.mesh import to_host
from jaxrl.sampling.requests import Engine, Request, Sample, Sampling
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature
from jaxrl.types import STOP_NONE, Prompts, Rollouts, Rows


def drawn(
    engine: Engine,
    prompts: Prompts,
    strategy: Strategy,
    *,
    n: int,
    key: Key[Array, ""],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    step: int = 0,
    first: int = 0,
    chosen: Sequence[int] | None = None,
) -> Iterator[tuple[int, int, Sample]]:
    """Samples ``first .. first + n - 1`` of each prompt as they end: (prompt, sample - first, the sample).

    ``chosen`` are the prompts to sample (default: all); no two may share a uid. Raises ``ValueError`` for what the
    engine refuses, and when a sample comes without log-probabilities of the distribution that was sampled.
    """
    tokens, length, uid = _host(prompts)
    at = range(len(uid)) if chosen is None else [int(p) for p in chosen]
    requests = [Request(int(uid[p]), tokens[p, : length[p]], n, max_new_tokens, first) for p in at]
    place = {int(uid[p]): p for p in at}
    for found in engine.stream(requests, Sampling(strategy, tuple(stop_ids), key, step)):
        if found.logps is None:
            raise ValueError(f"the engine gave no log-probabilities for sample {found.index} of prompt {found.uid}")
        if not found.processed and not isinstance(strategy, Greedy) and strategy != Temperature(value=1.0):
            raise ValueError(
                f"the engine's log-probabilities are of the policy itself, not of the distribution that {strategy} "
                "samples from, so they cannot be compared with the trainer's; start a vLLM server with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        yield place[found.uid], found.index - first, found


def sample(
    engine: Engine,
    prompts: Prompts,
    strategy: Strategy,
    *,
    n: int,
    max_new_tokens: int,
    finished: Callable[[int, int, Sample], None] | None = None,
    **options: Any,
) -> Rollouts:
    """The samples of ``drawn`` as ``jaxrl.sampling.generate.generate`` gives them, in numpy's arrays.

    Rows of prompts that were not chosen stay without a response (``STOP_NONE``). ``finished(p, g, sample)`` is told
    of each response as it ends, while others are still being decoded.
    """
    tokens, length, _ = _host(prompts)
    out = empty_rollouts(tokens, length, n, max_new_tokens)
    for p, g, found in drawn(engine, prompts, strategy, n=n, max_new_tokens=max_new_tokens, **options):
        span = slice(length[p], length[p] + len(found.tokens))
        out.rows.tokens[p, g, span], out.logps[p, g, span] = found.tokens, found.logps
        out.rows.length[p, g], out.stop[p, g] = span.stop, found.stop
        if finished is not None:
            finished(p, g, found)
    return out


def _host(prompts: Prompts) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x, np.int32) for x in to_host((prompts.tokens, prompts.length, prompts.uid)))


def empty_rollouts(
    tokens: Int[np.ndarray, "P S"], length: Int[np.ndarray, " P"], n: int, max_new_tokens: int
) -> Rollouts:
    """Host arrays of rollouts without a response."""
    prompts, width = tokens.shape
    rows = np.zeros((prompts, n, width + max_new_tokens), np.int32)
    rows[:, :, :width] = np.where(np.arange(width) < length[:, None], tokens, 0)[:, None]
    start = np.repeat(length[:, None], n, axis=1)
    logps = np.zeros(rows.shape, jnp.result_type(float))
    return Rollouts(Rows(rows, start, start.copy()), logps, np.full((prompts, n), STOP_NONE, np.int32))
