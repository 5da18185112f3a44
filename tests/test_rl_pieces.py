"""Advantages, filters, weights and losses: golden numbers of SCIENCE.md (sections B.0, B.1, B.8) and edge cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import B8_BASE_NLL, B8_GREEDY, b8, graded_of, rows_of

from jaxrl.rl.advantages import Centre, GroupZScore
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.filters import KeepGreedyFails, Mixed, RewardSpread, SampleAll, SampleGreedyFails, SolveRate
from jaxrl.rl.losses import Clip
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.weights import (
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SequenceMeanTokenSumNorm,
    TokenMean,
)
from jaxrl.types import STOP_LENGTH, Batch

GOLDEN = 1e-8  # golden.json prints nine digits
PRINTED = 1e-6  # SCIENCE.md prints six decimals; its own tolerance is 1e-6 at tightest


def advantage_of(rewards, piece):
    reward = jnp.asarray([rewards], float)
    return np.asarray(piece(graded_of(reward, [[1] * reward.shape[1]]))[0, :, 0])


def summed(terms, losses):
    """The loss of one mini-batch, given the token losses of each term."""
    return sum(float(jnp.sum(term.batch.weight * loss)) for term, loss in zip(terms, losses, strict=True))


# --- advantages -------------------------------------------------------------------------------


@pytest.mark.x64
@pytest.mark.parametrize(
    ("reward", "ddof", "expected"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], 1, [2.474867] + [-0.353552] * 7),
        (
            [1, -0.5, -1, -1, -0.5, -1, -1, -0.5],
            1,
            [2.304224, 0.092169, -0.645183, -0.645183, 0.092169, -0.645183, -0.645183, 0.092169],
        ),
        ([-0.5] + [-1] * 7, 1, [2.474860] + [-0.353551] * 7),
        ([1] * 7 + [-0.5], 1, [0.353553] * 7 + [-2.474869]),
    ],
)
def test_group_zscore_reproduces_the_worked_groups(x64, reward, ddof, expected):
    np.testing.assert_allclose(advantage_of(reward, GroupZScore(ddof=ddof)), expected, rtol=0, atol=PRINTED)


@pytest.mark.x64
def test_group_zscore_without_eps_and_ddof_0(x64):
    got = advantage_of([1] + [0] * 7, GroupZScore(ddof=0, eps=0.0))
    np.testing.assert_allclose(got, [2.645751] + [-0.377964] * 7, rtol=0, atol=PRINTED)


@pytest.mark.x64
def test_group_zscore_and_centre_match_golden_json(x64, golden):
    for case in golden["grpo"]:
        got = advantage_of(case["r"], GroupZScore(ddof=case["ddof"], eps=case["eps"]))
        np.testing.assert_allclose(got, case["adv"], rtol=0, atol=GOLDEN)
    got = advantage_of(golden["drgrpo"]["r"], Centre())
    np.testing.assert_allclose(got, golden["drgrpo"]["adv"], rtol=0, atol=GOLDEN)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("group", "ddof1", "ddof0"),
    [(2, 0.707107, 1), (4, 1.5, 1.732051), (8, 2.474874, 2.645751), (16, 3.75, 3.872983), (32, 5.480078, 5.567764)],
)
def test_advantage_bound_is_reached_by_one_correct_response(x64, group, ddof1, ddof0):
    one = [1] + [0] * (group - 1)
    assert max(advantage_of(one, GroupZScore(ddof=1, eps=0.0))) == pytest.approx(ddof1, abs=PRINTED)
    assert max(advantage_of(one, GroupZScore(ddof=0, eps=0.0))) == pytest.approx(ddof0, abs=PRINTED)
    draws = np.random.default_rng(0).normal(size=(200, group))
    worst = jnp.max(jnp.abs(GroupZScore(eps=0.0)(graded_of(draws, np.ones(draws.shape, int)))))
    assert worst <= (group - 1) / np.sqrt(group) + 1e-12


@pytest.mark.x64
def test_advantage_bounds_match_golden_json(x64, golden):
    for group, (ddof1, ddof0) in golden["adv_bound"].items():
        one = [1] + [0] * (int(group) - 1)
        assert max(advantage_of(one, GroupZScore(ddof=1, eps=0.0))) == pytest.approx(ddof1, abs=GOLDEN)
        assert max(advantage_of(one, GroupZScore(ddof=0, eps=0.0))) == pytest.approx(ddof0, abs=GOLDEN)


@pytest.mark.parametrize("piece", [GroupZScore(), GroupZScore(ddof=0, eps=0.0), Centre()])
@pytest.mark.parametrize("value", [0.1, -0.5, 1.0, 1 / 3])
def test_all_equal_group_has_advantage_exactly_zero(piece, value):
    # float32 and seven rewards: the mean of seven equal values need not be that value
    got = advantage_of([value] * 7, piece)
    assert got.tolist() == [0.0] * 7


def test_group_statistics_never_mix_prompts():
    reward = jnp.asarray([[1, 0, 0, 0], [5, 5, 5, 9]], float)
    both = GroupZScore()(graded_of(reward, np.ones((2, 4), int)))
    for p in range(2):
        np.testing.assert_allclose(both[p, :, 0], advantage_of(reward[p], GroupZScore()), rtol=1e-6)


@pytest.mark.parametrize("piece", [GroupZScore(), Centre()])
def test_group_of_one_is_refused(piece):
    with pytest.raises(ValueError, match=r"rollout\.n to 2"):
        piece(graded_of([[1.0]], [[3]]))


def test_unusable_settings_of_pieces_are_refused():
    with pytest.raises(ValueError, match="ddof"):
        GroupZScore(ddof=2)
    with pytest.raises(ValueError, match=r"algorithm.loss.low.*between 0 and 1"):
        Clip(low=1.5)
    with pytest.raises(ValueError, match="did you mean 'kept'"):
        TokenMean(over="keep")


# --- filters ----------------------------------------------------------------------------------


def test_greedy_filter_keeps_the_unsolved_prompts():
    assert SampleGreedyFails()(jnp.asarray(B8_GREEDY)).tolist() == [False, True, True]
    assert KeepGreedyFails()(b8()).tolist() == [False, True, True]
    assert SampleAll()(jnp.asarray(B8_GREEDY)).tolist() == [True] * 3


def test_mixed_filter_goes_by_correctness_not_by_reward_spread():
    graded = graded_of([[-0.5, -1, -1, -0.5], [1, -0.5, -1, 1], [1, 1, 1, 1]], np.ones((3, 4), int))
    assert float(jnp.std(graded.reward[0])) > 0
    assert Mixed()(graded).tolist() == [False, True, False]


def test_reward_spread_keeps_what_the_mixed_filter_drops():
    """SCIENCE B.6: rewards (-.5, -1, -1, -.5) spread, though nothing is correct."""
    graded = graded_of([[-0.5, -1, -1, -0.5], [1, 1, 1, 1]], [[1] * 4] * 2)
    assert np.asarray(RewardSpread()(graded)).tolist() == [True, False]
    assert np.asarray(Mixed()(graded)).tolist() == [False, False]


def test_solve_rate_filter_keeps_the_boundary():
    graded = graded_of(np.tri(11, 10, -1, dtype=int), np.ones((11, 10), int))
    assert SolveRate(max=0.3)(graded).tolist() == [True] * 4 + [False] * 7
    assert SolveRate(max=0.7)(graded).tolist() == [True] * 8 + [False] * 3


# --- losses and weights -----------------------------------------------------------------------

LOG_RATIO = [[0.1, 0.3, -0.05, 0.0], [0.25, -0.4, 0.0, 0.0]]
SURROGATE = {  # SCIENCE.md B.0
    (0.2, 0.2): (-0.885755, -0.564460, -2.214388, -0.553597),
    (0.2, 0.28): (-0.917755, -0.591127, -2.294388, -0.573597),
}
AGGREGATIONS = (
    TokenMean(),
    SequenceMeanTokenMean(),
    SequenceMeanTokenSum(),
    SequenceMeanTokenSumNorm(length=4),
)


def surrogate_rows():
    """The two worked rows with unit weight, and their log-probs."""
    mask = jnp.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    logps = jnp.where(mask, jnp.asarray(LOG_RATIO, float) - 1, 0)
    rows = rows_of([3, 2])
    batch = Batch(
        rows=dataclasses.replace(rows, tokens=rows.tokens[:, :4]),
        advantage=jnp.asarray([[2.0] * 4, [-1.0] * 4], float),
        old_logps=jnp.where(mask, -1.0, 0.0),
        weight=mask.astype(float),
    )
    return logps, batch, mask


@pytest.mark.x64
def test_clipped_surrogate_per_token(x64):
    logps, batch, _ = surrogate_rows()
    got = jax.vmap(Clip())(logps, batch)
    want = [[-2.210342, -2.4, -1.902459], [1.284025, 0.8]]
    np.testing.assert_allclose(got[0, :3], want[0], rtol=0, atol=PRINTED)
    np.testing.assert_allclose(got[1, :2], want[1], rtol=0, atol=PRINTED)


@pytest.mark.x64
@pytest.mark.parametrize("clip", SURROGATE)
def test_clipped_surrogate_under_each_aggregation(x64, clip):
    logps, batch, mask = surrogate_rows()
    loss = jax.vmap(Clip(low=clip[0], high=clip[1]))(logps, batch)
    for piece, want in zip(AGGREGATIONS, SURROGATE[clip], strict=True):
        weight = piece(mask[:, None], jnp.ones(2, bool))[:, 0]
        assert float(jnp.sum(weight * loss)) == pytest.approx(want, abs=PRINTED)


@pytest.mark.x64
def test_clipped_surrogate_matches_golden_json(x64, golden):
    case = golden["surrogate"]
    assert case["logratio"] == LOG_RATIO
    logps, batch, mask = surrogate_rows()
    names = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    for high, key in ((0.2, "clip_20_20"), (0.28, "clip_20_28")):
        loss = jax.vmap(Clip(high=high))(logps, batch)
        for name, piece in zip(names, AGGREGATIONS, strict=True):
            weight = piece(mask[:, None], jnp.ones(2, bool))[:, 0]
            assert float(jnp.sum(weight * loss)) == pytest.approx(case[key][name], abs=GOLDEN)


@pytest.mark.parametrize(("dual", "want"), [(None, 5.0), (3.0, 3.0)])
def test_dual_clip_bounds_the_loss_of_a_bad_token(dual, want):
    _, batch, _ = surrogate_rows()
    row = jax.tree.map(lambda x: x[1], batch)
    logps = row.old_logps + jnp.log(5.0)
    assert float(Clip(dual=dual)(logps, row)[0]) == pytest.approx(want, rel=1e-6)


def test_truncation_in_the_ratio_never_leaks_from_weightless_tokens():
    logps, batch, mask = surrogate_rows()
    wild = dataclasses.replace(batch, old_logps=jnp.where(mask, batch.old_logps, -1e4))

    def loss(x):
        return jnp.sum(batch.weight * jax.vmap(Clip())(x, wild))

    value, grad = jax.value_and_grad(loss)(logps)
    assert jnp.isfinite(value)
    assert bool(jnp.all(jnp.isfinite(grad)))
    assert bool(jnp.all(jnp.where(mask, 0, grad) == 0))


@pytest.mark.parametrize("over", ["kept", "all", "prompts"])
@pytest.mark.parametrize("cls", [TokenMean, SequenceMeanTokenMean, SequenceMeanTokenSum])
def test_weights_vanish_off_the_mask_and_on_dropped_prompts(cls, over):
    mask = b8().rollouts.rows.mask()
    for keep in ([True, False, True], [False] * 3):
        weight = cls(over=over)(mask, jnp.asarray(keep))
        assert bool(jnp.all(jnp.isfinite(weight)))
        assert bool(jnp.all(jnp.where(mask & jnp.asarray(keep)[:, None, None], 1, weight) >= 0))
        assert float(jnp.sum(jnp.where(mask & jnp.asarray(keep)[:, None, None], 0, weight))) == 0


def test_denominators_count_what_they_say():
    mask = b8().rollouts.rows.mask()
    keep = jnp.asarray([False, True, True])
    kept_tokens, all_tokens = 22, 34
    total = {over: float(jnp.sum(TokenMean(over=over)(mask, keep))) for over in ("kept", "all", "prompts")}
    assert total["kept"] == pytest.approx(1)
    assert total["all"] == pytest.approx(kept_tokens / all_tokens)
    assert total["prompts"] == pytest.approx(2 / 3)
    per_row = {over: jnp.sum(SequenceMeanTokenMean(over=over)(mask, keep), 2) for over in ("kept", "all")}
    np.testing.assert_allclose(per_row["kept"][1:], 1 / 8, rtol=1e-6)
    np.testing.assert_allclose(per_row["all"][1:], 1 / 12, rtol=1e-6)


def test_empty_responses_enter_no_denominator():
    graded = graded_of([[1, 0, 0, 0]], [[3, 0, 2, 0]])
    weight = SequenceMeanTokenSum()(graded.rollouts.rows.mask(), jnp.ones(1, bool))
    assert float(jnp.max(weight)) == pytest.approx(1 / 2)


@pytest.mark.parametrize("length", range(6))
def test_end_of_sequence_counts_and_padding_does_not(length):
    """The response mask over all lengths, 0 and the maximum included."""
    graded = graded_of([[1, 0]], [[length, 5]])
    weight = TokenMean()(graded.rollouts.rows.mask(), jnp.ones(1, bool))
    counted = np.flatnonzero(np.asarray(weight[0, 0])).tolist()
    start = int(graded.rollouts.rows.start[0, 0])
    assert counted == list(range(start, start + length))  # the last of them is the end-of-sequence token


# --- the worked batch of B.8 ------------------------------------------------------------------


def policy_loss(algorithm, graded):
    """Loss at ratio 1 of the single policy term."""
    ((term, *_),) = prepare(algorithm, graded)
    return float(jnp.sum(term.batch.weight * -term.batch.advantage))


@pytest.mark.x64
def test_worked_batch_advantages(x64):
    advantage = GroupZScore()(b8())[..., 0]
    want = [[0.499999, 0.499999, -1.499997, 0.499999], [-0.499999, 1.499997, -0.499999, -0.499999], [0.0] * 4]
    np.testing.assert_allclose(advantage, want, rtol=0, atol=PRINTED)


@pytest.mark.x64
def test_worked_batch_policy_losses(x64):
    assert policy_loss(Algorithm(), b8()) == pytest.approx(0.029412, abs=PRINTED)
    kept = Algorithm(keep=KeepGreedyFails(), weights=TokenMean(over="kept"))
    assert policy_loss(kept, b8()) == pytest.approx(-0.045455, abs=PRINTED)
    every = Algorithm(keep=KeepGreedyFails(), weights=TokenMean(over="all"))
    assert policy_loss(every, b8()) == pytest.approx(-0.029412, abs=PRINTED)


@pytest.mark.x64
@pytest.mark.parametrize(("over", "printed"), [("kept", 0.166666), ("all", 0.058824)])
def test_equation_9_as_printed_is_not_what_the_filter_does(x64, over, printed):
    """The printed indicator keeps the solved prompts; inverting greedy correctness reproduces its loss."""
    algorithm = Algorithm(keep=KeepGreedyFails(), weights=TokenMean(over=over))
    inverted = b8(greedy_correct=~jnp.asarray(B8_GREEDY))
    assert policy_loss(algorithm, inverted) == pytest.approx(printed, abs=1e-6)
    assert policy_loss(algorithm, b8()) < 0


@pytest.mark.x64
@pytest.mark.parametrize(("scope", "coef", "want"), [("token", 1.0, 0.515789), ("sequence", 1.0, 1.633333)])
def test_forward_kl_normalisation_on_worked_base_samples(x64, scope, coef, want):
    graded = b8()
    kl = Kl(scope=scope, estimator="nll", samples=2)
    term = kl(coef, graded, graded.rollouts.rows.mask(), jnp.ones(3, bool))
    assert summed([term], [worked_nll(graded)]) == pytest.approx(want, abs=PRINTED)


@pytest.mark.x64
@pytest.mark.parametrize(("coef", "want"), [(1e-4, -0.045403), (0.1, 0.006124)])
def test_worked_self_loss(x64, coef, want):
    kl = Kl(scope="token", estimator="nll", prompts="all", samples=2)
    algorithm = Algorithm(keep=KeepGreedyFails(), regularisers=((coef, kl),))
    graded = b8()
    ((policy, forward),) = prepare(algorithm, graded)
    total = summed((policy, forward), (-policy.batch.advantage, worked_nll(graded)))
    assert total == pytest.approx(want, abs=PRINTED)


def worked_nll(graded):
    """Token losses whose row sums are the worked NLL sums."""
    mask = graded.base.rows.mask()
    share = jnp.asarray(B8_BASE_NLL, float) / jnp.sum(mask, 2, dtype=float)
    return jnp.where(mask, share[..., None], 0).reshape(-1, mask.shape[-1])


@pytest.mark.parametrize("piece", [SampleGreedyFails(), KeepGreedyFails()])
def test_greedy_correct_prompt_has_zero_rl_gradient(piece):
    name = "prefilter" if isinstance(piece, SampleGreedyFails) else "keep"
    graded = b8(prefiltered=~jnp.asarray(B8_GREEDY)) if name == "prefilter" else b8()
    ((term,),) = prepare(Algorithm(**{name: piece}), graded)
    signal = jnp.abs(term.batch.weight * term.batch.advantage).reshape(3, -1).sum(1)
    assert float(jnp.abs(GroupZScore()(graded)[0]).sum()) > 0  # without the filter it would teach
    assert signal[0] == 0
    assert signal[1] > 0


def test_forward_kl_of_a_filtered_prompt_stays_unless_told():
    for prompts, first in (("all", True), ("kept", False)):
        kl = Kl(estimator="nll", prompts=prompts, samples=2)
        algorithm = Algorithm(prefilter=SampleGreedyFails(), regularisers=((0.1, kl),))
        ((_, term),) = prepare(algorithm, b8(prefiltered=~jnp.asarray(B8_GREEDY)))
        weight = term.batch.weight.reshape(3, -1)
        assert bool(jnp.any(weight[0] > 0)) is first
        assert bool(jnp.any(weight[1] > 0))
        assert float(weight.sum()) == pytest.approx(0.1)


def test_forward_kl_on_correct_base_samples_only():
    graded = b8(base_correct=jnp.asarray([[True, False], [False, False], [False, True]]))
    kl = Kl(estimator="nll", scope="sequence", source="correct", samples=2)
    term = kl(0.5, graded, graded.rollouts.rows.mask(), jnp.ones(3, bool))
    per_row = jnp.max(term.batch.weight, axis=-1).reshape(3, 2)
    np.testing.assert_allclose(per_row, [[0.25, 0], [0, 0], [0, 0.25]], rtol=0, atol=1e-7)


# --- truncated responses ----------------------------------------------------------------------


def test_truncated_responses_are_kept_or_leave_the_denominator():
    stop = jnp.zeros((3, 4), jnp.int32).at[0, 2].set(STOP_LENGTH)
    graded = b8(rollouts=dataclasses.replace(b8().rollouts, stop=stop))
    ((keep,),) = prepare(Algorithm(truncated="keep"), graded)
    ((mask,),) = prepare(Algorithm(truncated="mask"), graded)
    assert float(jnp.max(keep.batch.weight)) == pytest.approx(1 / 34)
    assert float(jnp.max(mask.batch.weight)) == pytest.approx(1 / 30)
    assert float(jnp.sum(keep.batch.weight[2])) > 0
    assert float(jnp.sum(mask.batch.weight[2])) == 0
    # the group's statistics still know the truncated response
    np.testing.assert_array_equal(keep.batch.advantage[:2], mask.batch.advantage[:2])
