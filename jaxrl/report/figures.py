"""Pictures of the kernel check, from plain arrays.

They read what ``jaxrl check`` leaves in its folder (SCIENCE.md C.3), so its output can be drawn
without the model. Natural logarithms, sums over response tokens (nats), SGD steps of size eta on
``A_n S_n`` from one fixed set of parameters. N training rows, M probe rows, E step sizes.

``pairs.npz`` (one training row moves one probe row):
    eta           [E]        step sizes
    delta         [E, N, M]  measured change of S_m after the step on row n alone, nats
    kernel        [N, M]     K_nm = <grad S_n, grad S_m>, nats^2 per squared parameter unit
    advantage     [N]        A_n
    bound_c       scalar     C = (G - 1) / sqrt(G), the largest |A| a group of G can have
    second_order  [E, N, M]  the term eta^2 A_n^2 / 2 g_n^T H_m g_n alone (not added to the first), nats

``batch.npz`` (all training rows in one step, with their loss weights):
    eta               [E]
    measured          [E, M]  change of S_m, nats
    predicted         [E, M]  eta sum_n w_n A_n K_nm, nats
    predicted_second  [E, M]  ``predicted`` plus the second-order term, nats
    kernel            [N, M]
    weight_advantage  [N]     w_n A_n
    advantage         [N]     A_n
    probe_norm        [M]     |grad S_m|, nats per parameter unit

``check.json``: the scalars of ``kernel_check`` in summary.json (slope_single, slope_batch,
slope_second_order, sign_agreement, violations_single, violations_batch, tightness_quantiles,
adam_residual), and ``tables``: {"T-C1": [{column: value, ...}, ...], "T-C2": ..., "T-C3": ...}. A
file ``T-C1.csv`` beside it is read where ``tables`` lacks one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import NullLocator

from jaxrl.report import style
from jaxrl.report.style import Picture

Arrays = Mapping[str, np.ndarray]
SCATTER = {"s": 16, "linewidths": 0.3, "edgecolors": "#444444", "rasterized": True}
ONE = "single pairs"
MANY = "whole batch"


def remainders(pairs: Arrays | None, batch: Arrays | None, scalars: Mapping[str, Any]) -> Picture:
    """F-C1: what first and second order leave unexplained, against the step size."""
    panels = [(ONE, _pair_terms(pairs))] if pairs else []
    panels += [(MANY, _batch_terms(batch))] if batch else []
    slopes = {ONE: scalars.get("slope_single"), MANY: scalars.get("slope_batch")}
    with style.drawing():
        figure, axes = style.grid(1, len(panels), height=3.6, width=style.WIDTH if len(panels) > 1 else 5.6)
        for panel, (title, (eta, predicted, first, second)) in zip(axes[0], panels, strict=True):
            _remainder_panel(panel, eta, predicted, first, second)
            slope = slopes[title]
            panel.set_title(title if slope is None else f"{title}: first-order slope {slope:.2f}")
        return style.picture(
            figure,
            "check-remainders",
            """F-C1. What the first-order prediction (circles) and the second-order one (squares) leave unexplained,
            against the SGD step size: on the dotted guides of slope 2 and 3 the expansion is right, and the grey line
            is the size of the predicted change itself; median over probes, shaded 25 to 75 %.""",
        )


def pair_bound(pairs: Arrays) -> Picture:
    """F-C2: the paper's lower bound |Delta| / (eta C) against the true |K|, one training row at a time."""
    bound, kernel, share, eta = pair_bounds(pairs)
    with style.drawing():
        figure, axes = style.grid(1, 1, height=4.2, width=6.6)
        panel = axes[0, 0]
        norm = Normalize(0, 1)
        panel.scatter(kernel, bound, c=share, cmap=style.SEQUENTIAL, norm=norm, **SCATTER)
        _log_square(panel, kernel, bound)
        span = np.array(panel.get_xlim())
        for level in _levels(share):
            ink = style.matplotlib.colormaps[style.SEQUENTIAL](norm(level))
            panel.plot(span, span * level, color=ink, lw=0.9, zorder=0.8)
        broken = bound > kernel
        panel.scatter(kernel[broken], bound[broken], s=34, facecolors="none", edgecolors=style.ALARM, lw=0.9)
        panel.set_xlabel("true kernel |K|  (nats² per unit²)")
        panel.set_ylabel("lower bound |Δ| / (ηC)  (same unit)")
        bar = figure.colorbar(ScalarMappable(norm, style.SEQUENTIAL), ax=panel, label="|A| / C of the training row")
        bar.outline.set_visible(False)
        _diagonal(panel, "|A| = C: tight")
        silent = int(np.sum(np.asarray(pairs["advantage"]) == 0))
        return style.picture(
            figure,
            "check-pair-bound",
            f"""F-C2. The lower bound |Δ|/(ηC) of Eq. 4 against the true |K| of each pair at η = {_power(eta)}: to first order
            a point lies on the ray of its |A|/C, so how tight the bound is says how unusual the reward was, nothing about
            K; {np.mean(broken):.1%} of the points lie above the dashed line (ringed) and violate it, and {silent} training
            rows with A = 0, which move nothing, are left out.""",
        )


