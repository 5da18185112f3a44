"""What each command does, given its parsed arguments. A command returns what is printed.

``jaxrl.cli`` parses and prints; nothing here reads ``sys.argv`` or writes to standard output.
"""

from jaxrl.commands.algorithms import algorithms
from jaxrl.commands.bench import bench
from jaxrl.commands.check import check
from jaxrl.commands.demo import demo
from jaxrl.commands.kernel import kernel
from jaxrl.commands.models import eval, probe, sample
from jaxrl.commands.runs import export, report, train

__all__ = ["algorithms", "bench", "check", "demo", "eval", "export", "kernel", "probe", "report", "sample", "train"]
