"""The gradient kernel by our methods and by other libraries, against one gradient pass over the same rows."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxrl.bench.cases import own_cases, peer_cases
from jaxrl.bench.compare import compare
from jaxrl.bench.environments import PAIRWISE, PAIRWISE_WORK
from jaxrl.bench.own import PASS, REFERENCE
from jaxrl.bench.report import Report, shape
from jaxrl.bench.sizes import KERNEL_SIZES, KernelSize
from jaxrl.bench.table import table
from jaxrl.bench.world import write_world


def kernel(
    names: Sequence[str],
    *,
    rows: Sequence[int] = (),
    methods: Sequence[str],
    peers: Sequence[str] = (),
    repeats: int,
    response: str = "all",
    sizes: Mapping[str, KernelSize] = KERNEL_SIZES,
) -> Report:
    """Benchmarks of the named sizes, with ``rows`` on either side (default: the size's own counts).

    A peer's environment is made when it is missing. Raises ``JaxrlError`` when that fails, or when
    the gradient pass itself cannot be timed; any other case that fails is left out and reported.
    """
    cases = [*own_cases("jaxrl.bench.own", (PASS, *methods)), *peer_cases("kernel", peers)]
    report = Report()
    for name in names:
        size = replace(sizes[name], response=response)
        model = size.model()
        parameters = sum(x.size for x in jax.tree.leaves(model))
        report.sizes.append(shape(name, model) | {"T": size.width})
        for n in rows or size.rows:
            title = f"kernel {name} {n}x{n}"
            left = PAIRWISE if n * n * parameters > PAIRWISE_WORK else frozenset()
            print(f"{title} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as folder:
                write_world(Path(folder) / "world.npz", model, size.sides(n))
                found = compare(
                    [c for c in cases if c.name not in left], Path(folder) / "world.npz", (n, n), repeats=repeats
                )
            report.add(title, table(found, PASS, REFERENCE), found)
    return report
