"""Advantages: printed numbers, published formulas written out again in plain loops, and exact expected gradients."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import PROMPT, graded_of

from jaxrl.rl.advantages import (
    BatchWhiten,
    Centre,
    Gae,
    GreedyBaseline,
    GroupZScore,
    LeaveOneOut,
    PassK,
    PassKTraining,
    Plain,
    Signed,
)
from jaxrl.rl.losses import Clip
from jaxrl.rl.shaping import Overlong
from jaxrl.rl.token_rewards import token_rewards
from jaxrl.rl.weights import TokenMean
from jaxrl.types import STOP_LENGTH, Batch, Rows

PRINTED = 1e-6
SHAPED = [1, -0.5, -1, -1, -0.5, -1, -1, -0.5]


def rewards(*rows, lengths=None):
    return graded_of(rows, [[1] * len(rows[0])] * len(rows) if lengths is None else lengths)


def of(piece, graded):
    """One number a response, which every one of its tokens has."""
    found = np.asarray(piece(graded))
    mask = np.asarray(graded.rollouts.rows.mask())
    if found.shape[-1] == 1:
        return found[..., 0]
    each = [[set(np.round(found[p, g, mask[p, g]], 12)) for g in range(mask.shape[1])] for p in range(len(mask))]
    assert all(len(values) == 1 for row in each for values in row)
    return np.array([[values.pop() for values in row] for row in each])


# --- printed numbers: SCIENCE B.2 to B.7, B.11 ------------------------------------------------


@pytest.mark.x64
@pytest.mark.parametrize(
    ("piece", "reward", "wanted"),
    [
        (LeaveOneOut(), [1] + [0] * 7, [1] + [-0.142857] * 7),
        (LeaveOneOut(), SHAPED, [1.785714, 0.071429, -0.5, -0.5, 0.071429, -0.5, -0.5, 0.071429]),
        (Plain(), SHAPED, SHAPED),
        (Signed(), [1, 0, 0, 1, -0.5], [0.1, -1, -1, 0.1, -1]),
        (Signed(positive=1.0, negative=0.0), [1, 0, 0, 1], [1, 0, 0, 1]),
        (PassK(k=4), [1] + [0] * 7, [0.5] + [0.214286] * 7),
        (PassK(k=2), [1, 1, 0, 0], [0.5, 0.5, 0.333333, 0.333333]),
        (PassKTraining(k=4), [1] + [0] * 7, [1] + [-0.142857] * 7),
        (PassKTraining(k=4), [1] * 5 + [0] * 3, [0] * 8),  # no group of four without a correct one
        (LeaveOneOut(), [0.3] * 8, [0] * 8),
    ],
)
def test_printed_advantages_of_one_group(x64, piece, reward, wanted):
    np.testing.assert_allclose(of(piece, rewards(reward))[0], wanted, rtol=0, atol=PRINTED)


@pytest.mark.x64
@pytest.mark.parametrize(("greedy", "wanted"), [(1.0, [0, -1, -1, 0]), (0.0, [1, 0, 0, 1])])
def test_the_greedy_reward_is_the_baseline(x64, greedy, wanted):
    graded = dataclasses.replace(rewards([1, 0, 0, 1]), greedy_reward=jnp.asarray([greedy]))
    np.testing.assert_allclose(of(GreedyBaseline(), graded)[0], wanted)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("piece", "wanted"),
    [
        (
            BatchWhiten(per="sequence"),
            [0.93541433, -0.93541433, -0.93541433, -0.93541433, 0.93541433] + [0.93541433] * 2 + [-0.93541433],
        ),
        (BatchWhiten(), [0.971825] + [-0.971825] * 3 + [0.971825] * 3 + [-0.971825]),
        (
            BatchWhiten(baseline="group_mean", per="sequence"),
            [1.620185] + [-0.540062] * 3 + [0.540062] * 3 + [-1.620185],
        ),
        (BatchWhiten(baseline="group_mean"), [1.842819] + [-0.708776] * 3 + [0.567021] * 3 + [-1.984574]),
    ],
    ids=["plain, sequence", "plain, token", "baseline, sequence", "baseline, token"],
)
def test_printed_advantages_whitened_over_the_batch(x64, piece, wanted):
    graded = rewards([1, 0, 0, 0], [1, 1, 1, 0], lengths=[[2, 3, 1, 4], [2, 2, 3, 1]])
    np.testing.assert_allclose(of(piece, graded).reshape(-1), wanted, rtol=0, atol=PRINTED)


@pytest.mark.x64
def test_json_numbers_of_every_advantage(x64, golden):
    def close(found, wanted):
        np.testing.assert_allclose(np.asarray(found).reshape(-1), wanted, rtol=0, atol=1e-8)

    for case in golden["grpo"]:
        close(of(GroupZScore(ddof=case["ddof"], eps=case["eps"]), rewards(case["r"])), case["adv"])
    case = golden["drgrpo"]
    close(of(Centre(), rewards(case["r"])), case["adv"])
    for case in golden["rloo"]:
        close(of(LeaveOneOut(), rewards(case["r"])), case["adv"])
    for case in golden["remax"]:
        graded = dataclasses.replace(rewards(case["r"]), greedy_reward=jnp.asarray([case["greedy"]]))
        close(of(GreedyBaseline(), graded), case["adv"])
    case = golden["reinforcepp"]
    rows = np.reshape(case["r"], (-1, case["group"])).tolist()
    graded = rewards(*rows, lengths=np.reshape(case["lens"], (-1, case["group"])).tolist())
    names = [name for name in case if name.endswith("weighted")]
    assert len(names) >= 2
    for name in names:
        baseline = "group_mean" if "baseline" in name else "none"
        per = "token" if "token" in name else "sequence"
        close(of(BatchWhiten(baseline=baseline, per=per, eps=case["eps"]), graded), case[name])
    for case in golden["gae"]:
        piece = Gae(gamma=case["gamma"], lam=case["lam"], whiten=False)
        close(piece(valued(case["V"]))[0, 0, PROMPT:], case["adv"])
    for case in golden["pkpo"]:
        close(of(PassK(k=case["k"]), rewards(case["f"])), case["s"])
    for case in golden["overlong"]:
        rows = Rows(
            jnp.zeros((1, 1, 1), jnp.int32), jnp.full((1, 1), 1 - case["L"], jnp.int32), jnp.ones((1, 1), jnp.int32)
        )
        graded = rewards([0.0])
        graded = dataclasses.replace(graded, rollouts=dataclasses.replace(graded.rollouts, rows=rows))
        close(Overlong(limit=case["Lmax"], cache=case["Lcache"])(graded, rows.mask()), [case["r"]])


@pytest.mark.x64
def test_the_worked_losses_of_weighted_reinforce(x64):
    """B.7: token mean at ratio 1, and the mean over responses of the advantage times the log-prob."""
    graded = rewards([1, 0, 0, 1, -0.5], lengths=[[3, 2, 4, 1, 2]])
    mask = graded.rollouts.rows.mask()
    advantage = Signed(positive=0.1, negative=-1.0)(graded)
    weight = TokenMean()(mask, jnp.ones(1, bool))
    assert -float(jnp.sum(weight * advantage)) == pytest.approx(0.633333, abs=PRINTED)
    sums = jnp.asarray([[-1.5, -2.0, -3.2, -0.4, -1.0]])
    assert -float(jnp.mean(advantage[..., 0] * sums)) == pytest.approx(-1.202, abs=PRINTED)


def valued(values, reward=1.0, stop=0):
    """One response whose last token is rewarded, and a critic's values of it."""
    graded = graded_of([[reward]], [[len(values)]])
    v = jnp.zeros_like(graded.old_logps).at[0, 0, PROMPT:].set(jnp.asarray(values, float))
    rollouts = dataclasses.replace(graded.rollouts, stop=jnp.full((1, 1), stop, jnp.int32))
    return dataclasses.replace(graded, values=v, end_values=jnp.full((1, 1), 0.7), rollouts=rollouts)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("gamma", "lam", "wanted", "returns"),
    [
        (1.0, 1.0, [0.5, 0.4, 0.2], [1, 1, 1]),
        (1.0, 0.95, [0.4705, 0.39, 0.2], [0.9705, 0.99, 1]),
        (0.99, 0.95, [0.45148405, 0.3801, 0.2], None),
    ],
)
def test_printed_generalised_advantages_and_returns(x64, gamma, lam, wanted, returns):
    graded, piece = valued([0.5, 0.6, 0.8]), Gae(gamma=gamma, lam=lam, whiten=False)
    np.testing.assert_allclose(piece(graded)[0, 0, PROMPT:], wanted, rtol=0, atol=1e-8)
    if returns:
        np.testing.assert_allclose(piece.returns(graded)[0, 0, PROMPT:], returns, rtol=0, atol=1e-8)
        np.testing.assert_allclose(Gae(lam=lam).returns(graded)[0, 0, PROMPT:], returns, rtol=0, atol=1e-8)


