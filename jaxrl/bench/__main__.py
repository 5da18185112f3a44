"""``python -m jaxrl.bench [--repeats N] [--json]``: all benchmarks, on the CPU."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence

import jax

from jaxrl.bench import SIZES, SUBJECTS, Sizes
from jaxrl.tables import write_json, write_tables


def main(argv: Sequence[str] | None = None, sizes: Sizes = SIZES) -> int:
    """Run, print, return 0. Cells in brackets are the smallest and the largest of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench", description=__doc__)
    parser.add_argument("--repeats", type=_count, default=5, metavar="N", help="rounds of timings (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    result = {
        "unit": "CPU-seconds of all threads; median of rounds [smallest, largest]",
        "rounds": arguments.repeats,
        "cores": os.cpu_count(),
        "jax": importlib.metadata.version("jax"),
    }
    for name, subject in SUBJECTS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        result[name] = subject(sizes, arguments.repeats)
    (write_json if arguments.json else write_tables)(result, sys.stdout)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    sys.exit(main())
