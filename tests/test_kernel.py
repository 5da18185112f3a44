"""The gradient kernel: two methods and finite differences agree, blocks add up, memory is bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import along, flat, gradient_matrix, row_scores, small_model, some_rows

from jaxrl.errors import OutOfMemory
from jaxrl.influence import cost, explicit, tiling
from jaxrl.influence.gradients import one_gradient, predicted_change, row_gradients, row_weights, second_order
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.models.decoder import with_config
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

jitted_gradients = jax.jit(row_gradients)
pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]


def dense(model, rows_a, rows_b, weights_a=None, weights_b=None, diagonal=None) -> np.ndarray:
    """The Gram matrix by its definition: one gradient at a time, flattened."""

    scale = 1.0 if diagonal is None else flat(diagonal)
    return (gradient_matrix(model, rows_a, weights_a) * scale) @ gradient_matrix(model, rows_b, weights_b).T


def first_gradient(model, rows):
    """The gradient of the first row's score."""
    return jax.tree.map(lambda x: x[0], jitted_gradients(model, rows, row_weights(rows)))


def assert_close(a, b, tolerance=1e-12) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, equal_nan=False)


@pytest.fixture(scope="module")
def world():
    with jax.enable_x64(True):
        model, a, b = small_model(), some_rows(6), some_rows(6, seed=1)
        return model, a, b, dense(model, a, b)


@pytest.mark.parametrize("method", ["auto", "reference", pytest.param("columns", marks=pytest.mark.slow)])
def test_every_method_gives_the_dense_gram_matrix(world, method):
    model, a, b, expected = world
    kernel = gradient_kernel(model, a, b, method=method)
    assert_close(kernel.values, expected)
    assert_close(kernel.sq_norms_a, np.diag(dense(model, a, a)))
    assert_close(kernel.sq_norms_b, np.diag(dense(model, b, b)))
    assert kernel.dtype == "float64"
    assert kernel.method == ("reference" if method == "auto" else method)


@pytest.mark.slow
def test_the_kernel_is_the_derivative_that_finite_differences_measure(world):
    model, a, b, expected = world
    for i in range(2):
        gradient = first_gradient(model, a[i:])
        step = 1e-5 / np.linalg.norm(flat(gradient))
        central = (row_scores(along(model, gradient, step), b) - row_scores(along(model, gradient, -step), b)) / (
            2 * step
        )
        assert_close(central, expected[i], 1e-6)


def test_a_kernel_of_rows_with_themselves_is_symmetric_and_has_no_negative_eigenvalue(world):
    model, a, _, _ = world
    for method in ("reference", "columns"):
        values = np.asarray(gradient_kernel(model, a, a, method=method).values)
        assert_close(values, values.T)
        assert np.linalg.eigvalsh((values + values.T) / 2).min() >= -1e-10 * np.trace(values)
        assert np.abs(gradient_kernel(model, a, a).cosine()).max() <= 1 + 1e-12


