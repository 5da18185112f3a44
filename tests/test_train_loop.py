"""The loop: what it logs, when it compiles, when it stops, and that devices do not matter."""

import ast
import json
import math
import pathlib
from dataclasses import replace

import jax
import numpy as np
import pytest
from train_world import (
    FILTER_ONLY,
    FKL_ONLY,
    GRPO,
    SELF,
    TWICE,
    arrays,
    assert_same_run,
    experiment,
    lines,
    use_devices,
)

import jaxrl
from jaxrl import keys
from jaxrl.data.synthetic import Msa0
from jaxrl.errors import JaxrlError
from jaxrl.models.hf import load_model
from jaxrl.rewards import Verdict
from jaxrl.rl.old_logps import Sampler, Tis
from jaxrl.rl.optimiser import Optimiser
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.train import loop, setup
from jaxrl.train.collect import Collector
from jaxrl.train.experiment import CheckpointSpec, EvalSpec, InfluenceSpec, MeshSpec, ProbeSpec
from jaxrl.train.loop import Run
from jaxrl.train.observe import scored
from jaxrl.train.record import NotFinite

QUIET = {"influence": InfluenceSpec(every=0), "eval": EvalSpec(every=0, n=4, k=(1, 4))}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name, made on first use."""
    cases = {
        "grpo": experiment(GRPO),
        "self": experiment(SELF),
        "several updates": experiment(**TWICE),
        "sparse": experiment(
            GRPO,
            steps=4,
            probe=ProbeSpec(prompts=8, n=2, every=2),
            **QUIET,
        ),
    }
    made = {}

    def run(name):
        if name not in made:
            made[name] = jaxrl.train(cases[name], out=tmp_path_factory.mktemp("runs") / "run", quiet=True)
        return made[name]

    return run


# ---------------------------------------------------------------- what is logged


@pytest.mark.parametrize("name", ["grpo", pytest.param("self", marks=pytest.mark.slow)])
def test_every_step_logs_what_comparisons_need(name, runs):
    """REFERENCE: kept fraction, greedy accuracy, optimiser steps, KL to the base."""
    train, probe = lines(runs(name), "train"), lines(runs(name), "probe")
    assert [line["step"] for line in train] == [line["step"] for line in probe] == list(range(6))
    for line in train:
        assert {"rollout/kept", "rollout/greedy_accuracy", "optim/updates"} <= line.keys()
    assert all(math.isfinite(line["kl/forward_base"]) for line in probe)
    assert [line["optim/updates"] for line in train] == list(range(1, 7))


def test_a_prefilter_keeps_the_prompts_that_greedy_decoding_fails(runs):
    for line in lines(runs("self"), "train"):
        assert line["rollout/kept"] == pytest.approx(1 - line["rollout/greedy_accuracy"])
    assert {line["rollout/kept"] for line in lines(runs("grpo"), "train")} == {1.0}
    kept = [round(8 * line["rollout/kept"]) for line in lines(runs("self"), "train")]
    assert [int(row.sum()) for row in arrays(runs("self"))["kept"]] == kept


def test_lines_are_means_with_the_counts_that_merge_them(runs):
    stored = arrays(runs("grpo"))
    for line in lines(runs("grpo"), "train"):
        assert line["reward/mean/n"] == 32
        assert line["reward/mean"] == pytest.approx(stored["reward"][line["step"]].mean())
        assert line["reward/correct"] == pytest.approx(stored["correct"][line["step"]].mean())
    for line in lines(runs("self"), "train"):  # prompts that were not sampled do not count
        assert line["reward/mean/n"] == 32 * line["rollout/kept"]


@pytest.mark.slow
def test_metrics_of_several_updates_a_step_are_merged_by_their_counts(runs):
    train = lines(runs("several updates"), "train")
    assert [line["optim/updates"] for line in train] == [4, 8, 12, 16, 20, 24]
    assert {line["policy/loss/n"] for line in train} == {4}
    assert any(line["clip/after_ratio"] != 1 for line in train)
    probe = lines(runs("several updates"), "probe")
    assert not any("probe/strength_per_update_sum" in line for line in probe)  # |dtheta| of the step is not known
    assert all("probe/strength_per_update_sum" in line for line in lines(runs("grpo"), "probe"))


def test_the_optimiser_starts_on_policy(runs):
    for line in lines(runs("grpo"), "train"):
        assert line["clip/before_ratio"] == pytest.approx(1, abs=1e-5)
        assert line["clip/before_token"] == 0
        assert line["kl/sampler_max"] < 1e-4


def test_the_probe_is_scored_around_every_observed_step(runs):
    scores = arrays(runs("sparse"))["probe_logp_sum"]
    assert [line["step"] for line in lines(runs("sparse"), "probe")] == [0, 2]
    assert np.isfinite(scores[:4]).all()
    assert np.isnan(scores[4]).all()
    assert np.isfinite(arrays(runs("grpo"))["probe_logp_sum"]).all()


def test_gradients_are_compared_on_influence_steps_alone(runs):
    assert [line["step"] for line in lines(runs("grpo"), "influence")] == [0, 3]
    assert lines(runs("sparse"), "influence") == []
    for line in lines(runs("grpo"), "influence"):  # one step of this size is nearly linear
        assert 0.5 < line["influence/median_ratio"] < 2
        assert line["influence/sign_agreement"] > 0.8
    stored = arrays(runs("grpo"))
    assert stored["kernel/3"].shape == stored["probe_kernel/3"].shape == (4, 4)
    assert stored["weights/3"].shape == (4,)
    np.testing.assert_allclose(stored["layers/3"].sum(0), stored["kernel/3"], rtol=1e-4, atol=1e-3)


def test_evaluation_comes_when_asked_and_at_the_end(runs):
    assert [line["step"] for line in lines(runs("grpo"), "eval")] == [0, 3, 6]
    assert [line["step"] for line in lines(runs("sparse"), "eval")] == [4]
    assert sorted(f.name for f in (runs("sparse") / "eval").iterdir()) == ["exact-000004.json"]


def test_the_rollout_log_is_readable_and_agrees_with_the_arrays(runs):
    logs = sorted((runs("self") / "rollouts").iterdir())
    assert [f.name for f in logs] == ["000000.jsonl", "000002.jsonl", "000004.jsonl"]
    reward, kept = (arrays(runs("self"))[name][2] for name in ("reward", "kept"))
    records = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert [r["reward"] for r in records] == reward[kept].ravel().tolist()
    first = records[0]
    assert first["prompt"].split()[0] == "BOS"
    assert len(first["response"].split()) == first["length"]
    assert first["stop"] in ("eos", "length")
    assert first["verdict"] in ("correct", "wrong", "no_box")


def test_a_run_is_summed_up_at_its_end(runs):
    summary = json.loads((runs("grpo") / "summary.json").read_text())
    last = lines(runs("grpo"), "eval")[-1]
    assert (summary["steps"], summary["updates"]) == (6, 6)
    assert summary["seconds"] > 0
    found = summary["evaluation"]["ood/exact"]["pass@4"]
    assert found == {
        end or "value": last[f"eval/ood/exact/pass@4{'/' if end else ''}{end}"] for end in ("", "low", "high")
    }


def test_a_run_keeps_its_resolved_config_and_what_ran_it(runs):
    described = json.loads((runs("self") / "config.json").read_text())
    assert jaxrl.config.from_tree(described["experiment"]) == experiment(SELF)
    assert described["versions"]["jax"] == jax.__version__
    assert {"commit", "command", "devices", "data"} <= described.keys()


# ---------------------------------------------------------------- one loop for every algorithm


@pytest.mark.parametrize("half", [FILTER_ONLY, FKL_ONLY], ids=["filter only", "forward KL only"])
def test_half_of_the_method_runs_through_the_same_loop(half, tmp_path):
    (line,) = lines(jaxrl.train(experiment(half, steps=1, **QUIET), out=tmp_path / "run", quiet=True), "train")
    assert ("policy/loss_full" in line) == (half is FKL_ONLY)
    assert (line["rollout/kept"] < 1) == (half is FILTER_ONLY)


def test_training_asks_for_no_algorithm_by_name():
    files = pathlib.Path(loop.__file__).parent.glob("*.py")
    named = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in ALGORITHMS
    ]
    assert named == []
    assert "grpo" in ALGORITHMS


def test_a_greedy_pass_that_only_the_log_wants_can_be_switched_off():
    x = experiment(SELF)
    ready, silent = setup.set_up(x), replace(x.rollout, log_greedy=False)
    needed = Collector(ready.task, SELF, silent, x.reward, mesh=ready.mesh)(ready.base, ready.base, ready.root, 0)
    assert needed.graded.greedy_correct is not None
    logged = Collector(ready.task, GRPO, silent, x.reward, mesh=ready.mesh)(ready.base, None, ready.root, 0)
    assert logged.graded.greedy_correct is None


def test_no_reference_is_held_where_no_piece_needs_one(monkeypatch, tmp_path):
    held = {}
    monkeypatch.setattr(Run, "go", lambda self: held.update(reference=self.reference, run=self))
    jaxrl.train(experiment(GRPO), out=tmp_path / "grpo", quiet=True)
    assert held["reference"] is None
    sizes = [x.size for x in jax.live_arrays() if x.size]
    embeddings = sizes.count(held["run"].state.model.embed.get_value().size)
    jaxrl.train(experiment(SELF), out=tmp_path / "self", quiet=True)
    assert held["reference"] is not None
    assert [x.size for x in jax.live_arrays()].count(held["run"].state.model.embed.get_value().size) == embeddings + 1


@pytest.mark.slow
@pytest.mark.parametrize("piece", [Sampler(), Tis()], ids=["sampler", "tis"])
def test_either_program_s_log_probs_are_trained_on_and_compared(piece, tmp_path):
    """The sampler's own save a scoring pass; the two are then compared on steps that score the rows anyway."""
    algorithm = replace(GRPO, old_logps=piece)
    x = experiment(algorithm, steps=3, probe=ProbeSpec(prompts=8, n=2, every=2), **QUIET)
    ready = setup.set_up(x)
    graded = Collector(ready.task, algorithm, x.rollout, x.reward, mesh=ready.mesh)(
        ready.base, None, ready.root, 0
    ).graded
    assert (graded.old_logps is None) == (piece == Sampler())
    train = lines(jaxrl.train(x, out=tmp_path / "run", quiet=True), "train")
    compared = [line["step"] for line in train if "kl/sampler_max" in line]
    assert compared == ([0, 2] if piece == Sampler() else [0, 1, 2])
    for line in train:
        if line["step"] in compared:
            assert 0 < line["kl/sampler_max"] < 1e-4
            assert line["kl/sampler_ess"] == pytest.approx(1, abs=1e-4)
            assert line["kl/sampler_correlation"] == pytest.approx(1, abs=1e-4)
            assert line.get("kl/sampler_capped", 0) == 0
        assert line.get("clip/before_ratio", 1) == pytest.approx(1, abs=1e-4)


