"""What the report shows, in order: each section's figures, tables and notes on what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.report import curves, figures, kernels, prompts, structure, tables
from jaxrl.report.curves import Panel, over_steps, recorded
from jaxrl.report.drift import drift_curve
from jaxrl.report.read import Run, read_arrays, read_json, split_order
from jaxrl.report.style import Picture
from jaxrl.report.tables import Table

Item = Picture | Table | str  # a string is a note to the reader


@dataclass
class Section:
    """One numbered part of the page."""

    id: str
    title: str
    intro: str = ""
    items: list[Item] = field(default_factory=list)


def report_sections(runs: Sequence[Run], check: Path | None) -> list[Section]:
    """Everything that the page shows, in order."""
    sets = list(dict.fromkeys(pair for run in runs for pair in run.eval_sets() if run.eval_ks(*pair)))
    return [
        _what_was_run(runs),
        _headline(runs, sets),
        _coverage(runs, sets),
        _steps(runs, "training", "Training", curves.TRAINING, "One point a training step; faint lines are single steps, "
               "solid lines a centred moving mean over a twentieth of the run.", smooth=True),
        *_further(runs),
        _steps(runs, "strength", "Influence strength", curves.STRENGTH, "A6. Mean square change of the probe's "
               "log-probabilities over one training step, and divided by the squared size of the parameter change: "
               "growth on the left without growth on the right is growth of the steps.", smooth=True),
        _interference(runs),
        _decomposition(runs),
        _steps(runs, "clip", "Clip violations", curves.CLIP, "A23. Fraction of probability ratios outside the clip range: "
               "(a) must be 0, (b) shows whether clipping could act at all, (c) one step and (d) all steps on probe "
               "answers, which no clipping restrains.", columns=2, smooth=True),
        _agreement(runs),
        _steps(runs, "kernel", "Kernel structure", curves.KERNEL, "A.4. Shape of the gradient kernel over "
               "training: growing squared norms (trace / n) with steady cosines and ranks mean longer gradients, not more "
               "entangled ones."),
        *_kernels(runs),
        _check(runs, check),
    ]  # fmt: skip


def check_pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    """F-C1 to F-C7 from a folder of ``jaxrl check``, and what was missing or left out (keys in ``figures``, ``structure``)."""
    pairs, batch = read_arrays(folder / "pairs.npz"), read_arrays(folder / "batch.npz")
    scalars = _scalars(folder)
    pictures, notes = [], []
    if pairs or batch:
        pictures.append(figures.remainders(pairs, batch, scalars))
    if pairs:
        pictures.append(figures.pair_bound(pairs))
    else:
        notes.append("pairs.npz is missing: no single-pair figures (F-C1 left, F-C2).")
    if not batch:
        notes.append("batch.npz is missing: no whole-batch figures (F-C1 right, F-C3).")
    elif pairs:
        pictures.append(figures.batch_bound(batch, float(pairs["bound_c"])))
    return pictures + _over_training(folder), notes + _left_out(folder)


def _over_training(folder: Path) -> list[Picture]:
    """F-C4 to F-C7, as far as the check had a run to look at."""
    whole = _whole(folder)
    found, moved = read_arrays(folder / "structure.npz"), read_arrays(folder / "transfer.npz")
    pictures = [structure.spectra(found)] if found else []
    if whole.get("c14"):
        pictures.append(structure.attribution(whole["c14"]))
    if found:
        pictures.append(structure.heat_maps(found))
    if moved:
        pictures.append(structure.transfer(moved, (whole.get("c15") or {}).get("p")))
    return pictures


def _left_out(folder: Path) -> list[str]:
    """Why parts of the check are missing, in the check's own words."""
    return list((_whole(folder).get("left_out") or {}).values())


def find_check(runs: Sequence[Run]) -> Path | None:
    """The check folder of the first run that has one."""
    return next((run.path / "check" for run in runs if (run.path / "check" / "check.json").is_file()), None)


