"""Benchmarks: what one way of computing costs against another, in CPU-seconds of the same run.

Only ratios travel between machines, so each subject times its cases turn by turn and reports what a
case costs over its baseline. ``python -m jaxrl.bench`` prints them.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.bench.kernel import kernel
from jaxrl.bench.sampling import sampling
from jaxrl.bench.sizes import SIZES, Sizes
from jaxrl.bench.step import step
from jaxrl.bench.timing import Row

SUBJECTS: dict[str, Callable[[Sizes, int], list[Row]]] = {"kernel": kernel, "sampling": sampling, "step": step}

__all__ = ["SIZES", "SUBJECTS", "Sizes", "kernel", "sampling", "step"]
