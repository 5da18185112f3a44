"""pass@k and coverage: golden numbers, and the definitions they come from."""

import math

import numpy as np
import pytest

from jaxrl.evaluation import passk

BASE = np.array([0, 1, 13, 64, 128, 127, 0, 5])  # correct of 128, the worked example
NEW = np.array([0, 0, 40, 128, 128, 128, 1, 0])


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (8, 1, 1, 0.125),
        (8, 1, 4, 0.5),
        (8, 1, 8, 1.0),
        (8, 3, 4, 0.928571),
        (16, 2, 8, 0.766667),
        (256, 1, 128, 0.5),
        (256, 3, 64, 0.579782),
        (5, 2, 3, 0.9),
        (10, 0, 5, 0.0),
        (10, 8, 5, 1.0),
    ],
)
def test_pass_at_k_gives_the_golden_numbers(n, c, k, expected):
    assert passk.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_matches_the_golden_file(golden):
    for row in golden["passk"]:
        assert passk.pass_at_k(row["n"], row["c"], row["k"]) == pytest.approx(row["v"], abs=1e-8)


def test_pass_at_k_is_the_ratio_of_binomials_for_every_small_case():
    for n in range(1, 9):
        c, k = np.meshgrid(np.arange(n + 1), np.arange(1, n + 1))
        expected = [[1 - math.comb(n - i, j) / math.comb(n, j) for i in range(n + 1)] for j in range(1, n + 1)]
        np.testing.assert_allclose(passk.pass_at_k(n, c, k), expected, rtol=0, atol=1e-14)


def test_pass_at_k_has_no_bias_and_the_plug_in_has():
    n, k, p = 8, 4, 0.2
    c = np.arange(n + 1)
    law = np.array([math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in c])
    assert law @ passk.pass_at_k(n, c, k) == pytest.approx(passk.exact_pass_at_k(p, k), abs=1e-14)
    assert passk.exact_pass_at_k(1 / 8, 4) == pytest.approx(0.413818, abs=1e-6)
    assert law @ passk.exact_pass_at_k(c / n, k) < passk.exact_pass_at_k(p, k) - 0.01


@pytest.mark.parametrize(("n", "sd"), [(256, 0.2655), (512, 0.1237), (1024, 0.0726)])
def test_spread_of_one_prompt_asks_for_twice_k_samples(n, sd):
    c = np.arange(min(n, 120) + 1)
    log_law = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in c]
    law = np.exp(np.array(log_law) + c * math.log(0.01) + (n - c) * math.log(0.99))
    u = passk.pass_at_k(n, c, 256)
    assert math.sqrt(law @ u**2 - (law @ u) ** 2) == pytest.approx(sd, abs=5e-5)


def test_k_above_n_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"larger than the number of samples.*n=8, c=3, k=9"):
        passk.pass_at_k([16, 8], [1, 3], 9)
    with pytest.raises(ValueError, match="0 <= c <= n"):
        passk.pass_at_k(8, 9, 1)
    with pytest.raises(ValueError, match="k >= 1"):
        passk.pass_at_k(8, 1, 0)
    with pytest.raises(ValueError, match="integers"):
        passk.pass_at_k(8, 0.5, 1)


def test_exact_pass_at_k_keeps_small_probabilities():
    assert passk.exact_pass_at_k(1e-12, 256) == pytest.approx(256e-12, rel=1e-9)
    np.testing.assert_array_equal(passk.exact_pass_at_k([0.0, 1.0], 16), [0, 1])
    with pytest.raises(ValueError, match="probabilities"):
        passk.exact_pass_at_k([1.5], 2)


def test_curve_has_mean_bounds_and_error_over_prompts():
    got = passk.curve(BASE, 128, [1, 16, 64])
    u = passk.pass_at_k(128, BASE, 16)
    point = got.at(16)
    assert point.value == pytest.approx(u.mean())
    assert point.se == pytest.approx(u.std(ddof=1) / math.sqrt(8))
    assert point.low < point.value < point.high
    assert point.n == 8
    assert got.value[0] == pytest.approx((BASE / 128).mean())
    with pytest.raises(ValueError, match=r"no k=2; it holds \[1, 16, 64\]"):
        got.at(2)


def test_curve_bounds_widen_around_the_normal_ones_for_many_prompts():
    p = np.random.default_rng(0).uniform(size=400)
    got = passk.exact_curve(p, [1, 4])
    np.testing.assert_allclose(got.high - got.low, 2 * 1.96 * got.se, rtol=0.1)
    np.testing.assert_allclose(got.value, [p.mean(), (1 - (1 - p) ** 4).mean()])