def batch_bound(batch: Arrays, bound_c: float) -> Picture:
    """F-C3: the same bound when a whole batch is stepped on, against the mean and the largest |K|."""
    bound, mean, largest, eta = batch_bounds(batch, bound_c)
    norms = np.asarray(batch["probe_norm"])
    with style.drawing():
        figure, axes = style.grid(1, 2, height=3.7, sharey=True)
        low, high = _positive_range(norms)
        norm = LogNorm(low, high) if high > 30 * low else Normalize(0, high)
        for panel, kernel, name in zip(axes[0], (mean, largest), ("mean", "largest"), strict=True):
            panel.scatter(kernel, bound, c=norms, cmap=style.SEQUENTIAL, norm=norm, **(SCATTER | {"s": 24}))
            _log_square(panel, np.concatenate([mean, largest]), np.append(bound, np.median(mean)))
            broken = np.mean(bound > kernel)
            panel.set_title(f"{name} |K|: {broken:.0%} of probes violate")
            panel.set_xlabel(f"{name} |K| over training rows  (nats² per unit²)")
        axes[0, 0].set_ylabel("|Δ| / (ηC Σ|w|)  (same unit)")
        bar = figure.colorbar(
            ScalarMappable(norm, style.SEQUENTIAL), ax=axes, label="|∇S| of the probe  (nats per unit)"
        )
        bar.outline.set_visible(False)
        for panel in axes[0]:
            _diagonal(panel, "bound = |K|")
        return style.picture(
            figure,
            "check-batch-bound",
            f"""F-C3. The same bound for one step on the whole batch (η = {_power(eta)}), against the weighted mean and the largest
            |K| over the training rows: it holds below the dashed line, and the distance to that line is what
            cancellation between rows hides; where colour follows height, the bound ranks the norms of the probes'
            own gradients.""",
        )


