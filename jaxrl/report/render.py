"""Run folders into one self-contained HTML page, with its figures and tables beside it."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from jaxrl.errors import JaxrlError
from jaxrl.report import style
from jaxrl.report.read import Run, read_run
from jaxrl.report.sections import Item, Section, find_check, report_sections
from jaxrl.report.style import Picture
from jaxrl.report.tables import Table


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
    sections = report_sections(read, Path(check) if check is not None else find_check(read))
    out = Path(out)
    file = out if out.suffix == ".html" else out / "report.html"
    for item in (item for section in sections for item in section.items):
        if isinstance(item, Picture):
            write(file.parent / "figures" / f"{item.name}.png", item.png)
        elif isinstance(item, Table):
            write(file.parent / "tables" / f"{item.name}.csv", item.csv().encode())
    write(file, _html(read, sections).encode())
    return file


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


def _html(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    return page(
        "Training report" if len(runs) > 1 else f"Training report: {runs[0].name}",
        [(run.name, _about(run)) for run in runs],
        sections,
        linked=True,
    )


def page(title: str, subjects: Sequence[tuple[str, str]], sections: Sequence[Section], *, linked: bool = False) -> str:
    """One self-contained HTML page; ``subjects`` are what it is about, each (name, a few words).

    ``linked``: the tables lie beside it as ``tables/NAME.csv``.
    """
    counts = {"figure": 0, "table": 0, "note": 0}

    def context(item: Item) -> dict[str, Any]:
        kind = "figure" if isinstance(item, Picture) else "table" if isinstance(item, Table) else "note"
        counts[kind] += 1
        return {"kind": kind, "number": counts[kind], **_SHOWN[kind](item)}

    return _TEMPLATE.render(
        title=title,
        linked=linked,
        runs=[{"name": name, "colour": style.colour(i), "about": about} for i, (name, about) in enumerate(subjects)],
        sections=[
            {"id": s.id, "title": s.title, "intro": s.intro, "parts": [context(item) for item in s.items]}
            for s in sections
        ],
    )


def _shown_figure(item: Picture) -> dict[str, Any]:
    width = struct.unpack(">I", item.png[16:20])[0] / (style.DPI * style.WIDTH)
    data = base64.b64encode(item.png).decode()
    return {
        "name": item.name,
        "caption": item.caption,
        "data": data,
        "narrow": round(100 * width) if width < 0.97 else 0,
    }


def _shown_table(item: Table) -> dict[str, Any]:
    return {
        "name": item.name,
        "caption": item.caption,
        "columns": [item.columns[i] for i in item.picked()],
        "rows": item.html_rows(),
        "grouped": item.name == "headline",
        "folded": {"settings-in-common": "Show the settings in common"}.get(item.name, ""),
    }


def _about(run: Run) -> str:
    algorithm = run.config.get("algorithm")
    algorithm = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
    steps = max(
        (max(line) for name, line in run.metrics.items() if name.startswith(("reward/", "probe/"))), default=None
    )
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
