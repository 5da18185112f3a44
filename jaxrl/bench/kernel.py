"""The gradient kernel by our methods and by other libraries, against one gradient pass over the same rows."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax

import jaxrl
from jaxrl.bench.compare import Case, compare
from jaxrl.bench.environments import PAIRWISE, PAIRWISE_WORK, PEERS, environment, peer_python
from jaxrl.bench.own import PASS, REFERENCE
from jaxrl.bench.sizes import KERNEL_SIZES, KernelSize
from jaxrl.bench.table import table
from jaxrl.bench.timing import Row
from jaxrl.bench.world import write_world


@dataclass
class Report:
    """The models' shapes, rows by the title of their table, versions by library, and why a case is missing."""

    sizes: list[Row] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


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
    cases, report = [*_own(methods), *_peers(peers)], Report()
    for name in names:
        size = replace(sizes[name], response=response)
        model = size.model()
        parameters = sum(x.size for x in jax.tree.leaves(model))
        report.sizes.append(_shape(name, size, parameters))
        for n in rows or size.rows:
            title = f"kernel {name} {n}x{n}"
            left = PAIRWISE if n * n * parameters > PAIRWISE_WORK else frozenset()
            print(f"{title} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as folder:
                write_world(Path(folder) / "world.npz", model, size.sides(n))
                found = compare(
                    [c for c in cases if c.name not in left], Path(folder) / "world.npz", (n, n), repeats=repeats
                )
            report.tables[title] = table(found, PASS, REFERENCE)
            report.failed += [f"{title}: {measured.failure}" for measured in found if measured.failure is not None]
            for measured in found:
                report.versions |= measured.versions
    return report


def _own(methods: Sequence[str]) -> list[Case]:
    root = str(Path(jaxrl.__file__).parents[1])
    env = environment() | {"PYTHONPATH": root}
    return [Case(name, (sys.executable, "-m", "jaxrl.bench.own"), env) for name in (PASS, *methods)]


def _peers(names: Sequence[str]) -> list[Case]:
    folder = Path(__file__).parent / "peers"
    peers = [(PEERS[name], str(peer_python(PEERS[name]))) for name in names]
    return [
        Case(case, (python, str(folder / peer.script)), environment(), peer=True)
        for peer, python in peers
        for case in peer.cases
    ]


def _shape(name: str, size: KernelSize, parameters: int) -> Row:
    config = size.config()
    return {
        "size": name,
        "d": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "MLP": config.intermediate_size,
        "V": config.vocab_size,
        "T": size.width,
        "parameters": parameters,
    }
