"""Exact evaluation on MSA-0, and the identities that hold there to the last digits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import keys
from jaxrl.data import synthetic as msa
from jaxrl.data.synthetic import Msa0
from jaxrl.errors import GateFailed
from jaxrl.evaluation.exact import (
    Exact,
    Gate,
    decompose,
    exact,
    exact_metrics,
    gates,
    require_gates,
    well_formed_mass,
)
from jaxrl.evaluation.sequence_kl import sequence_kl
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

SMALL = ModelConfig(
    vocab_size=24, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_positions=16, init_std=0.6,
)  # fmt: skip


def small(seed: int, **changes):
    """A random model, far from uniform; double precision where that is on."""
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"
    return init_model(dataclasses.replace(SMALL, dtype=dtype, **changes), keys.root(seed))


def rows_of(uid: int, responses: np.ndarray, length: np.ndarray) -> Rows:
    prompt = np.broadcast_to(Msa0().tokens[uid], (len(responses), 5))
    tokens = jnp.asarray(np.concatenate([prompt, responses], axis=1))
    return Rows(tokens, jnp.full(len(responses), 5, jnp.int32), jnp.asarray(5 + length, jnp.int32))


def all_responses(uid: int) -> Rows:
    return rows_of(uid, *msa.enumerate_responses(3))


@jax.jit
def sequence_logps(model, rows: Rows):
    return jnp.sum(token_logps(model, rows), axis=-1)


@jax.jit
def weighted_score(model, rows: Rows, weight):
    return jax.grad(lambda m: jnp.sum(weight * sequence_logps(m, rows)))(model)


@pytest.mark.x64
def test_p_is_the_mass_of_the_well_formed_responses_graded_correct(x64):
    model, every = small(0), msa.well_formed_responses()
    table, mass = exact(model), well_formed_mass(model)
    for uid in (0, 123, 319):
        logps = np.asarray(sequence_logps(model, rows_of(uid, every, np.full(200, 4))))
        right = Msa0().correct(np.full(200, uid), every, np.full(200, 4))
        np.testing.assert_allclose(table.p[uid], np.exp(logps[right]).sum(), rtol=1e-10)
        np.testing.assert_allclose(mass[uid], np.exp(logps).sum(), rtol=1e-10)
        for mode in (0, 1):
            joint = np.exp(logps[right & (msa.mode(every, np.full(200, 4)) == mode)]).sum()
            np.testing.assert_allclose(table.mode_correct[uid, mode], joint, rtol=1e-10)


@pytest.mark.x64
def test_the_mode_share_is_the_probability_of_the_first_token(x64):
    model = small(1)
    share = exact(model).mode_share
    for column, token in ((0, msa.LNG), (1, msa.COD)):
        first = np.asarray(sequence_logps(model, rows_of(77, np.array([[token]], np.int32), np.array([1]))))
        np.testing.assert_allclose(share[77, column], np.exp(first[0]), rtol=1e-12)


@pytest.mark.x64
def test_all_12720_responses_of_three_tokens_have_probability_one(x64):
    total = jnp.sum(jnp.exp(sequence_logps(small(2), all_responses(50))))
    assert abs(float(total) - 1) < 1e-12


@pytest.mark.x64
def test_score_identity_the_expected_score_is_zero_over_all_responses(x64):
    """R1. The well-formed responses alone would miss mass; the sum runs over everything a sampler can return."""
    model, rows = small(3), all_responses(200)
    weight = jnp.exp(sequence_logps(model, rows))
    mean_score = weighted_score(model, rows, weight)
    one = weighted_score(model, rows, jnp.zeros_like(weight).at[5].set(1))
    norm = lambda tree: float(jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree))))  # noqa: E731
    assert norm(one) > 0.1
    assert norm(mean_score) <= 1e-9 * norm(one)


@pytest.mark.x64
def test_score_identity_fails_without_the_truncated_responses(x64):
    model, rows = small(3), all_responses(200)
    ended = rows.tokens[jnp.arange(len(rows.tokens)), rows.length - 1] == msa.EOS
    weight = jnp.where(ended, jnp.exp(sequence_logps(model, rows)), 0.0)
    mean_score = weighted_score(model, rows, weight)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(mean_score)) > 1e-4


@pytest.mark.x64
def test_decomposition_interference_is_log_ratio_minus_narrowing(x64):
    """R2, against a change computed from the whole list of responses and the grader."""
    base, now, every = small(4), small(5), msa.well_formed_responses()
    parts = decompose(exact(base), exact(now))
    np.testing.assert_allclose(parts.change, parts.log_ratio - parts.narrowing, rtol=0, atol=1e-9)
    assert (parts.narrowing >= 0).all()
    assert parts.narrowing.min() > 1e-3
    for uid in (0, 150, 319):
        right = Msa0().correct(np.full(200, uid), every, np.full(200, 4))
        rows = rows_of(uid, every[right], np.full(20, 4))
        before, after = (np.asarray(sequence_logps(m, rows)) for m in (base, now))
        mean_change = np.sum(np.exp(before) * (after - before)) / np.exp(before).sum()
        assert abs(parts.change[uid] - mean_change) < 1e-9


def test_decomposition_of_the_review_example():
    """SCIENCE R2: p from .7 to .93 with a falling mean log-probability, 0.284104 - 0.406291 = -0.122187."""
    base, now = (
        Exact(np.log(np.array([[*pair, *[1e-300] * 18]])), np.full((1, 2), 0.5)) for pair in ((0.5, 0.2), (0.9, 0.03))
    )
    parts = decompose(base, now)
    for found, printed in ((parts.log_ratio, 0.284104), (parts.narrowing, 0.406291), (parts.change, -0.122187)):
        np.testing.assert_allclose(found, printed, rtol=0, atol=5e-7)


@pytest.mark.x64
def test_sequence_kl_by_the_chain_rule_is_the_sum_over_all_responses(x64):
    base, model = small(6), small(7)
    uid = np.array([3, 250])
    found = sequence_kl(base, model, uid)
    for i, number in enumerate(uid):
        ref, new = (np.asarray(sequence_logps(m, all_responses(int(number)))) for m in (base, model))
        assert abs(found.value[i] - np.sum(np.exp(ref) * (ref - new))) < 1e-10
    assert (found.dropped == 0).all()


@pytest.mark.x64
def test_sequence_kl_with_a_floor_says_what_it_left_out(x64):
    base, model = small(6), small(7)
    full, cut = (sequence_kl(base, model, np.array([3]), floor=f) for f in (0.0, 1e-3))
    assert 0 < cut.dropped[0] < 1
    assert cut.value[0] < full.value[0]
    assert sequence_kl(base, base, np.array([3])).value[0] == pytest.approx(0, abs=1e-12)


def test_expected_log_ratio_is_minus_the_kl_so_base_samples_can_only_lose():
    """R1 from the base: the mean change of all base responses is -KL, whatever the model has become."""
    base, model = small(6), small(8)
    rows = all_responses(9)
    before, after = (np.asarray(sequence_logps(m, rows), np.float64) for m in (base, model))
    change = np.sum(np.exp(before) * (after - before))
    assert change < 0
    assert change == pytest.approx(-sequence_kl(base, model, np.array([9])).value[0], rel=1e-4)


def of_p(p, share=(0.75, 0.25)) -> Exact:
    """A table with the given probabilities of being right, spread evenly over the correct responses."""
    p = np.asarray(p, float)
    with np.errstate(divide="ignore"):
        logps = np.log(np.broadcast_to(p[:, None] / 20, (len(p), 20)))
    return Exact(logps, np.broadcast_to(np.array(share), (len(p), 2)))


def test_pass_at_k_is_one_minus_all_wrong():
    table = of_p([0.0, 1e-12, 0.01, 0.5, 1.0])
    np.testing.assert_allclose(table.pass_at_k(1), table.p, rtol=1e-12)
    np.testing.assert_allclose(table.pass_at_k(256), [0, 2.56e-10, 1 - 0.99**256, 1, 1], rtol=1e-9)
    with pytest.raises(ValueError, match="expected k >= 1, got 0"):
        table.pass_at_k(0)


def test_effective_number_of_correct_responses_runs_from_one_to_twenty():
    np.testing.assert_allclose(of_p([0.3]).effective_correct, 20)
    lonely = np.full((1, 20), -np.inf)
    lonely[0, 7] = np.log(0.2)
    table = Exact(lonely, np.full((1, 2), 0.5))
    np.testing.assert_allclose(table.effective_correct, 1)
    np.testing.assert_allclose(table.mode_correct, [[0.2, 0]])


def test_mode_accuracy_is_missing_where_the_mode_never_occurs():
    accuracy = of_p([0.4], share=(1.0, 0.0)).mode_accuracy
    np.testing.assert_allclose(accuracy[0, 0], 0.2)
    assert np.isnan(accuracy[0, 1])


def test_metrics_give_means_with_intervals_for_each_split():
    rng = np.random.default_rng(0)
    table = of_p(rng.uniform(0, 0.4, 320))
    found = exact_metrics(table, Msa0().split(), (1, 64))
    assert set(found) == {"train", "heldout", "ood"}
    assert set(found["ood"]) == {"pass@1", "pass@64", "mode_share"}
    ood = found["ood"]["pass@1"]
    assert ood.value == pytest.approx(table.p[200:].mean())
    assert ood.low < ood.value < ood.high
    assert found["train"]["mode_share"].value == pytest.approx(0.25)


def test_gates_stop_an_untrained_base_and_name_what_failed():
    found = gates(small(0), Msa0(0))
    assert [gate.name for gate in found] == [
        "correlation with the teacher",
        "pass@1 of the hard families",
        "pass@1 of the training split",
        "pass@256 out of distribution",
        "code share of the Minerva-like family",
        "well-formed mass",
        "guess floor",
    ]
    with pytest.raises(GateFailed, match=r"fails \d of 7 gates: .*well-formed mass: \S+, expected >= 0.98") as error:
        require_gates(found)
    assert error.value.exit_code == 3
    assert [g["name"] for g in error.value.result["gates"] if not g["ok"]] == [g.name for g in found if not g.ok]


def test_the_guess_floor_is_the_joint_probability_and_prints_its_maximum():
    model = small(0)
    table = exact(model)
    guess = table.mode_correct[np.isin(np.arange(320) // 40, (3, 4, 5, 7)), 0]
    floor = gates(model, Msa0(0), k_max=64)[-1]
    assert floor.value == pytest.approx(guess.mean())
    assert floor.high == 1 / 256
    assert f"max {guess.max():.2e}; k <= 64" in str(floor)


def test_each_gate_has_the_bounds_of_the_specification():
    bounds = [(gate.low, gate.high) for gate in gates(small(0), Msa0(0))]
    assert bounds == [(0.95, None), (0.01, 0.1), (0.3, 0.5), (0.99, None), (0.2, 0.3), (0.98, None), (None, 1 / 1024)]


def test_a_gate_holds_at_its_bounds_and_never_for_a_missing_value():
    assert Gate("g", 0.1, 0.1, 0.2).ok
    assert Gate("g", 0.2, 0.1, 0.2).ok
    assert not Gate("g", 0.2001, 0.1, 0.2).ok
    assert not Gate("g", float("nan"), low=0.1).ok
    require_gates([Gate("g", 0.1, 0.1, 0.2)])