def test_a_sampler_that_is_too_far_off_stops_the_run_that_trusts_it():
    algorithm, line = replace(GRPO, old_logps=Sampler(max_gap=0.01)), {"kl/sampler_max": 0.02}
    with pytest.raises(
        JaxrlError, match=r"step 3: .* 0\.02 nats .* above algorithm\.old_logps\.max_gap = 0\.01; .*tis"
    ):
        loop.check_gap(algorithm, 3, line)
    loop.check_gap(replace(GRPO, old_logps=Sampler(max_gap=0.03)), 3, line)
    loop.check_gap(GRPO, 3, line)
    loop.check_gap(algorithm, 3, {})


@pytest.mark.slow
def test_the_line_of_a_sampler_that_is_too_far_off_is_written_before_the_run_stops(tmp_path):
    x = experiment(replace(GRPO, old_logps=Sampler(max_gap=0.0)), steps=3, **QUIET)
    with pytest.raises(JaxrlError, match="step 0: a token's log-prob differs"):
        jaxrl.train(x, out=tmp_path / "run", quiet=True)
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [0]


# ---------------------------------------------------------------- compilation


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **about: (
        COMPILED.append(about.get("fun_name")) if event.endswith("backend_compile_duration") else None
    )
)


def test_compilations_are_counted():
    before = len(COMPILED)
    jax.jit(lambda x: x * 1.2345)(1.0)
    assert len(COMPILED) == before + 1


