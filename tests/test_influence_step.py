"""What one optimiser step does to other rows: the loss's own kernel, and the four parts of Adam."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from influence_world import flat, jitted_logps, small_model, some_rows

from jaxrl import keys
from jaxrl.influence.batch import batch_gradient, batch_prediction, coefficients
from jaxrl.influence.gradients import predicted_change
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.precondition import current_rate, preconditioner, step_parts, step_sum
from jaxrl.models.logps import token_logps
from jaxrl.rl.losses import Clip, FullKl, Nll
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.update import update
from jaxrl.types import Batch, Term, TrainState

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
step = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"))


def warm_logps(model, rows):
    return token_logps(model, rows, temperature=0.7)


def optax_step(tx, gradient, state, model):
    """The model and state after one update."""
    with jax.numpy_dtype_promotion("standard"):
        change, state = jax.jit(tx.update)(gradient, state, model)
        return optax.apply_updates(model, change), state


def term(model, loss, *, seed=0, drift=0.0, per_token=False) -> Term:
    """Six rows with advantages; ``drift`` moves the old log-probs, so that ratios leave 1 and some are clipped."""
    rows = some_rows(6, seed=seed)
    mask = rows.mask()
    k1, k2 = jax.random.split(jax.random.key(seed))
    shape = mask.shape if per_token else (6, 1)
    advantage = jnp.broadcast_to(jax.random.normal(k1, shape), mask.shape)
    old = jitted_logps(model, rows) + drift * jax.random.normal(k2, mask.shape)
    weight = jnp.where(mask, 1 / jnp.sum(mask), 0)
    return Term(Batch(rows=rows, advantage=advantage, old_logps=old, weight=weight), loss)


@pytest.fixture(scope="module")
def world():
    with jax.enable_x64(True):
        model, other = small_model(), small_model(seed=1)
        return model, other, some_rows(6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (Clip(), {"drift": 0.4}),
        (Clip(dual=3.0), {"drift": 0.4, "per_token": True}),
        (Nll(), {}),
    ],
)
def test_the_weighted_kernel_is_what_the_loss_that_trains_predicts(world, loss, options):
    model, _, probe = world
    one = term(model, loss, **options)
    weighed = coefficients(model, one)
    kernel = gradient_kernel(model, one.batch.rows, probe, weights=jnp.asarray(weighed.token)).values
    expected = np.asarray(batch_prediction(model, (one,), probe))
    np.testing.assert_allclose(weighed.row @ np.asarray(kernel), expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    gradient = batch_gradient(model, (one,))
    by_hand = predicted_change(model, jax.tree.map(jnp.negative, gradient), probe)
    np.testing.assert_allclose(expected, by_hand, rtol=1e-12)


@pytest.mark.slow
def test_a_rollout_temperature_acts_on_the_training_side_only(world):
    model, _, probe = world
    one = term(model, Clip(), drift=0.1)
    weighed = coefficients(model, one, logps=warm_logps)
    kernel = gradient_kernel(
        model, one.batch.rows, probe, weights=jnp.asarray(weighed.token), logps=(warm_logps, token_logps)
    ).values
    expected = np.asarray(batch_prediction(model, (one,), probe, temperature=0.7))
    np.testing.assert_allclose(weighed.row @ np.asarray(kernel), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_on_policy_coefficients_are_weight_times_advantage_and_the_kernel_is_the_plain_one(world):
    model, _, _ = world
    one = term(model, Clip())
    weighed = coefficients(model, one)
    np.testing.assert_allclose(
        weighed.row,
        (one.batch.weight * one.batch.advantage).max(1, where=one.batch.rows.mask(), initial=-9),
        rtol=1e-12,
    )
    np.testing.assert_array_equal(weighed.token, one.batch.rows.mask())


@pytest.mark.slow
def test_several_terms_with_a_forward_kl_are_predicted_as_they_train(world):
    """A tiny SGD step on a policy term and a full forward KL changes the probe as predicted."""
    model, reference, probe = world
    kl = dataclasses.replace(term(model, FullKl(), seed=3))
    terms = (term(model, Clip()), kl)
    predicted = np.asarray(batch_prediction(model, terms, probe, reference))
    eta = 1e-7
    tx = make_optimiser(Optimiser(lr=eta, type="sgd"), total=1)
    state = TrainState(jnp.asarray(0), model, tx.init(model), keys.root(0))
    after, _ = step(state, terms, reference, tx=tx, temperature=1.0)
    measured = np.asarray((jitted_logps(after.model, probe) - jitted_logps(model, probe)).sum(1)) / eta
    np.testing.assert_allclose(measured, predicted, rtol=0, atol=1e-5 * np.abs(predicted).max())
    with pytest.raises(ValueError, match="whole distributions"):
        coefficients(model, kl)


SPECS = {
    "adamw": Optimiser(lr=1e-3),
    "adamw, clipped, decayed": Optimiser(lr=1e-3, clip=0.05, weight_decay=0.1),
    "adamw, small steps": Optimiser(lr=1e-6, clip=100.0, weight_decay=0.01, b1=0.8, b2=0.95, eps=1e-6),
    "adamw, cosine with warm-up": Optimiser(lr=1e-3, schedule="cosine", warmup=3, clip=0.05),
    "adamw without momentum": Optimiser(lr=1e-3, b1=0.0),
    "sgd": Optimiser(lr=1e-2, type="sgd", clip=0.05, weight_decay=0.1),
    "sgd with momentum": Optimiser(lr=1e-2, type="sgd", momentum=0.9, clip=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_four_parts_add_up_to_the_step_that_optax_takes(world, name):
    model, _, probe = world
    spec = SPECS[name]
    tx = make_optimiser(spec, total=10)
    state = tx.init(model)
    for seed in range(3):
        before, old = model, state
        gradient = batch_gradient(model, (term(model, Clip(), seed=seed),))
        model, state = optax_step(tx, gradient, state, model)
    parts = step_parts(spec, before, old, gradient, total=10)
    change = jax.tree.map(jnp.subtract, model, before)
    effect = {k: np.asarray(predicted_change(before, p, probe)) for k, p in parts.items()}
    whole = np.asarray(predicted_change(before, change, probe))
    np.testing.assert_allclose(sum(effect.values()), whole, rtol=0, atol=1e-10 * np.abs(whole).max())
    np.testing.assert_allclose(flat(step_sum(parts)), flat(change), rtol=0, atol=1e-9 * np.abs(flat(change)).max())
    acts = {"current": True, "clip": "clip" in name or spec.clip == 0.05, "decay": spec.weight_decay > 0}
    acts["momentum"] = spec.momentum > 0 or (spec.type == "adamw" and spec.b1 > 0)
    assert {k: bool(np.any(e)) for k, e in effect.items()} == acts


@pytest.mark.slow
def test_the_preconditioned_kernel_is_the_current_batchs_part_of_the_step(world):
    model, _, probe = world
    spec = SPECS["adamw, clipped, decayed"]
    tx = make_optimiser(spec, total=10)
    one = term(model, Clip())
    model, opt_state = optax_step(tx, batch_gradient(model, (one,)), tx.init(model), model)
    one = term(model, Clip(), seed=1)
    gradient = batch_gradient(model, (one,))
    diagonal = preconditioner(spec, model, opt_state, gradient, total=10)
    weighed = coefficients(model, one)
    for method in ("reference", "columns"):
        kernel = gradient_kernel(model, one.batch.rows, probe, precondition=diagonal, method=method).values
        parts = step_parts(spec, model, opt_state, gradient, total=10)
        expected = np.asarray(predicted_change(model, parts["current"], probe))
        np.testing.assert_allclose(
            weighed.row @ np.asarray(kernel), expected, rtol=0, atol=1e-10 * np.abs(expected).max()
        )


def test_the_rate_is_that_of_the_coming_step(world):
    model, _, _ = world
    spec = SPECS["adamw, cosine with warm-up"]
    state = make_optimiser(spec, total=10).init(model)
    assert float(current_rate(spec, state, total=10)) == pytest.approx(1e-3 / 3)


def test_a_state_of_another_optimiser_is_refused(world):
    model, _, _ = world
    state = make_optimiser(SPECS["sgd"], total=10).init(model)
    with pytest.raises(ValueError, match="expected one ScaleByAdamState, found 0"):
        step_parts(SPECS["adamw"], model, state, model, total=10)
