"""Optimisers and schedules, against their formulas on a toy tree."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.rl.optimiser import Optimiser, learning_rate, make_optimiser

PARAMS = {"a": [0.5, -2.0], "norm": [3.0]}
GRADS = {"a": [0.3, -0.4], "norm": [1.2]}  # norm 1.3


def arrays(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, float), tree, is_leaf=lambda x: isinstance(x, list))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def walk(spec, updates):
    """Parameters after each of ``updates`` steps on the same gradient."""
    tx, params, seen = make_optimiser(spec, total=updates), arrays(PARAMS), []
    state = tx.init(params)
    for _ in range(updates):
        with jax.numpy_dtype_promotion("standard"):
            steps, state = tx.update(arrays(GRADS), state, params)
        params = optax.apply_updates(params, steps)
        seen.append(flat(params))
    return seen


@pytest.mark.x64
@pytest.mark.parametrize(("clip", "scale"), [(None, 1.0), (0.65, 0.5), (2.6, 1.0)])
def test_sgd_clips_by_global_norm_and_decays_every_parameter(x64, clip, scale):
    spec = Optimiser(type="sgd", lr=0.1, clip=clip, weight_decay=0.01)
    theta, g = flat(arrays(PARAMS)), flat(arrays(GRADS))
    np.testing.assert_allclose(walk(spec, 1)[0], theta - 0.1 * (scale * g + 0.01 * theta), rtol=0, atol=1e-14)


@pytest.mark.x64
def test_momentum_accumulates(x64):
    theta, g = flat(arrays(PARAMS)), flat(arrays(GRADS))
    first, second = walk(Optimiser(type="sgd", lr=0.1, momentum=0.9), 2)
    np.testing.assert_allclose(first, theta - 0.1 * g, rtol=0, atol=1e-14)
    np.testing.assert_allclose(second, first - 0.1 * 1.9 * g, rtol=0, atol=1e-14)


@pytest.mark.x64
def test_adamw_steps_as_written(x64):
    theta, g, m, v = flat(arrays(PARAMS)), flat(arrays(GRADS)), 0.0, 0.0
    spec = Optimiser(lr=1e-2, weight_decay=0.1, b1=0.8, b2=0.95, eps=1e-3, clip=0.65)
    for t, got in enumerate(walk(spec, 3), start=1):
        m, v = 0.8 * m + 0.2 * (g / 2), 0.95 * v + 0.05 * (g / 2) ** 2
        theta = theta - 1e-2 * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3) + 0.1 * theta)
        np.testing.assert_allclose(got, theta, rtol=0, atol=1e-14)


def test_learning_rate_schedules():
    def rates(**fields):
        spec = Optimiser(lr=2.0, **fields)
        return [float(learning_rate(spec, t, total=7)) for t in range(7)]

    assert rates() == [2.0] * 7
    assert rates(warmup=2) == [1.0] + [2.0] * 6
    assert rates(schedule="linear", warmup=2) == pytest.approx([1, 2, 2, 1.5, 1, 0.5, 0])
    assert rates(schedule="linear", final=0.5) == pytest.approx([2 - t / 6 for t in range(7)])
    assert rates(schedule="cosine", final=0.1)[::3] == pytest.approx([2, 1.1, 0.2])


def test_steps_follow_the_schedule():
    walked = [flat(arrays(PARAMS)), *walk(Optimiser(type="sgd", lr=0.4, schedule="linear"), 3)]
    moved = [np.linalg.norm(b - a) / 1.3 for a, b in itertools.pairwise(walked)]
    assert moved == pytest.approx([0.4, 0.2, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "adam"}, r"optimiser\.type.*did you mean 'adamw'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"lr": -1.0}, r"optimiser\.lr.*at least 0"),
        ({"b1": 1.5}, r"optimiser\.b1.*between 0 and 1"),
        ({"microbatch": 0}, r"optimiser\.microbatch"),
    ],
)
def test_unusable_optimisers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Optimiser(**({"lr": 1.0} | fields))
