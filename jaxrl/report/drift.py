"""What accuracy costs in drift: evaluations against the KL between base and policy, as training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.report import style
from jaxrl.report.read import Run
from jaxrl.report.style import Picture

DRIFT = "kl/forward_base"  # nats a response, by the probe


def drift_points(run: Run, subset: str, preset: str) -> tuple[np.ndarray, np.ndarray]:
    """KL(base || policy) and pass@1 at every evaluation whose drift is known; 0 at the base."""
    metric = f"eval/{subset}/{preset}/pass@1"
    if not (run.has(metric) and run.has(DRIFT)):
        return np.zeros(0), np.zeros(0)
    known = dict(zip(*(x.tolist() for x in run.series(DRIFT)), strict=True))
    steps = [step for step in run.eval_steps(subset, preset) if step == 0 or step - 1 in known]
    drift = [0.0 if step == 0 else known[step - 1] for step in steps]
    return np.array(drift), np.array([run.at(metric, step) for step in steps])


def drift_curve(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> Picture | None:
    """One panel a set; None where no run has two points."""
    found = [pair for pair in sets if any(len(drift_points(run, *pair)[0]) > 1 for run in runs)][:3]
    if not found:
        return None
    with style.drawing():
        figure, axes = style.grid(1, len(found), height=3.0, sharey=True, width=style.WIDTH if len(found) > 1 else 5.6)
        for axis, (subset, preset) in zip(axes.ravel(), found, strict=True):
            ends = []
            for index, run in enumerate(runs):
                drift, value = drift_points(run, subset, preset)
                if len(drift):
                    axis.plot(drift, value, color=style.colour(index), ls=style.dash(index), marker="o", ms=3.5)
                    ends.append((float(drift[-1]), float(value[-1]), run.name, style.colour(index)))
            axis.set_title(subset)
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("KL(base to policy), nats")
        axes[0, 0].set_ylabel("pass@1  (probability)")
        style.label_ends(axes.ravel()[-1], ends)
        return style.picture(
            figure,
            "drift",
            """Accuracy against drift: each point is an evaluation, joined in the order of training, its drift the
            KL divergence of the base's responses (A19). A curve that bends down has been optimised past its best;
            at equal drift the higher curve spends it better.""",
        )
