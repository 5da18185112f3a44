"""One run of the benchmarks, as the command line asked for it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.bench import SUBJECTS
from jaxrl.bench.arguments import CASES, PEERS
from jaxrl.bench.cases import threads
from jaxrl.bench.head import HEAD_SIZES, HeadSize, head
from jaxrl.bench.kernel import kernel
from jaxrl.bench.report import Report
from jaxrl.bench.rollout import rollout
from jaxrl.bench.sizes import KERNEL_SIZES, KernelSize
from jaxrl.bench.step import step
from jaxrl.bench.workloads import SCALES, Scale
from jaxrl.errors import DoesNotHold, UsageError, nearest
from jaxrl.influence.kernels import METHODS

# Options that are not for every subject.
OPTIONS = {
    "sizes": ("kernel",),
    "rows": ("kernel",),
    "methods": ("kernel",),
    "response": ("kernel",),
    "cases": ("rollout", "step"),
    "quick": ("rollout", "step"),
    "accelerator": ("rollout", "step"),
}


def run(
    arguments: argparse.Namespace,
    kernel_sizes: Mapping[str, KernelSize] = KERNEL_SIZES,
    scales: Mapping[str, Scale] = SCALES,
    head_sizes: Mapping[str, HeadSize] = HEAD_SIZES,
) -> dict[str, Any]:
    """Tables by title, with what they were measured on.

    Raises ``UsageError`` for options that do not belong together, and ``DoesNotHold`` with what was
    found when a case had to be left out.
    """
    jax.config.update("jax_platforms", "cpu")  # here; workers choose for themselves
    chosen = SUBJECTS if arguments.subject == "all" else (arguments.subject,)
    _check(arguments, chosen)
    result: dict[str, Any] = {
        "unit": f"{_clock(arguments)}, median of rounds; ratios: median [smallest, largest]",
        "rounds": arguments.repeats,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "jax": importlib.metadata.version("jax"),
    }
    if chosen != ("kernel",) and not arguments.accelerator:
        result["threads of head, rollout and step"] = threads()
    failed: list[str] = []
    for name in chosen:
        if name == "kernel":
            report = _kernel(arguments, kernel_sizes)
        elif name == "head":
            report = head(repeats=arguments.repeats, size=head_sizes["quick" if arguments.subject == "all" else "full"])
        else:
            report = _given(name, arguments, scales)
        result |= report.versions
        result[f"models of {name}"] = report.sizes
        result |= report.tables
        failed += report.failed
    if failed:
        raise DoesNotHold("\n".join(failed), result)
    return result


def _clock(a: argparse.Namespace) -> str:
    return "seconds by the wall" if a.accelerator else "CPU-seconds of all threads of a process"


def _kernel(a: argparse.Namespace, sizes: Mapping[str, KernelSize]) -> Report:
    return kernel(
        a.sizes or (("XS",) if a.subject == "all" else ("S", "M")),
        rows=a.rows or (),
        methods=a.methods or ("reference", "streamed"),
        peers=_peers("kernel", a),
        repeats=a.repeats,
        response=a.response or "all",
        sizes=sizes,
    )


def _given(name: str, a: argparse.Namespace, scales: Mapping[str, Scale]) -> Report:
    """``rollout`` or ``step``."""
    scale = scales["quick" if a.quick or a.subject == "all" else "accelerator" if a.accelerator else "full"]
    cases = [case for case in CASES[name] if a.cases is None or case in a.cases]
    subject = {"rollout": rollout, "step": step}[name]
    return subject(cases, peers=_peers(name, a), repeats=a.repeats, scale=scale, accelerator=bool(a.accelerator))


def _peers(subject: str, a: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for that can do the subject; by default all of them, and none under ``all``."""
    if a.peer is None:
        return () if a.subject == "all" or a.accelerator else PEERS[subject]
    return tuple(name for name in PEERS[subject] if name in a.peer)


def _check(a: argparse.Namespace, chosen: tuple[str, ...]) -> None:
    for name, subjects in OPTIONS.items():
        if getattr(a, name) is not None and not set(subjects) & set(chosen):
            raise UsageError(f"--{name}: belongs to the subject {' or '.join(subjects)}, not to {a.subject}")
    if a.accelerator and (a.peer or a.subject == "all"):
        raise UsageError(
            "--accelerator: for rollout and step, without peers: their CPU environments know no accelerator"
        )
    _check_names("--cases", a.cases, [case for name in chosen for case in CASES.get(name, ())])
    _check_names("--peer", a.peer, [peer for name in chosen for peer in PEERS[name]])
    _check_names("--methods", a.methods, [name for name in METHODS if name != "auto"])  # auto is one of the others


def _check_names(option: str, given: tuple[str, ...] | None, known: list[str]) -> None:
    for name in given or ():
        if name not in known:
            raise UsageError(f"{option}: {nearest(name, known)}, got {name!r}")
