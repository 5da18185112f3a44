"""``bench rollout`` and ``bench step``: everybody gets the same requests and rows, and only what agrees is timed."""

import itertools
import json
import sys

import jax
import numpy as np
import pytest

from jaxrl.bench import cases, environments, own_rollout, own_step
from jaxrl.bench.cases import ONE_THREAD, one_thread, own_cases
from jaxrl.bench.compare import Case
from jaxrl.bench.environments import PEERS, peers_of
from jaxrl.bench.peers.batches import static_batches, useful
from jaxrl.bench.peers.given import checked, counted, parts, split
from jaxrl.bench.rollout import LOGITS, OWN, rollout
from jaxrl.bench.roofline import decode_seconds, multiplied, peak, rollout_seconds, step_seconds
from jaxrl.bench.step import LOSSES, SETTINGS, step
from jaxrl.bench.workloads import ACCELERATOR, FULL, QUICK, GivenBatch, Qwen2, Scale, Workload, write_given
from jaxrl.models.decoder import hidden, logits
from jaxrl.models.hf import load_model
from jaxrl.types import Rows

HEAVY = Workload(prompts=3, width=5, n=2, new=9, mean=4, slots=4)
TINY = Scale(
    model=Qwen2(hidden=16, layers=1, heads=2, kv_heads=1, vocab=24, positions=16),
    rollout={"plain": Workload(prompts=2, width=3, n=1, new=4), "refill": HEAVY},
    step={"ragged": GivenBatch(prompts=2, width=3, n=4, new=6, mean=3)},
    target=0.0,
)


@pytest.fixture(scope="module")
def model():
    return TINY.model.model()


def world(arrays, **config):
    return {**arrays, "config": config}


def heavy() -> dict:
    return world({"tokens": HEAVY.tokens(24), "lengths": HEAVY.lengths()}, slots=HEAVY.slots)


# ---------------------------------------------------------------- what everybody gets


def test_the_full_sizes_are_those_of_the_readme():
    config = FULL.model.config()
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (256, 1024, 4)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size, config.tied) == (8, 2, 4096, True)
    assert sum(x.size for x in jax.tree.leaves(FULL.model.model())) == 4_853_504
    assert {name: (w.prompts, w.width, w.n, w.new) for name, w in FULL.rollout.items()} == {
        "plain": (64, 32, 1, 128),
        "shared": (4, 256, 16, 64),
        "refill": (32, 32, 8, 128),
    }


def test_lengths_are_heavy_tailed_around_their_mean_and_cut():
    lengths = FULL.rollout["refill"].lengths()
    assert lengths.shape == (32, 8)
    assert lengths.min() >= 1
    assert lengths.max() == 128
    assert 26 < lengths.mean() < 36
    assert np.median(lengths) < 0.75 * lengths.mean()
    assert (FULL.rollout["plain"].lengths() == 128).all()


def test_prompts_leave_out_the_id_that_stops():
    assert all(w.tokens(8).max() == 6 for w in FULL.rollout.values())


def test_old_log_probabilities_are_off_policy_and_lie_on_the_response(model):
    given = TINY.step["ragged"].arrays(model)
    rows = Rows(*(np.asarray(given[name]) for name in ("tokens", "start", "length")))
    mask = np.asarray(rows.mask())
    assert (given["old_logps"][~mask] == 0).all()
    assert (given["old_logps"][mask] < 0).all()
    assert abs(given["old_logps"][mask].mean() + np.log(24)) < 0.2
    np.testing.assert_allclose(given["advantage"].reshape(2, 4).mean(1), 0, atol=1e-6)
    assert len(set(given["length"].tolist())) > 1


def test_static_batches_hold_as_many_prompts_as_fit_with_all_their_samples():
    batches = static_batches(heavy())
    assert [tokens.shape for tokens, _, _ in batches] == [(2, 5), (1, 5)]
    assert [n for _, n, _ in batches] == [2, 2]
    assert np.concatenate([wanted for _, _, wanted in batches]).tolist() == HEAVY.lengths().tolist()
    assert useful(np.zeros((4, 7)), np.array([[9, 2], [7, 1]])) == 7 + 2 + 7 + 1