@pytest.mark.x64
def test_generalised_advantages_are_whitened_and_bootstrapped_where_told(x64):
    found = Gae(lam=0.95)(valued([0.5, 0.6, 0.8]))[0, 0, PROMPT:]
    np.testing.assert_allclose(found, [0.842364, 0.262789, -1.105153], rtol=0, atol=PRINTED)
    piece = Gae(whiten=False, bootstrap=True)
    np.testing.assert_allclose(piece(valued([0.5, 0.6, 0.8], stop=STOP_LENGTH))[0, 0, PROMPT:], [1.2, 1.1, 0.9])
    np.testing.assert_allclose(piece(valued([0.5, 0.6, 0.8]))[0, 0, PROMPT:], [0.5, 0.4, 0.2])
    assert piece.needs == {"values", "end_values"}


@pytest.mark.x64
@pytest.mark.parametrize(
    ("limit", "cache", "pairs"),
    [
        (20480, 4096, {16384: 0, 17408: -0.25, 18432: -0.5, 20480: -1}),
        (16, 4, {11: 0, 12: 0, 13: -0.25, 14: -0.5, 15: -0.75, 16: -1, 17: -1}),
    ],
)
def test_printed_penalties_of_long_responses_lie_on_the_last_token(x64, limit, cache, pairs):
    """B.6, on a graded batch whose tokens need not exist."""
    lengths = np.array([list(pairs)], np.int32)
    graded = rewards([0.0] * len(pairs))
    tokens = jnp.zeros((1, len(pairs), 1), jnp.int32)
    rows = Rows(tokens, jnp.asarray(1 - lengths), jnp.ones_like(jnp.asarray(lengths)))
    graded = dataclasses.replace(graded, rollouts=dataclasses.replace(graded.rollouts, rows=rows))
    found = Overlong(limit=limit, cache=cache)(graded, rows.mask())
    np.testing.assert_allclose(found[0, :, 0], list(pairs.values()), rtol=0, atol=1e-12)