def pair_bounds(pairs: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """|Delta|/(eta C), |K| and |A|/C of every pair with A != 0, and the eta used: the most linear one."""
    kernel, advantage = np.asarray(pairs["kernel"]), np.asarray(pairs["advantage"])
    eta, delta = np.asarray(pairs["eta"]), np.asarray(pairs["delta"])
    e = most_linear(eta, delta, eta[:, None, None] * advantage[:, None] * kernel)
    active = advantage != 0
    bound_c = float(pairs["bound_c"])
    bound = np.abs(delta[e, active]) / (eta[e] * bound_c)
    share = np.broadcast_to(np.abs(advantage[active, None]) / bound_c, bound.shape)
    return bound.ravel(), np.abs(kernel[active]).ravel(), share.ravel(), float(eta[e])


def batch_bounds(batch: Arrays, bound_c: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """|Delta|/(eta C sum|w|), the weighted mean and the largest |K| of every probe [M], and the eta used.

    Rows with A = 0 are left out on both sides: they contribute nothing, and the bounds stay valid.
    """
    eta, advantage = np.asarray(batch["eta"]), np.asarray(batch["advantage"])
    e = most_linear(eta, np.asarray(batch["measured"]), np.asarray(batch["predicted"]))
    active = advantage != 0
    weight = np.abs(np.asarray(batch["weight_advantage"])[active] / advantage[active])
    kernel = np.abs(np.asarray(batch["kernel"])[active])
    bound = np.abs(np.asarray(batch["measured"])[e]) / (eta[e] * bound_c * weight.sum())
    return bound, weight @ kernel / weight.sum(), kernel.max(0), float(eta[e])


def most_linear(eta: np.ndarray, measured: np.ndarray, predicted: np.ndarray) -> int:
    """Index of the step size at which the first order explains most, neither curvature nor rounding ruling."""
    size = np.abs(predicted)
    error = np.where(size > 0, np.abs(measured - predicted) / np.where(size > 0, size, 1), np.nan)
    return int(np.nanargmin([np.nanmedian(row) for row in error.reshape(len(eta), -1)]))


def _pair_terms(pairs: Arrays) -> tuple[np.ndarray, ...]:
    eta, advantage = np.asarray(pairs["eta"]), np.asarray(pairs["advantage"])
    active = advantage != 0
    predicted = eta[:, None, None] * (advantage[:, None] * pairs["kernel"])[active]
    first = np.asarray(pairs["delta"])[:, active] - predicted
    second = first - pairs["second_order"][:, active] if "second_order" in pairs else None
    return eta, predicted, first, second


def _batch_terms(batch: Arrays) -> tuple[np.ndarray, ...]:
    measured, predicted = np.asarray(batch["measured"]), np.asarray(batch["predicted"])
    second = measured - batch["predicted_second"] if "predicted_second" in batch else None
    return np.asarray(batch["eta"]), predicted, measured - predicted, second


def _remainder_panel(
    panel: Axes, eta: np.ndarray, predicted: np.ndarray, first: np.ndarray, second: np.ndarray | None
) -> None:
    order = np.argsort(eta)
    eta = eta[order]
    size = np.median(np.abs(predicted[order].reshape(len(eta), -1)), 1)
    panel.loglog(eta, size, color=style.FAINT, lw=1.2)
    ends = [(eta[-1], size[-1], "predicted change", style.BASE)]
    kinds = ((first, "o", 0, "after 1st order", 2), (second, "s", 1, "after 2nd order", 3))
    for values, marker, index, label, slope in kinds:
        if values is not None:
            low, middle, high = np.quantile(np.abs(values[order].reshape(len(eta), -1)), (0.25, 0.5, 0.75), axis=1)
            panel.fill_between(eta, low, high, color=style.ORDERS[index], alpha=0.12, lw=0)
            panel.loglog(eta, middle, color=style.ORDERS[index], marker=marker)
            ends.append((eta[-1], middle[-1], label, style.ORDERS[index]))
            _guide(panel, eta, middle, slope)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())  # up to sixteen decades
    panel.set_xlabel("step size η of SGD")
    panel.set_ylabel("|change of log-probability|  (nats)")
    style.label_ends(panel, ends, size=8.5)


def _guide(panel: Axes, eta: np.ndarray, middle: np.ndarray, slope: int) -> None:
    """A dotted line of the given slope, a little below the curve and as long as the curve follows it."""
    guide = middle[-1] * (eta / eta[-1]) ** slope
    follows = (middle > 0) & (middle < 3 * guide)
    if follows.sum() >= 2:
        panel.loglog(eta[follows], guide[follows] / 8, color=style.INK, ls=":", lw=1.1)
        at = min(1, follows.sum() - 2)
        panel.annotate(f"slope {slope}", (eta[follows][at], guide[follows][at] / 8), xytext=(5, -2), va="top",
                       ha="left", textcoords="offset points", fontsize=8.5, color=style.INK)  # fmt: skip


def _power(eta: float) -> str:
    """``1e-05`` as ``1e-5``."""
    mantissa, power = f"{eta:.1e}".split("e")
    return f"{float(mantissa):g}e{int(power)}"


def _levels(share: np.ndarray) -> list[float]:
    """Up to eight distinct |A|/C, so that z-scored groups give one ray a level."""
    values = np.unique(np.round(share, 3))
    return list(values if len(values) <= 8 else np.quantile(values, np.linspace(0, 1, 8)))


def _positive_range(values: np.ndarray) -> tuple[float, float]:
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    return (low, high) if high > low else (low / 2, high * 2)


def _log_square(panel: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Log axes without the smallest 0.2 % of the values, whose distance to zero says nothing."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    for values, limit in ((x, panel.set_xlim), (y, panel.set_ylim)):
        positive = values[values > 0]
        if len(positive):
            limit(np.quantile(positive, 0.002) / 1.6, positive.max() * 1.8)


def _diagonal(panel: Axes, label: str) -> None:
    """The dashed line y = x inside the limits, labelled."""
    x, y = panel.get_xlim(), panel.get_ylim()
    low, high = max(x[0], y[0]), min(x[1], y[1])
    if high > low:
        panel.plot([low, high], [low, high], color=style.INK, ls="--", lw=1.0, zorder=0.9)
        panel.set_xlim(x)
        panel.set_ylim(y)
        style.label_line(panel, label, (low, low), (high, high), at=0.3)