def _what_was_run(runs: Sequence[Run]) -> Section:
    differ, common = tables.settings(runs) if any(run.config for run in runs) else (None, None)
    section = Section("runs", "What was run")
    section.items += [f"{run.name}: {note}" for run in runs for note in run.notes]
    environment = tables.environment(runs)
    if environment.rows:
        section.items.append(environment)
    if differ is not None and len(runs) > 1:
        section.items.append(differ if differ.rows else "The runs have the same settings.")
    if common is not None and common.rows:
        section.items.append(common)
    return section


def _headline(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> Section:
    section = Section("headline", "Headline")
    if sets:
        section.items.append(tables.headline(runs, sets))
    else:
        section.items.append("No evaluation was recorded (metrics eval/<set>/<sampler>/pass@<k>).")
    return section


def _coverage(runs: Sequence[Run], sets: Sequence[tuple[str, str]]) -> Section:
    section = Section("coverage", "Coverage: pass@k")
    if not sets:
        section.items.append("No pass@k was recorded, so there is no curve to draw.")
        return section
    section.items.append(curves.passk_curves(runs, sets))
    for run in runs:
        if not any(step > 0 for pair in sets for step in run.eval_steps(*pair)):
            section.items.append(f"{run.name}: no evaluation after training started.")
    if not any(0 in run.eval_steps(*pair) for run in runs for pair in sets):
        section.items.append("No run was evaluated at step 0, so the base has no curve.")
    panels = curves.learning_panels(runs, sets)
    if panels:
        section.items.append(
            over_steps(runs, panels, name="passk-over-training", caption="A9. Single-shot accuracy and coverage over "
                       "training: when the solid line rises while the dashed one falls, the policy is sharpening; "
                       "bands are 95 % cluster bootstrap intervals over prompts.")
        )  # fmt: skip
    drift = drift_curve(runs, sets)
    if drift is not None:
        section.items.append(drift)
    return section


def _further(runs: Sequence[Run]) -> list[Section]:
    """What some algorithms record beside the rest: no section where none of the runs does."""
    panels = recorded(curves.FURTHER, runs)
    if not panels:
        return []
    caption = (
        "Generation batches of a refill, a critic's fit, and what preferences and their importance ratios did: both "
    )
    caption += "log-probabilities of a pair may fall while its margin grows, and ratios then vanish with them."
    return [_steps(runs, "further", "Refill, critic, preferences", panels, caption, smooth=True)]


def _steps(
    runs: Sequence[Run], name: str, title: str, panels: Sequence[Panel], caption: str, *, columns: int = 3,
    smooth: bool = False,
) -> Section:  # fmt: skip
    """A section with one figure of metrics over training."""
    return Section(name, title, items=_figure(runs, name, panels, caption, columns=columns, smooth=smooth))


def _figure(
    runs: Sequence[Run], name: str, panels: Sequence[Panel], caption: str, *, columns: int = 3, smooth: bool = False,
    share: bool = False,
) -> list[Item]:  # fmt: skip
    """The figure of the recorded panels, and notes on the rest."""
    found = recorded(panels, runs)
    items: list[Item] = []
    if found:
        items.append(over_steps(runs, found, name=name, caption=caption, columns=columns, smooth=smooth, share=share))
    missing = [f"{panel.title} ({panel.metrics[0][0]})" for panel in panels if panel not in found]
    if missing:
        items.append("Not recorded: " + "; ".join(missing) + ".")
    for run in runs:
        if found and not any(run.has(panel.metrics[0][0]) for panel in found):
            items.append(f"{run.name} recorded none of these.")
    return items


def _interference(runs: Sequence[Run]) -> Section:
    section = Section(
        "interference", "Interference",
        "Probes are answers drawn from the base before training. Falling log-probability of all of them is forced by "
        "KL ≥ 0 and is no sign of harm; what matters is how correct and incorrect ones differ.",
    )  # fmt: skip
    section.items += _figure(
        runs, "interference", curves.INTERFERENCE, "A4, cumulative. Change of log-probability since step 0 of base answers "
        "that are correct (pooled, and averaged by prompt) and incorrect: lines below 0 lost probability; bands are "
        "95 % intervals, clustered by prompt.", share=True)  # fmt: skip
    section.items += _figure(
        runs, "interference-steps", curves.STEPWISE, "A4, one training step. The same changes over single steps (faint) "
        "with a centred moving mean: negative means that the update pushed these answers down.", smooth=True, share=True)  # fmt: skip
    scopes = curves.scope_panels(runs)
    if scopes:
        section.items += _figure(
            runs, "interference-scopes", scopes, "A7. Interference on correct answers (sum) by where the probe's prompt "
            "stands: what fades from left to right is learning about the batch, what persists on the right crosses "
            "problem families.", columns=4, smooth=True, share=True)  # fmt: skip
    else:
        section.items.append("Not recorded: interference by scope (probe/<scope>/interference_sum, A7).")
    table = tables.influence(runs)
    section.items.append(table if table.rows else "No cumulative influence was recorded, so there is no table.")
    return section


def _decomposition(runs: Sequence[Run]) -> Section:
    section = Section("decomposition", "Decomposition of interference (A5)")
    parts = [(run.name, prompts.decomposition(run.exact) if run.exact else prompts.EMPTY) for run in runs]
    for run, (_, part) in zip(runs, parts, strict=True):
        if not run.exact:
            section.items.append(f"{run.name}: no eval/exact*.json with p_base, p_now and delta_plus of each prompt.")
        elif part["left_out"]:
            section.items.append(f"{run.name}: left out {int(part['left_out'])} of {int(part['left_out']) + len(part['uid'])} "
                                 "prompts, whose p is 0 or that have no correct base answer.")  # fmt: skip
    splits = sorted({str(s) for _, part in parts for s in part["split"]}, key=lambda s: (split_order(s), s))
    if splits:
        shown = [prompts.decomposition_means(parts, splits), prompts.decomposition_prompts(parts, splits)]
        section.items = [*shown, tables.decomposition(parts, splits), *section.items]
    return section


def _agreement(runs: Sequence[Run]) -> Section:
    section = Section("agreement", "Predicted against measured change")
    section.items += _figure(
        runs, "agreement", curves.AGREEMENT, "C10. First-order prediction of each probe's change along the actual parameter "
        "change against the measured one: where the ratio is near 1 and the error above the noise floor, gradients "
        "explain the step.", columns=2)  # fmt: skip
    points = []
    for index, run in enumerate(runs):
        logps = run.array("probe_logp_sum")
        steps = [step for step in run.array_steps("predicted") if logps is not None and step + 1 < len(logps)]
        if logps is None or not steps:
            section.items.append(f"{run.name}: no scatter, arrays.zarr lacks predicted/<step> or probe_logp_sum.")
            continue
        predicted = np.concatenate([run.array(f"predicted/{step}") for step in steps])
        points.append((index, run.name, predicted, np.concatenate([logps[step + 1] - logps[step] for step in steps])))
    if points:
        section.items.insert(1, prompts.agreement(points))
    return section


def _kernels(runs: Sequence[Run]) -> list[Section]:
    """What ``influence.every`` stored of whole kernels, where some run has it."""
    items = kernels.training_items(runs)
    return [Section("kernel-training", "The kernel during training", items=list(items))] if items else []


def _check(runs: Sequence[Run], folder: Path | None) -> Section:
    section = Section(
        "check", "Kernel check", "In double precision, from a saved step: is the paper's bound what it claims?"
    )
    scalars = _scalars(folder) if folder else {}
    scalars = scalars or next((run.summary["kernel_check"] for run in runs if "kernel_check" in run.summary), {})
    if scalars:
        section.items.append(tables.kernel_check(scalars))
    if folder is None:
        section.items.append("No check/check.json was found: run `jaxrl check RUN` and render the report again.")
        return section
    pictures, notes = check_pictures(folder)
    section.items += pictures
    extra = read_json(folder / "check.json").get("tables", {}) if (folder / "check.json").is_file() else {}
    for name in tables.CHECK_TITLES:
        table = tables.check_table(name, folder, extra)
        section.items.append(table if table else f"{name} is missing from {folder.name}/.")
    section.items += structure.check_tables(_whole(folder))
    section.items += notes
    return section


def _scalars(folder: Path) -> dict[str, Any]:
    whole = _whole(folder)
    return whole.get("kernel_check", whole)


def _whole(folder: Path) -> dict[str, Any]:
    path = folder / "check.json"
    return read_json(path) if path.is_file() else {}
