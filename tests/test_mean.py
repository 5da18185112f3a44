"""Means are pairs that add up, so that no split of the data changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.mean import Mean, masked_mean, masked_sum

# numbers on a coarse grid add without rounding in float32, so equality can be exact
GRID = st.lists(st.tuples(st.integers(-1000, 1000), st.booleans()), min_size=1, max_size=30)
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def host_mean(items):
    """A ``Mean`` of (value, counted) pairs."""
    values, mask = (np.asarray(x) for x in zip(*items, strict=True))
    return Mean.of(values.astype(np.float32) / 8, mask)


def pair(mean):
    return float(mean.total), float(mean.count)


@SETTINGS
@given(GRID, st.data())
def test_any_split_gives_the_same_mean(items, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=4)))
    parts = [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]
    merged = sum(host_mean(part) for part in parts if part)
    assert pair(merged) == pair(host_mean(items))


@SETTINGS
@given(GRID, GRID, GRID)
def test_merging_is_associative_and_commutative_with_nothing_as_its_zero(a, b, c):
    x, y, z = (host_mean(items) for items in (a, b, c))
    assert pair((x + y) + z) == pair(x + (y + z))
    assert pair(x + y) == pair(y + x)
    assert pair(x + Mean.of(jnp.zeros(0))) == pair(x) == pair(0 + x)


def test_parts_of_unequal_size_weigh_by_their_counts():
    """The mean of means of these parts would be 3."""
    merged = Mean.of(jnp.asarray([1.0, 1.0, 1.0])) + Mean.of(jnp.asarray([5.0]))
    assert merged.value == 2.0


def test_masked_entries_do_not_count_even_when_they_are_not_numbers():
    values = jnp.asarray([1.0, jnp.nan, jnp.inf, 3.0])
    mean = Mean.of(values, jnp.asarray([True, False, False, True]))
    assert pair(mean) == (4.0, 2.0)


def test_a_mask_of_numbers_weighs():
    assert Mean.of(jnp.asarray([1.0, 4.0]), jnp.asarray([1.0, 0.5])).value == 2.0


def test_a_mean_of_nothing_is_not_a_number_rather_than_zero():
    assert np.isnan(Mean.of(jnp.zeros(3), jnp.zeros(3, bool)).value)


def test_integers_flags_and_half_precision_are_added_up_in_single_precision():
    for values in (jnp.ones(3000, jnp.bfloat16), jnp.ones(3000, bool), jnp.ones(3000, jnp.int32)):
        mean = Mean.of(values)
        assert mean.total.dtype == jnp.float32
        assert pair(mean) == (3000, 3000)


@pytest.mark.x64
def test_double_precision_is_kept(x64):
    assert Mean.of(jnp.ones(2, jnp.float64)).total.dtype == jnp.float64
    assert Mean.scalar(jnp.float64(0.1)).value == 0.1


def test_a_scalar_is_one_observation():
    assert pair(Mean.scalar(4) + Mean.scalar(jnp.float32(6))) == (10.0, 2.0)


def test_means_pass_through_compiled_code():
    total = jax.jit(lambda x: Mean.of(x[:2]) + Mean.of(x[2:]))(jnp.arange(5.0))
    assert pair(total) == (10.0, 5.0)


def test_masked_reductions_ignore_what_is_masked():
    values = jnp.asarray([[1.0, jnp.nan], [jnp.inf, 2.0], [jnp.nan, jnp.nan]])
    mask = jnp.asarray([[True, False], [False, True], [False, False]])
    assert masked_sum(values, mask) == 3
    assert masked_mean(values, mask) == 1.5
    assert masked_sum(values, mask, axis=1).tolist() == [1, 2, 0]
    assert masked_mean(values, mask, axis=1).tolist() == [1, 2, 0]  # an empty row is 0, not NaN


def test_masked_reductions_have_finite_gradients_where_rows_are_empty():
    mask = jnp.asarray([[True, True], [False, False]])
    grad = jax.grad(lambda x: masked_mean(x, mask, axis=1).sum())(jnp.asarray([[1.0, 2.0], [jnp.nan, 3.0]]))
    assert grad.tolist() == [[0.5, 0.5], [0, 0]]
