"""What the check says over training: blocks and ranks with intervals, growth by its parts, transfer, and what is left out."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.commands import check_run
from jaxrl.commands.check_transfer import STEPS, family_changes, family_gradients, forget_momentum
from jaxrl.commands.runs import open_run
from jaxrl.data.synthetic import MODE_CODE, MODE_LANGUAGE, MODE_NONE
from jaxrl.evaluation.exact import exact
from jaxrl.influence.attribution import PARTS, attribution
from jaxrl.influence.dynamics import Labelled, prompt_blocks, saved_diagonal
from jaxrl.influence.precision import crossing, summary
from jaxrl.influence.structure import (
    block_interval,
    cosines,
    effective_rank,
    erank_interval,
    label_pairs,
    null_erank,
    structure,
)
from jaxrl.influence.transfer import out_of_sample, transfer_scores
from jaxrl.models.decoder import cast
from jaxrl.report import structure as pictures
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.stats import resampled_sums
from jaxrl.types import Probe, Rows


def some_gradients(n=24, size=40, seed=0):
    """Gradients of which those of one prompt (three rows each) share a direction."""
    rng = np.random.default_rng(seed)
    uid = np.arange(n) // 3
    return rng.normal(size=(n, size)) + 1.5 * rng.normal(size=(n // 3, size))[uid], uid


# ---------------------------------------------------------------- blocks and ranks


def test_every_pair_of_labelled_rows_is_in_one_block_and_no_row_with_itself():
    labels = ["code", "language", "", "code", "language"]
    masks = label_pairs(labels)
    assert list(masks) == ["code/code", "code/language", "language/language"]
    np.testing.assert_array_equal(np.argwhere(masks["code/code"]), [[0, 3], [3, 0]])
    together = sum(mask.astype(int) for mask in masks.values())
    known = np.array([x != "" for x in labels])
    np.testing.assert_array_equal(together, np.outer(known, known) & ~np.eye(5, dtype=bool))
    crossed = label_pairs(labels, ["language", "code"])
    assert list(crossed) == ["code/code", "code/language", "language/code", "language/language"]
    np.testing.assert_array_equal(crossed["code/language"], np.outer([1, 0, 0, 1, 0], [1, 0]).astype(bool))


def test_blocks_never_pool_pairs_of_one_prompt_with_pairs_of_two():
    correct = np.array(["correct", "wrong", "correct", "wrong"])
    blocks = prompt_blocks(Labelled(None, np.array([7, 7, 8, 8]), {"correct": correct}))
    assert list(blocks) == [
        "one prompt", "two prompts", "correct/correct, two prompts", "correct/wrong, one prompt",
        "correct/wrong, two prompts", "wrong/wrong, two prompts",
    ]  # fmt: skip
    parts = [mask for name, mask in blocks.items() if "/" in name]
    np.testing.assert_array_equal(sum(mask.astype(int) for mask in parts), ~np.eye(4, dtype=bool))


@pytest.mark.parametrize("block", ["one prompt", "two prompts"])
def test_a_blocks_mean_is_that_of_its_entries_and_its_interval_resamples_prompts(block):
    g, uid = some_gradients()
    cosine = cosines(g @ g.T)
    pick = prompt_blocks(Labelled(None, uid))[block] & (np.add.outer(np.arange(24), np.arange(24)) % 5 < 3)
    found = block_interval(cosine, pick, uid, draws=50)
    assert found.value == pytest.approx(cosine[pick].mean(), rel=1e-12)
    assert found.n == 8
    means = []
    for weight in resampled_sums(np.eye(8), draws=50):  # by hand: rows of the drawn prompts, copy by copy
        drawn = np.repeat(np.arange(8), weight.astype(int))
        rows = np.concatenate([np.flatnonzero(uid == p) for p in drawn])
        copy = np.concatenate([np.full(np.sum(uid == p), i) for i, p in enumerate(drawn)])
        ours, same = pick[np.ix_(rows, rows)], copy[:, None] == copy[None, :]
        ours = ours & (same | (uid[rows][:, None] != uid[rows][None, :]))  # no pairs of two copies of a prompt
        means.append(cosine[np.ix_(rows, rows)][ours].mean())
    np.testing.assert_allclose([found.low, found.high], np.quantile(means, [0.025, 0.975]), rtol=1e-12)
    assert found.low < found.value < found.high


def test_copies_of_a_prompt_are_not_pairs_of_a_prompt():
    """Rows of one prompt are opposite: were a row paired with its own copy, some resample would give more than -1."""
    uid = np.repeat(np.arange(5), 2)
    cosine = np.where(uid[:, None] == uid[None, :], np.where(np.eye(10, dtype=bool), 1.0, -1.0), 0.25)
    blocks = prompt_blocks(Labelled(None, uid))
    one, two = (block_interval(cosine, blocks[name], uid) for name in ("one prompt", "two prompts"))
    assert (one.value, one.low, one.high) == (-1, -1, -1)
    assert (two.value, two.low, two.high) == (0.25, 0.25, 0.25)


def test_a_block_between_two_sets_resamples_the_prompts_of_both():
    values = np.arange(12.0).reshape(3, 4)
    found = block_interval(values, np.ones((3, 4), bool), np.array([0, 1, 2]), np.array([3, 3, 4, 5]))
    assert found.value == pytest.approx(5.5)
    assert found.n == 6
    assert found.low < 5.5 < found.high
    assert np.isnan(block_interval(values, np.zeros((3, 4), bool), np.arange(3), np.arange(4)).value)
    alone = block_interval(np.ones((2, 2)), ~np.eye(2, dtype=bool), np.zeros(2, int))
    assert (alone.value, alone.n) == (1, 1)
    assert np.isnan(alone.low)  # one prompt has no spread


def test_the_interval_of_the_rank_holds_it_and_narrows_with_more_prompts():
    few, many = (some_gradients(n, size=12) for n in (24, 240))
    widths = []
    for g, uid in (few, many):
        cosine = cosines(g @ g.T)
        found = erank_interval(cosine, uid)
        assert found.value == pytest.approx(structure(g @ g.T)["erank_cos"], rel=1e-9)
        assert found.low < found.value < found.high
        widths.append((found.high - found.low) / found.value)
    assert widths[1] < widths[0]
    alone = erank_interval(np.eye(6), np.arange(6))  # every half is as independent as the whole
    assert (alone.value, alone.se) == (pytest.approx(1), pytest.approx(0, abs=1e-12))


def test_random_directions_have_nearly_full_rank_and_the_rank_that_their_norms_allow():
    norms = np.array([1.0, 1.0, 1.0, 100.0])
    found = null_erank(norms, 5000, draws=50)
    assert found["erank_cos"] == pytest.approx(1, abs=1e-3)
    assert found["erank"] == pytest.approx(effective_rank(norms), rel=0.01)
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(400):  # few dimensions, where directions overlap
        g = rng.normal(size=(4, 6))
        drawn.append(effective_rank(np.linalg.eigvalsh(cosines(g @ g.T))) / 4)
    assert null_erank(norms, 6, draws=400)["erank_cos"] == pytest.approx(np.mean(drawn), abs=0.02)
    with pytest.raises(ValueError, match="at least as many dimensions"):
        null_erank(norms, 3)


# ---------------------------------------------------------------- growth by its parts


def steps_of(scale=1.0, norm=1.0):
    """Measured and first-order changes, squared norms and squared step size of three steps; the last scaled."""
    rng = np.random.default_rng(2)
    g, d = rng.normal(size=(3, 6, 20)), rng.normal(size=(3, 20))
    g[2], d[2] = norm * g[1], scale * d[1]
    first = np.einsum("tmp,tp->tm", g, d)
    return 1.1 * first, first, np.sum(g**2, axis=-1), np.sum(d**2, axis=-1)


def test_the_parts_of_the_growth_add_up_exactly():
    found = attribution(*steps_of(3, 0.5))
    assert list(found["parts"]) == list(PARTS)
    np.testing.assert_allclose(sum(np.array(part) for part in found["parts"].values()), found["total"], atol=1e-13)
    assert found["residual"] <= 1e-13
    np.testing.assert_allclose(
        sum(np.array(part) for part in found["steps"].values()), np.diff(found["total"]), atol=1e-13
    )
    assert sum(found["growth"][name] for name in PARTS) == pytest.approx(found["growth"]["total"], abs=1e-13)
    assert found["parts"]["remainder"] == pytest.approx([2 * np.log(1.1)] * 3)
    assert 0 < found["largest_cos2"] <= 1


@pytest.mark.parametrize(("scale", "norm", "part"), [(3, 1, "update"), (1, 3, "norms")])
def test_longer_steps_and_longer_gradients_are_no_alignment(scale, norm, part):
    found = attribution(*steps_of(scale, norm))
    last = {name: values[-1] for name, values in found["steps"].items()}
    assert last.pop(part) == pytest.approx(2 * np.log(3))
    assert np.abs(list(last.values())).max() < 1e-12


def test_numbers_that_do_not_belong_together_show_a_cosine_above_one():
    change, first, norms, update = steps_of()
    assert attribution(change, first, norms / 100, update)["largest_cos2"] > 1
    with pytest.raises(ValueError, match="first: entry 1 is 0"):
        attribution(change, first * np.array([[1], [0], [1]]), norms, update)


# ---------------------------------------------------------------- precision


def test_rounding_rules_below_the_step_at_which_its_floor_meets_the_signal():
    eta = 10.0 ** np.arange(0, -9, -0.5)
    predicted = eta[:, None] * np.array([1.0, -2.0, 3.0])
    exact_change = predicted + eta[:, None] ** 2
    found = summary(eta, exact_change + 1e-5, exact_change, predicted)
    assert found["change_lost_below"] == pytest.approx(1e-5, rel=1e-6)  # half of 2 eta
    assert found["order_lost_below"] == pytest.approx((1e-2).__pow__(1) * 10**-0.5, rel=1e-6)  # eta^2 = 1e-5
    assert found["sign"][-1] == pytest.approx(2 / 3)
    clean = summary(eta, exact_change, exact_change, predicted)
    assert (clean["change_lost_below"], clean["order_lost_below"]) == (None, None)
    nothing = summary(eta, 0 * predicted, exact_change, predicted)
    assert nothing["change_lost_below"] == eta[0]
    assert nothing["ratio"] == [0] * len(eta)


def test_a_crossing_is_the_last_one_on_the_way_down():
    eta = np.array([1.0, 0.1, 0.01, 0.001])
    assert crossing(eta, np.array([2.0, 0.5, 2.0, 2.0]), np.ones(4)) == pytest.approx(10**-1.5)
    assert crossing(eta, np.array([2.0, 2.0, 2.0, 0.5]), np.ones(4)) is None
    assert crossing(eta[::-1], np.array([2.0, 2.0, 0.5, 2.0]), np.ones(4)) == pytest.approx(10**-1.5)


# ---------------------------------------------------------------- transfer


def test_a_prediction_is_scored_on_the_rows_that_its_line_was_not_fitted_on():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 8))
    own = np.eye(5, 8, dtype=bool)
    y = 3 * x + 1
    found = transfer_scores(y, {"kernel": x, "noise": rng.normal(size=(5, 8))}, np.arange(8.0), own, ["kernel"])
    assert list(found) == ["kernel", "noise", "family means", "gradient norm"]
    assert found["kernel"]["all"]["fitted"] == pytest.approx(1)
    assert found["kernel"]["across"]["correlation"] == pytest.approx(1)
    assert found["kernel"]["all"]["as it is"] < 1
    assert found["noise"]["all"]["as it is"] is None
    for name in ("noise", "family means", "gradient norm"):
        assert found[name]["all"]["fitted"] < 0.3
    means = np.full((5, 8), np.nan)
    for f, g in np.ndindex(5, 8):
        means[f, g] = np.mean([y[i, g] for i in range(5) if i not in (f, g)])  # neither its own row nor g after g
    assert found["family means"]["across"]["correlation"] == pytest.approx(np.corrcoef(means[~own], y[~own])[0, 1])
    columns = np.tile(np.arange(8.0) ** 2, (5, 1)) + 0.01 * rng.normal(size=(5, 8))
    found = transfer_scores(columns, {}, np.arange(8.0), own)
    assert found["family means"]["across"]["fitted"] > 0.99
    assert 0.5 < found["gradient norm"]["all"]["fitted"] < 0.99


def test_a_row_does_not_help_to_predict_itself():
    rng = np.random.default_rng(4)
    x, y, every = rng.normal(size=(4, 6)), rng.normal(size=(4, 6)), np.ones((4, 6), bool)
    error = spread = 0.0
    for f in range(4):
        rest = [i for i in range(4) if i != f]
        slope, offset = np.polyfit(x[rest].ravel(), y[rest].ravel(), 1)
        error += np.sum((y[f] - slope * x[f] - offset) ** 2)
        spread += np.sum((y[f] - y[rest].mean()) ** 2)
    assert out_of_sample(y, x, every) == pytest.approx(1 - error / spread)
    assert np.isnan(out_of_sample(y[:1], x[:1], every[:1]))


@pytest.mark.x64
@pytest.mark.usefixtures("x64")
def test_the_saved_metric_is_the_corrected_second_moment_and_forgetting_momentum_keeps_it():
    spec = Optimiser(lr=1e-3, clip=0.5, weight_decay=0.01)
    model = {"w": jnp.array([1.0, -2.0])}
    tx = make_optimiser(spec, total=5)
    state = tx.init(model)
    assert saved_diagonal(spec, state) is None
    gradient = {"w": jnp.array([0.3, -0.1])}
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            _, state = tx.update(gradient, state, model)
    np.testing.assert_allclose(saved_diagonal(spec, state)["w"], 1 / (np.array([0.3, 0.1]) + 1e-8), rtol=1e-12)
    forgotten = forget_momentum(state)
    assert not np.any(optax.tree_utils.tree_get(forgotten, "mu")["w"])
    kept, was = (optax.tree_utils.tree_get(x, "nu")["w"] for x in (forgotten, state))
    np.testing.assert_array_equal(kept, was)
    assert jax.tree.structure(forgotten) == jax.tree.structure(state)
    assert (
        saved_diagonal(Optimiser(type="sgd", lr=1e-3), make_optimiser(Optimiser(type="sgd", lr=1), total=1).init(model))
        is None
    )


# ---------------------------------------------------------------- what a run and a model give


class TwoModes:
    """A task that tells the strategy from the first token of a response."""

    def modes(self, responses):
        return np.array([{1: MODE_CODE, 2: MODE_LANGUAGE}.get(r[0], MODE_NONE) for r in responses])


def small_probe() -> Probe:
    """Four prompts with three answers each; of prompt 11 all right, of 12 one, of 13 none; one answer cut off."""
    tokens = np.zeros((12, 6), np.int32)
    tokens[:, 2] = np.arange(12) % 4
    correct = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0], bool)
    rows = Rows(tokens, np.full(12, 2), np.full(12, 4))
    return Probe(rows, np.repeat([11, 12, 13, 14], 3), correct, np.arange(12) == 11)


def test_rows_of_the_probe_are_labelled_and_whole_prompts_are_chosen():
    found = check_run.labelled_probe(TwoModes(), small_probe(), 6)
    np.testing.assert_array_equal(found.uid, [11, 11, 11, 14, 14])  # the cut-off answer is left out
    assert found.labels["correct"].tolist() == ["correct"] * 5
    assert found.labels["difficulty"].tolist() == ["easy"] * 5
    assert found.labels["mode"].tolist() == ["", "code", "language", "code", "language"]
    every = check_run.labelled_probe(None, small_probe(), 100)
    assert "mode" not in every.labels
    assert every.labels["difficulty"].tolist() == ["easy"] * 3 + [""] * 3 + ["hard"] * 3 + ["easy"] * 2
    prompts = check_run.some_prompts(every, 2, 3)
    assert prompts.uid.tolist() == [11, 14]
    assert prompts.tokens.shape == (2, 3)
    assert not prompts.tokens[:, 2].any()  # the response is cut away


def test_a_probe_of_cut_off_answers_is_refused():
    probe = dataclasses.replace(small_probe(), truncated=np.ones(12, bool))
    with pytest.raises(ValueError, match="no row with a finished response"):
        check_run.labelled_probe(None, probe, 6)


def test_a_model_alone_says_what_it_cannot_show():
    training = check_run.training_of_model(None, small_probe(), 4)
    assert training.recorded is None
    assert training.transfer is None
    assert set(training.left_out) == {"c13", "c14", "c15"}
    assert [snapshot.step for snapshot in training.snapshots] == [0]


def test_a_run_without_recorded_predictions_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": {}}))
    found, reason = check_run.recorded_steps(tmp_path)
    assert found is None
    assert "influence.every" in reason


def test_blocks_of_checkpoints_become_columns():
    row = {"probe": "fixed", "block": "two prompts", "pairs": 3, "K": 1.0, "cosine under D": None}
    rows = [row | {"step": s, "cosine": c, "low": c - 1, "high": c + 1} for s, c in ((0, 0.1), (50, 0.2))]
    rows.append(rows[0] | {"block": "one prompt", "low": None, "high": None})
    table = pictures.block_table(rows)
    assert table.columns == ("probe", "block", "step 0", "step 50")
    assert "fixed,two prompts,0.1,-0.9,1.1,0.2,-0.8,1.2" in table.csv()
    assert "fixed,one prompt,0.1,,,,," in table.csv()
    assert pictures.block_table([]) is None


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.usefixtures("x64")
def test_family_gradients_predict_small_changes_of_every_familys_success():
    from jaxrl.models.decoder import init_model
    from jaxrl.train.supervised import BASE_CONFIG

    model = cast(init_model(BASE_CONFIG, jax.random.key(0)), "float64")
    before, rng = exact(model), np.random.default_rng(0)
    step = jax.tree.map(lambda x: jnp.asarray(1e-5 * rng.normal(size=x.shape)), model)
    up, down = (exact(jax.tree.map(lambda p, d, s=s: p + s * d, model, step)) for s in (1, -1))
    changes = [family_changes(before, after) for after in (up, down)]
    flat = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(step)])
    for name, weights in (("p", np.exp(before.logps)), ("delta_plus", np.exp(before.given_correct))):
        measured = (changes[0][name] - changes[1][name]) / 2
        predicted = family_gradients(model, weights) @ flat
        assert predicted.shape == (8,)
        np.testing.assert_allclose(predicted, measured, rtol=1e-5, atol=1e-6 * np.abs(measured).max())


@pytest.mark.slow
def test_the_check_of_a_short_run_says_everything_up_to_c15(tmp_path, monkeypatch):
    """Eight steps of GRPO on the enumerable task, checked in a process of its own, as the command does it."""
    from train_world import GRPO, experiment, use_devices

    import jaxrl
    from jaxrl.commands.check import check
    from jaxrl.train.experiment import InfluenceSpec

    use_devices(monkeypatch, 1)
    monkeypatch.setenv("XLA_FLAGS", "")
    spec = experiment(GRPO, steps=8, influence=InfluenceSpec(every=2, rows=8))
    run = jaxrl.train(spec, out=tmp_path / "run", quiet=True)
    arguments = argparse.Namespace(model=str(run), out=None, step=None, pairs=8, probe=None)
    try:
        check(arguments)
    except (
        jaxrl.errors.DoesNotHold
    ):  # a base that was hardly trained may not show two decades; what is said matters here
        pass
    found = json.loads((run / "check" / "check.json").read_text())
    assert found["c11"]["change"] == 0
    assert found["c14"]["step"] == [0, 2, 4, 6]
    assert found["c14"]["largest_cos2"] <= 1.001
    assert found["c15"]["steps"] == STEPS
    assert set(found["c13"]) == {"fixed", "fresh"}
    steps = {str(step) for step in check_run.chosen_steps(open_run(run))}
    assert {"0", "8"} <= steps
    assert set(found["c13"]["fixed"]) == steps
    assert set(found["c13"]["fresh"]) == steps
    blocks = {row["block"] for row in found["tables"]["T-C4"]}
    assert {"one prompt", "two prompts", "language/language, two prompts"} <= blocks
    for name in ("spectra", "attribution", "heat-map", "transfer"):
        assert (run / "check" / f"check-{name}.png").stat().st_size > 1000
