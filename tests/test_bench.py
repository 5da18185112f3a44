"""The benchmarks run, compare what they say they compare, and print numbers. No timing is asserted."""

import argparse
import importlib
import json
import math
import pathlib
import shlex
import sys
import time

import jax
import numpy as np
import pytest

from jaxrl import cli
from jaxrl.bench import SUBJECTS, arguments, environments
from jaxrl.bench.__main__ import main
from jaxrl.bench.compare import KERNEL, Case, Measured, compare
from jaxrl.bench.environments import PEERS, peer_python, peers_of
from jaxrl.bench.head import HEAD_SIZES
from jaxrl.bench.own import PASS, REFERENCE, case
from jaxrl.bench.report import Report
from jaxrl.bench.rollout import LOGITS
from jaxrl.bench.run import run
from jaxrl.bench.sizes import KERNEL_SIZES, KernelSize
from jaxrl.bench.table import speeds, table
from jaxrl.bench.timing import against
from jaxrl.bench.workers import Worker, WorkerFailed
from jaxrl.bench.workloads import SCALES
from jaxrl.bench.world import as_model, write_world
from jaxrl.errors import DoesNotHold, JaxrlError, UsageError
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.models.decoder import param_shapes

TINY_KERNEL = KernelSize(hidden=16, layers=2, vocab=300, width=6, rows=(3,), head_dim=4)


def parse(line: str) -> argparse.Namespace:
    return cli.parse(shlex.split(f"bench {line}"))


# ---------------------------------------------------------------- arguments


def test_both_command_lines_take_the_same_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxrl.bench.__main__.run", lambda a: seen.append(vars(a)))
    line = "kernel --sizes M,S --rows 4,8 --methods columns --peer nt --response half --repeats 2 --json"
    assert main(shlex.split(line)) == 0
    named = vars(parse(line))
    assert named.pop("command") == "bench"
    assert seen == [named]
    assert (named["sizes"], named["rows"], named["methods"], named["peer"]) == (
        ("M", "S"),
        (4, 8),
        ("columns",),
        ("nt",),
    )
    assert parse("").subject == "all"
    assert parse("kernel --peer none").peer == ()