def test_nothing_is_compiled_after_the_second_step_whatever_is_kept(monkeypatch, tmp_path):
    kept = [3, 5, 8, 0, 1, 6, 0, 8]  # of 8 prompts, a step; 0: all filtered, 8: none
    by_step, step = {}, Run.step
    right, wrong = (Verdict(status, "1", "complete", "text") for status in ("correct", "wrong"))
    answers = [[right if i >= kept[step] else wrong for i in range(8)] for step in range(len(kept))]
    monkeypatch.setattr(Collector, "_greedy", lambda self, prompts, root, step, chosen: (answers[step], 0))

    def counted(self, number):
        before = len(COMPILED)
        shown = step(self, number)
        by_step[number] = COMPILED[before:]
        return shown

    monkeypatch.setattr(Run, "step", counted)
    run = jaxrl.train(experiment(SELF, steps=8), out=tmp_path / "run", quiet=True)
    assert [round(8 * line["rollout/kept"]) for line in lines(run, "train")] == kept
    assert {number: found for number, found in by_step.items() if number > 1 and found} == {}


def test_a_second_run_of_the_process_shares_the_programs_of_the_first(runs, tmp_path):
    runs("grpo")
    before = len(COMPILED)
    again = jaxrl.train(experiment(GRPO), out=tmp_path / "run", quiet=True)
    assert len(COMPILED) == before
    assert_same_run(again, runs("grpo"))


