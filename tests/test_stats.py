"""Intervals and tests: golden numbers of the specification, and what must hold whatever the numbers."""

import math
import subprocess
import sys

import numpy as np
import pytest

from jaxrl import stats

# the worked probe set: prompt, tokens, correct, log-prob before and after (nats)
PROBE = np.array(
    [
        (0, 4, 1, -2, -1.8),
        (0, 5, 0, -3, -3.4),
        (0, 4, 1, -2.4, -2.6),
        (0, 6, 1, -3, -3.3),
        (1, 3, 0, -1.5, -1.2),
        (1, 4, 1, -4, -4.6),
        (1, 3, 0, -2, -2.1),
        (1, 0, 0, 0, 0),
        (2, 4, 0, -2.2, -2),
        (2, 4, 0, -2.5, -2.6),
        (2, 6, 0, -6, -6.5),
        (2, 4, 0, -1, -0.9),
    ]
)
UID, TOKENS, CORRECT = PROBE[:, 0].astype(int), PROBE[:, 1], PROBE[:, 2] > 0
OK = TOKENS > 0
CHANGE = PROBE[:, 4] - PROBE[:, 3]
PER_TOKEN = CHANGE / np.maximum(TOKENS, 1)


def ratio(values, mask):
    return stats.cluster_ratio(*stats.by_prompt(values, UID, mask))


@pytest.mark.parametrize(
    ("values", "mask", "expected", "se"),
    [
        (CHANGE, OK, -0.127273, None),
        (PER_TOKEN, OK, -0.022424, None),
        (CHANGE, OK & CORRECT, -0.225000, 0.162380),
        (PER_TOKEN, OK & CORRECT, -0.050000, 0.043301),
        (CHANGE, OK & ~CORRECT, -0.071429, None),
        (PER_TOKEN, OK & ~CORRECT, -0.006667, None),
        (CHANGE**2, OK, 0.100000, 0.021875),
        (PER_TOKEN**2, OK, 0.005291, 0.002432),
    ],
)
def test_cluster_ratio_gives_the_golden_values_and_errors(values, mask, expected, se):
    theta, error = ratio(values, mask)
    assert theta == pytest.approx(expected, abs=1e-6)
    if se is not None:
        assert error == pytest.approx(se, abs=1e-6)


def test_a_prompt_without_counted_values_still_counts_as_a_cluster():
    totals, counts = stats.by_prompt(CHANGE, UID, OK & CORRECT)
    assert counts.tolist() == [3, 1, 0]
    without = stats.cluster_ratio(totals[:2], counts[:2])
    assert stats.cluster_ratio(totals, counts)[1] == pytest.approx(without[1] * math.sqrt((3 / 2) / 2))


def test_masked_values_may_be_nan():
    totals, _ = stats.by_prompt([1.0, np.nan], [0, 0], [True, False])
    assert totals.tolist() == [1.0]


def test_nothing_counted_is_nan_and_not_zero():
    assert all(math.isnan(x) for x in stats.cluster_ratio([0, 0], [0, 0]))
    assert math.isnan(stats.bootstrap_ratio([0, 0], [0, 0]).low)


def test_cluster_bootstrap_resamples_prompts_with_all_their_values():
    rng = np.random.default_rng(0)
    prompt_means = rng.normal(size=200)
    values = np.repeat(prompt_means, 10)  # ten equal values a prompt add no information
    uid = np.repeat(np.arange(200), 10)
    clustered, naive = stats.cluster_bootstrap(values, uid), stats.cluster_bootstrap(values)
    expected = prompt_means.std(ddof=1) / math.sqrt(200)
    assert clustered.value == pytest.approx(values.mean())
    assert clustered.n == 200
    assert clustered.se == pytest.approx(expected, rel=0.06)
    assert naive.se < 0.5 * clustered.se
    assert clustered.low == pytest.approx(clustered.value - 1.96 * expected, abs=0.15 * expected)