def test_rows_are_split_into_prompts_and_completions(model):
    given = world(TINY.step["ragged"].arrays(model), pad=23, checked=2)
    prompts, completions, mask, old = split(given)
    for i, (start, length) in enumerate(zip(given["start"], given["length"], strict=True)):
        row = given["tokens"][i]
        assert (prompts[i] == row[:start]).all()
        assert completions[i].tolist() == row[start:length].tolist() + [23] * (row.size - length)
        assert mask[i].sum() == length - start
        assert (old[i] == given["old_logps"][i, start:]).all()
    losses = iter([1.0, 2.0, 3.0])
    assert checked(lambda: next(losses), given) == [[1.0, 2.0]]
    assert counted(lambda: next(losses), given)() == mask.sum()
    given["config"]["peer_microbatch"] = 4
    assert parts(given, "TRL GRPOTrainer, micro-batches") == [slice(0, 4), slice(4, 8)]
    assert parts(given, "TRL GRPOTrainer") == [slice(0, 8)]
    given["config"]["peer_microbatch"] = 3
    with pytest.raises(ValueError, match="8 rows do not split into micro-batches of 3"):
        parts(given, "TRL GRPOTrainer, micro-batches")
    with pytest.raises(ValueError, match="prompts of one length"):
        split(given | {"start": np.arange(8)})


def test_the_model_arrives_as_it_was(model, tmp_path):
    file = write_given(tmp_path, model, {"tokens": HEAVY.tokens(24)}, slots=4)
    with np.load(file) as read:
        config = json.loads(str(read["config"]))
        assert (read["tokens"] == HEAVY.tokens(24)).all()
    assert config["slots"] == 4
    again = load_model(config["model"])
    for was, is_ in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert (np.asarray(was) == np.asarray(is_)).all()


def test_inexact_old_log_probabilities_need_no_model(model):
    given, exact = (TINY.step["ragged"].arrays(model, exact=e) for e in (False, True))
    assert all((given[name] == exact[name]).all() for name in given if name != "old_logps")
    assert 0 < np.abs(given["old_logps"] - exact["old_logps"]).max() < 0.5


# ---------------------------------------------------------------- the least time


def test_the_decode_bound_is_that_of_the_published_table():
    config, h200 = ACCELERATOR.model.config(), peak("NVIDIA H200")
    assert multiplied(config) == pytest.approx(1.543e9, rel=1e-3)
    for rows, context, thousands in ((64, 512, 76), (64, 2048, 45), (256, 1024, 116)):
        one = Workload(prompts=rows, width=context - 1, n=1, new=1, slots=rows)
        assert rows / decode_seconds(config, one, h200) / 1e3 == pytest.approx(thousands, rel=0.01)


