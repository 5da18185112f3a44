"""What a rollout batch and a step say about themselves, as ``Mean``s that merge exactly."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl.mean import Mean, masked_mean, masked_sum
from jaxrl.rl.algorithms import Algorithm, kept
from jaxrl.rl.losses import k1, k3
from jaxrl.rl.old_logps import importance_ratio
from jaxrl.types import STOP_LENGTH, Graded


def rollout_metrics(algorithm: Algorithm, graded: Graded) -> dict[str, Mean]:
    """Rewards, lengths (tokens) and shares of one rollout batch; slots that were never sampled do not count."""
    sampled = jnp.broadcast_to(graded.prefiltered[:, None], graded.reward.shape)
    equal = jnp.max(graded.reward, axis=1) == jnp.min(graded.reward, axis=1)
    metrics = {
        "reward/mean": Mean.of(graded.reward, sampled),
        "reward/correct": Mean.of(graded.correct, sampled),
        "reward/zero_signal_groups": Mean.of(equal, graded.prefiltered),
        "rollout/length": Mean.of(graded.rollouts.rows.response_length(), sampled),
        "rollout/truncated": Mean.of(graded.rollouts.stop == STOP_LENGTH, sampled),
        "rollout/kept": Mean.of(kept(algorithm, graded)),
    }
    if graded.greedy_correct is not None:
        metrics["rollout/greedy_accuracy"] = Mean.of(graded.greedy_correct)
    return metrics


def clip_violations(
    logps: Float[Array, "N L"],
    old_logps: Float[Array, "N L"],
    mask: Bool[Array, "N L"],
    *,
    low: float = 0.2,
    high: float = 0.2,
    advantage: Float[Array, "N L"] | None = None,
) -> dict[str, Mean]:
    """How far the ratios ``exp(logp - old_logp)`` left ``[1 - low, 1 + high]``, over masked tokens.

    ``token``: share of tokens outside; ``active`` (with ``advantage``): share where the clip stops
    the gradient (A > 0 above, A < 0 below); ``ratio`` and ``abs_log_ratio`` (nats): means over
    tokens; ``sequence``: share of rows whose whole-response ratio is outside. On the training batch
    before its first mini-batch all shares are 0.
    """
    log_ratio = jnp.where(mask, logps - old_logps, 0)
    ratio = jnp.exp(log_ratio)
    whole = jnp.exp(masked_sum(log_ratio, mask, axis=-1))
    metrics = {
        "token": Mean.of((ratio < 1 - low) | (ratio > 1 + high), mask),
        "ratio": Mean.of(ratio, mask),
        "abs_log_ratio": Mean.of(jnp.abs(log_ratio), mask),
        "sequence": Mean.of((whole < 1 - low) | (whole > 1 + high), jnp.any(mask, axis=-1)),
    }
    if advantage is not None:
        active = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
        metrics["active"] = Mean.of(active, mask)
    return metrics


def kl_estimates(
    logps: Float[Array, "N L"], ref_logps: Float[Array, "N L"], mask: Bool[Array, "N L"]
) -> dict[str, Mean]:
    """Reverse KL(policy || reference) on samples of the policy, nats: k1 and k3, a token and a response."""
    rows = jnp.any(mask, axis=-1)
    metrics = {}
    for name, estimate in (("k1", k1), ("k3", k3)):
        values = estimate(jnp.where(mask, logps, 0), jnp.where(mask, ref_logps, 0))
        metrics[f"{name}_tok"] = Mean.of(values, mask)
        metrics[f"{name}_sum"] = Mean.of(masked_sum(values, mask, axis=-1), rows)
    return metrics


def sampler_gap(
    sampled: Float[Array, "*N L"], trained: Float[Array, "*N L"], mask: Bool[Array, "*N L"]
) -> tuple[Mean, Float[Array, ""]]:
    """Mean and maximum of |sampler - trainer| log-prob, nats: the engines' mismatch, before any clip."""
    gap = jnp.abs(jnp.where(mask, sampled - trained, 0))
    return Mean.of(gap, mask), jnp.max(gap)


def sampler_mismatch(
    sampled: Float[Array, "*N L"], trained: Float[Array, "*N L"], mask: Bool[Array, "*N L"], *, cap: float = math.inf
) -> dict[str, Any]:
    """How far the sampler's log-probs are from the trainer's, over masked tokens.

    Before any cap: ``mean`` and ``max`` of the absolute difference, nats; ``ratio``, the mean of
    ``exp(trained - sampled)``, which is 1 in expectation for samples of the whole distribution; ``correlation``,
    Pearson's, of the two probabilities (as verl's ``rollout_actor_probs_pearson_corr``; 0 where one does not vary).
    ``ess``: effective sample size of the ratios capped at ``cap``, as a share of the tokens. Under a finite ``cap``
    also ``capped``, the share of tokens above it.
    """
    sampled = sampled.astype(trained.dtype)
    gap, worst = sampler_gap(sampled, trained, mask)
    ratio = importance_ratio(trained, sampled, mask)
    used = jnp.where(mask, jnp.minimum(ratio, cap), 0).reshape(-1)
    count = jnp.maximum(jnp.sum(mask), 1).astype(used.dtype)
    found = {
        "mean": gap,
        "max": worst,
        "ratio": Mean.of(ratio, mask),
        "correlation": _correlation(*(jnp.where(mask, jnp.exp(x), 0) for x in (sampled, trained)), mask),
        "ess": effective_sample_size(used) / count,
    }
    return found | ({"capped": Mean.of(ratio > cap, mask)} if cap < math.inf else {})


def _correlation(a: Float[Array, "*N L"], b: Float[Array, "*N L"], mask: Bool[Array, "*N L"]) -> Float[Array, ""]:
    """Pearson's, over masked entries; 0 where one of the two does not vary."""
    a, b = (jnp.where(mask, x - masked_mean(x, mask), 0) for x in (a, b))
    scale = jnp.sqrt(jnp.sum(a**2) * jnp.sum(b**2))
    return jnp.where(scale > 0, jnp.sum(a * b) / jnp.where(scale > 0, scale, 1), 0)


def effective_sample_size(weights: Float[Array, " n"]) -> Float[Array, ""]:
    """``(sum w)^2 / sum w^2``; 0 when all weights are 0."""
    square = jnp.sum(weights**2)
    return jnp.where(square > 0, jnp.sum(weights) ** 2 / jnp.where(square > 0, square, 1), 0)


def signal_weight(p: float, group: int) -> float:
    """Expected length of GRPO's signal on a prompt solved with probability ``p``, in units of |g+ - g-|.

    For binary rewards with k of G correct, ``mean_i A_i g_i = sqrt(k (G-k) (G-1) / G^3) (g+ - g-)``
    (z-score, ddof 1, eps 0), g+ and g- being the mean gradients of correct and wrong responses.
    Symmetric in p and 1 - p: prompts that are always solved give none.
    """
    k = np.arange(group + 1)
    ways = np.array([math.comb(group, int(i)) for i in k], float)
    return float(np.sum(ways * p**k * (1 - p) ** (group - k) * np.sqrt(k * (group - k) * (group - 1) / group**3)))


def zero_signal_share(p: float, group: int) -> float:
    """Probability that all ``group`` binary rewards of a prompt are equal, ``p^G + (1-p)^G``."""
    return p**group + (1 - p) ** group