# ---------------------------------------------------------------- stopping


def test_a_number_that_is_not_finite_stops_the_run_and_the_last_good_checkpoint_remains(runs, monkeypatch, tmp_path):
    real = loop._update

    def poisoned(state, terms, *given, **options):
        if int(state.step) == 3:
            batch = terms[0].batch
            terms = (replace(terms[0], batch=replace(batch, advantage=batch.advantage * np.float32("nan"))), *terms[1:])
        return real(state, terms, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_update", poisoned)
        with pytest.raises(NotFinite, match=r"step 3: .*policy/loss.*of the train metrics is not finite.*checkpoint"):
            jaxrl.train(experiment(GRPO), out=tmp_path / "run", quiet=True)
    assert [f.name for f in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    assert "policy/loss" in lines(tmp_path / "run", "train")[-1]["not_finite"]
    jaxrl.train(experiment(GRPO), out=tmp_path / "run", resume=True, quiet=True)
    assert_same_run(tmp_path / "run", runs("grpo"))


def test_checkpoints_are_kept_as_the_config_says(tmp_path):
    x = experiment(GRPO, checkpoint=CheckpointSpec(every=1, keep_last=1, keep_every=4), **QUIET)
    run = jaxrl.train(x, out=tmp_path / "run", quiet=True)
    assert sorted(int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdigit()) == [4, 6]


# ---------------------------------------------------------------- devices


@pytest.mark.slow
def test_scoring_in_passes_changes_no_number_beyond_rounding():
    model, rows = load_model(experiment().model.path), Msa0(0).supervised_batch(keys.root(1), 13)
    whole, parts = (scored(model, rows, 0.7, at_once) for at_once in (None, 4))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_devices_change_no_number_beyond_rounding(monkeypatch, tmp_path):
    meshes = {1: MeshSpec(), 2: MeshSpec(data=2, fsdp=1), 4: MeshSpec(fsdp=2, tensor=2)}
    found = {}
    for devices, mesh in meshes.items():
        use_devices(monkeypatch, devices)
        # SGD: at step 0 the forward KL's gradient is rounding alone, which Adam would blow up; how many
        # parameters it moves is no number of the method either
        x = experiment(SELF, steps=3, mesh=mesh, optimiser=Optimiser(type="sgd", lr=0.1), **QUIET)
        run = jaxrl.train(x, out=tmp_path / str(devices), quiet=True)
        found[devices] = {
            f"{line['kind']} {line['step']} {name}": value
            for line in lines(run)
            for name, value in line.items()
            if isinstance(value, float) and name not in ("time", "cost/seconds", "optim/param_changed")
        }
    assert len(found[1]) > 300
    for devices in (2, 4):
        assert found[devices] == pytest.approx(found[1], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_rows_of_a_step_are_split_over_the_devices(monkeypatch):
    use_devices(monkeypatch, 4)
    x = experiment(SELF, mesh=MeshSpec(data=2, fsdp=2))
    ready = setup.set_up(x)
    collector = Collector(ready.task, x.algorithm, x.rollout, x.reward, None, ready.mesh)
    prompts = collector.place(ready.task.pools["train"].take(keys.root(0), 0, 8))
    assert {s.data.shape for s in prompts.tokens.addressable_shards} == {(2, 5)}
    sampled = collector(ready.base, ready.base, keys.root(0), 0).graded.rollouts
    assert {s.data.shape[:2] for s in sampled.rows.tokens.addressable_shards} == {(2, x.rollout.n)}
