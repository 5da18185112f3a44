"""The optimiser step: exact under any split, safe on empty rows, and as its record says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rl_cases import B8_GREEDY, PROMPT, SCORE, b8, prefiltered, quick_jit, scored, tiny_model

from jaxrl import keys
from jaxrl.models.logps import token_kl, token_logps
from jaxrl.rl.algorithms import Algorithm, kept, prepare
from jaxrl.rl.filters import KeepGreedyFails
from jaxrl.rl.losses import Clip
from jaxrl.rl.metrics import clip_violations
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.update import loss_and_grad, update
from jaxrl.rl.weights import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from jaxrl.types import TrainState

GRADIENT = quick_jit(loss_and_grad, static_argnames="microbatch")
UPDATE = quick_jit(update, static_argnames=("tx", "temperature", "microbatch"))
DOWN = make_optimiser(Optimiser(type="sgd", lr=0.05, schedule="linear"), total=2)
FORWARD_KL = dataclasses.replace(ALGORITHMS["self"], regularisers=((0.1, Kl(samples=2)),))
SELF = Algorithm(
    keep=KeepGreedyFails(), regularisers=((0.1, Kl(samples=2)), (0.3, Kl(direction="reverse", estimator="k2")))
)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])


def relative(a, b):
    return np.max(np.abs(flat(a) - flat(b))) / np.max(np.abs(flat(b)))


def off_policy(model, reference, temperature=1.0):
    return scored(model, b8(), reference, noise=0.3, temperature=temperature)


def state_of(model, tx):
    return TrainState(jnp.asarray(3), model, tx.init(model), keys.root(0))


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.x64
def test_any_microbatch_split_gives_the_same_gradient(x64):
    model, reference = tiny_model(0), tiny_model(1)
    (terms,) = prepare(SELF, off_policy(model, reference))
    assert [t.batch.weight.shape[0] for t in terms] == [12, 6, 12]
    losses, whole = GRADIENT(model, terms, reference, temperature=1.0)
    assert np.max(np.abs(flat(whole))) > 1e-3
    for size in (5, 100):  # 5 splits 12 rows and 6 rows unevenly
        part_losses, part = GRADIENT(model, terms, reference, temperature=1.0, microbatch=size)
        assert relative(part, whole) < 1e-10
        np.testing.assert_allclose(part_losses, losses, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.x64
def test_one_minibatch_is_the_full_batch_written_out(x64):
    """Token-mean GRPO on unsolved prompts plus both KLs, against a loss written down directly.

    Sampled at temperature 0.7: policy and reverse KL are of the tempered policy, the forward KL is not.
    """
    model, reference, temperature = tiny_model(0), tiny_model(1), 0.7
    graded = off_policy(model, reference, temperature)

    def direct(model, reference):
        rows, reward = graded.rollouts.rows, graded.reward
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-6)
        logps = token_logps(model, rows.flat(), temperature=temperature).reshape(graded.old_logps.shape)
        ratio, a = jnp.exp(logps - graded.old_logps), advantage[..., None]
        token = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        mask = rows.mask().astype(float)
        used = jnp.where(graded.greedy_correct[:, None, None], 0, mask)
        base = graded.base.rows.flat()
        forward = jnp.sum(token_kl(reference, model, base)) / jnp.sum(base.mask(), dtype=float)
        reverse = jnp.sum(0.5 * (logps - graded.ref_logps) ** 2) / jnp.sum(mask)
        return jnp.sum(token * used) / jnp.sum(used) + 0.1 * forward + 0.3 * reverse

    value, want = quick_jit(jax.value_and_grad(direct))(model, reference)
    (terms,) = prepare(SELF, graded)
    losses, got = GRADIENT(model, terms, reference, temperature=temperature)
    assert float(losses.sum()) == pytest.approx(float(value), rel=1e-10)
    assert relative(got, want) < 1e-10


@pytest.mark.slow
@pytest.mark.x64
def test_prompt_order_does_not_change_the_gradient(x64):
    model, reference = tiny_model(0), tiny_model(1)
    graded = off_policy(model, reference)
    order = jnp.asarray([2, 0, 1])
    shuffled = jax.tree.map(lambda x: x[order], graded)
    grads = [GRADIENT(model, prepare(SELF, g)[0], reference, temperature=1.0)[1] for g in (graded, shuffled)]
    assert relative(*grads) < 1e-12


@pytest.mark.parametrize("weights", [TokenMean(), SequenceMeanTokenMean()])
def test_weights_are_renormalised_in_each_minibatch(weights):
    graded = b8(greedy_correct=jnp.asarray([False, False, True]))
    parts = prepare(Algorithm(weights=weights, keep=KeepGreedyFails(), minibatches=3), graded)
    sums = [float(terms[0].batch.weight.sum()) for terms in parts]
    assert sums == pytest.approx([1, 1, 0])
    assert all(terms[0].batch.weight.shape[0] == 4 for terms in parts)


def test_minibatch_weights_average_to_the_full_batch_when_sequences_are_counted():
    """The gradient is linear in the weights, so equal weights are equal gradients."""
    full, parts = (prepare(Algorithm(weights=SequenceMeanTokenSum(), minibatches=m), b8()) for m in (1, 3))
    joined = np.concatenate([terms[0].batch.weight for terms in parts]) / 3
    np.testing.assert_allclose(joined, full[0][0].batch.weight, rtol=1e-6)


def test_prompts_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="3 prompts do not split into 2"):
        prepare(Algorithm(minibatches=2), b8())


# --- safe on nothing --------------------------------------------------------------------------


@pytest.mark.slow
def test_all_prompts_filtered_leaves_the_forward_kl_and_no_nan():
    model, reference = tiny_model(0), tiny_model(1)
    graded = prefiltered(FORWARD_KL, b8(greedy_correct=jnp.ones(3, bool)))
    (terms,) = prepare(FORWARD_KL, scored(model, graded))
    losses, grads = GRADIENT(model, terms, reference, temperature=1.0)
    assert not bool(kept(FORWARD_KL, graded).any())
    assert losses[0] == 0
    assert losses[1] > 0
    assert np.isfinite(flat(grads)).all()
    assert np.abs(flat(grads)).max() > 0


def test_empty_responses_give_no_nan():
    model = tiny_model(0)
    graded = scored(model, b8())
    rows = graded.rollouts.rows
    empty = dataclasses.replace(rows, length=jnp.full_like(rows.length, PROMPT))
    for lengths in (empty, dataclasses.replace(rows, length=rows.length.at[0, 1].set(PROMPT))):
        rollouts = dataclasses.replace(graded.rollouts, rows=lengths)
        (terms,) = prepare(Algorithm(), dataclasses.replace(graded, rollouts=rollouts))
        losses, grads = GRADIENT(model, terms, None, temperature=1.0)
        assert np.isfinite(flat((losses, grads))).all()


# --- what the policy is -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_ratio_is_one_and_no_clip_acts(temperature):
    """Same function, same shapes: bitwise. The temperature of rollouts and of training is one argument."""
    model = tiny_model(0)
    graded = scored(model, b8(), temperature=temperature)
    batch = prepare(Algorithm(), graded)[0][0].batch
    new = SCORE(model, batch.rows, temperature=temperature)
    got = clip_violations(new, batch.old_logps, batch.weight != 0, advantage=batch.advantage)
    assert [got[k].value for k in ("token", "active", "sequence", "ratio")] == [0, 0, 0, 1]
    other = clip_violations(SCORE(model, batch.rows, temperature=1.0), batch.old_logps, batch.weight != 0)
    assert (other["abs_log_ratio"].value > 0.01) == (temperature != 1)


def test_temperature_cannot_be_forgotten():
    with pytest.raises(TypeError, match="temperature"):
        loss_and_grad(None, (), None)
    with pytest.raises(TypeError, match="temperature"):
        Clip().tokens(None, None, None)


# --- the step itself --------------------------------------------------------------------------


def test_step_goes_the_right_way_and_the_second_epoch_is_off_policy():
    """Two updates on one batch by SGD, the first at 0.05, the second at a learning rate of 0."""
    model = tiny_model(0)
    (terms,) = prepare(Algorithm(epochs=2), scored(model, b8()))
    batch = terms[0].batch
    state, metrics = UPDATE(state_of(model, DOWN), terms, None, tx=DOWN, temperature=1.0)
    new = SCORE(state.model, batch.rows)
    change = (new - batch.old_logps).sum(-1)
    assert float(jnp.sum(change * batch.advantage[:, 0])) > 0
    moved = clip_violations(new, batch.old_logps, batch.weight != 0)
    assert moved["abs_log_ratio"].value > 1e-3
    step = np.linalg.norm(flat(state.model) - flat(model))
    assert metrics["optim/update_norm"].value == pytest.approx(step, rel=1e-4)
    assert metrics["optim/update_norm"].value == pytest.approx(0.05 * metrics["optim/grad_norm"].value, rel=1e-4)
    assert int(state.step) == 3  # rollout batches are counted by the loop

    again, second = UPDATE(state, terms, None, tx=DOWN, temperature=1.0)
    assert second["policy/loss"].value < metrics["policy/loss"].value
    np.testing.assert_array_equal(flat(again.model), flat(state.model))
    assert second["optim/param_changed"].value == 0
    assert second["optim/update_norm"].value == 0
    assert second["optim/grad_norm"].value > 0


def test_learning_rate_zero_keeps_every_ratio_at_one():
    model = tiny_model(0)
    (terms,) = prepare(Algorithm(), scored(model, b8()))
    state = state_of(model, DOWN)
    late, _ = UPDATE(state, terms, None, tx=DOWN, temperature=1.0)  # brings the schedule to its zero
    state = dataclasses.replace(state, opt_state=late.opt_state)
    state, _ = UPDATE(state, terms, None, tx=DOWN, temperature=1.0)
    batch = terms[0].batch
    got = clip_violations(SCORE(state.model, batch.rows), batch.old_logps, batch.weight != 0, advantage=batch.advantage)
    assert {k: m.value for k, m in got.items()} == {
        "token": 0, "active": 0, "sequence": 0, "ratio": 1, "abs_log_ratio": 0,
    }  # fmt: skip


def test_masters_and_moments_are_float32_and_small_steps_are_counted():
    model = tiny_model(0, dtype="bfloat16")
    tx = make_optimiser(Optimiser(lr=1e-6), total=1)
    (terms,) = prepare(Algorithm(), scored(model, b8()))
    state, metrics = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
    leaves = jax.tree.leaves((state.model, optax.tree_utils.tree_get(state.opt_state, "mu")))
    assert {x.dtype.name for x in leaves} == {"float32"}
    real = np.mean(flat(state.model) != flat(model))
    assert metrics["optim/param_changed"].value == pytest.approx(real, abs=1e-6)
    assert real > 0.5  # bfloat16 masters would have swallowed nearly all of a step of 1e-6
    as_bf16 = [np.asarray(jnp.asarray(flat(m)).astype(jnp.bfloat16)) for m in (model, state.model)]
    assert np.mean(as_bf16[0] != as_bf16[1]) < 0.05


@pytest.mark.slow
def test_filters_do_not_recompile_the_step():
    model, reference = tiny_model(0), tiny_model(1)
    algorithm, tx = FORWARD_KL, make_optimiser(Optimiser(type="sgd", lr=1e-3), total=4)
    # functions of this test alone: jax counts the programs of one function over all its jitted forms
    step = quick_jit(lambda s, t, r: update(s, t, r, tx=tx, temperature=1.0), donate_argnums=0)
    ready = quick_jit(lambda g: prepare(algorithm, g))
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), state_of(model, tx))
    for greedy in (B8_GREEDY, [True] * 3, [False] * 3, [False, True, False]):
        graded = scored(state.model, prefiltered(algorithm, b8(greedy_correct=jnp.asarray(greedy))))
        (terms,) = ready(graded)
        state, _ = step(state, terms, reference)
    assert step._cache_size() == 1
    assert ready._cache_size() == 1