@pytest.mark.parametrize("method", ["reference", pytest.param("columns", marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", ["layer", "leaf"])
def test_blocks_add_up_to_the_kernel(world, method, blocks):
    model, a, b, expected = world
    kernel = gradient_kernel(model, a, b, method=method, blocks=blocks)
    assert_close(sum(kernel.blocks.values()), expected)
    names = {"layer": {"embed", "layers.0", "layers.1", "norm"}, "leaf": {"embed", "layers.q", "layers.down", "norm"}}
    assert names[blocks] <= set(kernel.blocks)
    one = gradient_kernel(model, a, b, blocks=blocks).blocks
    for name, part in kernel.blocks.items():
        assert_close(part, one[name])


def test_layer_blocks_are_the_layers_own_gradients(world):
    model, a, b, _ = world
    part = gradient_kernel(model, a, b, blocks="layer").blocks["layers.1"]
    ga, gb = (jitted_gradients(model, rows, row_weights(rows)).layers for rows in (a, b))
    second = [np.asarray(x[:, 1]).reshape(len(x), -1) for x in jax.tree.leaves(ga)]
    other = [np.asarray(x[:, 1]).reshape(len(x), -1) for x in jax.tree.leaves(gb)]
    assert_close(part, np.concatenate(second, 1) @ np.concatenate(other, 1).T)


@pytest.mark.slow
def test_methods_agree_on_every_kind_of_parameter():
    kinds = {"tied": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "remat": "full"}
    model, a, b = small_model(**kinds), some_rows(6), some_rows(6, seed=1)
    expected = dense(model, a, b)
    for method in ("reference", "columns", "streamed"):
        assert_close(gradient_kernel(model, a, b, method=method).values, expected)


def test_parameters_that_are_not_finite_are_named(world):
    model, a, b, _ = world
    broken = jax.tree.map(lambda x: x, model)
    broken.layers.up[...] = model.layers.up[...].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"model: layers.up holds NaN or infinity \(1 of 11"):
        gradient_kernel(broken, a, b)


def test_a_streamed_method_refuses_what_it_cannot_stream(world):
    model, a, b, _ = world
    with pytest.raises(ValueError, match="method 'streamed' takes a Decoder scored by token_logps"):
        gradient_kernel(model, a, b, method="streamed", logps=lambda m, r: token_logps(m, r))
    with pytest.raises(ValueError, match=r"temperature: .* beside `logps`"):
        gradient_kernel(model, a, b, temperature=0.5, logps=lambda m, r: token_logps(m, r))
    with pytest.raises(ValueError, match="'ghost' forms no gradients"):
        gradient_kernel(model, a, b, method="ghost", precondition=jax.tree.map(jnp.ones_like, model))


@pytest.mark.parametrize("method", ["reference", pytest.param("columns", marks=pytest.mark.slow)])
def test_tok_divides_each_score_by_its_number_of_response_tokens(world, method):
    model, a, b, expected = world
    kernel = gradient_kernel(model, a, b, normalise="tok", method=method)
    lengths = np.outer(a.response_length(), b.response_length())
    assert_close(kernel.values, expected / lengths)
    assert kernel.normalise == "tok"


@pytest.mark.parametrize("method", ["reference", pytest.param("columns", marks=pytest.mark.slow)])
def test_token_weights_act_on_the_side_they_are_given_for(world, method):
    model, a, b, _ = world
    wa, wb = (jax.random.normal(jax.random.key(i), r.tokens.shape) for i, r in enumerate((a, b)))
    one = gradient_kernel(model, a, b, weights=wa, method=method)
    masked = jnp.where(a.mask(), wa, 0.0)
    assert_close(one.values, dense(model, a, b, masked))
    both = gradient_kernel(model, a, b, weights=(wa, wb), method=method)
    assert_close(both.values, dense(model, a, b, masked, jnp.where(b.mask(), wb, 0.0)))
    assert both.normalise == "weights"
    assert both.held_fixed == ("weights of rows_a", "weights of rows_b")


@pytest.mark.parametrize("method", ["reference", pytest.param("columns", marks=pytest.mark.slow)])
def test_a_diagonal_metric_enters_products_and_norms(world, method):
    model, a, b, _ = world
    diagonal = jax.tree.map(lambda x: 0.5 + x**2, model)
    kernel = gradient_kernel(model, a, b, method=method, precondition=diagonal)
    assert_close(kernel.values, dense(model, a, b, diagonal=diagonal))
    assert_close(kernel.sq_norms_a, np.diag(dense(model, a, a, diagonal=diagonal)))
    assert np.abs(kernel.cosine()).max() <= 1


def gradient_bytes(model) -> int:
    return sum(x.size for x in jax.tree.leaves(model)) * 8


@pytest.mark.parametrize("fits", [2, 5, pytest.param(9, marks=pytest.mark.slow), 64])
def test_tiles_of_any_size_give_the_same_kernel_and_never_hold_more_gradients_than_fit(world, fits, monkeypatch):
    model, a, b, expected = world
    leaf = model.layers.down[...].shape
    most = 0
    original = explicit._gram

    def spy(*args):
        nonlocal most
        held = {id(x): x.shape[0] for x in jax.live_arrays() if x.shape[1:] == leaf}
        most = max(most, sum(held.values()))
        return original(*args)

    monkeypatch.setattr(explicit, "_gram", spy)
    kernel = gradient_kernel(model, a, b, method="chunked", memory=fits * gradient_bytes(model))
    assert_close(kernel.values, expected)
    assert_close(kernel.sq_norms_b, np.diag(dense(model, b, b)))
    assert 0 < most <= fits


@pytest.mark.slow
def test_auto_says_what_it_took_and_why(world):
    """Explicit gradients while they are small; layers streamed for a decoder; tiles or columns for any other model."""
    model, a, b, expected = world
    size = gradient_bytes(model)

    def other(model, rows):
        return token_logps(model, rows)

    cases = (
        ("reference", {}, "small enough"),
        ("chunked", {"memory": 6 * size, "logps": other}, "given by `logps`"),
        ("columns", {"memory": 2 * size, "logps": other}, "fewer than 3 gradients"),
    )
    for method, options, reason in cases:
        kernel = gradient_kernel(model, a, b, **options)
        assert kernel.method == method
        assert reason in kernel.why
        assert_close(kernel.values, expected)


def test_auto_streams_a_decoder_whose_gradients_are_many(world, monkeypatch):
    model, a, b, expected = world
    monkeypatch.setattr(cost, "EXPLICIT", 11 * gradient_bytes(model))
    kernel = gradient_kernel(model, a, b)
    assert kernel.method == "streamed"
    assert "layer by layer" in kernel.why
    assert_close(kernel.values, expected)


def test_single_precision_agrees_with_double_to_its_rounding(world):
    _, a, b, expected = world
    kernel = gradient_kernel(small_model(dtype="float32"), a, b, noise=0)
    assert kernel.dtype == "float32"
    assert kernel.values.dtype == jnp.float32
    assert_close(kernel.values, expected, 1e-5)


def test_predicted_change_is_the_kernel_against_any_direction_at_any_scale(world):
    model, a, b, expected = world
    gradient = first_gradient(model, a)
    for scale in (1.0, 1e-30, -1e20):
        direction = jax.tree.map(lambda g, s=scale: g * s, gradient)
        for chunk in (None, 2):
            assert_close(predicted_change(model, direction, b, chunk=chunk) / scale, expected[0])
    zero = jax.tree.map(jnp.zeros_like, model)
    assert not np.any(predicted_change(model, zero, b))


@pytest.mark.slow
def test_predicted_change_keeps_small_steps_in_single_precision(world):
    _, a, b, expected = world
    model = small_model(dtype="float32")
    gradient = first_gradient(model, a)
    direction = jax.tree.map(lambda g: (g * 1e-12).astype(jnp.float32), gradient)
    assert_close(np.asarray(predicted_change(model, direction, b)) / 1e-12, expected[0], 1e-5)


def test_second_order_is_what_central_second_differences_measure(world):
    model, a, b, _ = world
    gradient = first_gradient(model, a)
    step = 1e-4 / np.linalg.norm(flat(gradient))
    up, middle, down = (row_scores(along(model, gradient, s * step), b) for s in (1, 0, -1))
    second = (up - 2 * middle + down) / (2 * step**2)
    assert_close(second_order(model, gradient, b), second, 1e-5)
    tiny = jax.tree.map(lambda g: g * 1e-9, gradient)
    assert_close(second_order(model, tiny, b, chunk=2) * 1e18, second, 1e-5)


def linear_logps(theta, rows: Rows):
    """A linear softmax over three answers; token 0 selects the features of the prompt."""
    features = jnp.array([[1.0, 2.0], [0.5, 1.0]])
    logits = features[rows.tokens[:, 0]] @ theta["w"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), rows.tokens[:, 1:2], axis=1)
    return jnp.pad(picked, [(0, 0), (1, 0)])


def test_linear_softmax_oracle():
    """SCIENCE.md A.4: theta = 0, V = 3, x = (1, 2), x' = (.5, 1)."""
    theta = {"w": jnp.zeros((3, 2))}
    two = jnp.ones(2, jnp.int32)
    train = Rows(jnp.array([[0, 0]], jnp.int32), two[:1], 2 * two[:1])
    probe = Rows(jnp.array([[1, 0], [1, 1]], jnp.int32), two, 2 * two)
    for method in ("reference", "columns"):
        values = gradient_kernel(theta, train, probe, method=method, logps=linear_logps).values
        np.testing.assert_allclose(values, [[1.666667, -0.833333]], rtol=0, atol=5e-7)
    gradient = one_gradient(theta, train[0], row_weights(train)[0], logps=linear_logps)
    before = linear_logps(theta, probe)[:, 1]
    for eta, golden in (
        (0.1, (0.233792316, -0.141207684)),
        (0.01, (0.024843105, -0.012656895)),
        (0.001, (0.002498437, -0.001251563)),
    ):
        step = jax.tree.map(lambda g, eta=eta: 1.5 * eta * g, gradient)
        after = linear_logps(along(theta, step, 1.0), probe)[:, 1]
        np.testing.assert_allclose(after - before, golden, rtol=0, atol=5e-10)
        np.testing.assert_allclose(
            predicted_change(theta, step, probe, logps=linear_logps), [2.5 * eta, -1.25 * eta], rtol=1e-9
        )


def test_an_unknown_name_is_answered_with_the_nearest(world):
    model, a, b, _ = world
    for field, value, match in (
        ("method", "column", "columns"),
        ("blocks", "layers", "layer"),
        ("normalise", "token", "tok"),
    ):
        with pytest.raises(ValueError, match=f"{field}.*did you mean '{match}'"):
            gradient_kernel(model, a, b, **{field: value})


def test_empty_sides_and_rows_without_a_response_are_named(world):
    model, a, b, _ = world
    with pytest.raises(ValueError, match="rows_a: there are no rows"):
        gradient_kernel(model, a[:0], b)
    with pytest.raises(ValueError, match="rows_b: there are no rows"):
        gradient_kernel(model, a, b[:0])
    silent = Rows(b.tokens, b.start, b.length.at[3].set(3))
    with pytest.raises(ValueError, match=r"rows_b: row 3 has no response token \(1 of 6"):
        gradient_kernel(model, a, silent)
    with pytest.raises(ValueError, match="there are no rows"):
        predicted_change(model, model, b[:0])


def test_a_direction_or_metric_that_does_not_fit_is_named_by_its_leaf(world):
    model, a, b, _ = world
    wrong = jax.tree.map(lambda x: x[:3] if x.shape == (16,) else x, model)
    with pytest.raises(ValueError, match=r"direction: norm has shape \(3,\), the model's is \(16,\)"):
        predicted_change(model, wrong, b)
    with pytest.raises(ValueError, match="precondition: the parameter 'embed' is missing"):
        gradient_kernel(model, a, b, precondition={"norm": model.norm})
    with pytest.raises(ValueError, match="precondition: embed has entries that are not positive"):
        gradient_kernel(model, a, b, precondition=model)
    with pytest.raises(ValueError, match="weights: expected one a token"):
        gradient_kernel(model, a, b, weights=jnp.ones(6))
    for method, match in (
        ("reference", r"6 \+ 6 gradients exceed `memory`"),
        ("chunked", "two gradients exceed `memory`"),
        ("streamed", "memory: 100 B hold 0 rows of 8 tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            gradient_kernel(model, a, b, method=method, memory=100)


def test_the_kernel_ignores_padding_and_what_stands_in_it(world):
    model, a, b, expected = world
    wider = Rows(jnp.pad(a.tokens, [(0, 0), (0, 3)], constant_values=5), a.start, a.length)
    assert_close(gradient_kernel(model, wider, b).values, expected)


@pytest.mark.slow
def test_row_gradients_do_not_depend_on_the_remat_policy(world):
    model, a, b, expected = world
    assert_close(gradient_kernel(with_config(model, remat="dots"), a, b).values, expected)
    assert token_logps(model, a).dtype == jnp.float64


@pytest.mark.slow
def test_the_noise_floor_is_what_a_second_computation_shows_and_marks_signs_below_it(world):
    """bf16 passes err far more than float32 ones; double precision has no floor measured."""
    model, a, b, expected = world
    single = small_model(dtype="float32")
    floors = {}
    for name in ("float32", "bfloat16"):
        kernel = gradient_kernel(with_config(single, dtype=name), a, b)
        assert (kernel.dtype, kernel.compute, kernel.precision) == ("float32", name, "highest")
        error = np.abs(np.asarray(kernel.values) - expected)[np.ix_([0, 5], [0, 5])]
        scale = np.sqrt(np.outer(np.asarray(kernel.sq_norms_a), np.asarray(kernel.sq_norms_b)))[np.ix_([0, 5], [0, 5])]
        assert kernel.noise == pytest.approx(np.max(error / scale), rel=0.5, abs=1e-6)
        np.testing.assert_array_equal(kernel.unsure(), np.abs(kernel.cosine()) <= kernel.noise)
        floors[name] = kernel.noise
    assert floors["bfloat16"] > 30 * floors["float32"]
    assert floors["float32"] < 1e-5
    exact = gradient_kernel(model, a, b)
    assert exact.noise is None
    assert not np.any(exact.unsure())
    assert gradient_kernel(single, a, b, noise=0).noise is None


def test_running_out_of_memory_names_tiles_that_fit(world, monkeypatch):
    model, a, b, _ = world

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(tiling, "stream", full)
    with pytest.raises(
        OutOfMemory, match=r"no room for 6 x 6 rows of 8 tokens .* tiles of 3 x 3 take half: memory=(\d+)"
    ) as found:
        gradient_kernel(model, a, b, method="streamed")
    monkeypatch.undo()
    memory = int(str(found.value).rsplit("=", 1)[1])
    kernel = gradient_kernel(model, a, b, method="streamed", memory=memory)
    assert "tiles of 3 x 3 rows" in kernel.why
    assert found.value.exit_code == 3
