"""The report: run folders in, one page with pictures and tables out. Imports no jax."""

from jaxrl.report.read import Run, read_run
from jaxrl.report.render import render

__all__ = ["Run", "read_run", "render"]
