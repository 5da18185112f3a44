"""Rows, masks and the checks at the library's border."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl import types
from jaxrl.types import Kernel, Rows, check_shapes, flatten_leading, wide

WIDTH = 7


def make(start, length, width=WIDTH):
    start, length = (np.asarray(x, np.int32) for x in (start, length))
    return Rows(np.ones((*start.shape, width), np.int32), start, length)


def test_the_mask_is_the_response_for_every_start_and_length():
    """Every 0 <= start <= length <= width: empty rows, empty responses, one token, full rows."""
    pairs = [(s, n) for n in range(WIDTH + 1) for s in range(n + 1)]
    rows = make(*zip(*pairs, strict=True))
    mask = np.asarray(rows.mask())
    for got, (s, n) in zip(mask, pairs, strict=True):
        assert got.tolist() == [s <= t < n for t in range(WIDTH)]
    assert rows.response_length().tolist() == [n - s for s, n in pairs]
    np.testing.assert_array_equal(mask.sum(axis=1), rows.response_length())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 5), min_size=9, max_size=9))
def test_the_mask_does_not_look_at_token_ids(start, length, ids):
    rows = Rows(np.asarray([ids], np.int32), np.asarray([start], np.int32), np.asarray([length], np.int32))
    assert rows.mask()[0].tolist() == [start <= t < length for t in range(9)]
    assert rows.response_length().tolist() == [max(length - start, 0)]


def test_rows_of_a_step_keep_their_order_when_flattened():
    rows = Rows(jnp.arange(24).reshape(2, 3, 4), jnp.ones((2, 3), jnp.int32), jnp.arange(6).reshape(2, 3))
    assert rows.mask().shape == (2, 3, 4)
    flat = rows.flat()
    np.testing.assert_array_equal(flat.tokens, np.arange(24).reshape(6, 4))
    np.testing.assert_array_equal(flat.mask(), rows.mask().reshape(6, 4))
    np.testing.assert_array_equal(rows[1].flat().tokens, flat[3:].tokens)
    np.testing.assert_array_equal(flat[np.asarray([4, 0])].length, [4, 0])
    assert flatten_leading({"a": jnp.zeros((2, 3, 5))}, 2)["a"].shape == (6, 5)


def test_containers_go_through_transformations():
    """JAX rebuilds them with placeholders for leaves, so construction must check nothing."""
    jax.tree.map(lambda _: object(), make([1], [2]))
    counted = jax.jit(jax.vmap(lambda r: r.mask().sum()))(make([[1], [2]], [[4], [7]]))
    assert counted.tolist() == [3, 5]


def test_optional_parts_of_a_batch_may_be_absent():
    batch = types.Batch(make([1], [2]), *(jnp.zeros((1, WIDTH)) for _ in range(3)))
    assert batch.ref_logps is None
    assert len(jax.tree.leaves(batch)) == 6


def test_a_losss_terms_differ_in_structure_by_their_loss():
    batch = types.Batch(make([1], [2]), *(jnp.zeros((1, WIDTH)) for _ in range(3)))
    a, b = (jax.tree.structure(types.Term(batch, loss)) for loss in ("x", "y"))
    assert a != b
    assert a == jax.tree.structure(types.Term(batch, "x"))


def test_accumulation_is_in_double_only_when_something_is():
    assert wide(jnp.bfloat16) == wide(jnp.float16, jnp.float32) == wide(jnp.int32) == jnp.float32
    assert wide(jnp.bfloat16, jnp.float64) == jnp.float64


def test_a_kernels_cosine_is_zero_where_a_gradient_is():
    kernel = Kernel(
        values=jnp.asarray([[2.0, 0.0], [0.0, 0.0]]),
        method="reference",
        dtype="float32",
        normalise="sum",
        sq_norms_a=jnp.asarray([4.0, 0.0]),
        sq_norms_b=jnp.asarray([1.0, 9.0]),
    )
    assert kernel.cosine().tolist() == [[1.0, 0.0], [0.0, 0.0]]


# ---- the check at the border


def test_good_rows_pass():
    check_shapes(make([1, 3, 7], [1, 7, 7]), vocab_size=2)


BAD = [
    ({"tokens": np.ones(7, np.int32)}, r"Rows.tokens: expected an integer array of rank 2, got int32 of shape \(7,\)"),
    ({"tokens": np.ones((2, 7), np.float32)}, r"Rows.tokens: expected an integer array of rank 2, got float32"),
    ({"start": np.ones((2, 1), np.int32)}, r"Rows.start: expected an integer array of rank 1, got int32 of shape \(2, 1\)"),
    ({"length": np.asarray([True, True])}, r"Rows.length: expected an integer array of rank 1, got bool"),
    ({"length": np.asarray([4], np.int32)}, r"2 token rows, 2 starts and 1 lengths; give one of each a row"),
    ({"start": np.asarray([1, 0], np.int32)}, r"row 1 has start 0, length 5 and width 7; expected 1 <= start <= length <= w"),
    ({"start": np.asarray([5, 1], np.int32)}, r"row 0 has start 5, length 4 and width 7"),
    ({"length": np.asarray([4, 8], np.int32)}, r"row 1 has start 2, length 8 and width 7"),
    ({"tokens": np.full((2, 7), 9, np.int32)}, r"row 0 holds id 9, outside the vocabulary of 9; is this the model's own"),
    ({"tokens": np.full((2, 7), -1, np.int32)}, r"row 0 holds id -1, outside the vocabulary of 9"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda x: x[:30] if isinstance(x, str) else "")
def test_bad_rows_are_refused_with_the_field_and_what_was_expected(changes, message):
    rows = dataclasses.replace(make([1, 2], [4, 5]), **changes)
    with pytest.raises(ValueError, match=message):
        check_shapes(rows, vocab_size=9)


def test_ids_off_the_row_are_not_checked():
    rows = make([1], [3])
    rows.tokens[0, 3:] = 99
    check_shapes(rows, vocab_size=2)
