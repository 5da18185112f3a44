"""Pictures with one point a prompt or a probe, from plain arrays.

The decomposition A5 reads ``eval/exact*.json`` of a run, written by an evaluation that
knows p exactly or from many samples: ``{"step": int, "uid": [...], "split": [...], "p_base": [...],
"p_now": [...], "delta_plus": [...]}``, one entry a prompt: the probability of a correct answer under
the base and now, and E over correct base answers of S_now - S_base (nats; null where the prompt
has no correct answer). The file with the largest step is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl import stats
from jaxrl.report import style
from jaxrl.report.style import MINUS, Picture


def decomposition(exact: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A5 of every usable prompt: ``log_ratio``, ``narrowing`` (KLc), ``delta_plus`` (nats), ``split``, ``uid``.

    KLc = log(p_now / p_base) - Delta+. Prompts whose p is 0, or without a correct base answer, have no
    decomposition and are left out; ``left_out`` counts them.
    """
    base, now, delta = (np.array(exact[key], float) for key in ("p_base", "p_now", "delta_plus"))
    split = np.array(exact.get("split", ["all"] * len(base)), str)
    usable = (base > 0) & (now > 0) & np.isfinite(delta)
    ratio = np.log(now[usable] / base[usable])
    return {
        "log_ratio": ratio,
        "narrowing": ratio - delta[usable],
        "delta_plus": delta[usable],
        "split": split[usable],
        "uid": np.array(exact.get("uid", np.arange(len(base))))[usable],
        "left_out": np.array(np.sum(~usable)),
    }


EMPTY = {key: np.zeros(0) for key in ("log_ratio", "narrowing", "delta_plus")} | {
    "split": np.zeros(0, str), "uid": np.zeros(0, int), "left_out": np.array(0),
}  # fmt: skip


def decomposition_means(runs: Sequence[tuple[str, Mapping[str, np.ndarray]]], splits: Sequence[str]) -> Picture:
    """Means of the three terms of A5 by split; ``runs`` are (name, ``decomposition``) in colour order."""
    terms = (("delta_plus", 1, "Δ⁺  interference"), ("log_ratio", 1, "log $p_T/p_b$  coverage"),
             ("narrowing", -1, f"{MINUS}KLc  narrowing"))  # fmt: skip
    with style.drawing():
        figure, axes = style.grid(
            1, len(splits), height=1.1 + 0.32 * 3 * max(len(runs), 2) / 2, sharey=True, sharex=True
        )
        for panel, split in zip(axes[0], splits, strict=True):
            panel.axvline(0, color=style.INK, lw=0.8)
            for index, (_, values) in enumerate(runs):
                offset = (index - (len(runs) - 1) / 2) * 0.6 / max(len(runs), 1)
                chosen = values["split"] == split
                for row, (key, sign, _) in enumerate(terms):
                    if chosen.any():
                        found = stats.cluster_bootstrap(sign * values[key][chosen])
                        panel.plot(
                            [found.low, found.high], [row + offset] * 2, color=style.colour(index), lw=2.2, alpha=0.55
                        )
                        panel.plot(found.value, row + offset, style.marker(index), color=style.colour(index), ms=5.5)
            panel.set_title(split)
            panel.set_xlabel("nats, mean over prompts")
            panel.grid(axis="y", visible=False)
        axes[0, 0].set_yticks(range(3), [label for _, _, label in terms])
        axes[0, 0].set_ylim(2.55, -0.55)
        style.legend(
            figure, [(name, {"color": style.colour(i), "marker": style.marker(i)}) for i, (name, _) in enumerate(runs)]
        )
        return style.picture(
            figure,
            "decomposition-means",
            f"""A5. Interference on correct base answers splits exactly into coverage and narrowing, Δ⁺ = log(p_T/p_b) {MINUS} KLc:
            a negative Δ⁺ with a positive middle row means that the answers got likelier while the policy settled on
            fewer of them; bars are 95 % bootstrap intervals over prompts.""",
        )


