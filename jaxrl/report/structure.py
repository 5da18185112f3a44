"""Pictures and tables of what ``jaxrl check`` finds over training (SCIENCE.md C.3): F-C4 to F-C7, T-C4.

``structure.npz`` (S checkpoints, n probe rows):
    step            [S]
    fixed_cosine    [S, n, n]  cosines of the fixed probe's gradients at each checkpoint
    fixed_spectrum  [S, n]     their eigenvalues, the largest first
    fresh_step, fresh_spectrum the same of each checkpoint's own samples, where there are any
    uid, correct, and where the task has them mode, family, difficulty  [n]

``transfer.npz`` (F trained families, G measured ones): trained [F], measured [G], steps, and for the
measures ``p`` and ``delta_plus`` the matrices ``<measure>/realised`` and ``<measure>/<prediction>`` [F, G].

``check.json``: ``c14`` with ``step [T]``, ``total [T]`` and ``parts {name: [T]}``, natural logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from jaxrl.report import kernels, style
from jaxrl.report.style import Picture
from jaxrl.report.tables import Interval, Table

Arrays = Mapping[str, np.ndarray]
PARTS = {
    "update": "step size |Δθ|²",
    "norms": "gradient norms, mean |g|²",
    "cosine": "alignment, mean cos²",
    "coupling": "norms and alignment together",
    "remainder": "beyond first order",
}
PREDICTION = "frozen gradient"


def spectra(arrays: Arrays) -> Picture:
    """F-C4: eigenvalues of the cosine matrix at each checkpoint, of both probes."""
    panels = [("fixed probe of the base", arrays["step"], arrays["fixed_spectrum"])]
    if "fresh_spectrum" in arrays:
        panels.append(("fresh samples of each checkpoint", arrays["fresh_step"], arrays["fresh_spectrum"]))
    with style.drawing():
        width = style.WIDTH if len(panels) > 1 else 5.6
        figure, axes = style.grid(1, len(panels), height=3.2, width=width, sharey=True)
        for panel, (title, steps, values) in zip(axes[0], panels, strict=True):
            _spectrum_panel(panel, np.asarray(steps), np.asarray(values))
            panel.set_title(title)
        axes[0, 0].set_ylabel("eigenvalue of the cosine matrix")
        return style.picture(
            figure,
            "check-spectra",
            f"""F-C4. Eigenvalues of the cosine matrix C of {np.shape(arrays["fixed_cosine"])[-1]} probe gradients at each
            checkpoint, the largest first; random directions would lie on the dotted line at 1, and the steeper the
            curve, the fewer directions the gradients share, whatever their length.""",
        )


def _spectrum_panel(panel: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    shades = style.matplotlib.colormaps["viridis_r"](np.linspace(0.15, 1, len(steps)))
    ends = []
    for step, row, ink in zip(steps, values, shades, strict=True):
        row = row[np.isfinite(row)]
        row = row[row > 1e-6 * row.max(initial=0)]
        panel.loglog(np.arange(1, len(row) + 1), row, color=ink, lw=1.4)
        ends.append((float(len(row)), float(row[-1]), f"step {step}", ink))
    panel.axhline(1, color=style.INK, ls=":", lw=1)
    panel.set_xlabel("rank of the eigenvalue")
    style.label_ends(panel, ends, size=8.5)


def attribution(found: Mapping[str, Any]) -> Picture:
    """F-C5: what made the log mean square change grow or shrink since the first step, stacked."""
    steps = np.asarray(found["step"])
    parts = {name: np.asarray(found["parts"][name]) for name in PARTS}
    total = np.asarray(found["total"])
    place = np.arange(len(steps))
    up, down = np.zeros(len(steps)), np.zeros(len(steps))
    with style.drawing():
        figure, axes = style.grid(1, 1, height=3.4)
        panel = axes[0, 0]
        for index, values in enumerate(parts.values()):
            since = values - values[0]
            base = np.where(since >= 0, up, down)
            panel.bar(place, since, bottom=base, width=0.72, color=style.colour(index), lw=0)
            up, down = up + np.maximum(since, 0), down + np.minimum(since, 0)
        panel.plot(place, total - total[0], color=style.INK, marker="o", lw=1.4, zorder=3)
        panel.axhline(0, color=style.INK, lw=0.8)
        every = -(-len(steps) // 14)
        panel.set_xticks(place[::every], [str(step) for step in steps[::every]])
        panel.grid(axis="x", visible=False)
        panel.set_xlabel("training step")
        panel.set_ylabel(f"change of the logarithm since step {steps[0]}")
        entries = [(label, {"color": style.colour(i), "lw": 6}) for i, label in enumerate(PARTS.values())]
        style.legend(figure, [*entries, ("log ‖Δ‖², their sum", {"color": style.INK, "marker": "o"})])
        return style.picture(
            figure,
            "check-attribution",
            f"""F-C5. Why the mean square change of {found["rows"]} probe rows in one training step differs from that of step
            {steps[0]}: bars above 0 raised it, bars below lowered it, and they add up to the line exactly; growth by
            longer steps or longer gradients is no growth of alignment.""",
        )


def heat_maps(arrays: Arrays) -> Picture:
    """F-C6: cosines of the fixed probe at the first and the last checkpoint, ordered by family and mode."""
    labels = probe_labels(arrays)
    order = np.argsort(labels, kind="stable")
    steps, cosine = np.asarray(arrays["step"]), np.asarray(arrays["fixed_cosine"])
    chosen = [0] if len(steps) == 1 else [0, len(steps) - 1]
    off = ~np.eye(len(order), dtype=bool)
    limit = float(np.quantile(np.abs(cosine[chosen][:, off]), 0.98)) or 1.0
    with style.drawing():
        width = style.WIDTH if len(chosen) > 1 else 5.6
        figure, axes = style.grid(1, len(chosen), height=4.0, width=width)
        for panel, at in zip(axes[0], chosen, strict=True):
            panel.imshow(cosine[at][np.ix_(order, order)], cmap=kernels.DIVERGING, vmin=-limit, vmax=limit, interpolation="nearest")  # fmt: skip
            panel.grid(False)
            _group_lines(panel, [labels[i] for i in order], write=at == chosen[0])
            panel.set_title(f"step {steps[at]}")
        bar = figure.colorbar(
            ScalarMappable(Normalize(-limit, limit), kernels.DIVERGING), ax=axes, label="cosine", extend="both"
        )
        bar.outline.set_visible(False)
        what = "family and mode" if "family" in arrays else "prompt" if len(set(labels)) > 2 else "correctness"
        return style.picture(
            figure,
            "check-heat-map",
            f"""F-C6. Cosine between the gradients of every two probe rows, ordered by {what}; lines part the groups.
            Orange pairs move together, purple ones against each other; a block off the diagonal is interference
            between groups.""",
        )


def probe_labels(arrays: Arrays) -> list[str]:
    """``F3 code`` where the task has families and modes, else whether a row is correct."""
    if "family" not in arrays:
        return [str(x) for x in arrays["correct"]]
    modes = arrays.get("mode", np.full(len(arrays["family"]), ""))
    return [f"F{f} {m}".strip() for f, m in zip(arrays["family"], modes, strict=True)]


def _group_lines(panel: Axes, labels: Sequence[str], *, write: bool) -> None:
    edges = [0, *(i for i in range(1, len(labels)) if labels[i] != labels[i - 1]), len(labels)]
    for edge in edges[1:-1]:
        panel.axhline(edge - 0.5, color=style.INK, lw=0.5)
        panel.axvline(edge - 0.5, color=style.INK, lw=0.5)
    middles = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    names = [labels[a] for a in edges[:-1]]
    panel.set_yticks(middles, names if write else [""] * len(names), fontsize=7)
    panel.set_xticks(middles, names, rotation=90, fontsize=7)


def transfer(arrays: Arrays, scores: Mapping[str, Any] | None = None) -> Picture:
    """F-C7: predicted and realised change of every family after training on one, and one against the other."""
    predicted, realised = (np.asarray(arrays[f"p/{name}"]) for name in (PREDICTION, "realised"))
    trained, measured = ([f"F{f}" for f in arrays[name]] for name in ("trained", "measured"))
    own = np.array([[f == g for g in measured] for f in trained])
    with style.drawing():
        figure, axes = style.grid(1, 3, height=3.0, gridspec_kw={"width_ratios": [1.15, 1.15, 1]})
        for panel, values, title in zip(axes[0], (predicted, realised), ("predicted", "realised"), strict=False):
            _matrix(figure, panel, values, trained, measured)
            panel.set_title(f"{title} Δp")
        axes[0, 0].set_ylabel("trained on family")
        panel = axes[0, 2]
        for pick, ink, label in ((~own, style.colour(0), "other families"), (own, style.colour(1), "the trained one")):
            panel.scatter(predicted[pick], realised[pick], s=18, color=ink, label=label)
        panel.axline((0, 0), slope=1, color=style.INK, ls="--", lw=1)
        panel.set_xlabel("predicted Δp")
        panel.set_ylabel("realised Δp")
        panel.legend(loc="best", fontsize=8)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(4))
        return style.picture(
            figure,
            "check-transfer",
            f"""F-C7. Change of each family's probability of a correct response after {int(arrays["steps"])} steps on one family
            alone: what the first batch's gradient would do if it stayed (left), what happened (middle, scales
            differ), and both against each other with the dashed line of equality.{_fit(scores)}""",
        )


def _fit(scores: Mapping[str, Any] | None) -> str:
    """The out-of-sample fit in words, where it is known."""
    r2 = {} if scores is None else {name: scores[name]["all"]["fitted"] for name in (PREDICTION, "family means")}
    if any(value is None for value in r2.values()) or not r2:
        return ""
    ours, base = (f"{value:.2f}".replace("-", style.MINUS) for value in r2.values())
    return f" A line fitted on the other trained families explains {ours} of the variance (R²), family means {base}."


def _matrix(figure: Any, panel: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    limit = float(np.abs(values).max()) or 1.0
    panel.imshow(values, cmap=kernels.DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    panel.grid(False)
    panel.set_xticks(range(len(columns)), columns, fontsize=8)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlabel("measured on family")
    bar = figure.colorbar(ScalarMappable(Normalize(-limit, limit), kernels.DIVERGING), ax=panel, location="bottom")
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(4)
    bar.update_ticks()


# ---------------------------------------------------------------- tables


def check_tables(whole: Mapping[str, Any]) -> list[Table]:
    """T-C4 with a column a checkpoint, the silent pairs, the limits of precision, and the scores of the predictions."""
    built = (
        block_table((whole.get("tables") or {}).get("T-C4") or []),
        precision_table(whole.get("c12") or {}),
        silent_table(whole.get("c11") or {}),
        transfer_table(whole.get("c15") or {}),
    )
    return [table for table in built if table is not None]


def block_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """T-C4: mean cosine of each block, a column a checkpoint."""
    if not rows:
        return None
    steps = sorted({row["step"] for row in rows})
    cells: dict[tuple[str, str], dict[int, Interval]] = {}
    for row in rows:
        value = Interval(*(math.nan if row[k] is None else row[k] for k in ("cosine", "low", "high")))
        cells.setdefault((row["probe"], row["block"]), {})[row["step"]] = value
    body = tuple((*key, *(by.get(step, Interval(math.nan)) for step in steps)) for key, by in cells.items())
    caption = (
        "T-C4. Mean cosine between the gradients of pairs of probe rows, by block and checkpoint, with 95 % bootstrap "
        "intervals over prompts. Pairs of one prompt and of two are never pooled: within a prompt some are negative by "
        "force. The fixed probe is of the base, the fresh one of each checkpoint."
    )
    return Table("T-C4", caption, ("probe", "block", *(f"step {step}" for step in steps)), body)


def precision_table(found: Mapping[str, Any]) -> Table | None:
    """C12: the step size below which rounding rules, by precision."""
    rows = [
        (name, one["change_lost_below"], one["order_lost_below"], min(one["changed"]) if "changed" in one else None)
        for name, one in found.items()
        if isinstance(one, Mapping)
    ]
    caption = (
        "C12. The batch's SGD step in lower precision: the step size η below which rounding exceeds half of the predicted "
        "change, below which it exceeds what is left after first order (no slope can be read), and the share of "
        "parameters that still change at the smallest η. The grid ends at 0.1 above and 1e-9 below."
    )
    columns = ("precision", "change lost below η", "order lost below η", "parameters changed at least")
    return Table("check-precision", caption, columns, tuple(rows)) if rows else None


def silent_table(found: Mapping[str, Any]) -> Table | None:
    """C11: pairs with a large kernel entry and no effect."""
    if not found or not found["pairs"]:
        return None
    rows = tuple((p["row"], p["probe"], p["K"], p["cosine"], p["change"]) for p in found["pairs"])
    caption = (
        f"C11. {found['silent_groups']} of {found['groups']} groups have equal rewards, so {found['silent_rows']} of "
        f"{found['rows']} rollouts ({found['share_of_rollouts']:.0%}) have advantage 0 and move nothing; "
        f"{found['large_pairs']} of their {found['silent_pairs']} pairs with probe rows have |K| above the median of the "
        "other rows. The largest:"
    )
    return Table("check-silent", caption, ("batch row", "probe row", "K", "cosine", "w A K"), rows)


def transfer_table(found: Mapping[str, Any]) -> Table | None:
    """C15: out-of-sample fit of each prediction and baseline."""
    if not found:
        return None
    cases = [(measure, where) for measure in ("p", "delta_plus") for where in ("all", "across")]
    rows = tuple((name, *(found[measure][name][where]["fitted"] for measure, where in cases)) for name in found["p"])
    caption = (
        f"C15. Out-of-sample R² of the change on each family after {found['steps']} steps on one family alone, each trained "
        "family left out in turn (1 is perfect, 0 no better than the mean of the others, below 0 worse). Kernel rows "
        "predict from the first batch; family means and the gradient norm are the baselines."
    )
    columns = ("prediction", "Δp, all pairs", "Δp, other families", "Δ⁺, all pairs", "Δ⁺, other families")
    return Table("check-transfer", caption, columns, rows)
