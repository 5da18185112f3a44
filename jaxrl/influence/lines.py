"""The numbers of one step as flat records: what the run folder's metrics lines hold about the probe.

Keys are those of ``metrics.jsonl``: ``probe/<name>_sum|_tok`` with ``/se`` and ``/n`` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from jaxrl.influence.changes import Estimate, change_metrics, changes, normalised_strength
from jaxrl.influence.distribution import forward_kl, perplexity
from jaxrl.influence.probe import counted
from jaxrl.rl.metrics import clip_violations
from jaxrl.types import Probe, Rows


def record(prefix: str, metrics: Mapping[str, Estimate]) -> dict[str, float]:
    """``prefix/name`` with its ``/se`` and ``/n``; what was not measured (NaN) is left out."""
    line: dict[str, float] = {}
    for name, (value, se, n) in metrics.items():
        if np.isnan(value):
            continue
        line[f"{prefix}/{name}"] = float(value)
        line[f"{prefix}/{name}/n"] = int(n)
        if not np.isnan(se):
            line[f"{prefix}/{name}/se"] = float(se)
    return line


def probe_line(
    probe: Probe,
    base: Float[np.ndarray, "M L"],
    before: Float[np.ndarray, "M L"],
    after: Float[np.ndarray, "M L"],
    *,
    scopes: Mapping[str, Bool[np.ndarray, " M"]] | None = None,
    update_norm: float | None = None,
    lr: float | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    include_truncated: bool = False,
) -> dict[str, float]:
    """A3 to A7, A19, A21 and A23 (c, d) of one step ``[t, t+1]``, and the same since the base.

    ``base``, ``before`` and ``after`` are token log-probs of the probe under the base and around the
    step (nats, 0 off the response). ``update_norm`` is ``|dtheta|``, ``clip`` the range (below,
    above 1) by which violations are counted.
    """
    scopes, ok = scopes or {}, counted(probe, include_truncated=include_truncated)
    length = np.asarray(probe.rows.length) - np.asarray(probe.rows.start)
    sums = [np.asarray(x, np.float64).sum(axis=-1) for x in (base, before, after)]
    rest = (length, np.asarray(probe.correct), np.asarray(probe.uid), ok)
    step = change_metrics(sums[1], sums[2], *rest, scopes=scopes)
    since_base = change_metrics(sums[0], sums[2], *rest)
    since_base = {f"cumulative_{name}": value for name, value in since_base.items() if name.endswith(("_sum", "_tok"))}
    line = record("probe", step) | record("probe", since_base)
    if update_norm is not None:
        strength = normalised_strength(step["strength_sum"].value, update_norm**2, lr=lr)
        line |= {f"probe/strength_{k}_sum": v for k, v in strength.items() if not np.isnan(v)}
    whole = (*rest[:3], counted(probe, include_truncated=True))  # the identity needs every sample
    line |= record("kl", {"forward_base": forward_kl(changes(sums[0], sums[2], *whole)["sum"])})
    line |= record("probe", perplexity(sums[2], length, np.asarray(probe.uid), ok))
    for name, old in (("probe", before), ("probe_cumulative", base)):
        line |= _clip(name, probe.rows, ok, old, after, clip)
    return line


def _clip(
    name: str, rows: Rows, ok: Bool[np.ndarray, " M"], old: np.ndarray, new: np.ndarray, clip: tuple[float, float]
) -> dict[str, float]:
    """Ratios of the probe's tokens against the clip range, as if the probe had been trained on."""
    mask = np.asarray(rows.mask()) & ok[:, None]
    new, old = (np.asarray(x, np.float32) for x in (new, old))
    found = clip_violations(new, old, mask, low=clip[0], high=clip[1])
    return {f"clip/{name}_{key}": mean.value for key, mean in found.items() if not np.isnan(mean.value)}


def influence_line(
    measured: Float[np.ndarray, " M"],
    predicted: Float[np.ndarray, " M"],
    scores: Float[np.ndarray, " M"] | None = None,
) -> dict[str, float]:
    """How well gradients predicted what the update did to each probe row (nats), as ``influence/<name>``.

    ``median_ratio`` of measured to predicted, Pearson ``correlation``, ``sign_agreement``,
    ``relative_error`` (``|measured - predicted|`` over ``|measured|``, root sums of squares), and
    with ``scores`` (summed log-probs, in the dtype they were computed in) ``noise_floor``: the median
    rounding of the difference of two scores over the median ``|measured|``; errors below it say nothing.
    """
    floor = None if scores is None else np.finfo(np.asarray(scores).dtype).eps * np.median(np.abs(scores))
    measured, predicted = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    moved = predicted != 0
    size = float(np.sqrt(np.sum(measured**2)))
    line: dict[str, float] = {"rows": len(measured)}
    if moved.any():
        line["median_ratio"] = float(np.median(measured[moved] / predicted[moved]))
        line["sign_agreement"] = float(np.mean(np.sign(measured[moved]) == np.sign(predicted[moved])))
    if np.std(measured) > 0 and np.std(predicted) > 0:
        line["correlation"] = float(np.corrcoef(measured, predicted)[0, 1])
    if size > 0:
        line["relative_error"] = float(np.sqrt(np.sum((measured - predicted) ** 2)) / size)
    if floor is not None and np.median(np.abs(measured)) > 0:
        line["noise_floor"] = float(floor / np.median(np.abs(measured)))
    return {f"influence/{name}": value for name, value in line.items()}
