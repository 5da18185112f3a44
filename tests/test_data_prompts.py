"""Prompt pools: which prompts a step takes, and how token lists become arrays."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import save_tiny

from jaxrl import keys
from jaxrl.data.datasets import Problem
from jaxrl.data.prompts import (
    PromptPool,
    PromptTooLong,
    build_pool,
    load_tokenizer,
    pad_left,
    pad_right,
    response_tokens,
)
from jaxrl.data.templates import make_template
from jaxrl.errors import UsageError
from jaxrl.types import Rows

KEY = keys.root(0)


def pool_of(n: int) -> PromptPool:
    return PromptPool([[1] * (1 + i % 3) for i in range(n)], np.arange(n) + 100, 4)


@given(size=st.integers(1, 23), n=st.integers(1, 23), epochs=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_an_epoch_takes_no_prompt_twice_and_leaves_out_less_than_a_step(size, n, epochs):
    if n > size:
        return
    pool, steps = pool_of(size), size // n
    for epoch in range(epochs):
        taken = np.concatenate([pool.take(KEY, epoch * steps + s, n).uid for s in range(steps)])
        assert len(taken) == len(set(taken.tolist())) == steps * n > size - n
        assert set(taken.tolist()) <= set(pool.uid.tolist())


def test_take_is_a_pure_function_of_key_and_step():
    pool, again = pool_of(20), pool_of(20)
    late = again.take(KEY, 7, 4)  # asked for first, by a pool that has seen no other step
    assert np.array_equal(pool.take(KEY, 7, 4).uid, late.uid)
    for step in (3, 0, 7):
        pool.take(KEY, step, 4)
    assert np.array_equal(pool.take(KEY, 7, 4).uid, late.uid)
    assert np.array_equal(pool.take(KEY, 7, 4).tokens, late.tokens)


def test_take_does_not_depend_on_the_process_or_on_double_precision():
    expected = pool_of(20).take(KEY, 3, 5).uid.tolist()
    with jax.enable_x64(True):
        assert pool_of(20).take(keys.root(0), 3, 5).uid.tolist() == expected
    code = (
        "import numpy as np; from jaxrl import keys; from jaxrl.data.prompts import PromptPool;"
        "print(PromptPool([[1]] * 20, np.arange(20) + 100, 4).take(keys.root(0), 3, 5).uid.tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(expected)


def test_epochs_and_keys_differ_in_order():
    pool = pool_of(32)
    orders = [pool.take(key, step, 32).uid.tolist() for key, step in ((KEY, 0), (KEY, 1), (keys.root(1), 0))]
    assert len({tuple(o) for o in orders}) == 3
    assert all(sorted(o) == pool.uid.tolist() for o in orders)


def test_a_prompt_keeps_its_uid_and_its_tokens_through_the_shuffle():
    pool = PromptPool([[5], [6, 6], [7, 7, 7]], np.array([50, 60, 70]), 3)
    prompts = pool.take(KEY, 1, 3)
    for tokens, length, uid in zip(prompts.tokens, prompts.length, prompts.uid, strict=True):
        assert uid == 10 * tokens[0]
        assert tokens[:length].tolist() == [uid // 10] * length
        assert (tokens[length:] == 0).all()


def test_every_step_has_the_same_width_whatever_it_holds():
    pool = PromptPool([[1], [1, 2, 3, 4], [1, 2]], np.arange(3), 6)
    assert {pool.take(KEY, step, 1).tokens.shape for step in range(6)} == {(1, 6)}


def test_more_prompts_a_step_than_there_are_is_refused():
    with pytest.raises(UsageError, match=r"rollout\.prompts: 9 prompts a step cannot be taken from 8"):
        pool_of(8).take(KEY, 0, 9)
    with pytest.raises(UsageError, match="0 prompts a step"):
        pool_of(8).take(KEY, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "uid", "width", "message"),
    [
        ([], [], 4, "expected at least one, got none"),
        ([[1], [2]], [0, 0], 4, "one distinct uid for each of 2 prompts, got 1 distinct of 2"),
        ([[1], []], [0, 1], 4, "prompt 1 is empty"),
        ([[1], [1, 2, 3]], [0, 1], 2, "the longest has 3 tokens, more than the width 2"),
    ],
)
def test_a_pool_refuses_prompts_that_cannot_be_sampled_from(tokens, uid, width, message):
    with pytest.raises(ValueError, match=message):
        PromptPool(tokens, np.array(uid, int), width)


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5), st.integers(6, 8))
@settings(max_examples=50, deadline=None)
def test_padding_keeps_every_token_on_its_side(sequences, width):
    right, length = pad_right(sequences, width, pad=-1)
    left, same = pad_left(sequences, width, pad=-1)
    assert length.tolist() == same.tolist() == [len(s) for s in sequences]
    for sequence, r, m in zip(sequences, right, left, strict=True):
        assert r.tolist() == sequence + [-1] * (width - len(sequence))
        assert m.tolist() == [-1] * (width - len(sequence)) + sequence
    assert right.dtype == left.dtype == np.int32


def test_padding_never_cuts():
    with pytest.raises(ValueError, match="a sequence of 3 tokens does not fit the width 2"):
        pad_left([[1, 2, 3]], 2)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_responses_are_cut_out_by_their_lengths(shapes):
    width = 10
    rows = Rows(
        jnp.asarray(np.arange(len(shapes) * width).reshape(-1, width) + 1, jnp.int32),
        jnp.asarray([s for s, _ in shapes], jnp.int32),
        jnp.asarray([s + n for s, n in shapes], jnp.int32),
    )
    tokens, length = response_tokens(rows)
    assert length.tolist() == [n for _, n in shapes]
    for i, (start, n) in enumerate(shapes):
        assert tokens[i, :n].tolist() == [i * width + start + t + 1 for t in range(n)]
        assert (tokens[i, n:] == 0).all()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


PROBLEMS = [Problem(f"p/{i}", "x" * n, "1") for i, n in enumerate((3, 40, 5, 60))]
PLAIN = make_template("plain")  # 20 letters around the problem, and <bos>


def test_a_pool_is_as_wide_as_its_longest_prompt(tokenizer):
    pool = build_pool(PROBLEMS, tokenizer, PLAIN)
    assert pool.width == max(len(t) for t in pool.tokens) == 60 + len("Problem: \nSolution:") + 1
    assert pool.uid.tolist() == [0, 1, 2, 3]
    assert tokenizer.decode(pool.tokens[2]) == "Problem: xxxxx\nSolution:"


def test_a_given_limit_is_the_width(tokenizer):
    assert build_pool(PROBLEMS, tokenizer, PLAIN, max_prompt=100).width == 100


def test_a_prompt_beyond_the_limit_is_named(tokenizer):
    with pytest.raises(PromptTooLong, match=r"2 of 4 prompts .* max_prompt = 50 tokens .*has 80\): p/1, p/3") as error:
        build_pool(PROBLEMS, tokenizer, PLAIN, max_prompt=50)
    assert error.value.ids == ["p/1", "p/3"]
    assert error.value.exit_code == 1


def test_long_prompts_are_dropped_and_counted_on_request(tokenizer):
    pool = build_pool(PROBLEMS, tokenizer, PLAIN, max_prompt=50, too_long="drop")
    assert pool.dropped == ("p/1", "p/3")
    assert pool.uid.tolist() == [0, 2]  # still the positions in the problem list
    with pytest.raises(UsageError, match="expected 'error' or 'drop', got 'cut'"):
        build_pool(PROBLEMS, tokenizer, PLAIN, too_long="cut")


def test_dropping_every_prompt_is_an_error(tokenizer):
    with pytest.raises(PromptTooLong, match="4 of 4 prompts"):
        build_pool(PROBLEMS, tokenizer, PLAIN, max_prompt=3, too_long="drop")
