"""Both ways to a row's log-probs: the same numbers and gradients, and what each of them can do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import VOCAB, quick_jit, tiny_model

from jaxrl.hlo import collective_bytes
from jaxrl.mesh import make_mesh, shard_tree, shardings, to_mesh
from jaxrl.models.decoder import abstract_model, param_axes
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


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("kind", [{}, {"tied": False}, {"vocab_limit": 5}, {"vocab_size": 9}])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8), (1, 8, 1), (8, 1, 1)])
def test_a_head_split_over_a_mesh_gives_the_same_numbers(x64, kind, shape):
    """Entries over tensor and width over fsdp, or whole where they do not divide; 12 positions that 8 do not divide."""
    model, reference, mesh = tiny_model(0, **kind), tiny_model(1, **kind), make_mesh(*shape)
    rows = jax.tree.map(lambda x: x[:3], some_rows())
    rows = Rows(rows.tokens % 5, rows.start, rows.length)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, WIDTH)))

    def value(model, reference, rows, score):
        out = (*score.scores(model, rows, temperature=0.7), score.kl(reference, model, rows))
        return sum(jnp.sum(w * x) for w, x in zip(weight, out, strict=True)), out

    run = quick_jit(jax.value_and_grad(value, has_aux=True), static_argnames="score")
    expected = run(model, reference, rows, score=Reverse(responses=5))
    there = [shard_tree(mesh, param_axes(m.config), m) for m in (model, reference)]
    got = run(*there, to_mesh(mesh, rows), score=Reverse(responses=5, mesh=mesh))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_no_logit_crosses_devices_and_the_matrix_does_so_once_a_pass(tied):
    """Left to the compiler, all logits are summed over the devices that split the matrix's width."""
    n, width, d, v = 16, 65, 64, 32768
    mesh = make_mesh(data=1, fsdp=8, tensor=1)
    config = dataclasses.replace(tiny_model(0).config, vocab_size=v, hidden_size=d, tied=tied)
    model = abstract_model(config)
    place = shardings(mesh, param_axes(config), model)
    model = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), model, place)
    shapes = Rows(*(jnp.zeros(shape, jnp.int32) for shape in ((n, width), (n,), (n,))))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), to_mesh(mesh, shapes))

    score = Reverse(mesh=mesh)
    program = quick_jit(jax.value_and_grad(lambda m, r: jnp.mean(score(m, r))), out_shardings=(None, place))
    found = collective_bytes(program.lower(model, rows).compile().as_text())
    matrix = 4 * v * d
    assert 2 * matrix <= found["all-gather"] < 2.2 * matrix  # forward and backward
    assert sum(found.values()) - found["all-gather"] < matrix  # logits are 16 times that
