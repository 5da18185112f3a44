"""``bench``: what one way of computing costs against another, on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from jaxrl.bench.run import run


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """The tables of the subjects asked for."""
    return run(arguments)
