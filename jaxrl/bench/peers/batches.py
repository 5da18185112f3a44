"""The requests of a rollout benchmark as static batches: what a library without refill has to run."""

import numpy as np


def static_batches(world):
    """``(prompts [B, S], n, wanted [B, n])`` of each batch: as many prompts as fit the slots with all their samples.

    A batch goes on until its longest response ends: to ``wanted.max()`` tokens.
    """
    tokens, wanted = world["tokens"], world["lengths"]
    n = wanted.shape[1]
    at_once = max(1, world["config"]["slots"] // n)
    starts = range(0, len(tokens), at_once)
    return [(tokens[i : i + at_once], n, wanted[i : i + at_once]) for i in starts]


def useful(sampled, wanted):
    """Tokens asked for and sampled: ``sampled`` [B n, T] ends where the batch did."""
    return int(np.minimum(wanted.reshape(-1), sampled.shape[1]).sum())
