"""The softmax bandit of arXiv 2510.02230, Appendix D: how one step of each objective moves every probability.

One state, V actions, logits as parameters. A step of size ``step`` along a gradient ``g`` of the logits multiplies the
probability of action i by ``alpha_i = 1 / sum_j pi_j exp(step (g_j - g_i))``, exactly. The paper's Lemma D.1 expands this
by cases; its first case, as printed for both correct actions, holds for the first of them alone (``lemma`` is the
mended form).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

Vector = Float[np.ndarray, " V"]


def growth(policy: Vector, gradient: Vector, step: float) -> Vector:
    """``pi_new / pi`` after one step along a logit gradient, in float64."""
    policy, gradient = np.asarray(policy, np.float64), np.asarray(gradient, np.float64)
    gap = step * (gradient[None, :] - gradient[:, None])
    top = gap.max(axis=1)
    return np.exp(-top) / (policy[None, :] * np.exp(gap - top[:, None])).sum(axis=1)


def likelihood(policy: Vector, correct: Bool[np.ndarray, " V"]) -> Vector:
    """Logit gradient of the summed log-probability of the correct actions: ``1[i in S] - |S| pi_i``."""
    return correct - correct.sum() * np.asarray(policy, np.float64)


def reinforce(policy: Vector, correct: Bool[np.ndarray, " V"]) -> Vector:
    """Exact gradient of the probability P of being correct: ``pi_i (1[i in S] - P)``."""
    policy = np.asarray(policy, np.float64)
    return policy * (correct - policy[correct].sum())


def grpo_limit(policy: Vector, correct: Bool[np.ndarray, " V"]) -> Vector:
    """That of GRPO with endless groups: divided by the deviation ``sqrt(P (1 - P))``; 0 where P is 0 or 1."""
    p = float(np.asarray(policy, np.float64)[correct].sum())
    scale = np.sqrt(p * (1 - p))
    return reinforce(policy, correct) / scale if scale > 0 else np.zeros(len(policy))


def sampled(policy: Vector, action: int, advantage: float) -> Vector:
    """One sample's policy gradient: ``A (1[i = action] - pi_i)``."""
    return advantage * (np.eye(len(policy))[action] - np.asarray(policy, np.float64))


def lemma(policy: Vector, correct: Bool[np.ndarray, " V"], step: float, objective: str) -> Vector:
    """Lemma D.1 as it must read, for two correct actions: ``likelihood`` or ``reinforce``.

    For correct i, ``1 / alpha_i`` sums ``pi_j beta_j`` over correct j and ``pi_j beta_j e^-step`` over the others, with
    ``beta_j = exp(-2 step (pi_j - pi_i))``; for REINFORCE correct j have ``gamma_j = exp(-step (P - 1) (pi_j - pi_i))``.
    Both are 1 at j = i only, where the paper prints 1 at j = y1 whatever i is.

    Raises ``ValueError`` for an unknown objective or another number of correct actions.
    """
    policy = np.asarray(policy, np.float64)
    if correct.sum() != 2:
        raise ValueError(f"lemma: expected two correct actions, got {int(correct.sum())}")
    gap = policy[None, :] - policy[:, None]  # [i, j]: pi_j - pi_i
    mine, theirs = correct[:, None], correct[None, :]
    if objective == "likelihood":
        factor = np.exp(-2 * step * gap) * np.exp(step * (theirs.astype(float) - mine))
    elif objective == "reinforce":
        p = policy[correct].sum()
        same = np.where(mine & theirs, np.exp(-step * (p - 1) * gap), np.exp(-step * p * gap))
        cross = np.exp(step * np.where(theirs, policy[None, :], -policy[:, None])) * np.exp(-step * p * gap)
        factor = np.where(mine == theirs, same, cross)
    else:
        raise ValueError(f"lemma: expected objective likelihood or reinforce, got {objective!r}")
    return 1 / (policy[None, :] * factor).sum(axis=1)


def trace_of_covariance(policy: Vector, advantage: Vector, group: int) -> float:
    """Trace of the covariance of ``1/G sum_i A(y_i) grad log pi(y_i)`` over G independent samples."""
    policy, advantage = (np.asarray(x, np.float64) for x in (policy, advantage))
    score = np.eye(len(policy)) - policy
    mean = (policy * advantage) @ score
    return float(((policy * advantage**2) @ (score**2).sum(axis=1) - mean @ mean) / group)
