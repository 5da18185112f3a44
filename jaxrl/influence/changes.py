"""How the log-probabilities of the probe changed (SCIENCE.md A.1): influence, interference, strength.

Plain numpy on one number a probe row: ``S``, the summed log-probability of its response, before and
after. Every metric comes twice, ``_sum`` from the change of ``S`` (nats) and ``_tok`` from that
change over the response length (nats a token); the two are never mixed. Standard errors are
cluster-robust with the prompt as the cluster. Rows without tokens are excluded and counted; prompts
without a correct row are missing from the interference, not zero in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.stats import cluster_ratio, effective_sample_size

# Base-difficulty bins of A4d, by the base model's probability of being right.
STRATA = (0.0, 0.02, 0.1, 0.3, 0.7, 1.0)
WEIGHT_CAP = 20.0


class Estimate(NamedTuple):
    """A mean, its cluster-robust standard error, and how many rows (macro means: prompts) it is over.

    ``value`` is NaN when nothing was counted, ``se`` when there are fewer than two prompts.
    """

    value: float
    se: float
    n: int


@dataclass(frozen=True)
class Changes:
    """Changes of ``M`` probe rows on one scale, and what they are averaged over.

    ``delta`` in nats (``_sum``) or nats a token (``_tok``); ``prompt`` numbers the prompts of the
    whole probe from 0, those without a counted row included.
    """

    delta: Float[np.ndarray, " M"]
    correct: Bool[np.ndarray, " M"]
    prompt: Int[np.ndarray, " M"]
    ok: Bool[np.ndarray, " M"]
    prompts: int


def changes(
    before: Float[np.ndarray, " M"],
    after: Float[np.ndarray, " M"],
    length: Int[np.ndarray, " M"],
    correct: Bool[np.ndarray, " M"],
    uid: Int[np.ndarray, " M"],
    include: Bool[np.ndarray, " M"] | None = None,
) -> dict[str, Changes]:
    """The ``sum`` and ``tok`` changes between two scorings of the probe.

    ``before`` and ``after`` are summed log-probs (nats), ``length`` counted tokens, ``include`` the
    rows that count (default all; truncated rows are left out by passing ``include``). Raises
    ``ValueError`` when the lengths of the arrays differ.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    length, uid = np.asarray(length), np.asarray(uid)
    include = np.ones(len(before), bool) if include is None else np.asarray(include, bool)
    named = {"after": after, "length": length, "correct": correct, "uid": uid, "include": include}
    for name, value in named.items():
        if len(value) != len(before):
            raise ValueError(f"{name}: expected one entry a probe row ({len(before)}), got {len(value)}")
    ok = include & (length > 0)
    number, prompt = np.unique(uid, return_inverse=True)
    delta = np.where(ok, after - before, 0.0)
    shared = (np.asarray(correct, bool), prompt, ok, len(number))
    return {"sum": Changes(delta, *shared), "tok": Changes(delta / np.maximum(length, 1), *shared)}


def change_metrics(
    before: Float[np.ndarray, " M"],
    after: Float[np.ndarray, " M"],
    length: Int[np.ndarray, " M"],
    correct: Bool[np.ndarray, " M"],
    uid: Int[np.ndarray, " M"],
    include: Bool[np.ndarray, " M"] | None = None,
    *,
    scopes: Mapping[str, Bool[np.ndarray, " M"]] | None = None,
) -> dict[str, Estimate]:
    """A3, A4a, A4b, A4f, A4g, A6 on both scales, and the same a scope (A7) as ``<scope>/<name>``.

    Names: ``all``, ``interference`` (correct rows, pooled), ``interference_macro`` (mean over
    prompts), ``incorrect``, ``selectivity`` (interference minus incorrect), ``strength`` (mean
    square) and ``strength_rms``, ``variance``, ``positive_part``, ``negative_part`` and
    ``fraction_down`` (correct rows), each ``_sum`` and ``_tok``. ``prompts_used`` is the share of
    prompts with a correct row, ``excluded`` the number of rows that do not count.
    """
    metrics: dict[str, Estimate] = {}
    pair = changes(before, after, length, correct, uid, include)
    for scale, one in pair.items():
        metrics |= {f"{name}_{scale}": value for name, value in summary(one).items()}
        for scope, member in (scopes or {}).items():
            part = restricted(one, member)
            metrics |= {f"{scope}/{name}_{scale}": value for name, value in summary(part).items()}
    one = pair["sum"]
    used = len(np.unique(one.prompt[one.ok & one.correct]))
    metrics["prompts_used"] = Estimate(used / max(one.prompts, 1), np.nan, one.prompts)
    metrics["excluded"] = Estimate(float(np.sum(~one.ok)), np.nan, len(one.ok))
    return metrics