def test_a_penalty_is_on_no_other_token_and_on_no_empty_response():
    graded = graded_of([[0.0, 0.0, 0.0]], [[0, 3, 4]])
    found = np.asarray(Overlong(limit=4, cache=2)(graded, graded.rollouts.rows.mask()))
    assert found[0, 0].tolist() == [0] * 6
    assert found[0, 1].tolist() == [0, 0, 0, 0, -0.5, 0]
    assert found[0, 2].tolist() == [0, 0, 0, 0, 0, -1]


# --- published formulas, written out in loops --------------------------------------------------

P, G, T = 2, 4, 3
ROWS = st.lists(st.floats(-2, 2, width=32), min_size=P * G, max_size=P * G)
LENGTHS = st.lists(st.integers(1, T), min_size=P * G, max_size=P * G)
TOKENS = st.lists(st.floats(-1, 1, width=32), min_size=P * G * T, max_size=P * G * T)


@functools.cache
def jitted(piece):
    return jax.jit(piece)


def sampled(reward, lengths, values=None):
    """A batch of fixed shapes, in single precision."""
    lengths = np.reshape(lengths, (P, G)).astype(np.int32)
    graded = graded_of(np.reshape(reward, (P, G)), lengths)
    rows = graded.rollouts.rows
    wide = Rows(jnp.zeros((P, G, PROMPT + T), jnp.int32), rows.start, rows.length)
    blank = jnp.zeros((P, G, PROMPT + T), jnp.float32)
    if values is not None:
        blank = jnp.where(wide.mask(), blank.at[..., PROMPT:].set(np.reshape(values, (P, G, T))), 0)
    return dataclasses.replace(
        graded, rollouts=dataclasses.replace(graded.rollouts, rows=wide, logps=blank), old_logps=blank, values=blank
    )


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_grpo_and_rloo_are_their_published_formulas(reward):
    z, loo = (
        np.asarray(jitted(piece)(sampled(reward, [1] * P * G)))[..., 0] for piece in (GroupZScore(), LeaveOneOut())
    )
    for p in range(P):
        group = [float(x) for x in reward[p * G : (p + 1) * G]]
        mean = sum(group) / G
        sd = math.sqrt(sum((x - mean) ** 2 for x in group) / (G - 1))
        for g, x in enumerate(group):
            others = [y for i, y in enumerate(group) if i != g]
            assert loo[p, g] == pytest.approx(0 if len(set(group)) == 1 else x - sum(others) / (G - 1), abs=1e-5)
            wanted = 0 if len(set(group)) == 1 else (x - mean) / (sd + 1e-6)
            if sd > 1e-3 or wanted == 0:  # nearer, single precision itself is what is seen
                assert z[p, g] == pytest.approx(wanted, abs=2e-3)


