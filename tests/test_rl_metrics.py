"""Clip violations, KL estimates and batch statistics: golden numbers of SCIENCE.md A18, A20, A23-A25."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import b8, graded_of

from jaxrl.mean import Mean
from jaxrl.rl.advantages import GroupZScore
from jaxrl.rl.metrics import (
    clip_violations,
    effective_sample_size,
    kl_estimates,
    rollout_metrics,
    sampler_gap,
    signal_weight,
    zero_signal_share,
)
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.types import STOP_LENGTH

LOG_RATIO = [[0, 0.25, -0.3, 0.1], [0.18, 0.19, -0.22, -0.23]]


@pytest.mark.x64
def test_clip_violations_of_the_worked_ratios(x64):
    new = jnp.asarray(LOG_RATIO, float)
    got = clip_violations(new, jnp.zeros_like(new), jnp.ones(new.shape, bool))
    want = {"token": 0.5, "ratio": 1.016692, "abs_log_ratio": 0.183750, "sequence": 0}
    assert {k: m.value for k, m in got.items()} == pytest.approx(want, abs=1e-6)


@pytest.mark.x64
def test_violation_and_gradient_active_fractions_of_the_worked_surrogate(x64):
    new = jnp.asarray([[0.1, 0.3, -0.05, 9.0], [0.25, -0.4, 9.0, 9.0]], float)  # SCIENCE.md B.0; 9 is padding
    mask = jnp.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    advantage = jnp.broadcast_to(jnp.asarray([[2.0], [-1.0]], float), new.shape)
    got = clip_violations(new, jnp.zeros_like(new), mask, advantage=advantage)
    assert got["token"].value == pytest.approx(0.6)
    assert got["active"].value == pytest.approx(0.4)


def test_unchanged_policy_violates_no_clip():
    lp = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)) - 2, jnp.float32)
    got = clip_violations(lp, lp, jnp.ones(lp.shape, bool), advantage=jnp.ones(lp.shape))
    assert {k: m.value for k, m in got.items()} == {
        "token": 0, "active": 0, "ratio": 1, "abs_log_ratio": 0, "sequence": 0,
    }  # fmt: skip


def test_sequence_violations_count_rows_with_tokens_only():
    new = jnp.asarray([[0.15, 0.15], [0.1, 0.0], [9.0, 9.0]], float)
    mask = jnp.asarray([[1, 1], [1, 1], [0, 0]], bool)
    got = clip_violations(new, jnp.zeros_like(new), mask)
    assert float(got["token"].total) == 0
    assert (float(got["sequence"].total), float(got["sequence"].count)) == (1, 2)


def test_metrics_do_not_depend_on_how_rows_are_split():
    rng = np.random.default_rng(1)
    new = jnp.asarray(rng.normal(size=(7, 5)) * 0.3, jnp.float32)
    mask = jnp.asarray(rng.random((7, 5)) < 0.6)
    whole = clip_violations(new, jnp.zeros_like(new), mask)
    parts = [clip_violations(new[a:b], jnp.zeros_like(new[a:b]), mask[a:b]) for a, b in ((0, 1), (1, 5), (5, 7))]
    for name, mean in whole.items():
        assert sum(p[name] for p in parts).value == pytest.approx(mean.value, rel=1e-6)


@pytest.mark.x64
def test_reverse_kl_estimates_of_the_worked_tokens(x64):
    lp, ref = jnp.asarray([[-1.0, -2.0, -0.5, 7.0]]), jnp.asarray([[-1.2, -1.5, -0.5, np.nan]])
    got = kl_estimates(lp, ref, jnp.asarray([[True, True, True, False]]))
    assert got["k1_sum"].value == pytest.approx(-0.3)
    assert got["k1_tok"].value == pytest.approx(-0.1)
    assert got["k3_sum"].value == pytest.approx(0.018731 + 0.148721, abs=1e-6)
    assert got["k3_tok"].value == pytest.approx((0.018731 + 0.148721) / 3, abs=1e-6)


@pytest.mark.x64
def test_k1_and_k3_estimate_the_reverse_kl_of_the_worked_distributions(x64):
    p, q = jnp.asarray([0.6, 0.3, 0.1]), jnp.asarray([0.8, 0.15, 0.05])
    lp, lq = jnp.log(p)[:, None], jnp.log(q)[:, None]
    got = [kl_estimates(lp[i : i + 1], lq[i : i + 1], jnp.ones((1, 1), bool)) for i in range(3)]
    for name in ("k1_tok", "k3_tok"):
        assert sum(float(p[i]) * got[i][name].value for i in range(3)) == pytest.approx(0.104650, abs=1e-6)


def test_sampler_gap_is_masked_and_absolute():
    a, b = jnp.asarray([[-1.0, -2.0, np.nan]]), jnp.asarray([[-1.5, -1.9, 0.0]])
    mean, largest = sampler_gap(a, b, jnp.asarray([[True, True, False]]))
    assert mean.value == pytest.approx(0.3, rel=1e-6)
    assert float(largest) == pytest.approx(0.5)


def test_rollout_metrics_skip_slots_that_were_never_sampled():
    stop = jnp.zeros((3, 4), jnp.int32).at[1, 0].set(STOP_LENGTH)
    graded = b8(prefiltered=jnp.asarray([False, True, True]))
    graded = dataclasses.replace(graded, rollouts=dataclasses.replace(graded.rollouts, stop=stop))
    got = {k: m.value for k, m in rollout_metrics(ALGORITHMS["self"], graded).items()}
    assert got == pytest.approx(
        {
            "reward/mean": 1 / 8,
            "reward/correct": 1 / 8,
            "reward/zero_signal_groups": 1 / 2,
            "rollout/length": 22 / 8,
            "rollout/truncated": 1 / 8,
            "rollout/kept": 2 / 3,
            "rollout/greedy_accuracy": 1 / 3,
        }
    )


@pytest.mark.parametrize(
    ("p", "weight"),
    [
        (0.01, 0.024160), (0.05, 0.109884), (0.125, 0.231657), (0.25, 0.355361),
        (0.5, 0.433952), (0.75, 0.355361), (0.9, 0.195962), (0.99, 0.024160),
    ],
)  # fmt: skip
def test_signal_weight_of_eight_rollouts(p, weight):
    assert signal_weight(p, 8) == pytest.approx(weight, abs=1e-6)
    assert signal_weight(p, 8) == pytest.approx(signal_weight(1 - p, 8), rel=1e-12)


def test_signal_weight_matches_golden_json(golden):
    for p, weight in golden["grpo_signal_weight_G8"].items():
        assert signal_weight(float(p), 8) == pytest.approx(weight, abs=1e-8)


@pytest.mark.x64
def test_signal_weight_is_the_length_of_the_group_signal(x64):
    size, gradients = 8, np.random.default_rng(0).normal(size=(8, 3))
    for k in range(1, size):
        reward = np.array([1.0] * k + [0.0] * (size - k))
        advantage = np.asarray(GroupZScore(eps=0.0)(graded_of([reward], np.ones((1, size), int)))[0])
        signal = (advantage * gradients).mean(0)
        difference = gradients[:k].mean(0) - gradients[k:].mean(0)
        np.testing.assert_allclose(
            signal, np.sqrt(k * (size - k) * (size - 1) / size**3) * difference, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("p", "share"), [(0.01, 0.9227), (0.05, 0.6634), (0.125, 0.3436), (0.25, 0.1001), (0.5, 0.0078)]
)
def test_zero_signal_share_of_eight_rollouts(p, share):
    assert zero_signal_share(p, 8) == pytest.approx(share, abs=5e-5)


@pytest.mark.x64
def test_effective_sample_size_of_the_worked_weights(x64):
    weights = jnp.exp(jnp.asarray([-0.5, -0.5, -1.0]))  # SCIENCE.md B.10, first three pairs
    assert float(effective_sample_size(weights)) == pytest.approx(2.869235, abs=1e-6)
    assert float(effective_sample_size(jnp.ones(5))) == pytest.approx(5)
    assert float(effective_sample_size(jnp.zeros(5))) == 0


@pytest.mark.x64
def test_mean_token_entropy_is_a_masked_mean(x64):
    entropy = jnp.asarray([0.801819, 0.0, 1.098612, 99.0])  # SCIENCE.md A18
    assert Mean.of(entropy, jnp.asarray([1, 1, 1, 0], bool)).value == pytest.approx(0.633477, abs=1e-6)
