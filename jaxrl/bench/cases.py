"""The processes of a benchmark: our own, those of the peers, and what keeps each of them on one thread."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jaxrl
from jaxrl.bench.compare import Case
from jaxrl.bench.environments import PEERS, environment, peer_python

# Read by XLA, OpenMP and MKL as they start; the peers' scripts ask torch itself too.
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def own_cases(module: str, names: Sequence[str]) -> list[Case]:
    """Cases that ``python -m module`` of this library serves."""
    env = environment() | {"PYTHONPATH": str(Path(jaxrl.__file__).parents[1])}
    return [Case(name, (sys.executable, "-m", module), env) for name in names]


def peer_cases(subject: str, names: Sequence[str]) -> list[Case]:
    """All cases of the named peers for one subject; their environments are made where they are missing."""
    folder = Path(__file__).parent / "peers"
    peers = [(PEERS[name].work[subject], str(peer_python(PEERS[name]))) for name in names]
    return [
        Case(case, (python, str(folder / work.script)), environment(), peer=True)
        for work, python in peers
        for case in work.cases
    ]


def one_thread(cases: Sequence[Case]) -> list[Case]:
    """The same cases, each told to use one thread and held on one core, the same for all."""
    pin = _pin()
    return [replace(c, command=(*pin, *c.command), env={**c.env, **ONE_THREAD}) for c in cases]


def threads() -> str:
    """What ``one_thread`` does on this machine, in words that can be repeated."""
    words = [*_pin(), *(f"{name}={value!r}" for name, value in ONE_THREAD.items())]
    return f"one: {' '.join(words)}, torch.set_num_threads(1)"


def _pin() -> tuple[str, ...]:
    """The last core that this process may use, where the system has ``taskset``."""
    taskset = shutil.which("taskset")
    return (taskset, "-c", str(max(os.sched_getaffinity(0)))) if taskset else ()