@settings(max_examples=200, deadline=None)
@given(ROWS, LENGTHS, st.booleans(), st.booleans())
def test_reinforce_pp_is_its_published_formula(reward, lengths, baseline, by_token):
    piece = BatchWhiten(baseline="group_mean" if baseline else "none", per="token" if by_token else "sequence")
    found = np.asarray(jitted(piece)(sampled(reward, lengths)))
    scores = [float(x) for x in reward]
    if baseline:
        scores = [x - sum(scores[i // G * G : i // G * G + G]) / G for i, x in enumerate(scores)]
    weighed = [x for x, n in zip(scores, lengths, strict=True) for _ in range(n if by_token else 1)]
    mean = sum(weighed) / len(weighed)
    variance = sum((x - mean) ** 2 for x in weighed) / (len(weighed) - 1)
    if 0 < variance < 1e-5:
        return  # near the rounding of single precision
    for i, x in enumerate(scores):
        wanted = 0 if variance == 0 else (x - mean) / math.sqrt(variance + 1e-8)
        for t in range(lengths[i]):
            assert found[i // G, i % G, PROMPT + t] == pytest.approx(wanted, abs=2e-3)
        assert (found[i // G, i % G, PROMPT + lengths[i] :] == 0).all()


@settings(max_examples=200, deadline=None)
@given(ROWS, LENGTHS, TOKENS)
def test_generalised_advantages_are_their_published_formula(reward, lengths, values):
    """A_t as the sum over l of (gamma lam)^l delta_{t+l}, rather than a recursion."""
    gamma, lam = 0.9, 0.8
    found = np.asarray(jitted(Gae(gamma=gamma, lam=lam, whiten=False))(sampled(reward, lengths, values)))
    for i, n in enumerate(lengths):
        v = [float(x) for x in values[i * T : i * T + n]] + [0.0]
        r = [0.0] * (n - 1) + [float(reward[i])]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            wanted = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n))
            assert found[i // G, i % G, PROMPT + t] == pytest.approx(wanted, abs=1e-5)


@functools.cache
def clip_row():
    return jax.jit(Clip(low=0.2, high=0.28, dual=3.0))


@settings(max_examples=200, deadline=None)
@given(*[st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4)] * 3)
def test_the_clipped_loss_is_its_published_formula(logps, old, advantage):
    row = Batch(None, jnp.asarray(advantage), jnp.asarray(old), jnp.ones(4))
    found = np.asarray(clip_row()(jnp.asarray(logps), row))
    for t in range(4):
        ratio, a = math.exp(float(logps[t]) - float(old[t])), float(advantage[t])
        loss = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        wanted = min(loss, 3 * -a) if a < 0 else loss
        assert found[t] == pytest.approx(wanted, rel=1e-4, abs=1e-4)


# --- exact expected gradients on a policy that can be enumerated --------------------------------

CORRECT = np.array([True, False, False, True, False])


def expected_gradient(piece, probability, group):
    """``E[1/G sum_i A_i grad log pi(y_i)]`` over all groups of iid responses; logits are the parameters."""
    score = np.eye(len(probability)) - probability  # row y: grad log pi(y)
    every = np.array(list(itertools.product(range(len(probability)), repeat=group)))
    graded = graded_of(CORRECT[every].astype(float), np.ones(every.shape, int))
    advantage = np.asarray(piece(graded))[..., 0]
    weight = probability[every].prod(axis=1)
    return np.einsum("n,ng,ngv->v", weight, advantage, score[every]) / group


def policy():
    p = np.exp(np.array([0.3, 1.1, -0.4, -0.9, 0.2]))
    return p / p.sum()


@pytest.mark.x64
def test_positive_negative_and_weighted_samples_have_one_expected_gradient(x64):
    """SCIENCE R4, to 1e-12: that of the probability of being right."""
    p = policy()
    right = p[CORRECT].sum()
    wanted = p * (CORRECT - right)
    lam = 0.3
    for piece, scale in (
        (Signed(positive=1.0, negative=0.0), 1),
        (Signed(positive=0.0, negative=-1.0), 1),
        (Signed(positive=lam, negative=-1.0), 1 + lam),
        (LeaveOneOut(), 1),
        (Plain(), 1),
    ):
        np.testing.assert_allclose(expected_gradient(piece, p, 3) / scale, wanted, rtol=0, atol=1e-12)


@pytest.mark.x64
@pytest.mark.parametrize("baseline", ["none", "leave_one_out"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_transformed_rewards_of_pass_at_k_are_unbiased(x64, k, baseline):
    """arXiv 2505.15201: the sum over a group's responses estimates the gradient of ``1 - (1 - p)^k``."""
    p, group = policy(), 4
    right = p[CORRECT].sum()
    wanted = k * (1 - right) ** (k - 1) * p * (CORRECT - right)
    found = group * expected_gradient(PassK(k=k, baseline=baseline), p, group)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


# --- what must not matter, and what is refused ---------------------------------------------------

GROUPED = (GroupZScore(), Centre(), LeaveOneOut(), BatchWhiten(baseline="group_mean"))
REWARDED = (*GROUPED, Plain(), BatchWhiten(), BatchWhiten(per="sequence"), Gae(whiten=False))


@pytest.mark.parametrize("piece", GROUPED, ids=lambda p: p.tag)
def test_a_group_of_one_is_refused_where_a_group_is_needed(piece):
    assert piece.least_group == 2
    with pytest.raises(ValueError, match=r"rollout\.n to 2 or more"):
        piece(rewards([1.0]))


@pytest.mark.parametrize("piece", [PassK(k=5), PassKTraining(k=5)], ids=lambda p: p.tag)
def test_pass_at_more_than_the_group_is_refused(piece):
    with pytest.raises(ValueError, match=r"pass@5 is not defined for 4 .* rollout\.n to 5"):
        piece(rewards([1, 0, 0, 0]))


@pytest.mark.parametrize("piece", REWARDED, ids=repr)
def test_rewards_of_single_tokens_act(piece):
    graded = graded_of([[1, 0, 0, 1], [0, 0, 1, 0]], [[2, 3, 1, 4], [2, 2, 3, 1]])
    graded = dataclasses.replace(graded, values=jnp.zeros_like(graded.old_logps))
    less = dataclasses.replace(
        graded,
        token_reward=jnp.zeros_like(graded.old_logps).at[0, 0, PROMPT].set(-0.5).at[1, 3, PROMPT + 2].set(jnp.nan),
    )
    total = token_rewards(less)
    assert float(total[0, 0].sum()) == 0.5
    assert float(total[1, 3].sum()) == 0
    clean = dataclasses.replace(less, token_reward=jnp.nan_to_num(less.token_reward))
    a, b = np.asarray(piece(clean)), np.asarray(piece(graded))
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("piece", [BatchWhiten(), BatchWhiten(per="sequence"), Gae()], ids=repr)
def test_what_is_not_used_moves_nothing_and_nothing_used_gives_zero(piece):
    graded = graded_of([[1, 0, 0, 1], [0, 0, 1, 0]], [[2, 3, 1, 4], [2, 2, 3, 1]])
    values = jnp.asarray(np.random.default_rng(0).normal(size=graded.old_logps.shape), jnp.float32)
    graded = dataclasses.replace(graded, values=jnp.where(graded.rollouts.rows.mask(), values, 0))
    used = graded.rollouts.rows.mask() & jnp.asarray([True, False])[:, None, None]
    found = piece(graded, used)
    wild = dataclasses.replace(graded, reward=graded.reward.at[1].set(100.0))
    np.testing.assert_array_equal(np.asarray(piece(wild, used))[0], np.asarray(found)[0])
    assert not np.asarray(piece(graded, used & False)).any()
    assert not np.asarray(found)[1].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchWhiten(baseline="group"), "algorithm.advantage.baseline: .*did you mean 'group_mean'"),
        (lambda: BatchWhiten(per="tokens"), "algorithm.advantage.per"),
        (lambda: Signed(positive=-0.1), "algorithm.advantage.positive"),
        (lambda: Signed(negative=0.1), "algorithm.advantage.negative"),
        (lambda: PassK(k=0), "algorithm.advantage.k"),
        (lambda: PassK(baseline="loo"), "algorithm.advantage.baseline"),
        (lambda: Gae(lam=1.5), "algorithm.advantage.lam"),
        (lambda: Gae(gamma=-0.1), "algorithm.advantage.gamma"),
        (lambda: Overlong(limit=4, cache=5), "algorithm.shaping.cache"),
    ],
)
def test_values_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
