"""A run that stops anywhere and goes on is, bit for bit, the run that never stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import yaml
from train_world import (
    GRPO,
    SELF,
    TWICE,
    Killed,
    assert_same_run,
    experiment,
    lines,
    stop_before_update,
    use_devices,
)

import jaxrl
from jaxrl.config import to_tree
from jaxrl.train import pending
from jaxrl.train.experiment import InfluenceSpec, MeshSpec

CASES = {
    "grpo": experiment(GRPO),
    "self": experiment(SELF),
    "two epochs of two mini-batches by SGD with momentum": experiment(**TWICE),
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run of each case, made on first use."""
    made = {}

    def run(case):
        if case not in made:
            made[case] = jaxrl.train(CASES[case], out=tmp_path_factory.mktemp("whole") / "run", quiet=True)
        return made[case]

    return run


def killed(monkeypatch, case, out, step):
    """A run that died between the rollouts of ``step`` and its update."""
    with monkeypatch.context() as patch:
        stop_before_update(patch, step)
        with pytest.raises(Killed):
            jaxrl.train(CASES[case], out=out, quiet=True)
    return out


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "grpo" else [pytest.mark.slow]) for case in CASES]
)
def test_a_run_killed_between_rollout_and_update_goes_on_bit_for_bit(case, whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, case, tmp_path / "run", 4)
    assert pending.load(run, 4) is not None
    jaxrl.train(CASES[case], out=run, resume=True, quiet=True)
    assert_same_run(run, whole(case))
    assert not (run / pending.FILE).exists()


@pytest.mark.slow
def test_a_run_on_several_devices_goes_on_bit_for_bit(monkeypatch, tmp_path):
    use_devices(monkeypatch, 4)
    x = experiment(SELF, mesh=MeshSpec(fsdp=2, tensor=2), steps=4, influence=InfluenceSpec(every=0))
    monkeypatch.setitem(CASES, "four devices", x)
    whole = jaxrl.train(x, out=tmp_path / "whole", quiet=True)
    run = killed(monkeypatch, "four devices", tmp_path / "run", 2)
    jaxrl.train(x, out=run, resume=True, quiet=True)
    assert_same_run(run, whole)


def test_held_rollouts_are_trained_on_and_not_collected_again(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "grpo", tmp_path / "run", 4)
    sampled = []
    collect = jaxrl.train.collect.Collector.__call__
    monkeypatch.setattr(
        "jaxrl.train.collect.Collector.__call__",
        lambda self, *given: sampled.append(given[3]) or collect(self, *given),
    )
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    assert sampled == [5]
    assert_same_run(run, whole("grpo"))


def test_a_run_killed_before_its_first_checkpoint_starts_again(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "grpo", tmp_path / "run", 0)
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    assert_same_run(run, whole("grpo"))


def test_rollouts_held_of_another_step_or_unreadable_are_ignored(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "grpo", tmp_path / "run", 4)
    other = pending.load(run, 4)
    pending.save(run, 2, other)
    assert pending.load(run, 4) is None
    for content in (b"", b"PK\x03\x04 cut", b"no archive"):
        (run / pending.FILE).write_bytes(content)
        assert pending.load(run, 4) is None
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    assert_same_run(run, whole("grpo"))


def test_what_a_kill_left_half_written_is_written_again(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "grpo", tmp_path / "run", 5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "kind": "tra')
    half = run / "checkpoints" / "6.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "manifest").write_text("cut")
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    assert_same_run(run, whole("grpo"))
    assert not half.exists()


@pytest.mark.slow
def test_no_evaluation_is_written_twice(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "self", tmp_path / "run", 5)  # after the evaluation of step 3, from the checkpoint of 4
    for _ in range(2):  # the second time there is nothing left to do
        jaxrl.train(CASES["self"], out=run, resume=True, quiet=True)
        assert [line["step"] for line in lines(run, "eval")] == [0, 3, 6]
    assert_same_run(run, whole("self"))


def test_a_resumed_run_says_what_each_part_of_it_ran_on(whole, monkeypatch, tmp_path):
    run = killed(monkeypatch, "grpo", tmp_path / "run", 1)
    first = json.loads((run / "config.json").read_text())
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    described = json.loads((run / "config.json").read_text())
    assert {k: v for k, v in described.items() if k != "resumed"} == first
    assert [part["versions"] for part in described["resumed"]] == [first["versions"]]
    assert_same_run(run, whole("grpo"))


def test_a_finished_run_may_be_given_more_steps(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("grpo"), run)
    jaxrl.train(replace(CASES["grpo"], steps=8), out=run, resume=True, quiet=True)
    assert timeless_steps(run, 6) == timeless_steps(whole("grpo"), 6)
    assert [line["step"] for line in lines(run, "train")] == list(range(8))
    assert json.loads((run / "summary.json").read_text())["updates"] == 8


def timeless_steps(run, below):
    return [
        (line["step"], line["reward/mean"], line["policy/loss"]) for line in lines(run, "train") if line["step"] < below
    ]


@pytest.mark.slow
def test_kill_9_of_the_command_loses_nothing(whole, tmp_path):
    config, run = tmp_path / "grpo.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(to_tree(CASES["grpo"])))
    command = [sys.executable, "-c", "from jaxrl.cli import main; main()", "train", str(config), "--out", str(run)]
    env = {**os.environ, "XLA_FLAGS": ""}  # one device, as in this test
    child = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (run / "checkpoints" / "2").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    jaxrl.train(CASES["grpo"], out=run, resume=True, quiet=True)
    assert_same_run(run, whole("grpo"))
    assert np.isfinite(lines(run, "train")[-1]["policy/loss"])
