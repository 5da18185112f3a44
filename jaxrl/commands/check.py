"""``check``: the kernel against reality, in a child process in double precision.

Double precision is a process-wide switch in JAX, and what else runs here may hold float32 arrays
and programs; so the check starts a Python of its own, which reads the run's checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxrl.commands.runs import is_run
from jaxrl.errors import DoesNotHold, JaxrlError, UsageError
from jaxrl.report import check_pictures
from jaxrl.report.render import write

# What summary.json keeps of the check: violations are fractions of pairs and of probes.
KERNEL_CHECK = (
    "slope_single",
    "slope_batch",
    "slope_second_order",
    "sign_agreement",
    "violations_single",
    "violations_batch",
    "tightness_quantiles",
    "adam_residual",
)

EXPECTED = {
    "slopes": "2, 2 and 3: remainders of first order (pairs, batch) and after second order",
    "sign_agreement": "1 at eta = 1e-3",
    "violations": "none by the batch's largest |K|; single pairs may exceed Eq. 4 by O(eta) where |A| = C",
    "adam_residual": "<= 1e-10: the parts of the optimiser's step sum to its first-order effect",
}


def check(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Run C1 to C15; write ``check.json``, tables (CSV) and figures (PNG). Exit code 3 when something fails."""
    model = arguments.model
    if not is_run(model) and arguments.probe is None:
        raise UsageError(f"{model}: not a run folder; a model is checked on solutions, give them with --probe FILE")
    out = arguments.out or (pathlib.Path(model) / "check" if is_run(model) else pathlib.Path("check"))
    child = start_check(model, out, step=arguments.step, pairs=arguments.pairs, probe=arguments.probe)
    found = finish_check(child, out)
    draw(out)
    whole = json.loads((out / "check.json").read_text())
    result = {"holds": whole["ok"], "kernel check": found, "expected": EXPECTED, "out": str(out)}
    if whole["left_out"]:
        result["left out"] = whole["left_out"]
    if not whole["ok"]:
        failed = "; ".join(whole["failures"])
        raise DoesNotHold(f"{model}: the check does not hold: {failed} (see {out / 'check.json'})", result)
    return result


def start_check(
    model: str | pathlib.Path,
    out: pathlib.Path,
    *,
    step: int | None = None,
    pairs: int = 64,
    probe: pathlib.Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start the child process; its messages go to a temporary file that ``finish_check`` reads."""
    command = [sys.executable, "-m", "jaxrl.commands.check_worker", str(model), str(out), "--pairs", str(pairs)]
    command += [] if step is None else ["--step", str(step)]
    command += [] if probe is None else ["--probe", str(probe)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process; closed by finish_check
    child = subprocess.Popen(command, env={**os.environ, "JAX_ENABLE_X64": "1"}, stderr=errors)
    child.stderr = errors  # type: ignore[assignment]
    return child


def finish_check(child: subprocess.Popen[bytes], out: pathlib.Path) -> dict[str, Any]:
    """Wait for the child; the numbers of ``kernel_check`` in ``summary.json``. Raises with its message if it failed."""
    code = child.wait()
    errors = child.stderr
    assert errors is not None
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()
    errors.close()
    if code:
        if os.environ.get("JAXRL_DEBUG") == "1":
            print(said, file=sys.stderr)
        said = said.splitlines()[-1] if said else "no message"
        raise JaxrlError(said if code == 1 else f"the check's process ended with code {code}: {said}")
    whole = json.loads((out / "check.json").read_text())
    return {name: whole[name] for name in KERNEL_CHECK}


def draw(out: pathlib.Path) -> None:
    """Figures F-C1 to F-C7 beside the tables, as far as there is something to draw."""
    pictures, _ = check_pictures(out)
    for picture in pictures:
        write(out / f"{picture.name}.png", picture.png)