def summary(one: Changes) -> dict[str, Estimate]:
    """The metrics of one scale; see ``change_metrics``."""
    right, wrong = one.ok & one.correct, one.ok & ~one.correct
    strength = ratio(one, one.delta**2, one.ok)
    rms = float(np.sqrt(strength.value))
    average = ratio(one, one.delta, one.ok)
    return {
        "all": average,
        "interference": ratio(one, one.delta, right),
        "interference_macro": macro(one, right),
        "incorrect": ratio(one, one.delta, wrong),
        "selectivity": difference(one, right, wrong),
        "strength": strength,
        "strength_rms": Estimate(rms, strength.se / (2 * rms) if rms > 0 else strength.se, strength.n),
        "variance": Estimate(strength.value - average.value**2, np.nan, strength.n),
        "positive_part": ratio(one, np.maximum(one.delta, 0), right),
        "negative_part": ratio(one, np.minimum(one.delta, 0), right),
        "fraction_down": ratio(one, (one.delta < 0).astype(float), right),
    }


def restricted(one: Changes, member: Bool[np.ndarray, " M"]) -> Changes:
    """The same changes over the prompts that have a row in ``member``; all other rows stop counting."""
    member = np.asarray(member, bool)
    number, prompt = np.unique(one.prompt[member], return_inverse=True)
    return Changes(one.delta[member], one.correct[member], prompt, one.ok[member], len(number))