def test_curve_of_a_single_prompt_has_no_error():
    assert math.isnan(passk.curve([3], 8, [1]).se[0])


def test_curve_takes_a_count_of_samples_for_each_prompt():
    got = passk.curve([1, 2], [4, 8], [2])
    assert got.value[0] == pytest.approx((passk.pass_at_k(4, 1, 2) + passk.pass_at_k(8, 2, 2)) / 2)


def test_split_half_error_is_that_of_repeated_sampling():
    rng = np.random.default_rng(0)
    p, n, k = rng.uniform(0.02, 0.5, 40), 32, 8
    means, estimates = [], []
    for _ in range(200):
        correct = rng.uniform(size=(40, n)) < p[:, None]
        halves = [passk.pass_at_k(n // 2, part.sum(1), k).mean() for part in (correct[:, :16], correct[:, 16:])]
        means.append(np.mean(halves))
        estimates.append(passk.split_half_se(correct, k) ** 2)
    assert math.sqrt(np.mean(estimates)) == pytest.approx(np.std(means), rel=0.15)
    with pytest.raises(ValueError, match="needs n >= 34"):
        passk.split_half_se(correct, 17)


def test_paired_difference_is_tighter_than_two_curves():
    rng = np.random.default_rng(1)
    p = rng.uniform(size=300)
    ks = [1, 4]
    base, new = passk.exact_pass_at_k(p[:, None], ks), passk.exact_pass_at_k(np.minimum(p + 0.05, 1)[:, None], ks)
    got = passk.curve_of(new - base, ks)
    assert got.se[0] < 0.2 * passk.exact_curve(p, ks).se[0]
    assert got.low[0] > 0


def test_crossover_interpolates_in_log_k():
    ks = [1, 4, 16]
    base = np.tile([0.2, 0.5, 0.8], (5, 1))
    new = base + np.array([0.3, 0.1, -0.1])
    got = passk.crossover(new, base, ks)
    assert got.k == pytest.approx(8.0)  # half way between 4 and 16 in log k
    assert (got.low, got.high) == (pytest.approx(8.0), pytest.approx(8.0))


def test_crossover_says_when_there_is_none_up_to_k_max():
    ks = [1, 4, 16]
    base = np.tile([0.2, 0.5, 0.8], (5, 1))
    assert str(passk.crossover(base + 0.1, base, ks)) == "none <= 16 [none <= 16, none <= 16]"
    assert passk.crossover(base, base, ks).k == 1


def test_crossover_bounds_may_reach_to_none():
    rng = np.random.default_rng(0)
    ks = [1, 4, 16]
    difference = np.array([0.3, 0.1, 0.0]) + rng.normal(scale=0.2, size=(20, 3)) * [0, 0, 1]
    got = passk.crossover(difference, np.zeros((20, 3)), ks)
    assert 4 < got.low <= 16
    assert math.isinf(got.high)


def test_solvable_sets_and_mcnemar_give_the_golden_numbers():
    assert passk.solvable_sets(BASE, NEW) == passk.SolvableSets(4, 2, 1, 1, 1.0)
    assert passk.mcnemar(0, 6) == pytest.approx(2 / 64)
    assert passk.mcnemar(0, 0) == 1.0


def test_clopper_pearson_bounds():
    assert passk.clopper_pearson(0, 128)[1] == pytest.approx(1 - 0.025 ** (1 / 128), abs=1e-12)
    assert passk.clopper_pearson(0, 128)[1] == pytest.approx(0.028, abs=5e-4)
    assert passk.clopper_pearson(0, 30)[1] == pytest.approx(0.116, abs=5e-4)
    assert passk.clopper_pearson(30, 30) == (pytest.approx(1 - 0.1157, abs=5e-5), 1.0)
    low, high = passk.clopper_pearson(5, 20)
    assert (low, high) == (pytest.approx(0.086571, abs=1e-6), pytest.approx(0.491046, abs=1e-6))


def test_accuracy_histogram_has_twelve_bins():
    assert passk.accuracy_histogram(BASE, 128).tolist() == [2, 2, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert passk.accuracy_histogram(NEW, 128).tolist() == [3, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 3]
    assert passk.accuracy_histogram([1, 2, 9, 10], 10).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1]


def test_sampling_efficiency_gap_gives_the_golden_numbers():
    base = passk.pass_at_k(128, np.array([0, 3, 0, 10, 128]), 64)
    np.testing.assert_allclose(base, [0, 0.877953, 0, 0.999332, 1], rtol=0, atol=1e-6)
    gap, se = passk.delta_se(base, [0, 0.5, 0, 0.9, 1])
    assert (gap, se) == (pytest.approx(0.095457, abs=1e-6), pytest.approx(0.073197, abs=1e-6))
