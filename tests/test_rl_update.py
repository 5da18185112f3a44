"""The optimiser step: exact under any split, safe on empty rows, and as its record says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rl_cases import B8_GREEDY, PROMPT, b8, prefiltered, scored, tiny_model

from jaxrl import keys
from jaxrl.models.logps import token_kl, token_logps
from jaxrl.rl.algorithms import ALGORITHMS, Algorithm, kept, prepare
from jaxrl.rl.filters import KeepGreedyFails
from jaxrl.rl.losses import Clip
from jaxrl.rl.metrics import clip_violations
from jaxrl.rl.optimiser import Optimiser, learning_rate, make_optimiser
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.update import loss_and_grad, update
from jaxrl.rl.weights import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from jaxrl.types import TrainState

GRADIENT = jax.jit(loss_and_grad, static_argnames=("temperature", "microbatch"))
UPDATE = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"))
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


@pytest.mark.x64
def test_any_microbatch_split_gives_the_same_gradient(x64):
    model, reference = tiny_model(0), tiny_model(1)
    (terms,) = prepare(SELF, off_policy(model, reference))
    assert [t.batch.weight.shape[0] for t in terms] == [12, 6, 12]
    losses, whole = GRADIENT(model, terms, reference, temperature=1.0)
    assert np.max(np.abs(flat(whole))) > 1e-3
    for size in (1, 5, 6, 12, 100):
        part_losses, part = GRADIENT(model, terms, reference, temperature=1.0, microbatch=size)
        assert relative(part, whole) < 1e-10
        np.testing.assert_allclose(part_losses, losses, rtol=1e-10, atol=1e-14)


@pytest.mark.x64
def test_one_minibatch_is_the_full_batch_written_out(x64):
    """Token-mean GRPO plus a token-mean forward KL, against a loss written down directly."""
    model, reference, temperature = tiny_model(0), tiny_model(1), 0.7
    graded = off_policy(model, reference, temperature)
    algorithm = Algorithm(keep=KeepGreedyFails(), regularisers=((0.1, Kl(samples=2)),))

    def direct(model, reference):
        rows, reward = graded.rollouts.rows, graded.reward
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-6)
        logps = token_logps(model, rows.flat(), temperature=temperature).reshape(graded.old_logps.shape)
        ratio, a = jnp.exp(logps - graded.old_logps), advantage[..., None]
        token = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        used = (rows.mask() & ~graded.greedy_correct[:, None, None]).astype(float)
        base = graded.base.rows.flat()
        kl = token_kl(reference, model, base)
        return jnp.sum(token * used) / jnp.sum(used) + 0.1 * jnp.sum(kl) / jnp.sum(base.mask(), dtype=float)

    value, want = jax.jit(jax.value_and_grad(direct))(model, reference)
    (terms,) = prepare(algorithm, graded)
    losses, got = GRADIENT(model, terms, reference, temperature=temperature)
    assert float(losses.sum()) == pytest.approx(float(value), rel=1e-10)
    assert relative(got, want) < 1e-10


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


@pytest.mark.x64
def test_minibatch_gradients_average_to_the_full_batch_when_sequences_are_counted(x64):
    model = tiny_model(0)
    graded = off_policy(model, model)
    full, parts = (prepare(Algorithm(weights=SequenceMeanTokenSum(), minibatches=m), graded) for m in (1, 3))
    grads = [GRADIENT(model, terms, None, temperature=1.0)[1] for terms in parts]
    mean = jax.tree.map(lambda *x: sum(x) / 3, *grads)
    assert relative(mean, GRADIENT(model, full[0], None, temperature=1.0)[1]) < 1e-10


def test_prompts_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="3 prompts do not split into 2"):
        prepare(Algorithm(minibatches=2), b8())


# --- safe on nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [None, 5])
def test_all_prompts_filtered_leaves_the_forward_kl_and_no_nan(microbatch):
    model, reference = tiny_model(0), tiny_model(1)
    algorithm = dataclasses.replace(ALGORITHMS["self"], regularisers=((0.1, Kl(samples=2)),))
    graded = prefiltered(algorithm, b8(greedy_correct=jnp.ones(3, bool)))
    (terms,) = prepare(algorithm, scored(model, graded))
    losses, grads = GRADIENT(model, terms, reference, temperature=1.0, microbatch=microbatch)
    assert not bool(kept(algorithm, graded).any())
    assert losses[0] == 0
    assert losses[1] > 0
    assert np.isfinite(flat(grads)).all()
    assert np.abs(flat(grads)).max() > 0
    policy_only = GRADIENT(model, terms[:1], None, temperature=1.0, microbatch=microbatch)[1]
    assert (flat(policy_only) == 0).all()


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
    new = token_logps(model, batch.rows, temperature=temperature)
    got = clip_violations(new, batch.old_logps, batch.weight != 0, advantage=batch.advantage)
    assert [got[k].value for k in ("token", "active", "sequence", "ratio")] == [0, 0, 0, 1]
    other = clip_violations(token_logps(model, batch.rows), batch.old_logps, batch.weight != 0)
    assert (other["abs_log_ratio"].value > 0.01) == (temperature != 1)


def test_temperature_cannot_be_forgotten():
    with pytest.raises(TypeError, match="temperature"):
        loss_and_grad(None, (), None)
    with pytest.raises(TypeError, match="temperature"):
        Clip().tokens(None, None, None)


def test_second_epoch_is_off_policy_against_stored_log_probs():
    model = tiny_model(0)
    tx = make_optimiser(Optimiser(lr=0.05), total=2)
    graded = scored(model, b8())
    (terms,) = prepare(Algorithm(epochs=2), graded)
    state, _ = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
    batch = terms[0].batch
    np.testing.assert_array_equal(batch.old_logps.reshape(graded.old_logps.shape), graded.old_logps)
    moved = clip_violations(token_logps(state.model, batch.rows), batch.old_logps, batch.weight != 0)
    assert moved["abs_log_ratio"].value > 1e-3


def test_one_small_step_raises_good_responses_and_lowers_bad_ones():
    model = tiny_model(0)
    tx = make_optimiser(Optimiser(type="sgd", lr=0.05), total=1)
    (terms,) = prepare(Algorithm(weights=SequenceMeanTokenSum()), scored(model, b8()))
    batch = terms[0].batch
    state, metrics = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
    change = (token_logps(state.model, batch.rows) - batch.old_logps).sum(-1)
    assert float(jnp.sum(change * batch.advantage[:, 0])) > 0
    after = GRADIENT(state.model, terms, None, temperature=1.0)[0].sum()
    assert float(after) < metrics["policy/loss"].value


# --- the step itself --------------------------------------------------------------------------


def test_learning_rate_zero_changes_nothing_and_says_so():
    model = tiny_model(0)
    tx = make_optimiser(Optimiser(lr=0.0), total=1)
    (terms,) = prepare(Algorithm(), scored(model, b8()))
    state, metrics = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
    np.testing.assert_array_equal(flat(state.model), flat(model))
    assert metrics["optim/param_changed"].value == 0
    assert metrics["optim/update_norm"].value == 0
    assert metrics["optim/grad_norm"].value > 0
    new = clip_violations(
        token_logps(state.model, terms[0].batch.rows), terms[0].batch.old_logps, terms[0].batch.weight != 0
    )
    assert new["token"].value == 0
    assert new["ratio"].value == 1


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


@pytest.mark.x64
def test_sgd_and_clipping_step_as_written(x64):
    model = tiny_model(0)
    (terms,) = prepare(Algorithm(), off_policy(model, model))
    gradient = flat(GRADIENT(model, terms, None, temperature=1.0)[1])
    norm = np.linalg.norm(gradient)
    for clip, scale in ((None, 1.0), (norm / 2, 0.5), (norm * 2, 1.0)):
        tx = make_optimiser(Optimiser(type="sgd", lr=0.1, clip=clip, weight_decay=0.01), total=1)
        state, metrics = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
        want = -0.1 * (scale * gradient + 0.01 * flat(model))
        np.testing.assert_allclose(flat(state.model) - flat(model), want, atol=1e-14)
        assert metrics["optim/grad_norm"].value == pytest.approx(norm, rel=1e-10)
        assert metrics["optim/update_norm"].value == pytest.approx(np.linalg.norm(want), rel=1e-10)
        assert int(state.step) == 3  # rollout batches are counted by the loop


@pytest.mark.x64
def test_two_adamw_steps_as_written(x64):
    model = tiny_model(0)
    spec = Optimiser(lr=1e-2, weight_decay=0.1, b1=0.8, b2=0.95, eps=1e-6)
    tx = make_optimiser(spec, total=2)
    (terms,) = prepare(Algorithm(), off_policy(model, model))
    state, theta, m, v = state_of(model, tx), flat(model), 0.0, 0.0
    for t in (1, 2):
        g = flat(GRADIENT(state.model, terms, None, temperature=1.0)[1])
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        theta = theta - 1e-2 * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6) + 0.1 * theta)
        state, _ = UPDATE(state, terms, None, tx=tx, temperature=1.0)
        np.testing.assert_allclose(flat(state.model), theta, atol=1e-12)


@pytest.mark.x64
def test_momentum_accumulates(x64):
    model = tiny_model(0)
    tx = make_optimiser(Optimiser(type="sgd", lr=0.1, momentum=0.9), total=2)
    (terms,) = prepare(Algorithm(), off_policy(model, model))
    first, _ = UPDATE(state_of(model, tx), terms, None, tx=tx, temperature=1.0)
    g1, g2 = (flat(GRADIENT(m, terms, None, temperature=1.0)[1]) for m in (model, first.model))
    second, _ = UPDATE(first, terms, None, tx=tx, temperature=1.0)
    np.testing.assert_allclose(flat(second.model) - flat(first.model), -0.1 * (0.9 * g1 + g2), atol=1e-13)


def test_learning_rate_schedules():
    def rates(**fields):
        spec = Optimiser(lr=2.0, **fields)
        return [float(learning_rate(spec, t, total=7)) for t in range(7)]

    assert rates() == [2.0] * 7
    assert rates(warmup=2) == [1.0] + [2.0] * 6
    assert rates(schedule="linear", warmup=2) == pytest.approx([1, 2, 2, 1.5, 1, 0.5, 0])
    assert rates(schedule="linear", final=0.5) == pytest.approx([2 - t / 6 for t in range(7)])
    assert rates(schedule="cosine", final=0.1)[::3] == pytest.approx([2, 1.1, 0.2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "adam"}, "optimiser.type.*did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"lr": -1.0}, "optimiser.lr.*at least 0"),
        ({"b1": 1.5}, "optimiser.b1.*between 0 and 1"),
        ({"microbatch": 0}, "optimiser.microbatch"),
    ],
)
def test_unusable_optimisers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Optimiser(**({"lr": 1.0} | fields))


def test_filters_do_not_recompile_the_step():
    model, reference = tiny_model(0), tiny_model(1)
    algorithm = dataclasses.replace(ALGORITHMS["self"], regularisers=((0.1, Kl(samples=2)),))
    tx = make_optimiser(Optimiser(lr=1e-3), total=4)
    step = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"), donate_argnums=0)
    ready = jax.jit(prepare, static_argnums=0)
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), state_of(model, tx))
    for greedy in (B8_GREEDY, [True] * 3, [False] * 3, [False, True, False]):
        graded = scored(state.model, prefiltered(algorithm, b8(greedy_correct=jnp.asarray(greedy))))
        (terms,) = ready(algorithm, graded)
        state, _ = step(state, terms, reference, tx=tx, temperature=1.0)
    assert step._cache_size() == 1
    assert ready._cache_size() == 1
