"""Run folders into one self-contained HTML page, with its figures and tables beside it."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from jaxrl.errors import JaxrlError
from jaxrl.report import curves, figures, prompts, style, tables
from jaxrl.report.curves import Panel, over_steps, recorded
from jaxrl.report.read import Run, read_arrays, read_json, read_run
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


def render(
    runs: Sequence[str | Path], out: str | Path, names: Sequence[str] | None = None, check: str | Path | None = None
) -> Path:
    """Write the report of one or several run folders and return the path of the HTML file.

    ``out`` is the HTML file or a folder that gets ``report.html``; ``figures/*.png`` and
    ``tables/*.csv`` go beside it. ``names`` label the runs (default: folder names). ``check`` is the
    folder of ``jaxrl check`` (default: the first run that has ``check/check.json``). Whatever a run did
    not record is named in its section. Files appear under their names only when complete.

    Raises ``JaxrlError`` for a wrong number of names, a malformed file, a folder that is no run, or a
    file that cannot be written.
    """
    read = _read_all([Path(path) for path in runs], names)
    sections = report_sections(read, Path(check) if check is not None else _find_check(read))
    out = Path(out)
    page = out if out.suffix == ".html" else out / "report.html"
    for item in (item for section in sections for item in section.items):
        if isinstance(item, Picture):
            write(page.parent / "figures" / f"{item.name}.png", item.png)
        elif isinstance(item, Table):
            write(page.parent / "tables" / f"{item.name}.csv", item.csv().encode())
    write(page, _html(read, sections).encode())
    return page


def report_sections(runs: Sequence[Run], check: Path | None) -> list[Section]:
    """Everything that the page shows, in order."""
    sets = list(dict.fromkeys(pair for run in runs for pair in run.eval_sets() if run.eval_ks(*pair)))
    return [
        _what_was_run(runs),
        _headline(runs, sets),
        _coverage(runs, sets),
        _steps(runs, "training", "Training", curves.TRAINING, "One point a training step; faint lines are single steps, "
               "solid lines a centred moving mean over a twentieth of the run.", smooth=True),
        _steps(runs, "strength", "Influence strength", curves.STRENGTH, "A6. Mean square change of the probe's "
               "log-probabilities over one training step, and divided by the squared size of the parameter change: "
               "growth on the left without growth on the right is growth of the steps.", smooth=True),
        _interference(runs),
        _decomposition(runs),
        _steps(runs, "clip", "Clip violations", curves.CLIP, "A23. Fraction of probability ratios outside the clip range: "
               "(a) must be 0, (b) shows whether clipping could act at all, (c) one step and (d) all steps on probe "
               "answers, which no clipping restrains.", columns=2, smooth=True),
        _agreement(runs),
        _steps(runs, "kernel", "Kernel structure", curves.KERNEL, "A.4. The kernel of gradients among probe rows over "
               "training: a growing trace with steady cosines and rank means longer gradients, not more entangled ones."),
        _check(runs, check),
    ]  # fmt: skip


def check_pictures(folder: Path) -> tuple[list[Picture], list[str]]:
    """F-C1 to F-C3 from a folder of ``jaxrl check``, and what was missing (keys in ``figures``)."""
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
    return pictures, notes


def write(path: Path, data: bytes) -> None:
    """Write a file under a temporary name in its folder, then rename it."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise JaxrlError(f"cannot write {path} ({error.strerror}); free the disk, or give another --out") from error


def _read_all(paths: list[Path], names: Sequence[str] | None) -> list[Run]:
    if not paths:
        raise JaxrlError("report: expected at least one run folder, got none")
    if names is not None and len(names) != len(paths):
        raise JaxrlError(f"report: {len(names)} names for {len(paths)} runs; give one name a run, in the same order")
    chosen = list(names) if names is not None else [path.resolve().name for path in paths]
    if names is None and len(set(chosen)) < len(chosen):
        chosen = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in paths]
    return [read_run(path, name) for path, name in zip(paths, chosen, strict=True)]


def _find_check(runs: Sequence[Run]) -> Path | None:
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
    return section


def _steps(
    runs: Sequence[Run], name: str, title: str, panels: Sequence[Panel], caption: str, *, columns: int = 3,
    smooth: bool = False,
) -> Section:  # fmt: skip
    """A section with one figure of metrics over training."""
    return Section(name, title, items=_figure(runs, name, panels, caption, columns=columns, smooth=smooth))


def _figure(
    runs: Sequence[Run], name: str, panels: Sequence[Panel], caption: str, *, columns: int = 3, smooth: bool = False
) -> list[Item]:
    """The figure of the recorded panels, and notes on the rest."""
    found = recorded(panels, runs)
    items: list[Item] = []
    if found:
        items.append(over_steps(runs, found, name=name, caption=caption, columns=columns, smooth=smooth))
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
        "95 % intervals, clustered by prompt.")  # fmt: skip
    section.items += _figure(
        runs, "interference-steps", curves.STEPWISE, "A4, one training step. The same changes over single steps (faint) "
        "with a centred moving mean: negative means that the update pushed these answers down.", smooth=True)  # fmt: skip
    section.items += _figure(
        runs, "interference-scopes", curves.SCOPES, "A7. Interference on correct answers (sum) by where the probe's prompt "
        "stands: an effect that fades from left to right is learning, one that persists on the right crosses "
        "problem families.", columns=4, smooth=True)  # fmt: skip
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
            section.items.append(f"{run.name}: {int(part['left_out'])} prompts have no decomposition (p = 0 or no correct "
                                 "base answer) and are left out.")  # fmt: skip
    splits = sorted({str(s) for _, part in parts for s in part["split"]}, key=lambda s: (_order(s), s))
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
        if steps:
            predicted = np.concatenate([run.array(f"predicted/{step}") for step in steps])
            points.append((index, run.name, predicted, np.concatenate([logps[step + 1] - logps[step] for step in steps])))
        else:
            section.items.append(f"{run.name}: no scatter, arrays.zarr lacks predicted/<step> or probe_logp_sum.")
    if points:
        section.items.insert(1, prompts.agreement(points))
    return section


def _check(runs: Sequence[Run], folder: Path | None) -> Section:
    section = Section("check", "Kernel check", "In double precision, from a saved step: is the paper's bound what it claims?")
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
    section.items += notes
    return section


def _scalars(folder: Path) -> dict[str, Any]:
    path = folder / "check.json"
    whole = read_json(path) if path.is_file() else {}
    return whole.get("kernel_check", whole)


def _order(split: str) -> int:
    known = ("train", "heldout", "ood")
    return known.index(split) if split in known else len(known)


def _html(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    counts = {"figure": 0, "table": 0, "note": 0}

    def context(item: Item) -> dict[str, Any]:
        kind = "figure" if isinstance(item, Picture) else "table" if isinstance(item, Table) else "note"
        counts[kind] += 1
        return {"kind": kind, "number": counts[kind], **_SHOWN[kind](item)}

    return _TEMPLATE.render(
        title="Training report" if len(runs) > 1 else f"Training report: {runs[0].name}",
        runs=[{"name": run.name, "colour": style.colour(i), "about": _about(run)} for i, run in enumerate(runs)],
        sections=[
            {"id": s.id, "title": s.title, "intro": s.intro, "parts": [context(item) for item in s.items]} for s in sections
        ],
    )


def _shown_figure(item: Picture) -> dict[str, Any]:
    width = struct.unpack(">I", item.png[16:20])[0] / (style.DPI * style.WIDTH)
    data = base64.b64encode(item.png).decode()
    return {"name": item.name, "caption": item.caption, "data": data, "narrow": round(100 * width) if width < 0.97 else 0}


def _shown_table(item: Table) -> dict[str, Any]:
    return {
        "name": item.name,
        "caption": item.caption,
        "columns": [item.columns[i] for i in item.picked()],
        "rows": item.html_rows(),
        "grouped": item.name == "headline",
        "folded": item.name in ("settings-in-common", "environment"),
    }


def _about(run: Run) -> str:
    algorithm = run.config.get("algorithm")
    algorithm = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
    steps = max((max(line) for name, line in run.metrics.items() if name.startswith(("reward/", "probe/"))), default=None)
    parts = [str(algorithm) if algorithm else "", f"seed {run.config['seed']}" if "seed" in run.config else ""]
    parts.append(f"{steps + 1} steps" if steps is not None else "")
    return ", ".join(part for part in parts if part) or str(run.path.name)


_SHOWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "figure": _shown_figure,
    "table": _shown_table,
    "note": lambda text: {"text": text},
}
_TEMPLATE = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
    files("jaxrl.report").joinpath("report.html.j2").read_text(encoding="utf-8")
)
