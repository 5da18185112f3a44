"""Both ways to a row's log-probs: the same numbers and gradients, and what each of them can do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import VOCAB, quick_jit, tiny_model

from jaxrl.models.scoring import FORWARD, REVERSE, Reverse
from jaxrl.types import Rows

START, LENGTH, WIDTH = [1, 3, 2, 4], [6, 8, 2, 8], 8  # responses of 5, 5, 0 and 4 tokens


def some_rows():
    tokens = np.random.default_rng(0).integers(0, VOCAB - 1, (4, WIDTH))
    return Rows(jnp.asarray(tokens, jnp.int32), jnp.asarray(START, jnp.int32), jnp.asarray(LENGTH, jnp.int32))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("score", "kind"),
    [
        (Reverse(responses=5), {"vocab_limit": VOCAB - 1}),
        pytest.param(REVERSE, {}, marks=pytest.mark.slow),
        pytest.param(REVERSE, {"tied": False}, marks=pytest.mark.slow),
    ],
)
def test_both_ways_give_the_same_values_and_gradients(x64, score, kind):
    """Log-probs, entropies and divergences, each weighted at random, with and without a bound on responses."""
    model, reference, rows = tiny_model(0, **kind), tiny_model(1, **kind), some_rows()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, WIDTH)))

    def run(score):
        def value(model):
            out = (*score.scores(model, rows, temperature=0.7), score.kl(reference, model, rows))
            return sum(jnp.sum(w * x) for w, x in zip(weight, out, strict=True)), out

        return quick_jit(jax.value_and_grad(value, has_aux=True))(model)

    expected = run(FORWARD)
    assert float(jnp.abs(expected[0][1][0]).min(where=rows.mask(), initial=1)) > 0
    for a, b in zip(jax.tree.leaves(run(score)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(b).max())))


def test_forward_mode_passes_the_one_and_is_refused_by_the_other():
    model, rows = tiny_model(0), some_rows()
    tangent = jax.tree.map(jnp.ones_like, model)
    moved = quick_jit(lambda m, t: jax.jvp(lambda m: FORWARD(m, rows), (m,), (t,))[1])(model, tangent)
    step, forward = 1e-3, quick_jit(lambda m: FORWARD(m, rows))
    up, down = (forward(jax.tree.map(lambda x, s=s: x + s, model)) for s in (step, -step))
    np.testing.assert_allclose(moved, (up - down) / (2 * step), atol=2e-2)
    assert np.abs(moved).max() > 0.1
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda m: REVERSE(m, rows), (model,), (tangent,))


def test_a_bound_on_responses_spares_the_head_every_other_position():
    model, rows = tiny_model(0), some_rows()
    shapes = [jax.eval_shape(score.states, model, rows).shape for score in (REVERSE, Reverse(responses=5))]
    assert shapes == [(4 * (WIDTH - 1), 8), (4 * 5, 8)]


def test_a_response_beyond_the_bound_is_no_number_rather_than_a_wrong_one():
    model, rows = tiny_model(0), some_rows()
    got, expected = (np.array(quick_jit(score)(model, rows)) for score in (Reverse(responses=4), REVERSE))
    expected[0, 5] = expected[1, 7] = np.nan  # the fifth token of both
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_rows_of_one_token_score_nothing():
    rows = Rows(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.ones(2, jnp.int32))
    for score in (FORWARD, REVERSE, Reverse(responses=3)):
        assert not np.any(quick_jit(score)(tiny_model(0), rows))


def test_bad_rows_and_temperatures_are_refused_before_anything_runs():
    model, rows = tiny_model(0), some_rows()
    with pytest.raises(ValueError, match="temperature: expected a number above 0, got 0"):
        REVERSE(model, rows, temperature=0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        REVERSE(model, Rows(rows.tokens + VOCAB, rows.start, rows.length))
