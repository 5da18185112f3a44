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
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, ScalarFormatter

BASE = "#6b6b6b"
INK = "#222222"
FAINT = "#b8b8b8"
ALARM = "#c1121f"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
SEQUENTIAL = "cividis"
WIDTH = 9.0  # inches; the page is set so that text in a figure is about as large as its caption
DPI = 170

SETTINGS = {
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10.0,
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


def legend(figure: Figure, entries: Iterable[tuple[str, dict]]) -> None:
    """One legend above the panels instead of one in each; entries are (label, Line2D properties)."""
    entries = list(entries)
    handles = [Line2D([], [], label=label, **style) for label, style in entries]
    if handles:
        longest = max(len(label) for label, _ in entries)
        columns = max(1, min(len(handles), int(105 / (longest + 7))))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.6)


def label_ends(axes: Axes, items: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) labels right of their points, moved apart where they would overlap.

    Call it after the limits of the y axis (linear) are final.
    """
    low, high = axes.get_ylim()
    gap = (high - low) * 12.5 / max(axes.get_window_extent().height * 72 / axes.figure.dpi, 1)
    wanted = sorted(items, key=lambda item: item[1])
    heights = _apart([item[1] for item in wanted], gap, high + gap / 4)
    for (x, y, text, ink), height in zip(wanted, heights, strict=True):
        axes.annotate(
            text, (x, y), xytext=(1.03, height), textcoords=axes.get_yaxis_transform(), color=ink, va="center",
            fontsize=9.5, annotation_clip=False,
        )  # fmt: skip


def _apart(values: Sequence[float], gap: float, top: float) -> list[float]:
    """Sorted ``values`` moved so that neighbours are ``gap`` apart and none is above ``top``."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + gap) if placed else value)
    for i in reversed(range(len(placed))):
        ceiling = top if i == len(placed) - 1 else placed[i + 1] - gap
        placed[i] = min(placed[i], ceiling)
    return placed


def step_axis(axes: Axes, label: str = "training step") -> None:
    """Whole steps on x; a common power of ten instead of long numbers on y."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.margins(x=0.02)
    plain_numbers(axes)


def plain_numbers(axes: Axes) -> None:
    """Few ticks on a linear y axis, with a common power of ten for very small or large values."""
    if axes.get_yscale() == "linear":
        formatter = ScalarFormatter(useMathText=True)
        formatter.set_powerlimits((-3, 4))
        axes.yaxis.set_major_formatter(formatter)
        axes.yaxis.set_major_locator(MaxNLocator(5))


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
