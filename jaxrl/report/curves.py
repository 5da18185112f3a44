"""Pictures over training steps and over k, from run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from jaxrl.report import style
from jaxrl.report.read import Run, split_order
from jaxrl.report.style import Picture


@dataclass(frozen=True)
class Panel:
    """One small plot: metrics over steps, each (name, label); the first is solid, the next dashed.

    ``level``: a value worth a thin line (0 for differences, 1 for ratios). ``unit`` labels the y axis.
    ``limits``: fixed ends of the y axis, None where the data decides.
    """

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    level: float | None = None
    limits: tuple[float | None, float | None] = (None, None)
    log: bool = False


def single(title: str, unit: str, metric: str, **kwargs) -> Panel:
    """A panel with one metric."""
    return Panel(title, unit, ((metric, ""),), **kwargs)


TRAINING = (
    single("reward", "mean reward", "reward/mean"),
    single("correct rollouts", "probability", "reward/correct", limits=(0, 1)),
    single("prompts kept by the filters", "fraction of prompts", "rollout/kept", limits=(0, 1)),
    single("token entropy (A18)", "nats per token", "entropy/token", limits=(0, None)),
    single("reverse KL to base, k3 (A20)", "nats per token", "kl/base_k3_tok", limits=(0, None)),
    single("response length", "tokens", "rollout/length"),
    single("truncated responses", "fraction", "rollout/truncated", limits=(0, None)),
    single("gradient norm", "loss per unit", "optim/grad_norm", limits=(0, None)),
    single("greedy answers correct", "fraction of prompts", "rollout/greedy_accuracy", limits=(0, 1)),
)
# What some algorithms record beside, drawn where a run has it.
FURTHER = (
    single("generation batches a step", "batches", "rollout/rounds", limits=(1, None)),
    single("critic's loss", "squared reward", "critic/loss", limits=(0, None)),
    Panel("pairs, against the reference", "nats", (("pair/chosen", "chosen"), ("pair/rejected", "rejected")),
          level=0),
    single("pairs with a positive margin", "fraction", "pair/accuracy", limits=(0, 1)),
    single("importance weight of pairs", "mean", "pair/weight", limits=(0, None)),
    single("effective sample size of pairs", "fraction", "pair/ess", limits=(0, 1)),
)  # fmt: skip
STRENGTH = (
    single("mean square Δ, sum (A6)", "nats²", "probe/strength_sum", limits=(0, None)),
    single("mean square Δ, per token (A6)", "(nats per token)²", "probe/strength_tok", limits=(0, None)),
    single("per squared update (A6n)", "nats² per unit²", "probe/strength_per_update_sum", limits=(0, None)),
)
INTERFERENCE = tuple(
    single(title, unit, f"probe/cumulative_{name}_{suffix}", level=0)
    for suffix, unit in (("sum", "nats"), ("tok", "nats per token"))
    for name, title in (
        ("interference", "correct, pooled (A4a)"),
        ("interference_macro", "correct, by prompt (A4b)"),
        ("incorrect", "incorrect (A4f)"),
    )
)
STEPWISE = tuple(
    single(panel.title, f"{panel.unit}, one step", panel.metrics[0][0].replace("cumulative_", ""), level=0)
    for panel in INTERFERENCE
)
SCOPES = {"in_batch": "in the batch", "train": "trained, other steps", "heldout": "held out", "ood": "other families"}
CLIP = (
    Panel("(a) batch, before the update", "fraction", (("clip/before_token", "tokens"),), limits=(0, None), level=0),
    Panel("(b) batch, after the update", "fraction",
          (("clip/after_token", "tokens"), ("clip/after_sequence", "sequences"),
           ("clip/after_active", "tokens whose gradient is cut")), limits=(0, None)),
    Panel("(c) probe, after the update", "fraction",
          (("clip/probe_token", "tokens"), ("clip/probe_sequence", "sequences")), limits=(0, None)),
    Panel("(d) probe, against the base", "fraction",
          (("clip/probe_cumulative_token", "tokens"), ("clip/probe_cumulative_sequence", "sequences")),
          limits=(0, None)),
)  # fmt: skip
AGREEMENT = (
    single("median measured / predicted", "ratio", "influence/median_ratio", level=1),
    single("correlation", "Pearson r", "influence/correlation", level=1, limits=(None, 1)),
    single("same sign", "fraction of probes", "influence/sign_agreement", level=1, limits=(None, 1)),
    Panel("relative error", "fraction of the change",
          (("influence/relative_error", "relative error"), ("influence/noise_floor", "noise floor of the arithmetic")),
          log=True),
)  # fmt: skip
KERNEL = (
    single("mean squared gradient", "nats² per unit²", "kernel/trace", limits=(0, None)),
    single("off-diagonal share", "fraction of Σ|K|", "kernel/offdiag_mass", limits=(0, 1)),
    Panel("mean cosine", "cosine", (("kernel/mean_cos", "all pairs"), ("kernel/cross/mean_cos", "across prompts"),
                                    ("kernel/same/mean_cos", "same prompt")), level=0),
    Panel("mean |cosine|", "cosine", (("kernel/mean_abs_cos", "all pairs"), ("kernel/cross/mean_abs_cos", "across prompts"),
                                      ("kernel/same/mean_abs_cos", "same prompt")), limits=(0, None)),
    single("participation ratio", "directions", "kernel/participation", limits=(0, None)),
    single("effective rank", "directions", "kernel/erank", limits=(0, None)),
)  # fmt: skip


def recorded(panels: Sequence[Panel], runs: Sequence[Run]) -> tuple[Panel, ...]:
    """The panels of which at least one run has the first metric."""
    return tuple(panel for panel in panels if any(run.has(panel.metrics[0][0]) for run in runs))


def scope_panels(runs: Sequence[Run]) -> tuple[Panel, ...]:
    """Interference by where the probe's prompt stands (A7): the batch, then every set that was recorded."""
    parts = [name.split("/") for run in runs for name in run.metrics]
    names = {part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == ("probe", "interference_sum")}
    order = sorted(names, key=lambda name: (name != "in_batch", split_order(name), name))
    return tuple(
        single(SCOPES.get(name, name), "nats, one step", f"probe/{name}/interference_sum", level=0) for name in order
    )