def test_bootstrap_is_a_function_of_its_seed_and_close_to_the_formula():
    totals, counts = np.random.default_rng(1).gamma(2.0, size=(2, 100))
    a, b, c = (stats.bootstrap_ratio(totals, counts, seed=s) for s in (3, 3, 4))
    assert a == b
    assert a != c
    assert a.se == pytest.approx(stats.cluster_ratio(totals, counts)[1], rel=0.1)


def test_resamples_of_equal_shape_and_seed_are_paired():
    x = np.random.default_rng(2).normal(size=(30, 1))
    difference = stats.resampled_sums(x + 1, seed=5) - stats.resampled_sums(x, seed=5)
    np.testing.assert_allclose(difference, 30)


def test_resampling_in_blocks_has_the_same_law(monkeypatch):
    monkeypatch.setattr(stats, "_BLOCK", 64)
    sums = stats.resampled_sums(np.ones((10, 2)), draws=101)
    assert sums.shape == (101, 2)
    np.testing.assert_allclose(sums, 10)


@pytest.mark.parametrize(("seeds", "p"), [(3, 0.25), (5, 0.0625), (8, 0.0078), (10, 0.0020)])
def test_smallest_sign_flip_p_is_two_over_the_number_of_flips(seeds, p):
    assert stats.sign_flip_test(np.linspace(0.1, 0.3, seeds)) == pytest.approx(p, abs=5e-5)


def test_sign_flip_counts_ties_and_is_two_sided():
    assert stats.sign_flip_test([1, -1]) == 1.0
    assert stats.sign_flip_test([-0.1, -0.2, -0.3]) == stats.sign_flip_test([0.1, 0.2, 0.3])
    assert stats.sign_flip_test([0.1] * 10 + [-0.1]) == pytest.approx(2 * 12 / 2**11)


def test_sign_flip_beyond_twenty_differences_samples_flips():
    assert stats.sign_flip_test(np.full(30, 0.1)) == pytest.approx(1e-5, rel=0.01)
    assert stats.sign_flip_test(np.r_[np.ones(15), -np.ones(15)]) == pytest.approx(1.0)


@pytest.mark.parametrize(("dof", "t"), [(1, 12.706205), (2, 4.302653), (7, 2.364624), (9, 2.262157), (60, 2.000298)])
def test_student_quantiles(dof, t):
    assert stats.t_quantile(0.975, dof) == pytest.approx(t, abs=1e-6)
    assert stats.t_cdf(-t, dof) == pytest.approx(0.025, abs=1e-8)


def test_paired_t_interval():
    got = stats.paired_t([1.0, 2.0, 3.0])
    assert (got.value, got.n) == (2.0, 3)
    assert got.high - got.value == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    with pytest.raises(ValueError, match="at least 2"):
        stats.paired_t([1.0])


def test_correlations_over_checkpoint_pairs_give_the_golden_numbers():
    x, gap = stats.pair_differences([0, -0.1, -0.35, -0.4])
    y, _ = stats.pair_differences([0, 0.5, -0.2, -0.6])
    assert len(x) == 6
    assert stats.pearson(x, y) == pytest.approx(0.478954, abs=1e-6)
    assert stats.spearman(x, y) == pytest.approx(0.257143, abs=1e-6)
    assert stats.spearman(x, gap) == pytest.approx(-0.925820, abs=1e-6)
    assert stats.spearman(y, gap) == pytest.approx(-0.277746, abs=1e-6)
    assert stats.partial_spearman(x, y, gap) == pytest.approx(0, abs=1e-6)


def test_ranks_share_ties():
    assert stats.ranks([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]
    assert math.isnan(stats.spearman([1, 1, 1], [1, 2, 3]))


def test_effective_sample_size():
    assert stats.effective_sample_size(np.full(7, 0.3)) == pytest.approx(7)
    assert stats.effective_sample_size([1, 0, 0]) == 1
    assert stats.effective_sample_size([]) == 0


def test_statistics_verdicts_and_passk_load_no_jax():
    code = (
        "import sys, jaxrl.stats, jaxrl.rewards, jaxrl.evaluation.passk; "
        "print([m for m in ('jax', 'sympy', 'math_verify', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
