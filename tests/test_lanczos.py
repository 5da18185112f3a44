"""Kernel-vector products and the spectrum's top agree with the explicit kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import gradient_matrix, small_model, some_rows

from jaxrl.influence import lanczos
from jaxrl.influence.gradients import row_weights
from jaxrl.influence.lanczos import kernel_vector, top_spectrum
from jaxrl.types import Rows

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
# four rows a pass everywhere, so that all tests share one program
PASSES = {"chunk": 4}
LANCZOS = {"key": jax.random.key(3), **PASSES}


def assert_close(a, b, tolerance=1e-12) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, equal_nan=False)


@pytest.fixture(scope="module")
def world():
    """A model, ten rows and the kernel of its rows."""
    with jax.enable_x64(True):
        model, rows = small_model(), some_rows(10)
        gradients = gradient_matrix(model, rows)
        return model, rows, gradients @ gradients.T


def test_a_kernel_vector_product_is_the_kernel_times_the_vector(world):
    model, rows, kernel = world
    for seed in range(2):
        v = np.random.default_rng(seed).normal(size=10)
        assert_close(kernel_vector(model, rows, jnp.asarray(v), **PASSES), kernel @ v)


def test_normalisation_and_weights_act_as_in_the_kernel(world):
    model, rows, kernel = world
    v = np.random.default_rng(0).normal(size=10)
    lengths = np.asarray(rows.response_length())
    for given in ({"normalise": "tok"}, {"weights": row_weights(rows, "tok")}):
        found = kernel_vector(model, rows, jnp.asarray(v), **PASSES, **given)
        assert_close(found, (kernel / np.outer(lengths, lengths)) @ v)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1, 5, 99])
def test_passes_over_any_number_of_rows_give_the_same_product(world, chunk):
    model, rows, kernel = world
    v = np.random.default_rng(0).normal(size=10)
    assert_close(kernel_vector(model, rows, jnp.asarray(v), chunk=chunk), kernel @ v)


def test_as_many_steps_as_rows_give_the_whole_spectrum(world):
    model, rows, kernel = world
    values, vectors = np.linalg.eigh(kernel)
    found = top_spectrum(model, rows, 10, **LANCZOS)
    assert_close(found.eigenvalues, values[::-1])
    assert_close(np.abs(np.sum(found.eigenvectors * vectors[:, ::-1], axis=0)), np.ones(10))
    assert found.residuals.max() < 1e-12 * values[-1]


def test_residuals_are_what_the_explicit_kernel_shows_and_bound_the_error(world):
    model, rows, kernel = world
    exact = np.linalg.eigvalsh(kernel)
    errors = []
    for steps in (3, 5, 8):
        found = top_spectrum(model, rows, 3, steps=steps, **LANCZOS)
        shown = kernel @ found.eigenvectors - found.eigenvectors * found.eigenvalues
        np.testing.assert_allclose(found.residuals, np.linalg.norm(shown, axis=0), rtol=1e-6)
        nearest = np.abs(exact[:, None] - found.eigenvalues).min(axis=0)
        assert np.all(nearest <= found.residuals * (1 + 1e-9))
        assert_close(found.eigenvectors.T @ found.eigenvectors, np.eye(3))
        errors.append(exact[-1] - found.eigenvalues[0])
    assert errors[0] > errors[1] > errors[2] > 0


def test_equal_rows_and_rows_without_a_response_do_not_stop_the_search(world):
    model, rows, kernel = world
    index = np.array([0, 0, 0, 1, 1, 2, 3, 4, 5, 6])
    twice = rows[jnp.asarray(index)]
    silent = Rows(twice.tokens, twice.start, twice.length.at[9].set(3))
    kernel = kernel[np.ix_(index, index)] * np.outer(index != 6, index != 6)
    found = top_spectrum(model, silent, 10, **LANCZOS)
    assert_close(found.eigenvalues, np.linalg.eigvalsh(kernel)[::-1])
    assert found.residuals.max() < 1e-11 * found.eigenvalues[0]
    assert_close(found.eigenvectors.T @ found.eigenvectors, np.eye(10))


@pytest.mark.slow
def test_residuals_hold_the_rounding_of_single_precision_products(world):
    _, rows, kernel = world
    found = top_spectrum(small_model(dtype="float32"), rows, 10, **LANCZOS)
    exact = np.linalg.eigvalsh(kernel)[::-1]
    shown = np.linalg.norm(kernel @ found.eigenvectors - found.eigenvectors * found.eigenvalues, axis=0)
    assert found.residuals.max() > 1e-9 * exact[0]
    assert shown.max() < 5 * found.residuals.max()
    assert_close(found.eigenvalues, exact, 1e-5)


def test_all_products_are_one_program(world):
    model, rows, _ = world
    lanczos._product.clear_cache()
    top_spectrum(model, rows, 2, steps=4, **LANCZOS)
    assert lanczos._product._cache_size() == 1


def test_what_does_not_fit_is_named(world):
    model, rows, _ = world
    with pytest.raises(ValueError, match=r"v: expected one number a row, shape \(10,\), got \(3,\)"):
        kernel_vector(model, rows, jnp.ones(3))
    with pytest.raises(ValueError, match="there are no rows"):
        kernel_vector(model, rows[:0], jnp.ones(0))
    with pytest.raises(ValueError, match="k: expected 1 to 10"):
        top_spectrum(model, rows, 11, **LANCZOS)
    with pytest.raises(ValueError, match="steps: expected 3"):
        top_spectrum(model, rows, 3, steps=2, **LANCZOS)
