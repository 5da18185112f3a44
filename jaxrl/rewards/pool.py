"""A pool of verifier processes that can be killed, and that nothing in a batch can take down."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import context, popen_spawn_posix, spawn
from typing import Any

import pebble

from jaxrl.rewards import worker
from jaxrl.rewards.math import Question, judge
from jaxrl.rewards.verdict import MathRule, Verdict

_START_SECONDS = 60  # allowance for starting a worker: imports on a loaded machine
_JOBS_A_WORKER = 2000  # then a fresh process: sympy's caches only grow
_ERROR_SAMPLE = 50  # inputs seen before the error rate is judged

_DEFAULT_RULE = MathRule()


class Verifier:
    """Verdicts on batches of responses.

    ``workers`` spawned processes (started when first needed, each limited to ``memory_gb`` of address
    space) do what our own comparison cannot decide. A comparison that runs longer than ``timeout``
    seconds is killed and run once more alone; a worker that dies gives ``error`` for its own row; the
    others are not touched. Raises ``RuntimeError`` when workers cannot be started, or when more than
    ``max_error_rate`` of all inputs so far ended in ``error``.
    """

    def __init__(
        self, timeout: float = 10, workers: int = 1, memory_gb: float = 2, *, max_error_rate: float = 0.1
    ) -> None:
        for name, value in (("timeout", timeout), ("workers", workers), ("memory_gb", memory_gb)):
            if value <= 0:
                raise ValueError(f"Verifier.{name}: expected more than 0, got {value}")
        self.timeout, self.workers, self.max_error_rate = timeout, workers, max_error_rate
        self.memory_bytes = int(memory_gb * 2**30)
        self.restarts = 0
        self._lock = threading.RLock()
        self._pool: pebble.ProcessPool | None = None
        self._peak = 0
        self._seen = self._errors = 0

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        pool, self._pool, self._peak = self._pool, None, 0
        if pool is not None:
            pool.stop()
            pool.join()

    def verify(self, pairs: Sequence[tuple[str, str]], rule: MathRule = _DEFAULT_RULE) -> list[Verdict]:
        """One verdict a ``(gold, response)``, in the order given. Equal comparisons are made once."""
        first = [judge(gold, response, rule) for gold, response in pairs]
        questions = list(dict.fromkeys(v for v in first if isinstance(v, Question)))
        answers = dict(zip(questions, self.ask(questions, rule), strict=True))
        verdicts = [answers[v] if isinstance(v, Question) else v for v in first]
        self._count_errors(verdicts)
        return verdicts

    def ask(self, questions: Sequence[Question], rule: MathRule = _DEFAULT_RULE) -> list[Verdict]:
        """One verdict a question, by computer algebra, in the order given."""
        jobs = list(dict.fromkeys(self._job(q, rule) for q in questions))
        with self._lock:
            reports = dict(zip(jobs, self._run(jobs), strict=True))
            for job in jobs:
                if reports[job].status == "timeout":  # perhaps only the machine was busy: once more, alone
                    reports[job] = self._run([job])[0]
            self._recycle()
        return [_verdict(q, reports[self._job(q, rule)]) for q in questions]

    def _job(self, question: Question, rule: MathRule) -> worker.Job:
        return worker.Job(
            question.gold,
            question.answer,
            self.timeout,
            rule.relative_tolerance,
            rule.evaluate_decimals,
            rule.positive_symbols,
        )

    def _run(self, jobs: Sequence[worker.Job]) -> list[worker.Report]:
        """Reports in order. A pool that broke down (not a row, the pool) is rebuilt once for the rest."""
        reports: dict[int, worker.Report] = {}
        for _ in range(2):
            rest = [i for i in range(len(jobs)) if i not in reports]
            reports |= self._attempt(rest, jobs)
            if len(reports) == len(jobs):
                return [reports[i] for i in range(len(jobs))]
            self.close()
            self.restarts += 1
        raise RuntimeError(
            f"Verifier: the worker processes do not start or do not stay up (limit {self.memory_bytes / 2**30:g} GB "
            "of address space each; their error is printed above). Raise memory_gb, or check that math-verify imports."
        )

    def _attempt(self, rest: Sequence[int], jobs: Sequence[worker.Job]) -> dict[int, worker.Report]:
        """What one pool could report; rows it lost by breaking down are left out."""
        if not rest:
            return {}
        try:
            pool = self._start()
            futures = {i: pool.schedule(worker.run, args=(jobs[i],), timeout=self.timeout) for i in rest}
        except RuntimeError:  # the pool broke before it took the jobs
            return {}
        # every job has its own clock; the deadline only guards against a pool that stopped answering
        deadline = time.monotonic() + _START_SECONDS + 2 * self.timeout * (1 + len(rest) / self.workers)
        reports = {i: self._collect(future, deadline) for i, future in futures.items()}
        return {i: report for i, report in reports.items() if report is not None}

    def _collect(self, future: Any, deadline: float) -> worker.Report | None:
        try:
            report = future.result(timeout=max(0.0, deadline - time.monotonic()))
        except BrokenProcessPool:
            return None
        except (TimeoutError, CancelledError):
            future.cancel()
            return worker.Report("timeout", self.timeout, 0)
        except Exception:  # the worker died, or what it sent cannot be read: this row's trouble alone
            return worker.Report("error", 0.0, 0)
        self._peak = max(self._peak, report.memory)
        return report

    def _start(self) -> pebble.ProcessPool:
        if self._pool is None:
            self._pool = pebble.ProcessPool(
                max_workers=self.workers,
                max_tasks=_JOBS_A_WORKER,
                initializer=worker.start,
                initargs=(self.memory_bytes,),
                context=_Spawn(),
            )
        return self._pool

    def _recycle(self) -> None:
        if self._peak > self.memory_bytes // 2:
            self.close()
            self.restarts += 1

    def _count_errors(self, verdicts: Sequence[Verdict]) -> None:
        self._seen += len(verdicts)
        self._errors += sum(v.status == "error" for v in verdicts)
        if self._seen >= _ERROR_SAMPLE and self._errors > self.max_error_rate * self._seen:
            raise RuntimeError(
                f"Verifier: {self._errors} of {self._seen} verdicts are errors, above the limit of "
                f"{self.max_error_rate:g}. Check the golds with check_golds, and the memory of the workers "
                f"({self.memory_bytes / 2**30:g} GB each)."
            )


def _verdict(question: Question, report: worker.Report) -> Verdict:
    if report.status == "bad_gold":
        return Verdict("error", question.box, "complete", "gold", report.seconds)
    return Verdict(report.status, question.box, "complete", "math_verify", report.seconds)


class _Launch(popen_spawn_posix.Popen):
    """Spawns without running the caller's main script again.

    The standard spawn imports ``__main__`` into the child: it would load jax there, and would train
    once more in a script without a main guard. The workers need nothing of it.
    """

    _lock = threading.Lock()

    def _launch(self, process_obj: Any) -> None:
        with self._lock:
            standard, me = spawn.get_preparation_data, threading.get_ident()

            def without_main(name: str) -> dict[str, Any]:
                data = standard(name)
                ours = threading.get_ident() == me
                return {k: v for k, v in data.items() if not (ours and k.startswith("init_main"))}

            spawn.get_preparation_data = without_main  # ty: ignore[invalid-assignment]
            try:
                super()._launch(process_obj)
            finally:
                spawn.get_preparation_data = standard


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Launch:
        return _Launch(process_obj)


class _Spawn(context.SpawnContext):
    Process = _Process
