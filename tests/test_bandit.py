"""The bandit of Appendix D (SCIENCE B.12) and the variance example of B.7: printed numbers, and what they correct."""

import numpy as np
import pytest

from jaxrl.bandit import growth, grpo_limit, lemma, likelihood, reinforce, sampled, trace_of_covariance

PI, RIGHT, STEP = np.array([0.5, 0.2, 0.2, 0.1]), np.array([True, True, False, False]), 0.5
WRONG_GREEDY = np.array([0.8, 0.01, *[0.19 / 8] * 8])  # the likely action is wrong, the second is right


def test_json_numbers_of_the_bandit(golden):
    case = golden["bandit"]
    policy, right = np.array(case["pi"]), np.isin(np.arange(4), case["S"])
    for name, objective in (("alpha_mle", likelihood), ("alpha_reinforce", reinforce)):
        found = growth(policy, objective(policy, right), case["etap"])
        np.testing.assert_allclose(found, case[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("objective", "wanted", "printed_at_y2"),
    [
        (likelihood, [0.976370, 1.317962, 0.799384, 0.883456], 1.125697),
        (reinforce, [1.048452, 1.002317, 0.906934, 0.939239], 1.025984),
    ],
)
def test_the_worked_step_and_the_lemma_as_printed_that_misses_it(objective, wanted, printed_at_y2):
    np.testing.assert_allclose(growth(PI, objective(PI, RIGHT), STEP), wanted, rtol=0, atol=1e-6)
    others = growth(PI, objective(PI, RIGHT), STEP)[1]
    # Case 1 with 1 in the place of y1's factor, as printed for both correct actions
    g = objective(PI, RIGHT)
    factors = np.exp(STEP * (g - g[1]))
    factors[0] = 1
    assert 1 / (PI * factors).sum() == pytest.approx(printed_at_y2, abs=1e-6)
    assert abs(others - printed_at_y2) > 0.02


@pytest.mark.parametrize(("name", "objective"), [("likelihood", likelihood), ("reinforce", reinforce)])
def test_the_mended_lemma_is_the_update_on_random_problems(name, objective):
    rng = np.random.default_rng(0)
    for _ in range(500):
        v = int(rng.integers(3, 12))
        policy, step = rng.dirichlet(np.ones(v)), float(rng.uniform(0.05, 3))
        right = np.isin(np.arange(v), rng.choice(v, 2, replace=False))
        direct = growth(policy, objective(policy, right), step)
        np.testing.assert_allclose(np.log(lemma(policy, right, step, name)), np.log(direct), rtol=0, atol=1e-11)
        moved = np.log(policy) + step * objective(policy, right)
        new = np.exp(moved - moved.max()) / np.exp(moved - moved.max()).sum()
        np.testing.assert_allclose(policy * direct, new, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "wanted"),
    [(0.06, 1.042), (0.1, 1.034), (0.2, 1.007), (0.3, 0.972), (0.5, 0.909), (0.6, 0.893), (0.9, 0.963)],
)
def test_a_small_first_action_does_not_push_the_second_down(first, wanted):
    """Corollary (b) of the paper says the reverse."""
    policy = np.array([first, 0.05, *[(0.95 - first) / 48] * 48])
    right = np.arange(50) < 2
    assert growth(policy, reinforce(policy, right), 1.0)[1] == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize(("second", "wanted"), [(0.001, 0.878), (0.49, 1.000)])
def test_a_smaller_second_action_is_hit_harder(second, wanted):
    policy = np.array([0.5, second, *[(0.5 - second) / 48] * 48])
    assert growth(policy, reinforce(policy, np.arange(50) < 2), 1.0)[1] == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        (reinforce, {10: 0.159, 100: 0.0101, 1000: 0.00107}),
        (grpo_limit, {10: 0.0675, 100: 0.00083, 1000: 1.3e-5}),
        (likelihood, {1000: 1.0}),
    ],
)
def test_the_exact_gradient_lets_the_second_mode_collapse_as_a_power_law(objective, wanted):
    """Corollary (e), from .3 and .1 of ten actions (the numbers' own start, found by their ratio of .333)."""
    policy, found = np.array([0.3, 0.1, *[0.075] * 8]), {}
    right = np.arange(10) < 2
    for step in range(1, 1001):
        policy = policy * growth(policy, objective(policy, right), STEP)
        found[step] = policy[1] / policy[0]
    for step, ratio in wanted.items():
        assert found[step] == pytest.approx(ratio, rel=0.02)


def test_the_exact_gradient_never_helps_a_wrong_greedy_action_but_a_sampled_one_may():
    right = np.arange(10) == 1
    exact = growth(WRONG_GREEDY, reinforce(WRONG_GREEDY, right), 1.0)
    np.testing.assert_allclose(exact[:2], [0.998342, 1.016373], rtol=0, atol=1e-6)
    rare = growth(WRONG_GREEDY, sampled(WRONG_GREEDY, 2, -1.0), 1.0)
    np.testing.assert_allclose(rare[:3], [1.129873, 0.512787, 0.191256], rtol=0, atol=1e-6)
    greedy = growth(WRONG_GREEDY, sampled(WRONG_GREEDY, 0, -1.0), 1.0)
    np.testing.assert_allclose(greedy[:2], [0.952398, 1.174953], rtol=0, atol=1e-6)


def test_positive_samples_have_the_smaller_variance_where_few_are_right():
    """B.7 prints .002009 and .041823 without the policy; on this one, whose likely action is wrong, exact values are
    within half a percent of them, as a simulation's would be."""
    policy, right = np.array([0.8, 0.01, *[0.19 / 4] * 4]), np.arange(6) == 1
    psr, nsr = (trace_of_covariance(policy, a, 8) for a in (right.astype(float), right - 1.0))
    assert psr == pytest.approx(0.002009, rel=5e-3)
    assert nsr == pytest.approx(0.041823, rel=5e-3)
    rng, score = np.random.default_rng(0), np.eye(6) - policy
    drawn = rng.choice(6, p=policy, size=(20000, 8))
    for advantage, exact in ((right.astype(float), psr), (right - 1.0, nsr)):
        estimates = (advantage[drawn][..., None] * score[drawn]).mean(axis=1)
        assert estimates.var(axis=0).sum() == pytest.approx(exact, rel=0.03)


def test_what_the_lemma_is_not_of_is_refused():
    with pytest.raises(ValueError, match="two correct actions, got 1"):
        lemma(PI, np.arange(4) == 0, 0.5, "reinforce")
    with pytest.raises(ValueError, match="likelihood or reinforce"):
        lemma(PI, RIGHT, 0.5, "mle")
