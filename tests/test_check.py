"""The kernel check: what holds is found to hold, and what does not is named."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import VOCAB, gradient_matrix, jitted_logps, small_model, some_rows

from jaxrl import keys
from jaxrl.data.synthetic import enumerate_responses
from jaxrl.influence.account import Step, explained
from jaxrl.influence.audit import advantage_bound, pair_audit
from jaxrl.influence.check import batch_sweep, check_model, pair_slopes, silent_rows_audit
from jaxrl.influence.dynamics import Labelled, Snapshot, saved_diagonal
from jaxrl.influence.exactness import chosen_rows, score_identity
from jaxrl.influence.outcome import verdicts
from jaxrl.influence.precision import CASES
from jaxrl.influence.slopes import fit_slope
from jaxrl.influence.sweep import pair_sweep, stratified
from jaxrl.influence.training import Training, Transfer
from jaxrl.report.sections import check_pictures
from jaxrl.report.structure import check_tables
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.update import update
from jaxrl.types import STOP_EOS, Graded, Probe, Rollouts, Rows, TrainState

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
SPEC = Optimiser(lr=1e-3, clip=0.5, weight_decay=0.01)
PAIRS = 16
jitted_prepare = jax.jit(prepare, static_argnums=0)


def policy_terms(model, reward, seed=0):
    """The terms of a GRPO step on random rows of 4 prompts with 4 responses each, one of them never sampled."""
    rows = some_rows(16, seed=seed)
    rows = Rows(rows.tokens, rows.start, rows.length.at[6].set(3))
    order = np.argsort(np.arange(16) % 4, kind="stable")
    rows = jax.tree.map(lambda x: x[order].reshape(4, 4, *x.shape[1:]), rows)
    reward = jnp.asarray(reward, float)
    old = jitted_logps(model, rows.flat()).reshape(rows.tokens.shape)
    graded = Graded(
        rollouts=Rollouts(rows, old, jnp.full((4, 4), STOP_EOS, jnp.int32)),
        uid=jnp.arange(4),
        reward=reward,
        correct=reward == 1,
        prefiltered=jnp.ones(4, bool),
        old_logps=old,
    )
    return jitted_prepare(Algorithm(), graded)[0]


REWARD = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]


@pytest.fixture(scope="module")
def world():
    """A model after two real updates, its optimiser state, the next terms and a probe."""
    with jax.enable_x64(True):
        model = small_model()
        tx = make_optimiser(SPEC, total=10)
        state = TrainState(jnp.asarray(0), model, tx.init(model), keys.root(0))
        step = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"))
        for seed in (5, 6):
            state, _ = step(state, policy_terms(state.model, REWARD, seed), None, tx=tx, temperature=1.0)
        rows = some_rows(18, seed=9, prompts=6)
        flags = np.arange(18) % 2 == 0
        probe = Probe(jax.device_get(rows), np.arange(18) % 6, flags, np.arange(18) == 17)
        return state, policy_terms(state.model, REWARD), probe


@pytest.fixture(scope="module")
def everything(world) -> Rows:
    """All responses of one or two tokens to one prompt: those that end in token 0, and those cut off."""
    tokens, length = enumerate_responses(2, vocab_size=VOCAB, stop_id=0)
    prompt = np.tile(np.asarray(some_rows(1).tokens[:, :3]), (len(tokens), 1))
    start = np.full(len(tokens), 3)
    with jax.enable_x64(True):
        return Rows(*(jnp.asarray(x, jnp.int32) for x in (np.concatenate([prompt, tokens], 1), start, start + length)))


@pytest.fixture(scope="module")
def result(world, everything, tmp_path_factory):
    state, terms, probe = world
    folder = tmp_path_factory.mktemp("check")
    with jax.enable_x64(True):
        later = {10: jax.tree.map(lambda x: x * 1.05, state.model)}
        found = check_model(
            state.model, SPEC, state.opt_state, terms, probe, pairs=PAIRS, group_size=4, enumerated=everything,
            later=later, training=over_training(state, probe), out=folder,
        )  # fmt: skip
    return found, folder


def over_training(state, probe) -> Training:
    """The model before and after its two updates, on the probe's finished rows; three recorded steps; a transfer."""
    labels = {"correct": np.where(probe.correct, "correct", "wrong")[:PAIRS]}
    fixed = Labelled(jax.tree.map(jnp.asarray, probe.rows[:PAIRS]), probe.uid[:PAIRS], labels)
    snapshots = (Snapshot(0, small_model()), Snapshot(2, state.model, saved_diagonal(SPEC, state.opt_state), fixed))
    rng = np.random.default_rng(0)
    first, norms, update = rng.normal(size=(3, 5)), 10 + rng.random((3, 5)), 1 + rng.random(3)
    change = first + 0.01 * rng.normal(size=(3, 5))
    recorded = {"step": np.arange(3), "change": change, "first": first, "sq_norms": norms, "update_sq": update}
    moved = {name: rng.normal(size=(3, 4)) for name in ("p", "delta_plus")}
    families = (("0", "1", "2"), ("0", "1", "2", "3"))
    transfer = Transfer(
        *families,
        2,
        moved,
        {k: {"kernel": 2 * x, "frozen gradient": x} for k, x in moved.items()},
        {k: np.ones(4) for k in moved},
    )
    return Training(fixed, snapshots, recorded, lambda: transfer, {"c99": "Nothing is left out but this."})