def over_steps(
    runs: Sequence[Run], panels: Sequence[Panel], *, name: str, caption: str, columns: int = 3, smooth: bool = False,
    share: bool = False,
) -> Picture:  # fmt: skip
    """Small multiples of metrics over training steps, one colour a run; ``share``: one y axis a row.

    ``smooth``: series of more than 60 points are drawn faint, with a centred moving mean on top;
    otherwise 95 % bands are drawn where an interval was recorded.
    """
    columns = min(columns, len(panels))
    with style.drawing():
        rows = -(-len(panels) // columns)
        figure, axes = style.grid(rows, columns, height=2.15, width=style.WIDTH if columns > 1 else 5.6,
                                  sharey="row" if share else False)  # fmt: skip
        for axis, panel in zip(axes.ravel(), panels, strict=False):
            for index, run in enumerate(runs):
                for line, (metric, _) in enumerate(panel.metrics):
                    if run.has(metric):
                        _draw(axis, run, metric, index, line, smooth=smooth)
            _dress(axis, panel)
        style.hide_rest(axes, len(panels))
        for position, axis in enumerate(axes.ravel()[: len(panels)]):
            if position + columns < len(panels):
                axis.set_xlabel("")
            if share and position % columns:
                axis.set_ylabel("")
            else:
                style.plain_numbers(axis.yaxis)
        style.legend(figure, _run_entries(runs) + _line_entries(runs, panels))
        return style.picture(figure, name, caption)


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean; at the ends over what there is. NaN entries are left out."""
    known = np.isfinite(values)
    ones = np.ones(window)
    total = np.convolve(np.where(known, values, 0), ones, "same")
    count = np.convolve(known.astype(float), ones, "same")
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def passk_curves(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> Picture:
    """Pass@k against k, one panel a (set, preset): the base at step 0, each run at its last evaluation."""
    presets = {preset for _, preset in sets}
    with style.drawing():
        columns = min(3, len(sets))
        figure, axes = style.grid(-(-len(sets) // columns), columns, height=3.1, sharey=True,
                                  width=style.WIDTH if columns > 1 else 5.6)  # fmt: skip
        for axis, (subset, preset) in zip(axes.ravel(), sets, strict=False):
            ends, used = [], set()
            for label, run, step, ink, line in passk_rows(runs, subset, preset):
                ks = np.array(run.eval_ks(subset, preset))
                used.update(ks.tolist())
                points = [run.interval(f"eval/{subset}/{preset}/pass@{k}", step) for k in ks]
                value, low, high = np.array(points, float).T
                axis.fill_between(ks, low, high, color=ink, alpha=0.16, lw=0)
                axis.plot(ks, value, color=ink, ls=line, marker="o", ms=3.5)
                ends.append((float(ks[-1]), float(value[-1]), label, ink))
            style.k_axis(axis, sorted(used))
            axis.set_ylim(0, 1.02)
            axis.set_title(subset if len(presets) == 1 else f"{subset}, {preset}")
        style.hide_rest(axes, len(sets))
        for axis in axes[:, 0]:
            axis.set_ylabel("pass@k  (probability)")
        style.label_ends(axes.ravel()[len(sets) - 1], ends)
        return style.picture(
            figure,
            "passk",
            """A9. Probability that at least one of k samples is correct, mean over prompts: where a run starts above the
            base (grey, before training) and ends below it, training traded coverage for single-shot accuracy; bands
            are 95 % cluster bootstrap intervals over prompts.""",
        )


def passk_rows(runs: Sequence[Run], subset: str, preset: str) -> list[tuple[str, Run, int, str, str]]:
    """(label, run, step, colour, line style) of every curve: each distinct base, then the runs."""
    rows, bases = [], {}
    for run in runs:
        if 0 in run.eval_steps(subset, preset):
            ks = run.eval_ks(subset, preset)
            key = tuple(round(run.at(f"eval/{subset}/{preset}/pass@{k}", 0), 9) for k in ks)
            bases.setdefault(key, run)
    for run in bases.values():
        label = "base" if len(bases) == 1 else f"base of {run.name}"
        rows.append((label, run, 0, style.BASE, style.LINES[len(rows) % len(style.LINES)]))
    for index, run in enumerate(runs):
        steps = [step for step in run.eval_steps(subset, preset) if step > 0]
        if steps:
            rows.append((run.name, run, steps[-1], style.colour(index), style.dash(index)))
    return rows


def learning_panels(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> tuple[Panel, ...]:
    """Pass@1 and pass@(largest k) over training, one panel a set that was evaluated at least twice."""
    panels = []
    for subset, preset in sets:
        ks = sorted({k for run in runs for k in run.eval_ks(subset, preset)})
        if ks and any(len(run.eval_steps(subset, preset)) > 1 for run in runs):
            stem = f"eval/{subset}/{preset}/pass@"
            metrics = tuple((f"{stem}{k}", f"pass@{k}") for k in sorted({ks[0], ks[-1]}))
            panels.append(Panel(f"{subset}, {preset}", "probability", metrics, limits=(0, 1)))
    return tuple(panels)


def _draw(axis: Axes, run: Run, metric: str, index: int, line: int, *, smooth: bool) -> None:
    steps, values = run.series(metric)
    ink, dash = style.colour(index), style.LINES[(index // len(style.PALETTE) + line) % len(style.LINES)]
    if smooth and len(steps) > 60:
        if line == 0:
            axis.plot(steps, values, color=ink, lw=0.6, alpha=0.3)
        values = moving_mean(values, window(len(steps)))
    elif not smooth and (band := run.band(metric)) is not None:
        axis.fill_between(*band, color=ink, alpha=0.15, lw=0)
    axis.plot(steps, values, color=ink, ls=dash, marker="o" if len(steps) <= 12 else "")


def window(points: int) -> int:
    """Odd width of the moving mean: about a twentieth of the series."""
    return 2 * (points // 40) + 1


def _dress(axis: Axes, panel: Panel) -> None:
    """Title, unit, level and limits. Zero limits leave room so that a line on the border can be seen."""
    axis.set_title(panel.title)
    axis.set_ylabel(panel.unit)
    style.step_axis(axis)
    if panel.log:
        axis.set_yscale("log")
    if panel.level is not None:
        axis.axhline(panel.level, color=style.INK, lw=0.8, zorder=1.5)
    low, high = panel.limits
    if low == 0:
        top = high if high is not None else float(axis.dataLim.ymax) if axis.dataLim.ymax > 0 else 1.0
        axis.set_ylim(-0.03 * top, (1.03 if high is not None else 1.08) * top)
    elif high is not None:
        bottom = min(float(axis.dataLim.ymin), high)
        reach = max(high - bottom, 1e-3 * abs(high))
        axis.set_ylim(high - 1.08 * reach, high + 0.08 * reach)


def _run_entries(runs: Sequence[Run]) -> list[tuple[str, dict]]:
    return [(run.name, {"color": style.colour(i), "ls": style.dash(i)}) for i, run in enumerate(runs)]


def _line_entries(runs: Sequence[Run], panels: Sequence[Panel]) -> list[tuple[str, dict]]:
    """What dashes mean, when some panel draws more than one metric."""
    entries: dict[str, str] = {}
    for panel in panels:
        drawn = [i for i, (metric, _) in enumerate(panel.metrics) if any(run.has(metric) for run in runs)]
        for line in drawn if len(drawn) > 1 else []:
            entries.setdefault(panel.metrics[line][1], style.LINES[line])
    return [(label, {"color": style.BASE, "ls": line}) for label, line in entries.items()]
