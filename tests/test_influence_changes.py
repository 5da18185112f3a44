"""Influence metrics of the probe: golden numbers, missing and empty cases, clusters, scopes."""

import numpy as np
import pytest

from jaxrl.influence.changes import (
    change_metrics,
    changes,
    interference_hajek,
    interference_strata,
    normalised_strength,
    restricted,
    summary,
    telescoping_error,
)
from jaxrl.influence.distribution import decomposition, forward_kl, halves, perplexity, smoothed, split_by_change

# The worked probe set of SCIENCE.md A.0: (prompt, tokens, correct, S before, S after).
WORKED = [
    (0, 4, 1, -2, -1.8), (0, 5, 0, -3, -3.4), (0, 4, 1, -2.4, -2.6), (0, 6, 1, -3, -3.3),
    (1, 3, 0, -1.5, -1.2), (1, 4, 1, -4, -4.6), (1, 3, 0, -2, -2.1), (1, 0, 0, 0, 0),
    (2, 4, 0, -2.2, -2), (2, 4, 0, -2.5, -2.6), (2, 6, 0, -6, -6.5), (2, 4, 0, -1, -0.9),
]  # fmt: skip
UID, LENGTH, CORRECT, BEFORE, AFTER = (np.array(column) for column in zip(*WORKED, strict=True))
CORRECT = CORRECT.astype(bool)
ARGUMENTS = (BEFORE, AFTER, LENGTH, CORRECT, UID)


@pytest.fixture(scope="module")
def metrics():
    return change_metrics(*ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "value", "se"),
    [
        ("all_sum", -0.127273, None),
        ("all_tok", -0.022424, None),
        ("interference_sum", -0.225000, 0.162380),
        ("interference_tok", -0.050000, 0.043301),
        ("interference_macro_sum", -0.350000, 0.250000),
        ("interference_macro_tok", -0.083333, 0.066667),
        ("incorrect_sum", -0.071429, None),
        ("incorrect_tok", -0.006667, None),
        ("strength_sum", 0.100000, 0.021875),
        ("strength_tok", 0.005291, 0.002432),
        ("strength_rms_sum", 0.316228, None),
        ("strength_rms_tok", 0.072742, None),
        ("fraction_down_sum", 0.75, None),
        ("positive_part_sum", 0.050000, None),
        ("negative_part_sum", -0.275000, None),
    ],
)
def test_golden_numbers_of_the_worked_probe_set(metrics, name, value, se):
    assert metrics[name].value == pytest.approx(value, abs=5e-7)
    if se is not None:
        assert metrics[name].se == pytest.approx(se, abs=5e-7)


def test_what_is_counted_is_reported(metrics):
    assert metrics["all_sum"].n == 11  # the row without tokens is excluded, not zero
    assert metrics["excluded"].value == 1
    assert metrics["interference_sum"].n == 4
    assert metrics["interference_macro_sum"].n == 2  # of 3 prompts: one has no correct row
    assert metrics["prompts_used"].value == pytest.approx(2 / 3)


def test_hajek_weights_undo_the_bias_towards_easy_prompts():
    """SCIENCE.md A4c: m = 4, p = (.75, .25) give weights (1.003922, 1.462857)."""
    found = interference_hajek(changes(*ARGUMENTS)["sum"], np.array([0.75, 0.25, 0.0]), 4)
    assert found.estimate.value == pytest.approx(-0.396512, abs=5e-7)
    weights = np.array([1.003922, 1.462857])
    assert found.ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-6)
    rare = interference_hajek(changes(*ARGUMENTS)["sum"], np.array([1e-9, 1.0, 0.0]), 4)
    assert rare.estimate.value == pytest.approx((20 * -0.1 + -0.6) / 21)  # capped at 20
    with pytest.raises(ValueError, match=r"p_base: expected one probability a prompt \(3\), got 2"):
        interference_hajek(changes(*ARGUMENTS)["sum"], np.ones(2), 4)


