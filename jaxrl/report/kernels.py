"""Pictures of gradient kernels, from plain arrays: heat map, spectrum, share of each layer; and over training.

A kernel is ``K[n, m]`` (nats² per squared parameter unit) between the rows of two sets, or of one
set with itself; its cosines are ``C[n, m]``. Layers are parts ``K[blocks, n, m]`` that sum to K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

from jaxrl.influence.labels import label_order
from jaxrl.influence.structure import cosines, effective_rank
from jaxrl.report import style
from jaxrl.report.read import Run, read_json
from jaxrl.report.style import Picture

DIVERGING = "PuOr_r"  # orange above 0, purple below; told apart with any common colour blindness
NAMED = 14  # groups of a side up to which they are written at the border
ACROSS = 3  # kernels drawn side by side
FLOOR = 1e-7  # of the largest value: where a spectrum in single precision ends


def heat_map(
    name: str, cosine: np.ndarray, labels: tuple[Sequence[Any], Sequence[Any]], caption: str,
    *, sides: tuple[str, str] = ("rows A", "rows B"), itself: bool = False,
) -> Picture:  # fmt: skip
    """Cosines ``[n, m]`` with equal labels side by side; thin lines part the groups."""
    orders = [label_order(side) for side in labels]
    limit = _reach([cosine], itself=itself)
    with style.drawing():
        figure, axes = style.grid(1, 1, height=4.6, width=6.4)
        _heat(axes[0, 0], cosine[np.ix_(*orders)], limit)
        for axis, order, side in zip("yx", orders, labels, strict=True):
            _groups(axes[0, 0], axis, [side[i] for i in order])
        axes[0, 0].set_ylabel(sides[0])
        axes[0, 0].set_xlabel(sides[1])
        _colour_bar(figure, axes, limit)
        return style.picture(figure, name, caption)


def spectrum(name: str, curves: Sequence[tuple[str, np.ndarray]], caption: str, *, unit: str = "eigenvalue") -> Picture:
    """Descending spectra on a log axis, each (label, values); later curves are darker."""
    largest = max((float(np.max(values, initial=0)) for _, values in curves), default=0.0) or 1.0
    shades = _shades(len(curves))
    with style.drawing():
        figure, axes = style.grid(1, 1, height=3.2, width=6.4)
        panel = axes[0, 0]
        for (_, values), ink in zip(curves, shades, strict=True):
            values = np.maximum(np.sort(values)[::-1], FLOOR * largest)
            panel.semilogy(np.arange(1, len(values) + 1), values, color=ink, marker="o", ms=3)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel.set_xlabel("rank")
        panel.set_ylabel(unit)
        style.legend(figure, [(label, {"color": ink}) for (label, _), ink in zip(curves, shades, strict=True) if label])
        return style.picture(figure, name, caption)


def layer_profile(name: str, blocks: Sequence[str], shares: Mapping[str, np.ndarray], caption: str) -> Picture:
    """Shares of each block, one marked line a measure (``shares[measure][block]``)."""
    with style.drawing():
        figure, axes = style.grid(1, 1, height=3.0, width=max(6.4, min(style.WIDTH, 0.28 * len(blocks) + 2)))
        panel, ends = axes[0, 0], []
        for index, (label, values) in enumerate(shares.items()):
            panel.plot(np.arange(len(blocks)), values, color=style.colour(index), marker=style.MARKERS[index])
            ends.append((len(blocks) - 1.0, float(values[-1]), label, style.colour(index)))
        panel.axhline(0, color=style.INK, lw=0.8, zorder=1.5)
        _block_axis(panel, blocks)
        panel.set_ylabel("share of the whole")
        style.label_ends(panel, ends, size=8.5)
        return style.picture(figure, name, caption)


def predicted_steps(name: str, steps: Sequence[tuple[str, np.ndarray, np.ndarray]], caption: str) -> Picture:
    """Predicted against measured change of every row (nats), one panel a step: (title, predicted, measured)."""
    with style.drawing():
        figure, axes = style.grid(1, len(steps), height=3.5, width=3.6 * len(steps) + 0.8)
        for index, (panel, (title, predicted, measured)) in enumerate(zip(axes[0], steps, strict=True)):
            both = np.concatenate([predicted, measured, [0.0]])
            low, high = float(both.min()), float(both.max())
            room = 0.06 * ((high - low) or 1.0)
            ends = (low - room, high + room)
            panel.plot(ends, ends, color=style.INK, ls="--", lw=1.0)
            panel.scatter(
                predicted, measured, s=26, color=style.colour(index), marker=style.MARKERS[index], alpha=0.75, lw=0
            )
            panel.set_xlim(*ends)
            panel.set_ylim(*ends)
            panel.set_aspect("equal")
            panel.set_title(title)
            panel.set_xlabel("predicted change  (nats)")
            panel.set_ylabel("" if index else "measured change  (nats)")
            style.plain_numbers(panel.xaxis)
            style.plain_numbers(panel.yaxis)
        return style.picture(figure, name, caption)


def layer_shares(layers: np.ndarray, *, itself: bool) -> dict[str, np.ndarray]:
    """What each block adds, as shares: of ``sum |K|`` summed over blocks, of ``sum K`` with its sign over ``sum |K|``,
    and with ``itself`` of the squared gradient norms (those sum to 1 exactly, and |K| leaves the diagonal out).
    """
    layers = np.asarray(layers, np.float64)
    n, m = layers.shape[1:]
    off = ~np.eye(n, m, dtype=bool) if itself and n > 1 else np.ones((n, m), bool)
    size = np.abs(layers[:, off]).sum(axis=1)
    total = np.abs(layers.sum(axis=0)[off]).sum()
    shares = {"|K|": _over(size, size.sum()), "K, signed": _over(layers[:, off].sum(axis=1), total)}
    if not itself:
        return shares
    norms = np.trace(layers, axis1=1, axis2=2)
    return {"squared norms": _over(norms, norms.sum()), **shares}


def kernel_spectrum(cosine: np.ndarray, *, itself: bool) -> np.ndarray:
    """Eigenvalues of a symmetric cosine matrix, singular values of another; descending, none below 0."""
    cosine = np.asarray(cosine, np.float64)
    if not itself:
        return np.linalg.svd(cosine, compute_uv=False)
    return np.maximum(np.linalg.eigvalsh((cosine + cosine.T) / 2)[::-1], 0)


# ---------------------------------------------------------------- of a run


def training_items(runs: Sequence[Run]) -> list[Picture | str]:
    """The kernels that training stored, of every run that has some: probe cosines, their spectra, shares of layers."""
    items: list[Picture | str] = []
    for index, run in enumerate(runs):
        suffix = "" if len(runs) == 1 else f"-{index + 1}"
        steps = run.array_steps("probe_kernel")
        kernels = [run.array(f"probe_kernel/{step}") for step in steps]
        if steps:
            said = "" if len(runs) == 1 else f"{run.name}. "
            found = [cosines(kernel.astype(np.float64)) for kernel in kernels]
            items += [_probe_heat(run, steps, found, suffix, said), _probe_spectra(steps, found, suffix, said)]
        items += _training_layers(run, suffix)
    return items


def _probe_heat(run: Run, steps: list[int], found: list[np.ndarray], suffix: str, said: str) -> Picture:
    """Up to three kernels of the probe with itself, correct answers first."""
    chosen = sorted({0, len(steps) // 2, len(steps) - 1})[:ACROSS]
    correct = _probe_labels(run, steps[0], len(found[0]))
    order = label_order(correct)
    limit = _reach([found[i] for i in chosen], itself=True)
    with style.drawing():
        figure, axes = style.grid(1, len(chosen), height=3.2, width=style.WIDTH if len(chosen) > 1 else 5.2)
        for panel, i in zip(axes[0], chosen, strict=True):
            _heat(panel, found[i][np.ix_(order, order)], limit)
            for axis in "yx":
                _groups(panel, axis, [correct[j] for j in order], write=axis == "x" or i == chosen[0])
            panel.set_title(f"step {steps[i]}")
        _colour_bar(figure, axes, limit)
        return style.picture(
            figure,
            f"kernel-training-cosines{suffix}",
            f"""{said}Cosine between the gradients of every two of the followed probe answers, at one scale: blocks that
            darken between steps are answers that have come to move together (orange) or against each other
            (purple); the diagonal, 1 everywhere, says nothing.""",
        )


def _probe_labels(run: Run, step: int, count: int) -> list[str]:
    """Whether each followed probe answer is correct, where the run says which ones were followed."""
    rows = np.asarray(attributes(run, f"probe_kernel/{step}").get("probe_rows", ()), int)
    known = run.probe.get("correct")
    if known is None or len(rows) != count or rows.max(initial=-1) >= len(known):
        return ["probe"] * count
    return ["correct" if known[i] else "incorrect" for i in rows]


def _probe_spectra(steps: list[int], found: list[np.ndarray], suffix: str, said: str) -> Picture:
    chosen = np.unique(np.linspace(0, len(steps) - 1, 6).round().astype(int))
    curves = [(f"step {steps[i]}", kernel_spectrum(found[i], itself=True)) for i in chosen]
    ranks = [effective_rank(values) for _, values in (curves[0], curves[-1])]
    return spectrum(
        f"kernel-training-spectra{suffix}",
        curves,
        f"""{said}Eigenvalues of the cosine matrix of the followed probe answers: a spectrum that steepens means gradients
        in fewer directions, whatever their length. Effective rank of {len(found[0])}: {ranks[0]:.1f} at step
        {steps[0]}, {ranks[1]:.1f} at step {steps[-1]}.""",
    )


def _training_layers(run: Run, suffix: str) -> list[Picture | str]:
    """Shares of |K| between batch and probe, blocks by steps."""
    steps = run.array_steps("layers")
    if not steps:
        return []
    blocks = attributes(run, f"layers/{steps[0]}").get("blocks", [])
    shares = np.stack([layer_shares(run.array(f"layers/{step}"), itself=False)["|K|"] for step in steps])
    blocks = list(blocks) if len(blocks) == shares.shape[1] else [str(i) for i in range(shares.shape[1])]
    with style.drawing():
        figure, axes = style.grid(1, 1, height=0.9 + min(4.5, 0.22 * len(steps) + 1.4))
        panel = axes[0, 0]
        norm = Normalize(0, float(shares.max()) or 1.0)
        panel.imshow(shares, cmap=style.SEQUENTIAL, norm=norm, aspect="auto", interpolation="nearest")
        panel.grid(False)
        _block_axis(panel, blocks)
        some = np.unique(np.linspace(0, len(steps) - 1, min(10, len(steps))).round().astype(int))
        panel.set_yticks(some, [str(steps[i]) for i in some])
        panel.set_ylabel("training step")
        bar = figure.colorbar(ScalarMappable(norm, style.SEQUENTIAL), ax=panel, label="share of Σ|K| over blocks")
        bar.outline.set_visible(False)
        said = f"{run.name}. " if suffix else ""
        return [
            style.picture(
                figure,
                f"kernel-training-layers{suffix}",
                f"""{said}Where the kernel between the live batch and the followed probe answers comes from: each block's
                share of Σ|K|, a row a step. Tied matrices stand once, under the embedding.""",
            )
        ]


def attributes(run: Run, name: str) -> dict[str, Any]:
    """The attributes of one array of arrays.zarr, {} where it has none."""
    file = run.path / "arrays.zarr" / name / ".zattrs"
    return read_json(file) if file.is_file() else {}


# ---------------------------------------------------------------- parts of pictures


def _heat(panel: Axes, values: np.ndarray, limit: float) -> None:
    panel.imshow(values, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    panel.grid(False)


def _groups(panel: Axes, axis: str, labels: Sequence[Any], *, write: bool = True) -> None:
    """Lines between runs of equal labels, and their names in the middle where there are not too many."""
    edges = [0, *(i for i in range(1, len(labels)) if labels[i] != labels[i - 1]), len(labels)]
    if len(edges) - 1 > len(labels) / 2 and len(edges) > 3:  # nearly every row stands alone: nothing to part
        return
    for edge in edges[1:-1]:
        (panel.axhline if axis == "y" else panel.axvline)(edge - 0.5, color=style.INK, lw=0.6)
    middles = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    names = [_short(labels[low]) for low in edges[:-1]]
    line = panel.yaxis if axis == "y" else panel.xaxis
    if len(names) > NAMED or not write:
        line.set_major_locator(FixedLocator(middles))
        line.set_major_formatter(NullFormatter())
        return
    turned = {"rotation": 40, "ha": "right"} if axis == "x" and sum(map(len, names)) > 40 else {}
    (panel.set_yticks if axis == "y" else panel.set_xticks)(middles, names, **turned)


def _short(label: Any) -> str:
    text = "none" if label is None else str(label)
    return text if len(text) <= 18 else f"{text[:17]}…"


def _block_axis(panel: Axes, blocks: Sequence[str]) -> None:
    """Names of blocks; of many layers every so-manieth."""
    every = -(-len(blocks) // 24)
    names = [name.removeprefix("layers.") for name in blocks]
    keep = [i for i, name in enumerate(names) if not name.isdigit() or int(name) % every == 0]
    crowded = any(len(names[i]) > 3 for i in keep) and len(keep) > 8
    panel.set_xticks(keep, [names[i] for i in keep], **({"rotation": 60, "ha": "right"} if crowded else {}))
    panel.set_xlabel("block of parameters (numbers: layers)")


def _colour_bar(figure: Any, axes: np.ndarray, limit: float) -> None:
    bar = figure.colorbar(ScalarMappable(Normalize(-limit, limit), DIVERGING), ax=axes, label="cosine", extend="both")
    bar.outline.set_visible(False)


def _reach(found: Sequence[np.ndarray], *, itself: bool) -> float:
    """Symmetric colour limits: the 98th percentile of |cosine|, without the diagonal of rows with themselves."""
    parts = [np.abs(c[~np.eye(*c.shape, dtype=bool)] if itself and len(c) > 1 else c).ravel() for c in found]
    reach = float(np.quantile(np.concatenate(parts), 0.98))
    return reach if reach > 0 else 1.0


def _shades(count: int) -> list[Any]:
    """Light to dark."""
    if count == 1:
        return [style.colour(0)]
    return [style.matplotlib.colormaps["viridis_r"](x) for x in np.linspace(0.15, 1, count)]


def _over(values: np.ndarray, total: float) -> np.ndarray:
    return values / total if total > 0 else np.zeros_like(values)