@pytest.mark.slow
def test_everything_holds_on_a_right_implementation(result):
    found, _ = result
    assert found["failures"] == []
    assert found["ok"] is True


@pytest.mark.slow
def test_gradients_are_exact(result):
    found, _ = result
    assert found["c1"]["forward"] <= 1e-8
    assert found["c1"]["central"] <= 1e-6
    assert found["c2"]["responses"] == 1 + 11 + 11 * 11
    assert found["c2"]["mass"] == pytest.approx(1, abs=1e-12)
    assert found["c2"]["error"] <= 1e-10


@pytest.mark.slow
def test_remainders_have_orders_two_and_three(result):
    found, _ = result
    assert found["slope_single"] == pytest.approx(2.00, abs=0.05)
    assert found["slope_second_order"] == pytest.approx(3.0, abs=0.1)
    assert found["slope_batch"] == pytest.approx(2.00, abs=0.05)
    assert found["c5"]["second"]["value"] == pytest.approx(3.0, abs=0.1)
    assert found["c3"]["same_prompt"]["value"] == pytest.approx(2.00, abs=0.05)
    assert found["c3"]["cross_prompt"]["value"] == pytest.approx(2.00, abs=0.05)
    for slope in (found["c3"]["first"], found["c5"]["first"]):
        assert slope["high"] / slope["low"] >= 10 - 1e-6


@pytest.mark.slow
def test_every_sign_of_a_batch_step_is_predicted_at_small_steps(result):
    found, _ = result
    assert found["sign_agreement"] == 1
    assert found["c5"]["sign_agreement_below"] == 1


@pytest.mark.slow
def test_the_kernel_sum_is_the_gradient_of_the_loss_that_trains(result):
    assert result[0]["c5"]["kernel_error"] <= 1e-10


@pytest.mark.slow
def test_the_optimisers_four_parts_are_its_step(result):
    found, _ = result
    assert found["adam_residual"] <= 1e-10
    parts = found["c9"]["parts"]
    assert set(parts) == {"current", "clip", "momentum", "decay"}
    assert all(abs(p["rms"]) > 0 for p in parts.values())
    assert sum(p["share"] for p in parts.values()) == pytest.approx(1, abs=1e-9)
    remainder = np.array(found["c9"]["relative_remainder"])[-5:]
    np.testing.assert_allclose(remainder[:-1] / remainder[1:], np.sqrt(10), rtol=0.05)  # proportional to lr


@pytest.mark.slow
def test_tightness_of_the_bound_is_the_advantage_over_its_largest_value(result):
    found, folder = result
    assert found["c4"]["fit_slope"] == pytest.approx(1, abs=0.01)
    assert found["c4"]["fit_r2"] > 0.999
    assert found["c4"]["silent_max"] == 0  # rows with A = 0 move nothing, whatever their kernel
    pairs = np.load(folder / "pairs.npz")
    silent = pairs["advantage"] == 0
    assert np.abs(pairs["kernel"][silent]).max() > 0
    assert advantage_bound(8) == pytest.approx(2.4748737)


@pytest.mark.slow
def test_what_first_order_explains_falls_with_the_distance(result):
    one, ten = (result[0]["c10"][h] for h in ("1", "10"))
    assert one["explained"] > 0.99
    assert ten["explained"] < one["explained"]