def test_the_names_of_the_arguments_are_those_that_exist():
    assert set(arguments.SIZES) == set(KERNEL_SIZES)
    assert arguments.PEERS.keys() == set(SUBJECTS)
    assert {subject: set(peers_of(subject)) for subject in SUBJECTS} == {s: set(p) for s, p in arguments.PEERS.items()}
    for scale in SCALES.values():
        assert [tuple(scale.rollout), tuple(scale.step)] == [arguments.CASES["rollout"], arguments.CASES["step"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--repeats 0", "argument --repeats: expected an integer of at least 1, got '0'"),
        ("--repeats x", "argument --repeats: expected an integer of at least 1, got 'x'"),
        ("krnel", "argument SUBJECT: invalid choice: 'krnel'"),
        ("kernel --sizes S,L", "argument --sizes: expected one of: XS, S, M, got 'L'"),
        ("kernel --peer torhc", "argument --peer: did you mean 'torch'?"),
        ("kernel --peer torch,none", "argument --peer: expected one of: torch, nt, hf, tunix, trl, got 'none'"),
        ("kernel --rows 4,0", "argument --rows: expected an integer of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_usage_errors(line, message, capsys):
    assert cli.main(["bench", *line.split()]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step --sizes S --rows 4", "--sizes: belongs to the subject kernel, not to step"),
        ("kernel --quick", "--quick: belongs to the subject rollout or step, not to kernel"),
        ("step --peer hf", "--peer: expected one of: trl, tunix"),
        ("all --accelerator", "--accelerator: for rollout and step, without peers"),
        ("rollout --accelerator --peer hf", "--accelerator: for rollout and step, without peers"),
        ("rollout --cases plain,ragged", "--cases: expected one of: plain, shared, refill"),
        ("kernel --methods colums", "--methods: did you mean 'columns'?"),
        ("kernel --methods auto", "--methods: expected one of:"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_runs(line, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        run(parse(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kernel", (("S", "M"), ("reference", "streamed"), ("torch", "nt"), "all")),
        ("all", (("XS",), ("reference", "streamed"), (), "all")),
        (
            "kernel --sizes XS --methods columns --peer none --response half",
            (("XS",), ("columns",), (), "half"),
        ),
        ("all --sizes S --peer torch", (("S",), ("reference", "streamed"), ("torch",), "all")),
    ],
)
def test_the_kernel_alone_runs_at_full_size_with_peers_and_quickly_among_the_others(monkeypatch, line, expected):
    seen = []

    def kernel(names, *, rows, methods, peers, repeats, response, sizes):
        seen.append((names, methods, peers, response))
        return Report(tables={"kernel XS 3x3": [{"case": "a"}]}, versions={"torch": "2"}, failed=["a: died"])

    monkeypatch.setattr("jaxrl.bench.run.kernel", kernel)
    for other in ("rollout", "step"):
        monkeypatch.setattr(f"jaxrl.bench.run.{other}", lambda cases, **_: Report())
    monkeypatch.setattr("jaxrl.bench.run.head", lambda **_: Report())
    with pytest.raises(DoesNotHold, match="a: died") as failed:  # what failed is said, what was found is kept
        run(parse(line))
    assert failed.value.result["kernel XS 3x3"] == [{"case": "a"}]
    assert failed.value.result["torch"] == "2"
    assert seen == [expected]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rollout", ("rollout", ["plain", "shared", "refill"], ("hf", "tunix"), "full", False)),
        ("step --peer tunix --cases ragged", ("step", ["ragged"], ("tunix",), "full", False)),
        ("rollout --quick --peer none --cases refill,plain", ("rollout", ["plain", "refill"], (), "quick", False)),
        ("step --accelerator", ("step", ["full", "ragged"], (), "accelerator", True)),
    ],
)
def test_rollout_and_step_run_with_all_their_peers_unless_told_otherwise(monkeypatch, line, expected):
    seen = []

    def subject(name):
        def called(cases, *, peers, repeats, scale, accelerator):
            seen.append((name, cases, peers, next(key for key, value in SCALES.items() if value is scale), accelerator))
            return Report(tables={f"{name} a": [{"case": "a"}]})

        return called

    for name in ("rollout", "step"):
        monkeypatch.setattr(f"jaxrl.bench.run.{name}", subject(name))
    result = run(parse(line))
    assert seen == [expected]
    assert result[f"{expected[0]} a"] == [{"case": "a"}]
    one_thread = "--xla_cpu_multi_thread_eigen=false" in result.get("threads of head, rollout and step", "")
    accelerator = expected[-1]
    assert one_thread is not accelerator
    assert ("CPU-seconds" in result["unit"]) is not accelerator


def test_everything_together_is_quick_and_without_peers(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxrl.bench.run.kernel", lambda names, **_: Report())
    for name in ("rollout", "step"):
        monkeypatch.setattr(
            f"jaxrl.bench.run.{name}", lambda cases, *, peers, scale, **_: seen.append((peers, scale)) or Report()
        )
    monkeypatch.setattr("jaxrl.bench.run.head", lambda *, repeats, size: seen.append(((), size)) or Report())
    run(parse("all"))
    assert seen == [((), HEAD_SIZES["quick"]), *[((), SCALES["quick"])] * 2]


def test_the_command_prints_what_was_found(monkeypatch, capsys):
    module = importlib.import_module("jaxrl.commands.bench")  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "run", lambda a: {"rounds": a.repeats})
    assert cli.main(["bench", "step", "--repeats", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rounds": 4}


def test_the_module_says_what_failed_after_what_was_found(monkeypatch, capsys):
    def failing(a):
        raise DoesNotHold("a: died", {"rounds": 4})

    monkeypatch.setattr("jaxrl.bench.__main__.run", failing)
    assert main(["--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out) == {"rounds": 4}
    assert said.err == "jaxrl.bench: a: died\n"


# ---------------------------------------------------------------- tables


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    seconds = {"base": np.array([1.0, 10.0, 2.0]), "other": np.array([3.0, 20.0, 8.0])}
    base, other = against(seconds, "base", "ratio")
    assert base["ratio"] == {"value": 1, "low": 1, "high": 1}
    assert other["ratio"] == {"value": 3, "low": 2, "high": 4}
    assert (base["CPU-seconds"], other["CPU-seconds"]) == (2, 8)


def measured(name, seconds, *, peer=False, temp=None, rss=None, differs=None, failure=None) -> Measured:
    return Measured(
        Case(name, (), peer=peer), list(seconds), temp_bytes=temp, peak_rss_bytes=rss, differs=differs, failure=failure
    )


FOUND = [
    measured(PASS, [2.0, 4.0, 2.0], temp=10_000_000, rss=500_000_000),
    measured(REFERENCE, [3.0, 8.0, 2.0], temp=80_000_000),
    measured("streamed", [2.0, 6.0, 4.0], temp=12_000_000, differs=1e-7),
    measured("slow peer", [20.0], peer=True),  # dear: timed in the first round alone
    measured("fast peer", [4.0, 4.0, 8.0], peer=True, differs=2e-6),
    measured("dead peer", [1e-3], peer=True, failure="died"),
]


def test_every_ratio_is_of_the_same_rounds():
    rows = {row["case"]: row for row in table(FOUND, PASS, REFERENCE)}
    assert list(rows) == [PASS, REFERENCE, "streamed", "slow peer", "fast peer"]  # what failed is left out
    assert rows[PASS]["ratio"] == {"value": 1, "low": 1, "high": 1}
    assert rows["streamed"]["ratio"] == {"value": 1.5, "low": 1, "high": 2}
    assert rows["streamed"]["CPU-seconds"] == 4
    assert rows["slow peer"]["ratio"] == {"value": 10, "low": 10, "high": 10}
    assert rows["streamed"]["over best peer"] == {"value": 0.5, "low": 0.5, "high": 1.5}
    assert rows["slow peer"]["over best peer"]["value"] == 5


def test_speeds_are_tokens_a_cpu_second_and_seconds_over_our_own():
    rows = {row["case"]: row for row in speeds(FOUND, 100, "streamed")}
    assert "dead peer" not in rows
    assert rows["fast peer"]["CPU-seconds"] == {"value": 4, "low": 4, "high": 8}
    assert rows["fast peer"]["tokens/CPU-second"] == 25
    assert rows["fast peer"]["ratio"] == {"value": 2, "low": 4 / 6, "high": 2}
    assert rows["fast peer"]["differs by"] == 2e-6


def test_the_bound_is_known_where_the_device_is():
    timed = measured("a", [1.0, 2.0, 4.0])
    for kind, expected in (("NVIDIA H200", {"value": 0.25, "low": 0.125, "high": 0.5}), ("cpu", None)):
        timed.versions = {"device": kind}
        (row,) = speeds([timed], 100, "a", lambda device: device.bandwidth / 4.8e12 / 2)
        assert row["of the bound"] == expected
        assert row["tokens/second"] == 50
        assert "seconds" in row


def test_memory_is_in_megabytes_and_over_the_pass_and_the_reference():
    rows = {row["case"]: row for row in table(FOUND, PASS, REFERENCE)}
    streamed = rows["streamed"]
    assert (streamed["temp MB"], streamed["temp ratio"], streamed["temp over reference"]) == (12, 1.2, 0.15)
    assert (rows[PASS]["peak RSS MB"], streamed["peak RSS MB"]) == (500, None)
    assert rows["fast peer"]["temp MB"] is rows["fast peer"]["temp over reference"] is None
    assert (rows[PASS]["differs by"], rows["fast peer"]["differs by"]) == (None, 2e-6)


def test_columns_without_peers_or_reference_are_left_out():
    (first, last) = table([FOUND[0], FOUND[2]], PASS, REFERENCE)
    assert (
        set(first)
        == set(last)
        == {"case", "CPU-seconds", "ratio", "temp MB", "temp ratio", "peak RSS MB", "differs by"}
    )


# ---------------------------------------------------------------- workers

# A worker that speaks the protocol and computes nothing; its case's last word says how it fails.
STUB = """
import json, os, sys, time
job = json.loads(sys.argv[1])
name, how = job["case"], job["case"].split()[-1]
log = open(os.path.join(os.path.dirname(job["world"]), "order"), "a")
kernel = [[1.0, 2.0], [3.0, 4.0 + {"rounding": 1e-6, "wrong": 0.1, "nan": float("nan")}.get(how, 0)]]
made = {"idler": 4, "tiring": 5, "counting": 5}.get(how)
first = {"values": kernel, "temp_bytes": 7, "versions": {"stub": "1"}, "seconds": {"dear": 1000.0}.get(how, 1e-3), "made": made}
if how == "pass": first["values"] = None
if how == "narrow": first["values"] = [[1.0, 2.0]]
if how == "forgetful": del first["temp_bytes"]
if how == "silent": time.sleep(60)
if how == "stillborn": sys.exit("no such library")
print("a library says hello" if how == "chatty" else json.dumps(first), flush=True)
for turn, line in enumerate(sys.stdin):
    print(name, line.strip(), file=log, flush=True)
    if how == "dying" and turn: os._exit(9)
    seconds = {"lying": 1e9, "idle": 0.0, "nothing": None}.get(how, 1e-3)
    if how == "tiring" and turn: made = 3
    print(json.dumps({"seconds": seconds, "peak_rss_bytes": 1000 + turn, "made": made}), flush=True)
"""


@pytest.fixture
def compared(tmp_path):
    """Compares stub workers: a list of names (peers begin with "peer") -> what was found, and the order of timings."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)

    def run(*names: str, repeats: int = 2, target: float = 0.0, **options) -> tuple[dict[str, Measured], list[str]]:
        cases = [Case(name, (sys.executable, str(script)), peer=name.startswith("peer")) for name in names]
        found = compare(cases, tmp_path / "world.npz", (2, 2), repeats=repeats, target=target, **options)
        return {m.case.name: m for m in found}, (tmp_path / "order").read_text().splitlines()

    return run


def test_rounds_are_interleaved_after_everybody_was_warmed_up(compared):
    found, order = compared("pass", "ours", "peer rounding")
    assert order == ["pass 1", "ours 1", "peer rounding 1"] + ["pass 1", "ours 1", "peer rounding 1"] * 2
    assert [m.failure for m in found.values()] == [None] * 3
    assert [len(m.seconds) for m in found.values()] == [2] * 3
    assert found["ours"].temp_bytes == 7
    assert found["ours"].peak_rss_bytes == 1002  # of the last answer
    assert found["peer rounding"].versions == {"stub": "1"}
    assert found["pass"].differs is found["ours"].differs is None  # nothing to compare, and what others are compared to
    assert found["peer rounding"].differs == pytest.approx(1e-6 / np.sqrt(30), rel=1e-6)


def test_short_calls_are_repeated_and_dear_ones_are_timed_once(compared):
    found, order = compared("pass", "peer dear", target=0.004)
    assert order == ["pass 1", "pass 4", "peer dear 1", "pass 4"]
    assert [len(m.seconds) for m in found.values()] == [2, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("wrong", "another kernel: it differs by"),
        ("nan", "expected finite numbers"),
        ("narrow", r"expected finite numbers, \(2, 2\), got shape \(1, 2\)"),
        ("forgetful", "its answer lacks temp_bytes"),
        ("chatty", "expected a JSON object in one line, got b'a library says hello'"),
        ("stillborn", "died with exit code 1\nno such library"),
        ("dying", "died with exit code 9"),
        ("lying", r"says that a call took 1000000000.0 seconds"),
        ("idle", r"says that a call took 0.0 seconds"),
        ("nothing", r"says that a call took None seconds"),
    ],
)
def test_a_case_that_fails_is_left_out_and_the_others_go_on(compared, how, message):
    found, _ = compared("pass", "ours", f"peer {how}", "peer rounding")
    failed = found.pop(f"peer {how}")
    with pytest.raises(WorkerFailed, match=message):
        raise WorkerFailed(failed.failure)
    assert f"peer {how}: " in failed.failure
    assert [(m.failure, len(m.seconds)) for m in found.values()] == [(None, 2)] * 3


def test_a_call_must_have_made_what_was_asked_for(compared):
    found, _ = compared("ours counting", "peer counting", "peer idler", "peer tiring", "peer rounding", made=5)
    failures = {name: m.failure for name, m in found.items()}
    assert failures["ours counting"] is failures["peer counting"] is None
    assert failures["peer idler"] == "peer idler: a call should have made 5, and made 4"
    assert failures["peer tiring"] == "peer tiring: a call should have made 5, and made 3"  # found in a later round
    assert failures["peer rounding"] == "peer rounding: a call should have made 5, and made None"
    assert found["peer tiring"].seconds == []


def test_what_counts_as_the_same_is_the_benchmarks_own(compared):
    found, _ = compared("ours", "peer rounding", "peer wrong", agreement=LOGITS)
    assert found["peer rounding"].differs == pytest.approx(1e-6)
    assert (
        found["peer wrong"].failure
        == "peer wrong: another model: it differs by 0.1 in a logit, at most 0.0001 is rounding"
    )


def test_silence_is_not_waited_for_forever(compared, monkeypatch):
    monkeypatch.setattr("jaxrl.bench.workers.PATIENCE", 0.5)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"silent: gave no answer in 0\.5 s"):
        compared("silent")
    assert time.monotonic() - began < 20


def test_without_the_first_case_there_is_nothing_to_compare_with(compared):
    with pytest.raises(WorkerFailed, match="dying: died"):
        compared("dying", "ours")


def test_kernels_are_compared_with_our_own_not_with_a_peers(compared):
    found, _ = compared("pass", "peer wrong", "ours", "peer rounding")
    assert 0.1 / np.sqrt(30) > KERNEL.limit
    assert found["peer wrong"].failure is None  # there was no truth yet: own cases come first in a real run
    assert found["peer rounding"].differs < 1e-6


# A real worker's side of the protocol on a case that needs no library.
SERVED = """
import protocol, time
world, case = protocol.read_job()
calls = []
def call():
    calls.append(case)
    print("a library says hello")
    if len(calls) > 3: raise ValueError("too often")
    until = time.process_time() + 0.05
    while time.process_time() < until: pass
    return world["kernel"] * len(calls)
protocol.serve(call, {"numpy": "2"}, temp_bytes=world["config"]["bytes"])
"""


@pytest.fixture
def served(tmp_path):
    script = pathlib.Path(environments.__file__).parent / "peers" / "protocol.py"
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "protocol.py").write_text(script.read_text())
    np.savez(tmp_path / "world.npz", kernel=np.ones((1, 2), np.float32), config=np.array('{"bytes": 5}'))
    job = {"world": str(tmp_path / "world.npz"), "case": "a", "memory": 1 << 30}
    with Worker("a", [sys.executable, str(tmp_path / "served.py")], job, {}, tmp_path / "log") as worker:
        yield worker


def test_a_script_serves_its_case_as_the_protocol_says(served):
    held = np.ones(50_000_000)  # memory of the process that starts another is not the other's
    first = served.first((1, 2))
    assert (first["temp_bytes"], first["versions"], first["values"].tolist()) == (5, {"numpy": "2"}, [[1, 1]])
    assert served.made is None
    assert 0.05 <= served.seconds(2) < 0.1  # of one call
    assert 1e6 < served.peak_rss_bytes < held.nbytes / 2
    with pytest.raises(WorkerFailed, match=r"a: died with exit code 1\n(.*\n)*ValueError: too often"):
        served.seconds(1)
    with pytest.raises(WorkerFailed, match="a: died"):
        served.seconds(1)


# ---------------------------------------------------------------- our own cases


@pytest.fixture(scope="module")
def tiny():
    return TINY_KERNEL.model(), TINY_KERNEL.sides(3)


def test_a_world_is_read_as_it_was_written(tiny, tmp_path):
    model, sides = tiny
    write_world(tmp_path / "world.npz", model, sides)
    with np.load(tmp_path / "world.npz") as file:
        world = {**file, "config": json.loads(str(file["config"]))}
    again, rows = as_model(world)
    assert again.config == model.config
    for was, is_ in zip(jax.tree.leaves((model, sides)), jax.tree.leaves((again, rows)), strict=True):
        assert (np.asarray(was) == np.asarray(is_)).all()
    assert world["weights_a"].dtype == np.float32
    assert (world["weights_b"] == np.array([[0, 1, 1, 1, 1, 1]] * 3)).all()


@pytest.mark.slow
def test_the_reference_is_the_kernel_and_the_pass_computes_no_kernel(tiny):
    call, temp = case(REFERENCE, *tiny)
    expected = np.asarray(gradient_kernel(tiny[0], *tiny[1], method="reference").values)
    np.testing.assert_allclose(call(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    passed, least = case(PASS, *tiny)
    assert passed() is None
    assert temp > least > 0


def test_half_a_row_can_be_the_response():
    a, b = KernelSize(hidden=16, layers=1, vocab=24, width=6, rows=(3,), response="half").sides(2)
    assert a.start.tolist() == b.start.tolist() == [3, 3]
    assert a.length.tolist() == [6, 6]
    assert not np.array_equal(a.tokens, b.tokens)


def test_the_sizes_are_those_of_the_readme():
    count = {name: sum(math.prod(s) for s in shapes(size)) for name, size in KERNEL_SIZES.items()}
    assert (count["S"], count["M"]) == (4_002_048, 26_753_536)
    assert [(s.width, s.rows) for s in KERNEL_SIZES.values()] == [(32, (8,)), (128, (16, 32)), (256, (8, 16))]


def shapes(size):
    return param_shapes(size.config()).values()


# ---------------------------------------------------------------- the peers' environments


@pytest.fixture
def made(monkeypatch):
    """Stands in for ``python -m venv`` and pip: makes the Python, or fails; returns the commands given."""
    commands = []

    def command(words, peer):
        commands.append(words)
        if "venv" in words:
            python = pathlib.Path(words[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(environments, "_command", command)
    return commands


def test_an_environment_is_made_once_and_again_when_its_pins_change_or_it_is_half_made(made, tmp_path):
    python = peer_python(PEERS["nt"], tmp_path)
    assert python == tmp_path / "nt" / "bin" / "python"
    assert len(made) == 2
    assert {"--no-deps", "neural-tangents==0.6.5", "jax==0.4.23"} <= set(made[1])
    assert peer_python(PEERS["nt"], tmp_path) == python
    assert len(made) == 2
    stamp = tmp_path / "nt" / environments.STAMP
    for spoil in (stamp.unlink, lambda: stamp.write_text("jax==0.4.22\n"), python.unlink):
        spoil()
        (tmp_path / "nt" / "left over").touch()
        peer_python(PEERS["nt"], tmp_path)
        assert not (tmp_path / "nt" / "left over").exists()
    assert len(made) == 8


def test_an_environment_that_cannot_be_made_stays_half_made_and_says_why(monkeypatch, tmp_path):
    peer = environments.Peer("none", {}, ("no-such-package==0",))
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho no index here; exit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(environments.sys, "executable", str(stand_in))
    with pytest.raises(JaxrlError, match=r"(?s)peer none cannot be made.*no index here.*--peer none runs without"):
        peer_python(peer, tmp_path / "cache")
    assert not (tmp_path / "cache" / "none" / environments.STAMP).exists()


def test_the_cache_is_below_the_current_folder_or_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXRL_BENCH_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert environments.cache_folder() == tmp_path / ".cache" / "bench"
    monkeypatch.setenv("JAXRL_BENCH_CACHE", str(tmp_path / "elsewhere"))
    assert environments.cache_folder() == tmp_path / "elsewhere"


def test_peers_get_no_foreign_paths_or_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--new")
    monkeypatch.setenv("PYTHONPATH", "x")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "y")
    env = environments.environment()
    assert not {"XLA_FLAGS", "PYTHONPATH", "JAX_ENABLE_X64"} & set(env)
    assert env["PIP_INDEX_URL"] == "y"


# ---------------------------------------------------------------- real workers


def peer(name: str) -> list[Case]:
    """The peer's cases, if a Python that can run them is there."""
    if name == "torch":
        pytest.importorskip("torch")
        python = sys.executable
    else:
        python = environments.cache_folder() / name / "bin" / "python"
        if not (python.parents[1] / environments.STAMP).exists():
            pytest.skip(f"no environment of peer {name}: `jaxrl bench kernel` makes it")
    work = PEERS[name].work["kernel"]
    script = pathlib.Path(environments.__file__).parent / "peers" / work.script
    return [Case(c, (str(python), str(script)), environments.environment(), peer=True) for c in work.cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", peers_of("kernel"))
def test_a_peers_kernel_is_ours(name, tiny, tmp_path):
    write_world(tmp_path / "world.npz", *tiny)
    env = environments.environment()
    ours = [Case(c, (sys.executable, "-m", "jaxrl.bench.own"), env) for c in (PASS, REFERENCE, "streamed")]
    found = compare([*ours, *peer(name)], tmp_path / "world.npz", (3, 3), repeats=1, target=0.0)
    assert [m.failure for m in found] == [None] * 5
    assert all(m.differs < 1e-5 for m in found[2:])
    assert all(m.peak_rss_bytes > 5e7 and len(m.seconds) == 1 for m in found)
    assert found[1].temp_bytes > found[0].temp_bytes > 0
    assert found[2].temp_bytes > 0


@pytest.mark.slow
def test_memory_that_is_not_there_is_an_error_of_its_case(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.bench.compare.free_memory", lambda: 900 << 20)
    size = KERNEL_SIZES["S"]
    write_world(tmp_path / "world.npz", size.model(), size.sides(16))
    ours = [Case(c, (sys.executable, "-m", "jaxrl.bench.own"), environments.environment()) for c in (REFERENCE,)]
    with pytest.raises(WorkerFailed, match="reference: died with exit code"):
        compare(ours, tmp_path / "world.npz", (16, 16), repeats=1)