def test_strata_hold_each_prompt_once():
    one = changes(*ARGUMENTS)["sum"]
    strata = interference_strata(one, np.array([0.7, 0.019, 1.0]))
    assert list(strata) == ["[0,0.02)", "[0.02,0.1)", "[0.1,0.3)", "[0.3,0.7)", "[0.7,1]"]
    assert strata["[0.7,1]"].value == pytest.approx(-0.1)
    assert strata["[0,0.02)"].value == pytest.approx(-0.6)
    assert sum(e.n for e in strata.values()) == 2
    assert np.isnan(strata["[0.1,0.3)"].value)


def test_mean_square_is_squared_mean_plus_variance(metrics):
    for scale in ("sum", "tok"):
        mean, variance = metrics[f"all_{scale}"].value, metrics[f"variance_{scale}"].value
        assert metrics[f"strength_{scale}"].value == pytest.approx(mean**2 + variance, rel=1e-12)
        assert metrics[f"selectivity_{scale}"].value == pytest.approx(
            metrics[f"interference_{scale}"].value - metrics[f"incorrect_{scale}"].value
        )


def test_standard_error_of_a_difference_uses_the_prompts_that_hold_both_sides():
    """Shifting all rows of a prompt together moves both means, so their difference keeps its error."""
    rng = np.random.default_rng(0)
    uid = np.repeat(np.arange(200), 4)
    correct = np.tile([True, True, False, False], 200)
    noise = rng.normal(size=800) * 0.01
    shift = np.repeat(rng.normal(size=200), 4)
    zero, four = np.zeros(800), np.full(800, 4)
    found = change_metrics(zero, shift + noise, four, correct, uid)
    assert found["selectivity_sum"].se == pytest.approx(0.01 / np.sqrt(200), rel=0.2)
    assert found["interference_sum"].se == pytest.approx(1 / np.sqrt(200), rel=0.2)