@pytest.mark.slow
def test_the_folder_holds_the_arrays_and_tables_that_the_report_reads(result):
    found, folder = result
    assert {p.name for p in folder.iterdir()} == {
        "check.json", "pairs.npz", "batch.npz", "structure.npz", "transfer.npz",
        "T-C1.csv", "T-C2.csv", "T-C3.csv", "T-C4.csv",
    }  # fmt: skip
    pairs, batch = np.load(folder / "pairs.npz"), np.load(folder / "batch.npz")
    e, n, m = pairs["delta"].shape
    assert (n, m) == (15, PAIRS)  # the empty slot is no row
    shapes = {"eta": (e,), "kernel": (n, m), "advantage": (n,), "second_order": (e, n, m), "bound_c": ()}
    assert {name: pairs[name].shape for name in shapes} == shapes
    e, m = batch["measured"].shape
    shapes = {
        "eta": (e,), "predicted": (e, m), "predicted_second": (e, m), "kernel": (n, m), "weight_advantage": (n,),
        "advantage": (n,), "probe_norm": (m,),
    }  # fmt: skip
    assert {name: batch[name].shape for name in shapes} == shapes
    np.testing.assert_allclose(
        batch["eta"][:, None] * (batch["weight_advantage"] @ batch["kernel"]), batch["predicted"], rtol=1e-9, atol=1e-18
    )
    saved = json.loads((folder / "check.json").read_text())
    assert saved == json.loads(json.dumps(found))
    for name in ("T-C1", "T-C2", "T-C3", "T-C4"):
        rows = list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))
        assert len(rows) == len(saved["tables"][name])


@pytest.mark.slow
def test_groups_with_equal_rewards_move_nothing_though_their_kernel_is_large(result):
    found, folder = result
    silent = found["c11"]
    assert (silent["rows"], silent["silent_rows"], silent["groups"], silent["silent_groups"]) == (
        15,
        3,
        4,
        1,
    )  # a fourth was never sampled
    assert silent["share_of_rollouts"] == pytest.approx(3 / 15)
    assert silent["change"] == 0
    assert silent["contribution"] == 0
    batch = np.load(folder / "batch.npz")
    quiet = batch["advantage"] == 0
    assert silent["large_pairs"] == np.sum(np.abs(batch["kernel"][quiet]) > np.median(np.abs(batch["kernel"][~quiet])))
    assert silent["silent_pairs"] == 3 * PAIRS
    largest = silent["pairs"][0]
    assert abs(largest["K"]) == np.abs(batch["kernel"][quiet]).max() > 0
    assert batch["kernel"][largest["row"], largest["probe"]] == largest["K"]
    assert largest["change"] == 0


@pytest.mark.slow
def test_a_row_with_an_advantage_that_passed_for_silent_is_caught(world, monkeypatch):
    state, terms, probe = world
    rows = jax.tree.map(jnp.asarray, probe.rows[:PAIRS])
    swept = batch_sweep(state.model, terms[0], rows)
    monkeypatch.setattr("jaxrl.influence.silent.silent_rows", lambda term: np.arange(15) < 1)
    found = silent_rows_audit(state.model, swept, rows, 1.0)
    assert found["change"] > 1e-6
    assert found["contribution"] > 0


@pytest.mark.slow
def test_rounding_takes_over_at_larger_steps_the_lower_the_precision(result):
    single, mixed, low = (result[0]["c12"][name] for name, *_ in CASES)
    for one in (single, mixed, low):
        assert one["order_lost_below"] >= one["change_lost_below"]
    assert 1e-7 < single["change_lost_below"] < 1e-4 < mixed["change_lost_below"]
    assert single["order_lost_below"] < 1e-1
    at = int(np.argmin(np.abs(np.array(result[0]["c12"]["eta"]) - 1e-2)))
    assert single["ratio"][at] == pytest.approx(1, abs=0.1)
    assert single["error"][at] < 1e-2 * mixed["error"][at]
    assert np.all(np.diff(low["changed"]) <= 0)  # smaller steps change fewer bfloat16 parameters, at last none
    assert low["changed"][0] > 0
    assert low["changed"][-1] == 0
    assert low["ratio"][-1] == 0
    exact = np.array(result[0]["c12"]["exact_remainder"])
    assert exact[at] / exact[at + 2] == pytest.approx(100, rel=0.1)  # a decade below: double precision is still exact


@pytest.mark.slow
def test_what_is_known_over_training_is_found_and_what_is_not_is_said(result):
    found, folder = result
    assert found["left_out"] == {"c99": "Nothing is left out but this."}
    assert list(found["c13"]["fixed"]) == ["0", "2"]
    assert list(found["c13"]["fresh"]) == ["2"]
    assert found["c13"]["fixed"]["2"] == found["c13"]["fresh"]["2"]  # the same rows
    assert "preconditioned" not in found["c13"]["fixed"]["0"]
    assert found["c14"]["step"] == [0, 1, 2]
    assert found["c15"]["p"]["kernel"]["all"]["fitted"] == pytest.approx(1)
    assert found["c15"]["p"]["kernel"]["all"]["as it is"] is None  # its scale is not the change's
    assert found["c15"]["delta_plus"]["frozen gradient"]["across"]["as it is"] == 1
    held = np.load(folder / "structure.npz")
    assert held["fixed_cosine"].shape == (2, PAIRS, PAIRS)
    np.testing.assert_allclose(held["fixed_spectrum"].sum(axis=1), PAIRS)
    assert held["fresh_spectrum"].shape == (1, PAIRS)


