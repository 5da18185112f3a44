"""The verifier's processes: killed, dead or hungry, they cost their own row and nothing else."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jaxrl.rewards import MathRule, Verifier, verify_math, worker
from jaxrl.rewards import pool as pool_module
from jaxrl.rewards.worker import Report

CORRECT = (r"x+\sqrt{2}", r"\boxed{\sqrt{2}+x}")
WRONG = (r"x+\sqrt{2}", r"\boxed{\sqrt{3}+x}")


# Stand-ins for worker.run; the child imports them by name.
def die_on_y(job):
    if "y" in job.answer:
        os._exit(3)
    return worker.run(job)


def sleep_on_y(job):
    if "y" in job.answer:
        time.sleep(60)
    return worker.run(job)


def sleep_the_first_time(job):
    flag = pathlib.Path(os.environ["JAXRL_TEST_FLAG"])
    if not flag.exists():
        flag.touch()
        time.sleep(60)
    return worker.run(job)


def allocate_on_y(job):
    if "y" in job.answer:
        bytearray(4 << 30)
    return worker.run(job)


def report_surroundings(job):
    clean = not {"jax", "jaxlib", "flax", "transformers"} & set(sys.modules)
    return Report("correct" if clean and os.environ["JAX_PLATFORMS"] == "cpu" else "wrong", 0.0, 0)


def report_much_memory(job):
    return Report("correct", 0.0, 3 << 30)


def die(job):
    os._exit(1)


@pytest.fixture(scope="module")
def verifier():
    with Verifier() as verifier:
        yield verifier


def statuses(verdicts):
    return [v.status for v in verdicts]


def test_results_come_in_input_order_one_an_input_and_equal_pairs_are_checked_once(verifier, monkeypatch):
    jobs = []
    run = verifier._run
    monkeypatch.setattr(verifier, "_run", lambda batch: jobs.extend(batch) or run(batch))
    batch = [WRONG, ("5", r"\boxed{5}"), CORRECT, ("5", "none"), CORRECT, (CORRECT[0], "longer: " + CORRECT[1]), WRONG]
    got = statuses(verifier.verify(batch))
    assert got == ["wrong", "correct", "correct", "no_box", "correct", "correct", "wrong"]
    assert len(jobs) == 2


def test_an_empty_batch_has_no_results(verifier):
    assert verifier.verify([]) == []


def test_no_process_starts_until_computer_algebra_is_needed():
    lazy = Verifier()
    assert statuses(lazy.verify([("5", r"\boxed{5.0}"), ("5", r"\boxed{6}"), ("5", "")])) == [
        "correct",
        "wrong",
        "no_box",
    ]
    assert lazy._pool is None


def test_a_worker_never_imports_jax(monkeypatch):
    monkeypatch.setattr(worker, "run", report_surroundings)
    with Verifier() as fresh:
        assert statuses(fresh.verify([CORRECT])) == ["correct"]


def test_a_dead_worker_is_an_error_of_its_own_row_alone(monkeypatch):
    monkeypatch.setattr(worker, "run", die_on_y)
    with Verifier() as fresh:
        got = fresh.verify([CORRECT, ("x^2", r"\boxed{x+y}"), WRONG, CORRECT])
    assert statuses(got) == ["correct", "error", "wrong", "correct"]


def test_a_row_that_runs_out_of_memory_is_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr(worker, "run", allocate_on_y)
    with Verifier() as fresh:
        got = fresh.verify([("x^2", r"\boxed{x+y}"), CORRECT])
    assert statuses(got) == ["error", "correct"]


def test_a_comparison_that_never_ends_is_killed_and_the_batch_goes_on(monkeypatch):
    monkeypatch.setattr(worker, "run", sleep_on_y)
    begun = time.monotonic()
    with Verifier(timeout=1) as fresh:  # too short for the alarm inside: only the kill is left
        got = fresh.verify([CORRECT, ("x^2", r"\boxed{x+y}"), WRONG])
    assert statuses(got) == ["correct", "timeout", "wrong"]
    assert time.monotonic() - begun < 40


def test_a_timeout_is_run_once_more_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRL_TEST_FLAG", str(tmp_path / "ran"))
    monkeypatch.setattr(worker, "run", sleep_the_first_time)
    with Verifier(timeout=2) as fresh:
        assert statuses(fresh.verify([CORRECT])) == ["correct"]
    assert (tmp_path / "ran").exists()


def test_a_power_tower_is_a_timeout_by_the_alarm_inside():
    with Verifier(timeout=2) as fresh:
        verdict = fresh.verify([("92.58", r"\boxed{\frac{5^{5^{5^{5^5}-4}}-5}{16}}")])[0]
    assert verdict.status == "timeout"


def test_workers_that_grew_are_replaced(monkeypatch):
    monkeypatch.setattr(worker, "run", report_much_memory)
    with Verifier() as fresh:
        assert statuses(fresh.verify([CORRECT])) == ["correct"]
        assert fresh.restarts == 1
        assert fresh._pool is None
        assert statuses(fresh.verify([WRONG])) == ["correct"]


def test_workers_that_cannot_start_are_a_clear_failure(capfd):
    with pytest.raises(RuntimeError, match=r"do not start or do not stay up \(limit 0\.01 GB"):
        Verifier(memory_gb=0.01).verify([CORRECT])


def test_a_killed_idle_worker_is_replaced():
    with Verifier() as fresh:
        fresh.verify([CORRECT])
        for pid in list(fresh._pool._pool_manager.worker_manager.workers):
            os.kill(pid, signal.SIGKILL)
        assert statuses(fresh.verify([WRONG])) == ["wrong"]


def test_the_memory_of_a_worker_is_its_own_and_not_its_parents():
    child = "from jaxrl.rewards.worker import _peak_memory; print(_peak_memory())"
    parent = f"import subprocess, sys; held = bytearray(b'x') * (400 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=120, check=True)
    assert 1 << 20 < int(done.stdout) < 300 << 20


def test_too_many_errors_stop_the_run(monkeypatch):
    lazy = Verifier(max_error_rate=0.1)
    lazy.verify([("", r"\boxed{5}")] * 5 + [("5", r"\boxed{5}")] * 60)
    with pytest.raises(RuntimeError, match=r"15 of 75 verdicts are errors, above the limit of 0\.1.*check_golds"):
        lazy.verify([("", r"\boxed{5}")] * 10)


@pytest.mark.parametrize("name", ["timeout", "workers", "memory_gb"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=rf"Verifier\.{name}: expected more than 0, got 0"):
        Verifier(**{name: 0})


def test_a_pool_that_stops_answering_is_bounded_by_the_batch_deadline(monkeypatch):
    monkeypatch.setattr(pool_module, "_START_SECONDS", 0)
    monkeypatch.setattr(worker, "run", sleep_on_y)
    with Verifier(timeout=0.01) as fresh:  # over before a worker is up
        assert statuses(fresh.verify([("x^2", r"\boxed{x+y}")])) == ["timeout"]


def test_the_callers_alarm_and_threads_are_left_alone(verifier):
    rang = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        got = []
        thread = threading.Thread(target=lambda: got.extend(verifier.verify([CORRECT, WRONG])))
        thread.start()
        thread.join()
        assert statuses(got) == ["correct", "wrong"]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not rang


def test_rules_differ_for_equal_pairs(verifier):
    pair = (r"\pi", r"\boxed{3.1416}")
    assert statuses(verifier.verify([pair])) == ["wrong"]
    loose = MathRule(relative_tolerance=1e-4, evaluate_decimals=True)
    assert statuses(verifier.verify([pair], loose)) == ["correct"]


def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(r"""
        print("main", flush=True)
        from jaxrl.rewards import verify_math
        from jaxrl.rewards.math import _shared_verifier
        print(verify_math("x+1", r"\boxed{1+x}").status)
        print(*_shared_verifier()._pool._pool_manager.worker_manager.workers)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    main, status, pid = done.stdout.split()
    assert (main, status, done.stderr) == ("main", "correct", "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_single_calls_share_one_verifier():
    from jaxrl.rewards.math import _shared_verifier

    assert verify_math(*CORRECT).correct
    pool = _shared_verifier()._pool
    assert not verify_math(*WRONG).correct
    assert _shared_verifier()._pool is pool
