"""Whole runs of algorithms that ask for more than rollouts: refill, critics, teachers, demonstrations, pairs, controls."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_tokenizer import EOS, save_tiny
from train_world import (
    Killed,
    arrays,
    assert_same_run,
    base_folder,
    experiment,
    last_state,
    lines,
    stop_before_update,
    use_devices,
)

import jaxrl
from jaxrl import keys
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.hf import load_model, save_model
from jaxrl.rl.advantages import Gae
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.critic import Critic
from jaxrl.rl.filters import KeepMatched, KeepRandom, Mixed, SampleGreedyFails, SampleMatched
from jaxrl.rl.losses import NoPolicy
from jaxrl.rl.optimiser import Optimiser
from jaxrl.rl.pair_losses import Importance
from jaxrl.rl.preferences import Preference
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.refill import Refill
from jaxrl.rl.regularisers import Entropy, Imitation, Kl, TrustRegion
from jaxrl.train.dryrun import dry_run
from jaxrl.train.experiment import (
    CheckpointSpec,
    EvalSpec,
    InfluenceSpec,
    MeshSpec,
    ModelSpec,
    ProbeSpec,
    ProblemsSpec,
    RolloutSpec,
    StopSpec,
    TeacherSpec,
)
from jaxrl.train.setup import set_up

PPO = Algorithm(advantage=Gae(lam=0.95), critic=Critic(optimiser=Optimiser(lr=1e-2), warmup=2))
SHARED = Algorithm(advantage=Gae(bootstrap=True), critic=Critic(trunk="shared", coef=0.5))


# Nothing beside the updates: no kernel, one probe, no evaluation on the way.
QUIET = {
    "influence": InfluenceSpec(every=0),
    "eval": EvalSpec(every=0, n=4, k=(1, 4)),
    "checkpoint": CheckpointSpec(every=100),
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


def only(piece):
    return Algorithm(loss=NoPolicy(), regularisers=((1.0, piece),))


def trained(algorithm, folder, **changes):
    jaxrl.train(experiment(algorithm, **(QUIET | changes)), out=folder, quiet=True)
    return folder


# ---------------------------------------------------------------- refill


def test_a_refill_puts_other_prompts_in_the_places_of_dropped_ones(tmp_path):
    plain = trained(Algorithm(keep=Mixed()), tmp_path / "plain", steps=3)
    full = trained(Algorithm(keep=Mixed(), refill=Refill(rounds=10)), tmp_path / "full", steps=3)
    assert [line["rollout/kept"] for line in lines(full, "train")] > [
        line["rollout/kept"] for line in lines(plain, "train")
    ]
    for line, kept, right in zip(lines(full, "train"), arrays(full)["kept"], arrays(full)["correct"], strict=True):
        assert line["rollout/rounds"] > 1
        assert line["rollout/oversampling"] > 1
        assert line["cost/generated_tokens"] > lines(plain, "train")[0]["cost/generated_tokens"]
        mixed = right.any(1) & ~right.all(1)
        np.testing.assert_array_equal(kept, mixed)
        assert kept.mean() == pytest.approx(line["rollout/kept"])
    # what was kept in the first round stands where it stood
    first = [arrays(x)["kept"][0] for x in (plain, full)]
    reward = [arrays(x)["reward"][0] for x in (plain, full)]
    np.testing.assert_array_equal(reward[0][first[0]], reward[1][first[0]])


def test_a_prefilter_is_refilled_with_no_more_rollouts_than_places(tmp_path):
    run = trained(Algorithm(prefilter=SampleGreedyFails(), refill=Refill(rounds=4)), tmp_path / "run", steps=2)
    for line in lines(run, "train"):
        assert line["rollout/oversampling"] == pytest.approx(line["rollout/kept"])
        assert line["rollout/rounds"] > 1


def test_a_step_that_cannot_be_filled_goes_on_or_stops_as_configured(tmp_path):
    goes_on = trained(Algorithm(keep=KeepRandom(rate=0.0), refill=Refill(rounds=3)), tmp_path / "on", steps=2)
    assert [line["rollout/rounds"] for line in lines(goes_on, "train")] == [3, 3]
    assert [line["rollout/kept"] for line in lines(goes_on, "train")] == [0, 0]
    with pytest.raises(JaxrlError, match=r"step 0: 0 of 8 prompts passed the filters after 3 generation batches"):
        trained(Algorithm(keep=KeepRandom(rate=0.0), refill=Refill(rounds=3, short="stop")), tmp_path / "stop", steps=2)


# ---------------------------------------------------------------- controls


def test_a_matched_filter_keeps_as_many_prompts_as_the_other_run(tmp_path):
    other = trained(Algorithm(prefilter=SampleGreedyFails(), no_kept="skip"), tmp_path / "other", steps=3)
    counts = arrays(other)["kept"].sum(1)
    for piece in ({"prefilter": SampleMatched(run=str(other))}, {"keep": KeepMatched(run=str(other))}):
        run = trained(Algorithm(**piece, no_kept="skip"), tmp_path / next(iter(piece)), steps=3)
        np.testing.assert_array_equal(arrays(run)["kept"].sum(1), counts)
        assert lines(run, "train")[-1]["optim/updates"] == lines(other, "train")[-1]["optim/updates"]
    with pytest.raises(UsageError, match="has 3 steps of 8 prompts; this one takes 4 of 8"):
        trained(Algorithm(prefilter=SampleMatched(run=str(other))), tmp_path / "longer", steps=4)
    with pytest.raises(UsageError, match=r"no arrays\.zarr/kept"):
        trained(Algorithm(prefilter=SampleMatched(run="nowhere")), tmp_path / "nowhere", steps=1)
    with pytest.raises(UsageError, match=r"no arrays\.zarr/kept"):
        dry_run(experiment(Algorithm(keep=KeepMatched(run="nowhere")), steps=1))


def test_a_run_stops_once_a_metric_reaches_its_number_or_another_runs(tmp_path):
    run = trained(ALGORITHMS["grpo"], tmp_path / "run", steps=5, stop=(StopSpec(metric="optim/updates", value=2),))
    assert len(lines(run, "train")) == 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["stopped"] == "optim/updates reached 2 at step 1"
    assert lines(run, "eval")[-1]["step"] == 2
    drift = lines(run, "probe")[-1]["kl/forward_base"]
    other = trained(
        ALGORITHMS["grpo"], tmp_path / "other", steps=5, stop=(StopSpec(metric="kl/forward_base", of=str(run)),)
    )
    found = [line["kl/forward_base"] for line in lines(other, "probe")]
    assert found[-1] >= drift > max([*found[:-1], -1])
    jaxrl.train(
        experiment(ALGORITHMS["grpo"], **QUIET, steps=5, stop=(StopSpec(metric="optim/updates", value=3),)),
        out=run,
        resume=True,
        quiet=True,
    )
    assert len(lines(run, "train")) == 3
    with pytest.raises(UsageError, match="logged no 'kl/forward_bas'; did you mean 'kl/forward_base'"):
        trained(ALGORITHMS["grpo"], tmp_path / "x", steps=1, stop=(StopSpec(metric="kl/forward_bas", of=str(run)),))


# ---------------------------------------------------------------- critics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "shared"])
def test_a_critic_learns_is_kept_and_resumes_bit_for_bit(name, monkeypatch, tmp_path):
    algorithm = {"own": PPO, "shared": SHARED}[name]
    x = experiment(algorithm, steps=6)
    whole = jaxrl.train(x, out=tmp_path / "whole", quiet=True)
    train = lines(whole, "train")
    loss = [line["critic/loss" if name == "own" else "policy/loss_value"] for line in train]
    assert np.isfinite(loss).all()
    assert max(loss) > min(loss)
    if name == "own":  # the policy holds still while the critic warms up
        assert [line["optim/updates"] for line in train] == [0, 0, 1, 2, 3, 4]
        assert [line["all"] if "all" in line else line["probe/all_sum"] for line in lines(whole, "probe")][:2] == [0, 0]
    run = tmp_path / "killed"
    with monkeypatch.context() as patch:
        stop_before_update(patch, 4)
        with pytest.raises(Killed):
            jaxrl.train(x, out=run, quiet=True)
    jaxrl.train(x, out=run, resume=True, quiet=True)
    assert_same_run(run, whole)


def test_a_critic_starts_at_zero_and_lies_on_the_mesh_as_the_policy_does(monkeypatch):
    use_devices(monkeypatch, 4)
    ready = set_up(experiment(PPO, mesh=MeshSpec(data=1, fsdp=-1, tensor=1)))
    state = ready.first_state()
    critic = state.critic.model
    assert not np.asarray(critic.value[...]).any()
    np.testing.assert_array_equal(critic.embed[...], state.model.embed[...])
    assert critic.layers.q[...].sharding == state.model.layers.q[...].sharding
    assert not critic.layers.q[...].sharding.is_fully_replicated
    (moments,) = {x.sharding for x in jax.tree.leaves(state.critic.opt_state) if x.shape == critic.layers.q[...].shape}
    assert moments == critic.layers.q[...].sharding
    assert state.model.value is None
    shared = set_up(experiment(SHARED)).first_state()
    assert shared.critic is None
    assert shared.model.value[...].shape == critic.value[...].shape


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO, SHARED], ids=["own", "shared"])
def test_a_critic_on_four_devices_trains_as_on_one(algorithm, monkeypatch, tmp_path):
    found = []
    for count in (1, 4):
        use_devices(monkeypatch, count)
        run = trained(
            algorithm, tmp_path / str(count), steps=4, mesh=MeshSpec(data=2 if count == 4 else 1, fsdp=-1, tensor=1)
        )
        found.append(last_state(run))
    assert any(name.startswith("critic.") for name in found[0]) == (algorithm is PPO)
    for name, value in found[0].items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(found[1][name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_a_policy_with_a_value_head_exports_without_it(tmp_path):
    from jaxrl.cli import main

    run = trained(SHARED, tmp_path / "run", steps=1)
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert load_model(tmp_path / "hf").config == load_model(base_folder()).config


# ---------------------------------------------------------------- samples of others


@pytest.mark.parametrize(
    ("piece", "metric"),
    [
        pytest.param(Imitation(), "policy/loss_nll", marks=pytest.mark.slow),
        pytest.param(Preference(importance=Importance(), samples=4), "pair/weight", marks=pytest.mark.slow),
        pytest.param(Imitation(source="base", select="correct", samples=2), "policy/loss_nll", marks=pytest.mark.slow),
        pytest.param(
            Imitation(source="teacher", estimator="full", samples=2), "policy/loss_full", marks=pytest.mark.slow
        ),
    ],
    ids=["demonstrations", "preferences", "base", "teacher"],
)
def test_a_recipe_without_a_policy_term_samples_no_rollouts(piece, metric, monkeypatch, tmp_path):
    monkeypatch.setattr("jaxrl.train.setup.train_oracle", lambda seed: load_model(base_folder()))
    teacher = TeacherSpec(base="oracle") if getattr(piece, "source", "") == "teacher" else None
    x = experiment(only(piece), steps=8, teacher=teacher)
    run = jaxrl.train(x, out=tmp_path / "run", quiet=True)
    train = lines(run, "train")
    assert not arrays(run)["correct"].any()
    assert all(np.isfinite(line[metric]) for line in train)
    assert "clip/before_token" not in train[0]
    assert {line["step"] for line in lines(run, "influence")} == {0, 3, 6}
    if isinstance(piece, Imitation) and piece.source == "demonstrations":
        assert all(line["cost/generated_tokens"] <= 8 * 5 for line in train)  # the greedy pass alone
        assert train[-1]["policy/loss_nll"] < train[0]["policy/loss_nll"]


@pytest.mark.slow
def test_the_probe_may_be_trained_on_and_then_moves_less(tmp_path):
    free = trained(ALGORITHMS["grpo"], tmp_path / "free", steps=6)
    held = trained(
        replace(ALGORITHMS["grpo"], regularisers=((10.0, TrustRegion()), (0.0, Entropy()))), tmp_path / "held", steps=6
    )
    moved = [abs(lines(run, "probe")[-1]["probe/cumulative_all_sum"]) for run in (free, held)]
    assert moved[1] < moved[0]


@pytest.mark.slow
def test_a_forward_kl_may_have_a_stream_of_prompts_of_its_own(tmp_path):
    stream = ((0.1, Kl(prompts="stream", samples=2)),)
    run = trained(replace(ALGORITHMS["grpo"], regularisers=stream), tmp_path / "run", steps=2)
    plain = trained(replace(ALGORITHMS["grpo"], regularisers=((0.1, Kl(samples=2)),)), tmp_path / "plain", steps=2)
    losses = [lines(x, "train")[1]["policy/loss_full"] for x in (run, plain)]
    assert losses[0] > 0
    assert losses[0] != losses[1]


# ---------------------------------------------------------------- text: solutions and preferences of files


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """An untrained decoder over bytes, problems with worked solutions, and preferences with log-probs."""
    folder = tmp_path_factory.mktemp("words")
    shape = ModelConfig(
        vocab_size=263, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        max_positions=256,
    )  # fmt: skip
    save_model(init_model(shape, keys.root(0)), folder / "model")
    save_tiny(folder / "model", stop=EOS)
    sums = [
        {"id": str(a), "problem": f"{a}+{a}?", "answer": str(2 * a), "solution": f"\\boxed{{{2 * a}}}"}
        for a in range(6)
    ]
    pairs = [
        {"prompt": f"{a}+1?", "chosen": f"{a + 1}", "rejected": "no", "chosen_logp": -9.0, "rejected_logp": -9.5}
        for a in range(6)
    ]
    for name, rows in (("sums", sums), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def text_run(words, out, piece, **task):
    x = experiment(
        only(piece),
        model=ModelSpec(path=str(words / "model")),
        task=ProblemsSpec(train=str(words / "sums.jsonl"), template="plain", max_prompt=32, **task),
        rollout=RolloutSpec(prompts=4, n=2, max_new_tokens=16, log_greedy=False),
        probe=ProbeSpec(prompts=2, n=1),
        optimiser=Optimiser(lr=1e-2),
        steps=12,
        **QUIET,
    )
    return lines(jaxrl.train(x, out=out, quiet=True), "train")


@pytest.mark.slow
def test_solutions_of_a_problem_file_are_imitated(words, tmp_path):
    train = text_run(words, tmp_path / "run", Imitation(), solution="solution")
    assert train[-1]["policy/loss_nll"] < 0.8 * train[0]["policy/loss_nll"]
    with pytest.raises(UsageError, match="have no field 'worked' with text, the first 0; the fields are solution"):
        text_run(words, tmp_path / "other", Imitation(), solution="worked")


@pytest.mark.slow
def test_preferences_of_a_file_are_trained_on_with_their_log_probs(words, tmp_path):
    piece = Preference(source="file", importance=Importance(clip=1.0))
    train = text_run(words, tmp_path / "run", piece, preferences=str(words / "pairs.jsonl"), max_preferred=16)
    assert train[0]["pair/margin"] == pytest.approx(0, abs=1e-4)
    assert train[-1]["pair/margin"] > 0.1
    assert train[0]["pair/log_ratio"] != pytest.approx(0, abs=1e-3)  # against the file's policy, not the reference
    assert train[0]["pair/filled"] == 1