@pytest.mark.slow
def test_blocks_hold_the_means_of_their_pairs_and_intervals_around_them(world, result):
    state, _, probe = world
    g = gradient_matrix(state.model, jax.tree.map(jnp.asarray, probe.rows[:PAIRS]))
    unit = g / np.linalg.norm(g, axis=1, keepdims=True)
    cosine, uid, right = unit @ unit.T, probe.uid[:PAIRS], probe.correct[:PAIRS]
    d = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(saved_diagonal(SPEC, state.opt_state))])
    scaled = g @ (d[:, None] * g.T)
    under = scaled / np.sqrt(np.outer(np.diag(scaled), np.diag(scaled)))
    rows = {r["block"]: r for r in result[0]["tables"]["T-C4"] if (r["probe"], r["step"]) == ("fixed", 2)}
    pairs = [(i, j) for i in range(PAIRS) for j in range(i)]
    chosen = {
        "one prompt": [p for p in pairs if uid[p[0]] == uid[p[1]]],
        "two prompts": [p for p in pairs if uid[p[0]] != uid[p[1]]],
        "correct/wrong, two prompts": [p for p in pairs if uid[p[0]] != uid[p[1]] and right[p[0]] != right[p[1]]],
        "wrong/wrong, one prompt": [p for p in pairs if uid[p[0]] == uid[p[1]] and not (right[p[0]] or right[p[1]])],
    }
    for name, block in chosen.items():
        row, index = rows[name], tuple(np.array(block).T)
        assert row["pairs"] == len(block) > 0
        assert row["cosine"] == pytest.approx(cosine[index].mean(), rel=1e-9)
        assert row["K"] == pytest.approx((g @ g.T)[index].mean(), rel=1e-9)
        assert row["cosine under D"] == pytest.approx(under[index].mean(), rel=1e-9)
        assert row["low"] <= row["cosine"] <= row["high"]


@pytest.mark.slow
def test_the_report_draws_what_the_check_found_over_training(result):
    found, folder = result
    pictures, notes = check_pictures(folder)
    assert [p.name for p in pictures] == [
        "check-remainders", "check-pair-bound", "check-batch-bound", "check-spectra", "check-attribution",
        "check-heat-map", "check-transfer",
    ]  # fmt: skip
    assert notes == ["Nothing is left out but this."]
    tables = {table.name: table for table in check_tables(found)}
    assert set(tables) == {"T-C4", "check-precision", "check-silent", "check-transfer"}
    assert tables["T-C4"].columns == ("probe", "block", "step 0", "step 2")
    assert [row[0] for row in tables["check-precision"].rows] == [name for name, *_ in CASES]


@pytest.mark.slow
def test_a_wrong_kernel_is_caught(world):
    """Two per cent off: the remainder is first order, and no slope of two is found."""
    state, terms, probe = world
    rows = jax.tree.map(jnp.asarray, probe.rows)
    swept = pair_sweep(state.model, terms[0].batch.rows[:4], np.array([0.5, -0.5, 1.5, 0.5]), rows)
    same = np.zeros((4, 18), bool)
    assert pair_slopes(swept, same)["first"]["value"] == pytest.approx(2, abs=0.05)
    wrong = dataclasses.replace(swept, kernel=swept.kernel * 1.02)
    assert not abs(pair_slopes(wrong, same)["first"]["value"] - 2) <= 0.05
    assert pair_audit(wrong, advantage_bound(8))["fit_slope"] == pytest.approx(1 / 1.02, abs=0.005)


@pytest.mark.slow
def test_what_does_not_hold_is_named(result):
    found = {k: v for k, v in result[0].items() if k.startswith("c")}
    broken = json.loads(json.dumps(found))
    broken["c9"]["residual"] = 1e-6
    broken["c3"]["first"] |= {"value": float("nan"), "reason": "no decade"}
    broken["c5"]["sign_agreement_below"] = 0.5
    outcome = verdicts(broken)
    assert not outcome["ok"]
    text = " | ".join(outcome["failures"])
    assert "adam_residual: 1e-06 is outside 0..1e-10" in text
    assert "slope_single: no decade" in text
    assert "sign_agreement" in text
    assert outcome["slope_single"] is None
    assert len(outcome["failures"]) == 3