def test_standard_errors_cover_at_their_rate():
    """Two standard errors cover the true mean in about 95 % of simulated probes (clusters of unequal size)."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        uid = np.repeat(np.arange(60), rng.integers(1, 8, 60))
        delta = rng.normal(size=60)[uid] + rng.normal(size=len(uid))
        ones = np.ones(len(uid), bool)
        found = change_metrics(np.zeros(len(uid)), delta, np.full(len(uid), 3), ones, uid)["all_sum"]
        covered += abs(found.value) < 1.96 * found.se
    assert 0.95 - 3 * np.sqrt(0.05 * 0.95 / 400) - 0.01 < covered / 400 < 0.99


def test_sum_and_tok_differ_by_the_length_of_each_row():
    pair = changes(*ARGUMENTS)
    np.testing.assert_allclose(pair["tok"].delta * np.maximum(LENGTH, 1), pair["sum"].delta)


def test_truncated_rows_leave_every_mean_when_not_included():
    include = np.ones(12, bool)
    include[5] = False
    found = change_metrics(*ARGUMENTS, include)
    assert found["interference_sum"].value == pytest.approx(-0.3 / 3)
    assert found["interference_macro_sum"].n == 1
    assert np.isnan(found["interference_macro_sum"].se)


def test_a_probe_without_correct_rows_has_no_interference_instead_of_zero():
    found = change_metrics(BEFORE, AFTER, LENGTH, np.zeros(12, bool), UID)
    assert np.isnan(found["interference_sum"].value)
    assert found["interference_sum"].n == 0
    assert np.isfinite(found["all_sum"].value)
    assert np.isnan(found["selectivity_sum"].value)


def test_scopes_are_the_metrics_of_their_own_prompts():
    scopes = {"train": UID < 2, "ood": UID == 2}
    found = change_metrics(*ARGUMENTS, scopes=scopes)
    rows = UID < 2
    alone = change_metrics(*(x[rows] for x in ARGUMENTS))
    for name in ("all_sum", "interference_tok", "strength_sum"):
        assert found[f"train/{name}"] == pytest.approx(alone[name])
    assert found["ood/interference_sum"].n == 0
    parts = [summary(restricted(changes(*ARGUMENTS)["sum"], s))["all"] for s in scopes.values()]
    assert sum(p.n for p in parts) == 11


def test_normalised_strength_removes_scale():
    found = normalised_strength(0.1, 0.04, lr=0.2, mean_sq_gradient=5.0)
    assert found == pytest.approx({"per_update": 2.5, "per_lr": 2.5, "cosine_sq": 0.5})
    assert np.isnan(normalised_strength(0.0, 0.0)["per_update"])


def test_steps_telescope_and_a_missed_step_is_seen():
    rng = np.random.default_rng(0)
    scores = np.cumsum(rng.normal(size=(50, 20)), axis=0).astype(np.float32) - 200
    deltas = scores[1:] - scores[:-1]
    assert telescoping_error(deltas, scores[0], scores[-1]) < 1e-4
    assert telescoping_error(deltas[1:], scores[0], scores[-1]) > 1e-4


def test_arrays_of_other_lengths_are_named():
    with pytest.raises(ValueError, match=r"length: expected one entry a probe row \(12\), got 3"):
        change_metrics(BEFORE, AFTER, LENGTH[:3], CORRECT, UID)


def test_perplexity_golden_numbers():
    found = perplexity(BEFORE, LENGTH, UID)
    assert found["ppl"].value == pytest.approx(1.896384, abs=5e-7)
    assert found["ppl_geometric"].value == pytest.approx(1.854146, abs=5e-7)
    each = [np.exp(-BEFORE / np.maximum(LENGTH, 1))[(UID == k) & (LENGTH > 0)].mean() for k in range(3)]
    assert found["ppl_macro"].value == pytest.approx(np.mean(each))
    assert found["ppl"].n == 11


def test_decomposition_splits_the_change_into_coverage_and_narrowing():
    """SCIENCE.md R2: p .7 -> .93 and yet the change on correct answers is -0.122187."""
    found = decomposition([0.7, 0.0], [0.93, 0.2], [-0.122187, np.nan])
    assert found.log_ratio[0] == pytest.approx(0.284104, abs=5e-7)
    assert found.narrowing[0] == pytest.approx(0.406291, abs=1e-6)
    assert np.isnan(found.log_ratio[1])
    np.testing.assert_allclose(smoothed([0, 512], 512), [0.5 / 513, 512.5 / 513])


def test_forward_kl_is_minus_the_mean_change_on_base_samples():
    """On an enumerable policy: the mean over base samples approaches the exact divergence."""
    rng = np.random.default_rng(0)
    base, now = np.array([0.6, 0.3, 0.1]), np.array([0.8, 0.15, 0.05])
    drawn = rng.choice(3, size=20000, p=base)
    found = forward_kl(
        changes(np.log(base)[drawn], np.log(now)[drawn], np.ones(20000, int), drawn == 0, np.arange(20000))["sum"]
    )
    assert found.value == pytest.approx(0.104650, abs=3 * found.se)  # SCIENCE.md A20
    assert 0 < found.se < 0.005


def test_sets_are_chosen_on_one_half_and_measured_on_the_other():
    """Pure noise: the chosen half shows an effect, the other half does not (SCIENCE.md N11)."""
    rng = np.random.default_rng(0)
    first, second = halves(8)
    assert not set(first) & set(second)
    samples = rng.normal(size=(4000, 8))
    change = samples[:, first].mean(1)
    up, down = split_by_change(change, np.full(4000, 0.5))
    assert not np.any(up & down)
    assert change[up].mean() > 1
    assert abs(samples[up][:, second].mean()) < 4 * 0.5 / np.sqrt(up.sum())
    with pytest.raises(ValueError, match="at least two samples"):
        halves(1)
