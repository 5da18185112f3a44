"""The report: run folders in, one page with pictures and tables out. Imports no jax."""

from jaxrl.report.read import Run, read_run
from jaxrl.report.render import render
from jaxrl.report.sections import check_pictures

__all__ = ["Run", "check_pictures", "read_run", "render"]