def test_slopes_are_fitted_between_rounding_and_a_tenth_of_the_prediction():
    eta = 10.0 ** np.arange(-1, -9, -0.5)
    predicted = eta[:, None] * np.ones(3)
    remainder = 3 * predicted**2 + 1e-15  # rounding below, curvature above
    scores = np.full(3, -5.0)
    slope = fit_slope(eta, remainder, predicted, scores)
    assert slope.value == pytest.approx(2, abs=0.02)
    assert slope.high == pytest.approx(10**-1.5)  # 3 eta < 0.1
    assert slope.low == pytest.approx(10**-6.5)  # 3 eta^2 > 100 eps 5
    order = np.random.default_rng(0).permutation(len(eta))
    assert fit_slope(eta[order], remainder[order], predicted[order], scores) == slope


def test_less_than_one_decade_is_a_failure_and_not_a_slope():
    eta = 10.0 ** np.arange(-1, -9, -0.5)
    predicted = eta[:, None] * np.ones(3)
    slope = fit_slope(eta, 3 * predicted**2, predicted, np.full(3, -1e10))
    assert np.isnan(slope.value)
    assert "one decade is needed" in slope.reason
    assert np.isnan(fit_slope(eta, predicted, predicted, np.full(3, -5.0)).value)


@pytest.mark.slow
def test_the_score_identity_fails_when_a_response_is_missing(world, everything):
    state, _, probe = world
    rows = jax.tree.map(jnp.asarray, probe.rows)
    partial = score_identity(state.model, everything[1:], rows, 1.0)
    assert partial["error"] > 1e-6
    assert partial["mass"] < 1


@pytest.mark.slow
def test_double_precision_is_required(world):
    state, terms, probe = world
    with jax.enable_x64(False), pytest.raises(ValueError, match="double precision"):
        check_model(state.model, SPEC, state.opt_state, terms, probe)


@pytest.mark.slow
def test_a_decaying_schedule_needs_the_number_of_updates(world):
    state, terms, probe = world
    spec = dataclasses.replace(SPEC, schedule="cosine")
    with pytest.raises(ValueError, match="total: the cosine schedule"):
        check_model(state.model, spec, state.opt_state, terms, probe)


@pytest.mark.slow
def test_a_schedule_that_has_run_out_is_checked_at_its_peak_rate(world):
    state, terms, _ = world
    spec = Optimiser(lr=1e-3, schedule="linear")
    after = jax.tree.map(
        lambda x: x + 20 if x.dtype == jnp.int32 else x, make_optimiser(spec, total=10).init(state.model)
    )
    step = Step(spec, state.model, after, terms, total=10)
    assert step.lr == 1e-3
    assert any(np.any(x) for x in jax.tree.leaves(step.change))


@pytest.mark.slow
def test_a_batch_without_signal_is_refused(world):
    state, _, probe = world
    silent = policy_terms(state.model, np.ones((4, 4)))
    with pytest.raises(ValueError, match="no signal"):
        check_model(state.model, SPEC, state.opt_state, silent, probe, pairs=PAIRS)


@pytest.mark.slow
def test_chosen_rows_share_prompts_where_they_can(world):
    _, terms, probe = world
    counted = ~probe.truncated
    train, rows, same = chosen_rows(terms[0].batch.rows, probe.rows, counted, 8)
    assert same.shape == (8, 8)
    tokens = np.asarray(train.tokens)[:, None, :3] == np.asarray(rows.tokens)[None, :, :3]
    np.testing.assert_array_equal(same, tokens.all(-1))
    assert same.any()
    assert (~same).any()
    with pytest.raises(ValueError, match="the probe has no row"):
        chosen_rows(terms[0].batch.rows, probe.rows, np.zeros(18, bool), 8)


def test_advantages_are_those_of_binary_groups_of_eight():
    assert set(np.abs(stratified(64))) == {0, 0.353553, 0.5, 1.5, 2.474867}


@pytest.mark.slow
def test_snapshots_alone_are_explained_too(world):
    state, _, probe = world
    rows = jax.tree.map(jnp.asarray, probe.rows)
    found = explained(state.model, {3: jax.tree.map(lambda x: x * 1.0001, state.model)}, rows)
    assert found["3"]["explained"] > 0.999
    assert found["3"]["median_ratio"] == pytest.approx(1, abs=0.01)