def test_a_shared_prompt_is_read_once_a_step_and_slots_bound_the_steps():
    config, h200 = ACCELERATOR.model.config(), peak("NVIDIA H200")
    shared, alone = (Workload(prompts=p, width=512, n=64 // p, new=64) for p in (1, 64))
    weights, token = 2 * multiplied(config), 28_672
    assert decode_seconds(config, shared, h200) * 4.8e12 == pytest.approx(
        64 * (weights + 512 * token) + 64 * 65 / 2 * 64 * token
    )
    assert decode_seconds(config, alone, h200) - decode_seconds(config, shared, h200) == pytest.approx(
        63 * 64 * 512 * token / 4.8e12
    )
    half = Workload(prompts=1, width=512, n=64, new=64, slots=32)
    gained = decode_seconds(config, half, h200) - decode_seconds(config, shared, h200)
    assert gained == pytest.approx(64 * weights / 4.8e12)
    assert rollout_seconds(config, shared, h200) - decode_seconds(config, shared, h200) == pytest.approx(
        512 * (2 * multiplied(config) + 2 * 12 * 128 * 28 * 512) / 989e12
    )


def test_operations_of_a_training_step_are_those_of_the_published_table():
    config, h200 = ACCELERATOR.model.config(), peak("NVIDIA H200")
    for width, giga in ((1024, 9.5), (2048, 9.8), (4096, 10.3)):
        assert step_seconds(config, np.array([width, width]), h200) * 989e12 / (2 * width) == pytest.approx(
            giga * 1e9, rel=0.005
        )


def test_the_closest_name_of_a_device_counts():
    assert peak("TPU v5 lite").bandwidth == 0.819e12
    assert peak("TPU v5").bandwidth == peak("TPU v5p").bandwidth == 2.765e12
    assert peak("NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert peak("cpu") is None


# ---------------------------------------------------------------- our own cases


def asked(streams) -> dict:
    """Length by (uid, sample) over all streams."""
    requests = list(itertools.chain(*streams))
    samples = [((r.uid, r.first + k), r.max_new) for r in requests for k in range(r.n)]
    assert len(dict(samples)) == len(samples)
    return dict(samples)


@pytest.mark.parametrize("name", ["jaxrl", own_rollout.STATIC])
def test_every_case_asks_for_the_same_samples(name):
    expected = {(i, g): int(length) for (i, g), length in np.ndenumerate(HEAVY.lengths())}
    assert asked(own_rollout.streams(name, heavy())) == expected


def test_samples_that_pay_for_their_own_prefill_are_prompts_of_their_own():
    (requests,) = own_rollout.streams(own_rollout.PREFILLS, heavy())
    assert len({r.uid for r in requests}) == len(requests) == HEAVY.lengths().size
    assert [r.max_new for r in requests] == HEAVY.lengths().reshape(-1).tolist()
    assert [r.prompt.tolist() for r in requests] == np.repeat(heavy()["tokens"], 2, axis=0).tolist()


def test_cases_differ_in_what_they_are_named_after():
    full = world({"tokens": HEAVY.tokens(24), "lengths": np.full((3, 2), 4, np.int32)}, slots=4)
    assert [[r.n for r in s] for s in own_rollout.streams("jaxrl", full)] == [[2, 2, 2]]
    assert [[r.n for r in s] for s in own_rollout.streams(own_rollout.PREFILLS, full)] == [[1] * 6]
    assert [len(s) for s in own_rollout.streams(own_rollout.STATIC, full)] == [2, 1]
    assert own_rollout.spec(own_rollout.COPIED, full).share is False
    assert not own_rollout.spec(own_rollout.STATIC, full).compact


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN["shared"] + OWN["refill"][1:])
def test_our_cases_sample_all_that_was_asked_for(model, name):
    call = own_rollout.case(name, heavy(), model)
    assert [call(), call()] == [HEAVY.lengths().sum()] * 2


@pytest.mark.slow
def test_the_checked_logits_are_of_the_last_position_without_the_last_id(model):
    tokens = HEAVY.tokens(24)
    found = own_rollout.last_logits(model, tokens)
    np.testing.assert_allclose(found, logits(model, hidden(model, tokens))[:, -1, :-1], atol=1e-6)


@pytest.mark.slow
def test_micro_batches_and_packed_rows_take_the_same_steps(model):
    given = world(TINY.step["ragged"].arrays(model), n=4, pad=23, checked=3, microbatch=3, **SETTINGS)
    losses = []
    for name in (own_step.WHOLE, own_step.MICRO, own_step.OURS):
        call = own_step.case(name, given, TINY.model.model())
        losses.append([call() for _ in range(3)])
    assert len(set(losses[0])) == 3  # the optimiser moves
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)


def test_the_loss_is_the_mean_over_responses_of_their_means(model):
    given = world(TINY.step["ragged"].arrays(model), n=4, pad=23, checked=3, **SETTINGS)
    weight = np.asarray(own_step.batch(given).weight)
    np.testing.assert_allclose(weight.sum(1), np.full(8, 1 / 8), rtol=1e-6)
    assert ((weight > 0).sum(1) == given["length"] - given["start"]).all()


# ---------------------------------------------------------------- the commands, with stand-ins for the workers

STAND_IN = """
import json, sys
import numpy as np
job = json.loads(sys.argv[1])
with np.load(job["world"]) as file:
    world = {name: file[name] for name in file.files}
config, name = json.loads(str(world["config"])), job["case"]
if "lengths" in world:
    made, values = int(world["lengths"].sum()), np.zeros((len(world["checked"]), config_vocab - 1))
else:
    made, values = int((world["length"] - world["start"]).sum()), np.ones((1, config["checked"]))
if name == "another": values = values + 0.01
if name == "short": made -= 1
first = {"values": values.tolist(), "temp_bytes": None, "versions": {"stand-in": "1", "device": "NVIDIA H200", "clock": job["clock"]}, "seconds": 0.001, "made": made}
print(json.dumps(first), flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": 0.002 if name == "slow" else 0.001, "peak_rss_bytes": 1, "made": made}), flush=True)
"""


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Every own case, and the peers "slow", "another" and "short", answered by a script that computes nothing."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.replace("config_vocab", str(TINY.model.vocab)))

    def made(names, peer):
        return [Case(name, (sys.executable, str(script)), peer=peer) for name in names]

    for module in ("rollout", "step"):
        monkeypatch.setattr(f"jaxrl.bench.{module}.own_cases", lambda module, names: made(names, False))
        monkeypatch.setattr(f"jaxrl.bench.{module}.peer_cases", lambda subject, names: made(names, True))


@pytest.mark.parametrize(
    ("subject", "name", "reason"), [(rollout, "refill", "another model"), (step, "ragged", "another loss")]
)
def test_peers_that_compute_something_else_are_left_out(stand_ins, subject, name, reason):
    report = subject([name], peers=("slow", "another", "short"), repeats=2, scale=TINY)
    (title,) = report.tables
    rows = {row["case"]: row for row in report.tables[title]}
    assert title == f"{subject.__name__} {name}"
    assert "slow" in rows
    assert not {"another", "short"} & set(rows)
    assert rows[next(iter(rows))]["ratio"]["value"] == 1
    assert rows["slow"]["ratio"]["value"] == 2
    assert len(report.failed) == 2
    assert f"{title}: another: {reason}: it differs by 0.01" in report.failed[0]
    assert "short: a call should have made" in report.failed[1]
    assert report.versions == {"stand-in": "1", "device": "NVIDIA H200", "clock": "cpu"}
    assert report.sizes[0]["parameters"] == sum(x.size for x in jax.tree.leaves(TINY.model.model()))


def test_an_accelerator_is_timed_by_the_wall_and_held_against_its_bound(stand_ins):
    report = rollout(["plain"], peers=(), repeats=1, scale=TINY, accelerator=True)
    (row,) = report.tables["rollout plain"]
    least = rollout_seconds(TINY.model.config(), TINY.rollout["plain"], peak("NVIDIA H200"))
    assert row["of the bound"]["value"] == pytest.approx(least / 0.001)
    assert report.versions["clock"] == "wall"


def test_agreement_is_by_the_largest_logit_and_by_the_worst_loss():
    truth = np.array([[1.0, -2.0], [3.0, 4.0]])
    assert LOGITS.distance(truth + np.array([[0, 0], [0, 2e-4]]), truth) == pytest.approx(2e-4)
    assert LOSSES.distance(truth * np.array([[1, 1.01], [1, 1]]), truth) == pytest.approx(0.01)


def test_each_case_is_held_on_one_core_and_told_to_use_one_thread(monkeypatch):
    monkeypatch.setattr(cases.shutil, "which", lambda name: f"/bin/{name}")
    (ours,) = one_thread(own_cases("jaxrl.bench.own_rollout", ["jaxrl"]))
    assert ours.command[:2] == ("/bin/taskset", "-c")
    assert ours.command[2].isdecimal()
    assert ours.command[3:] == (sys.executable, "-m", "jaxrl.bench.own_rollout")
    assert ONE_THREAD.items() <= ours.env.items()
    assert ours.env["PYTHONPATH"]
    monkeypatch.setattr(cases.shutil, "which", lambda name: None)
    assert one_thread(own_cases("m", ["a"]))[0].command == (sys.executable, "-m", "m")
    assert "taskset" not in cases.threads()


# ---------------------------------------------------------------- real workers


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "cases"), [(rollout, ["refill"]), (step, ["ragged"])])
def test_the_quick_subjects_run_and_their_peers_agree(subject, cases):
    """With the peers whose environments exist; they are made by the command, not by a test."""
    name = subject.__name__
    folder = environments.cache_folder()
    peers = [peer for peer in peers_of(name) if (folder / peer / environments.STAMP).exists()]
    report = subject(cases, peers=peers, repeats=1, scale=QUICK)
    assert report.failed == []
    named = [case for peer in peers for case in PEERS[peer].work[name].cases]
    for rows in report.tables.values():
        assert [row["case"] for row in rows][-len(named) or len(rows) :] == named
        assert all(row["tokens/CPU-second"] > 0 for row in rows)
        assert rows[0]["ratio"] == {"value": 1, "low": 1, "high": 1}
