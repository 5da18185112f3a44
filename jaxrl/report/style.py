"""How the report's pictures look: one palette, one set of sizes, direct labels.

The palette is Okabe and Ito's (2008, "Color Universal Design"), which readers with any common
colour blindness can tell apart. The base model is always grey; run ``i`` has colour ``i`` in every
figure. Figures are made without pyplot, so that drawing keeps no global state.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

BASE = "#6b6b6b"
INK = "#222222"
FAINT = "#b8b8b8"
MINUS = "\N{MINUS SIGN}"
ALARM = "#c1121f"
ORDERS = ("#222222", "#8a3ffc")  # first and second order: no run has these colours
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
SEQUENTIAL = "cividis"
WIDTH = 9.0  # inches; the page is set so that text in a figure is about as large as its caption
DPI = 170

SETTINGS = {
    "font.size": 9.5,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ebebeb",
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "mathtext.default": "regular",
}


@dataclass(frozen=True)
class Picture:
    """One drawn figure: file name without ending, a one-sentence caption, and its PNG bytes."""

    name: str
    caption: str
    png: bytes


@contextmanager
def drawing() -> Iterator[None]:
    """Everything drawn inside has the report's look, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def grid(rows: int, columns: int, *, height: float = 2.5, width: float = WIDTH, **kwargs) -> tuple[Figure, np.ndarray]:
    """A figure of ``rows x columns`` panels, each ``height`` inches tall, and its axes [rows, columns]."""
    figure = Figure(figsize=(width, height * rows + 0.35), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def picture(figure: Figure, name: str, caption: str) -> Picture:
    """Render ``figure``; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return Picture(name, " ".join(caption.split()), buffer.getvalue())


def colour(index: int) -> str:
    """The colour of run ``index``; colours repeat after six, when ``dash`` changes instead."""
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    """The line style of run ``index``: solid for the first six runs."""
    return LINES[index // len(PALETTE) % len(LINES)]


def marker(index: int) -> str:
    """The marker of run ``index``: a circle for the first six runs."""
    return MARKERS[index // len(PALETTE) % len(MARKERS)]


def legend(figure: Figure, entries: Iterable[tuple[str, dict]]) -> None:
    """One legend above the panels instead of one in each; entries are (label, Line2D properties)."""
    entries = list(entries)
    handles = [Line2D([], [], label=label, **style) for label, style in entries]
    if handles:
        longest = max(len(label) for label, _ in entries)
        one_row = sum(len(label) + 7 for label, _ in entries) <= 110 * figure.get_figwidth() / WIDTH
        columns = len(handles) if one_row else max(1, int(105 * figure.get_figwidth() / WIDTH / (longest + 7)))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.6)


def label_ends(axes: Axes, items: Sequence[tuple[float, float, str, str]], *, size: float = 9.5) -> None:
    """Write (x, y, text, colour) labels right of the panel at the height of their points, moved apart where
    they would overlap. Works on any scale; call it after the limits are final.
    """
    axes.figure.draw_without_rendering()  # settles the layout
    to_fraction = axes.transData + axes.transAxes.inverted()
    items = sorted(items, key=lambda item: item[1])
    heights = np.array([to_fraction.transform(item[:2])[1] for item in items])
    gap = 1.3 * size / (axes.get_window_extent().height * 72 / axes.figure.dpi)
    heights = spread(heights, gap)
    heights -= np.max(heights - 1.04, initial=0)  # a long list ends at the panel's top
    for (x, y, text, ink), height in zip(items, heights, strict=True):
        axes.annotate(text, (x, y), xytext=(1.02, height), textcoords="axes fraction", color=ink, va="center",
                      fontsize=size, annotation_clip=False)  # fmt: skip


def spread(values: np.ndarray, gap: float) -> np.ndarray:
    """Ascending ``values`` moved as little as possible (least squares) so that neighbours are ``gap`` apart."""
    blocks: list[list[float]] = []  # [sum, count] of pooled neighbours: isotonic regression of value - i * gap
    for i, value in enumerate(values):
        blocks.append([float(value) - i * gap, 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    level = np.concatenate([np.full(int(count), total / count) for total, count in blocks] or [np.zeros(0)])
    return level + gap * np.arange(len(level))


def label_line(axes: Axes, text: str, start: tuple[float, float], end: tuple[float, float], at: float = 0.5) -> None:
    """Write ``text`` just above the line from ``start`` to ``end``, turned along it, on any scale.

    Call it when nothing more is added to the figure, which would change the angle.
    """
    axes.figure.draw_without_rendering()
    a, b = axes.transData.transform([start, end])
    angle = float(np.degrees(np.arctan2(*(b - a)[::-1])))
    up = np.array([a[1] - b[1], b[0] - a[0]]) / np.hypot(*(b - a)) * 2.5 * axes.figure.dpi / 72
    x, y = axes.transAxes.inverted().transform(a + at * (b - a) + up)
    axes.text(x, y, text, transform=axes.transAxes, rotation=angle, rotation_mode="anchor", ha="center", va="bottom",
              fontsize=8.5, color=INK)  # fmt: skip


def step_axis(axes: Axes, label: str = "training step") -> None:
    """Whole steps on x."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.margins(x=0.02)


def plain_numbers(axis: Axis) -> None:
    """Few round ticks on a linear axis; very small or large values share a power of ten, named in the label.

    Call it after limits and label are final.
    """
    if axis.get_scale() != "linear":
        return
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    largest = float(np.max(np.abs(axis.get_view_interval())))
    power = int(np.floor(np.log10(largest))) if largest > 0 else 0
    if -3 < power < 4:
        power = 0
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10.0**power:g}".replace("-", MINUS)))
    if power:
        axis.set_label_text(f"{axis.get_label_text()}  ($\\times 10^{{{power}}}$)")


def k_axis(axes: Axes, ks: Sequence[int]) -> None:
    """Samples per prompt on a base-2 logarithmic axis, ticks at the ``ks`` that were evaluated."""
    axes.set_xscale("log", base=2)
    keep = [k for k in ks if len(ks) <= 5 or np.log2(k) % 2 == 0]
    axes.xaxis.set_major_locator(FixedLocator(keep))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("samples k per prompt")


def hide_rest(axes: np.ndarray, used: int) -> None:
    """Remove the panels after the first ``used`` of a grid."""
    for panel in axes.ravel()[used:]:
        panel.remove()