def _totals(one: Changes, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of ``values`` and row counts a prompt, over ``rows``."""
    picked = one.prompt[rows]
    total = np.bincount(picked, weights=values[rows], minlength=one.prompts)
    return total, np.bincount(picked, minlength=one.prompts).astype(float)


def ratio(one: Changes, values: Float[np.ndarray, " M"], rows: Bool[np.ndarray, " M"]) -> Estimate:
    """Mean of ``values`` over ``rows`` with the cluster-robust standard error of a ratio."""
    total, count = _totals(one, values, rows)
    return Estimate(*cluster_ratio(total, count), int(count.sum()))


def difference(one: Changes, rows: Bool[np.ndarray, " M"], others: Bool[np.ndarray, " M"]) -> Estimate:
    """Mean change over ``rows`` minus that over ``others``; prompts that hold both enter as one cluster."""
    sides = [_totals(one, one.delta, r) for r in (rows, others)]
    if not all(count.sum() for _, count in sides):
        return Estimate(np.nan, np.nan, 0)
    (mean_a, mean_b) = (total.sum() / count.sum() for total, count in sides)
    (part_a, part_b) = (
        (total - mean * count) / count.sum() for (total, count), mean in zip(sides, (mean_a, mean_b), strict=True)
    )
    return Estimate(float(mean_a - mean_b), _spread(part_a - part_b), int(rows.sum() + others.sum()))


def _spread(parts: Float[np.ndarray, " m"]) -> float:
    """``sqrt(m / (m - 1) sum parts^2)`` over clusters; NaN for one cluster."""
    m = len(parts)
    return float(np.sqrt(m / (m - 1) * np.sum(parts**2))) if m > 1 else float("nan")


def prompt_means(one: Changes, rows: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " X"]:
    """Mean change over each prompt's ``rows``, NaN where a prompt has none; in the order of sorted uids."""
    total, count = _totals(one, one.delta, rows)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def macro(one: Changes, rows: Bool[np.ndarray, " M"]) -> Estimate:
    """A4b: mean over prompts of the mean over their ``rows``, each prompt weighing the same."""
    means = prompt_means(one, rows)
    return _mean(means[~np.isnan(means)])


def _mean(values: Float[np.ndarray, " X"]) -> Estimate:
    if not len(values):
        return Estimate(np.nan, np.nan, 0)
    se = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan
    return Estimate(float(np.mean(values)), se, len(values))


class Hajek(NamedTuple):
    """A4c: the estimate, and the effective sample size of its weights (prompts)."""

    estimate: Estimate
    ess: float


def interference_hajek(one: Changes, p_base: Float[np.ndarray, " X"], samples: int, cap: float = WEIGHT_CAP) -> Hajek:
    """A4c: interference with prompts weighted by one over their probability of being seen.

    A prompt enters only when one of its ``samples`` probe rows is correct, so easy prompts are over-represented.
    ``p_base`` is each prompt's probability of being right under the base (order of sorted uids), from
    an *independent* sample of at least 128: estimating it on the probe itself would bias the weights.
    Weights are capped at ``cap``.
    """
    p_base = np.asarray(p_base, np.float64)
    if len(p_base) != one.prompts:
        raise ValueError(f"p_base: expected one probability a prompt ({one.prompts}), got {len(p_base)}")
    means = prompt_means(one, one.ok & one.correct)
    seen = ~np.isnan(means)
    if not seen.any():
        return Hajek(Estimate(np.nan, np.nan, 0), 0.0)
    with np.errstate(divide="ignore"):
        weight = np.minimum(1 / (1 - (1 - p_base[seen]) ** samples), cap)
    value = np.sum(weight * means[seen]) / weight.sum()
    se = _spread(weight * (means[seen] - value) / weight.sum())
    return Hajek(Estimate(float(value), se, int(seen.sum())), effective_sample_size(weight))


def interference_strata(one: Changes, p_base: Float[np.ndarray, " X"]) -> dict[str, Estimate]:
    """A4d: the macro interference inside base-difficulty bins, ``"[0,0.02)"`` ... ``"[0.7,1]"``."""
    p_base = np.asarray(p_base, np.float64)
    if len(p_base) != one.prompts:
        raise ValueError(f"p_base: expected one probability a prompt ({one.prompts}), got {len(p_base)}")
    means = prompt_means(one, one.ok & one.correct)
    strata = {}
    for low, high in pairwise(STRATA):
        last = high == STRATA[-1]
        inside = (p_base >= low) & ((p_base <= high) if last else (p_base < high)) & ~np.isnan(means)
        strata[f"[{low:g},{high:g}{']' if last else ')'}"] = _mean(means[inside])
    return strata


def normalised_strength(
    strength: float,
    update_sq_norm: float,
    *,
    lr: float | None = None,
    mean_sq_gradient: float | None = None,
) -> dict[str, float]:
    """A6n: ``strength`` (mean square change, nats^2) without what only scales it.

    ``per_update``: over ``|dtheta|^2``; ``per_lr``: over ``lr^2``; ``cosine_sq``: over ``|dtheta|^2
    mean_j |g_j|^2``, to first order the mean squared cosine between the step and the probe's
    gradients, which growing gradient norms leave alone.
    """
    moved = update_sq_norm if update_sq_norm > 0 else np.nan
    values = {"per_update": strength / moved}
    if lr is not None:
        values["per_lr"] = strength / lr**2 if lr > 0 else np.nan
    if mean_sq_gradient is not None:
        values["cosine_sq"] = strength / (moved * mean_sq_gradient) if mean_sq_gradient > 0 else np.nan
    return values


def telescoping_error(
    deltas: Float[np.ndarray, "steps M"], first: Float[np.ndarray, " M"], last: Float[np.ndarray, " M"]
) -> float:
    """A2: largest ``|sum_t Delta_t - (S_T - S_0)| / max(1, |S_0|)`` over probe rows; below 1e-4 in float32.

    ``deltas`` are the changes as measured step by step, ``first`` and ``last`` scorings of the first
    and last model. A step that was missed, or measured on other rows, shows here.
    """
    first, last = np.asarray(first, np.float64), np.asarray(last, np.float64)
    total = np.sum(np.asarray(deltas, np.float64), axis=0)
    return float(np.max(np.abs(total - (last - first)) / np.maximum(1, np.abs(first)), initial=0.0))