def decomposition_prompts(runs: Sequence[tuple[str, Mapping[str, np.ndarray]]], splits: Sequence[str]) -> Picture:
    """Every prompt's two terms of A5, with the line on which Delta+ is 0."""
    reach = np.concatenate([values["narrowing"] for _, values in runs] or [np.ones(1)])
    height = np.concatenate([values["log_ratio"] for _, values in runs] or [np.ones(1)])
    right = max(float(np.quantile(reach, 0.99)) * 1.1, 0.1)
    bottom, top = (float(value) for value in np.quantile(height, (0.005, 1.0)))
    bottom, top = min(bottom, -0.1) * 1.1, max(top, 0.1) * 1.15
    with style.drawing():
        columns = min(len(runs), 3)
        figure, axes = style.grid(-(-len(runs) // columns), columns, height=3.5, sharex=True, sharey=True,
                                  width=style.WIDTH if columns > 1 else 5.6)  # fmt: skip
        for index, (panel, (name, values)) in enumerate(zip(axes.ravel(), runs, strict=False)):
            x, y = np.clip(values["narrowing"], None, right), np.clip(values["log_ratio"], bottom, top)
            line = np.array([0, 1.05 * right])
            panel.fill_between(line, 0, line, color="#f1f1f1", lw=0, zorder=0)
            panel.axhline(0, color=style.INK, lw=0.8)
            panel.plot(line, line, color=style.INK, ls="--", lw=1.0)
            for marker, split in zip(style.MARKERS, splits, strict=False):
                chosen = values["split"] == split
                panel.scatter(x[chosen], y[chosen], s=20, marker=marker, color=style.colour(index), alpha=0.55, lw=0)
            both = np.mean((values["delta_plus"] < 0) & (values["log_ratio"] > 0)) if len(x) else np.nan
            panel.set_title(f"{name}: {both:.0%} in the wedge")
            panel.set_xlim(min(0.0, float(x.min(initial=0))) - 0.02 * right, right * 1.02)
            panel.set_ylim(bottom, top)
            panel.set_xlabel("narrowing KLc  (nats)")
            panel.tick_params(labelbottom=index + columns >= len(runs))
        style.hide_rest(axes, len(runs))
        short = min(right, top)
        style.label_line(axes[0, 0], "Δ⁺ = 0", (0, 0), (short, short), at=0.8)
        for panel in axes[:, 0]:
            panel.set_ylabel("coverage log $p_T/p_b$  (nats)")
        markers = zip(style.MARKERS, splits, strict=False)
        style.legend(figure, [(s, {"color": style.BASE, "marker": m, "ls": ""}) for m, s in markers])
        return style.picture(
            figure,
            "decomposition-prompts",
            """A5. One point a prompt; below the dashed line (Δ⁺ = 0) interference is negative, and in the grey wedge it is
            negative although the probability of a correct answer rose; points beyond the axes are drawn at the edge.""",
        )


def agreement(runs: Sequence[tuple[int, str, np.ndarray, np.ndarray]]) -> Picture:
    """Predicted against measured per-step change; ``runs`` are (colour index, name, predicted, measured), nats."""
    with style.drawing():
        columns = min(len(runs), 3)
        figure, axes = style.grid(-(-len(runs) // columns), columns, height=3.3, width=3.2 * columns + 1.2)
        for panel, (index, name, predicted, measured) in zip(axes.ravel(), runs, strict=False):
            reach = 1.1 * max(float(np.nanmax(np.abs([predicted, measured]), initial=0.0)), 1e-12)
            panel.plot([-reach, reach], [-reach, reach], color=style.INK, ls="--", lw=1.0)
            panel.scatter(predicted, measured, s=12, color=style.colour(index), alpha=0.5, lw=0, rasterized=True)
            panel.set_xlim(-reach, reach)
            panel.set_ylim(-reach, reach)
            panel.set_aspect("equal")
            panel.set_title(name)
            panel.set_xlabel("predicted change  (nats)")
            panel.set_ylabel("" if len(runs) > 1 and index else "measured change  (nats)")
            style.plain_numbers(panel.xaxis)
            style.plain_numbers(panel.yaxis)
        style.hide_rest(axes, len(runs))
        return style.picture(
            figure,
            "agreement-probes",
            """C10. Change of each probe's summed log-probability over one training step, as predicted to first order from
            gradients along the actual parameter change, against what was measured; on the dashed line they are equal.""",
        )
