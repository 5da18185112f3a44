"""One run of the benchmarks, as the command line asked for it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.bench import SUBJECTS
from jaxrl.bench.kernel import kernel
from jaxrl.bench.sampling import sampling
from jaxrl.bench.sizes import KERNEL_SIZES, SIZES, KernelSize, Sizes
from jaxrl.bench.step import step
from jaxrl.errors import DoesNotHold, UsageError, nearest
from jaxrl.influence.kernels import METHODS

OPTIONS = ("sizes", "rows", "methods", "peer", "response")  # of the kernel alone


def run(
    arguments: argparse.Namespace, sizes: Sizes = SIZES, kernel_sizes: Mapping[str, KernelSize] = KERNEL_SIZES
) -> dict[str, Any]:
    """Tables by title, with what they were measured on.

    Raises ``UsageError`` for options that do not belong together, and ``DoesNotHold`` with what was
    found when a case had to be left out.
    """
    jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    chosen = SUBJECTS if arguments.subject == "all" else (arguments.subject,)
    _check(arguments, chosen)
    result: dict[str, Any] = {
        "unit": "CPU-seconds of all threads of a process, median of rounds; ratios: median [smallest, largest]",
        "rounds": arguments.repeats,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "jax": importlib.metadata.version("jax"),
    }
    failed: list[str] = []
    for name in chosen:
        if name == "kernel":
            failed += _kernel(arguments, kernel_sizes, result)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        result[name] = {"sampling": sampling, "step": step}[name](sizes, arguments.repeats)
    if failed:
        raise DoesNotHold("\n".join(failed), result)
    return result


def _kernel(a: argparse.Namespace, sizes: Mapping[str, KernelSize], result: dict[str, Any]) -> list[str]:
    """Adds the kernel's tables to ``result``; returns what failed."""
    quick = a.subject == "all"
    report = kernel(
        a.sizes or (("XS",) if quick else ("S", "M")),
        rows=a.rows or (),
        methods=a.methods or ("reference", "streamed"),
        peers=a.peer if a.peer is not None else () if quick else ("torch", "nt"),
        repeats=a.repeats,
        response=a.response or "all",
        sizes=sizes,
    )
    result |= report.versions
    result["sizes"] = report.sizes
    result |= report.tables
    return report.failed


def _check(a: argparse.Namespace, chosen: tuple[str, ...]) -> None:
    if "kernel" not in chosen:
        given = [f"--{name}" for name in OPTIONS if getattr(a, name) is not None]
        if given:
            raise UsageError(f"{', '.join(given)}: belongs to the subject kernel, not to {a.subject}")
    known = [name for name in METHODS if name != "auto"]  # auto is one of the others
    for name in a.methods or ():
        if name not in known:
            raise UsageError(f"--methods: {nearest(name, known)}, got {name!r}")
