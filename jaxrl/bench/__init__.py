"""Benchmarks: what one way of computing costs against another, in CPU-seconds of the same run.

Only ratios travel between machines, so each subject times its cases turn by turn, each in a process of
its own, and reports what a case costs over its baseline. ``jaxrl bench``, or ``python -m jaxrl.bench``,
prints them.
"""

SUBJECTS = ("kernel", "head", "rollout", "step")
