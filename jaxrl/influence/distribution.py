"""Distances between policies on the probe, and what a fall of its log-probability does and does not mean.

Base samples must lose log-probability under any other policy: E over base samples of ``S_base -
S_now`` is ``KL(base || now) >= 0`` (SCIENCE.md R1). So falling probe scores are a necessity, and a
falling correct score splits into a change of coverage and a narrowing among correct answers (R2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.influence.changes import Changes, Estimate, macro, ratio


def forward_kl(cumulative: Changes) -> Estimate:
    """A19: ``KL(base || now)`` in nats a sequence, ``-mean`` change since the base (the k1 estimate).

    ``cumulative`` holds the ``sum`` changes since the base. Unbiased only for probes drawn from the
    base at temperature 1 with truncated rows included.
    """
    value, se, n = ratio(cumulative, -cumulative.delta, cumulative.ok)
    return Estimate(value, se, n)


def perplexity(
    scores: Float[np.ndarray, " M"],
    length: Int[np.ndarray, " M"],
    uid: Int[np.ndarray, " M"],
    include: Bool[np.ndarray, " M"] | None = None,
) -> dict[str, Estimate]:
    """A21: perplexity of responses, ``exp(-S / T)`` each, over rows that count.

    ``ppl``: mean over responses; ``ppl_macro``: mean over prompts of their mean; ``ppl_geometric``:
    ``exp`` of the mean of ``-S / T``, which one improbable response cannot dominate. ``scores`` are
    summed log-probs (nats) under the scorer, of rows written by the writer; the four cells of the
    swap are four calls.
    """
    length = np.asarray(length)
    ok = (length > 0) if include is None else (length > 0) & np.asarray(include, bool)
    number, prompt = np.unique(uid, return_inverse=True)
    nll = np.where(ok, -np.asarray(scores, np.float64), 0) / np.maximum(length, 1)
    each = Changes(np.exp(nll), np.ones(len(nll), bool), prompt, ok, len(number))
    mean = ratio(each, nll, ok)
    geometric = float(np.exp(mean.value))
    return {
        "ppl": ratio(each, each.delta, ok),
        "ppl_macro": macro(each, ok),
        "ppl_geometric": Estimate(geometric, geometric * mean.se, mean.n),
    }


class Split(NamedTuple):
    """A22: prompts whose accuracy rose and fell, chosen on half of the samples."""

    up: Bool[np.ndarray, " X"]
    down: Bool[np.ndarray, " X"]


def split_by_change(change: Float[np.ndarray, " X"], se: Float[np.ndarray, " X"]) -> Split:
    """A22: prompts whose change of reward exceeds two standard errors, from *one half* of their samples.

    Report perplexity or influence of these sets on the other half: prompts chosen and measured on
    the same noise regress to the mean and show an effect where there is none.
    """
    change, margin = np.asarray(change, np.float64), 2 * np.asarray(se, np.float64)
    return Split(change > margin, change < -margin)


def halves(samples: int) -> tuple[Int[np.ndarray, " a"], Int[np.ndarray, " b"]]:
    """Sample indices of the selecting and the reporting half: even ones, odd ones."""
    if samples < 2:
        raise ValueError(f"a split needs at least two samples a prompt, got {samples}")
    return np.arange(0, samples, 2), np.arange(1, samples, 2)


class Decomposition(NamedTuple):
    """A5, one entry a prompt, nats: ``delta = log_ratio - narrowing``."""

    delta: Float[np.ndarray, " X"]
    log_ratio: Float[np.ndarray, " X"]
    narrowing: Float[np.ndarray, " X"]


def decomposition(
    p_base: Float[np.ndarray, " X"], p_now: Float[np.ndarray, " X"], delta: Float[np.ndarray, " X"]
) -> Decomposition:
    """A5, R2: the change on correct answers is the coverage change minus the narrowing among them.

    ``delta`` is the expected cumulative change of ``S`` over correct base answers, ``log_ratio`` is
    ``log p_now / p_base`` and ``narrowing`` is ``KL(base given correct || now given correct) >= 0``.
    Exact when all three are exact; NaN where the base has no correct answer.
    """
    p_base, p_now, delta = (np.asarray(x, np.float64) for x in (p_base, p_now, delta))
    known = p_base > 0
    with np.errstate(divide="ignore"):
        log_ratio = np.where(known, np.log(p_now) - np.log(np.where(known, p_base, 1)), np.nan)
    return Decomposition(delta, log_ratio, log_ratio - delta)


def smoothed(correct: Int[np.ndarray, " X"], samples: int) -> Float[np.ndarray, " X"]:
    """``(c + 1/2) / (n + 1)``, for ``decomposition`` on tasks that are sampled, not enumerated (n >= 512)."""
    return (np.asarray(correct, np.float64) + 0.5) / (samples + 1)
