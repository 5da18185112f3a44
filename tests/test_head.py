"""The head by blocks of the vocabulary against whole logits: values, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import quick_jit

from jaxrl.models.head import token_head
from jaxrl.models.head_blocks import block_size
from jaxrl.models.head_kl import token_head_kl
from jaxrl.types import wide

QWEN = 151936  # 128 * 1187: no power of two above 128 divides it


def case(n, d, v, *, tied=True, seed=0, dtype=None, spread=1.0):
    """States, matrix, tokens and a weight for each of the three results."""
    rng = np.random.default_rng(seed)
    dtype = dtype or jnp.result_type(float)
    states = jnp.asarray(rng.normal(size=(n, d)), dtype)
    matrix = jnp.asarray(rng.normal(size=(v, d) if tied else (d, v)) * spread / np.sqrt(d), dtype)
    token = rng.integers(0, v, n)
    token[:2] = 0, v - 1  # both ends: the last block is moved back
    return states, matrix, jnp.asarray(token, jnp.int32), jnp.asarray(rng.normal(size=(3, n)), jnp.result_type(float))


def whole(states, matrix, token, temperature, limit, tied):
    """The same from whole logits."""
    dtype = wide(states.dtype)
    z = states.astype(dtype) @ (matrix.T if tied else matrix).astype(dtype) / jnp.asarray(temperature, dtype)
    z = z if limit is None else jnp.where(jnp.arange(z.shape[1])[None] < limit, z, -jnp.inf)
    logp = jax.nn.log_softmax(z, axis=-1)
    entropy = -jnp.sum(
        jnp.where(jnp.isneginf(logp), 0, jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0, logp)), axis=-1
    )
    return jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0], jax.nn.logsumexp(z, axis=-1), entropy


def loss(head):
    """Weighs the three results, so that every cotangent is another."""

    def run(states, matrix, temperature, token, weight, **options):
        out = head(states, matrix, token, temperature=temperature, **options)
        return sum(jnp.sum(w * x) for w, x in zip(weight, out, strict=True)), out

    return run


def assert_close(got, expected, tolerance):
    """Largest difference, relative to the largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert float(jnp.max(jnp.abs(a - b))) <= tolerance * max(1.0, float(jnp.max(jnp.abs(b))))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("v", "block", "tied", "limit", "temperature"),
    [
        (97, 32, True, None, 0.7),
        (97, 32, False, 80, 1.3),  # the limit cuts a block
        (101, 25, False, 50, 1.0),  # and falls between two
        (97, 200, True, 96, 1.0),
    ],
)
def test_blocks_equal_whole_logits_in_values_and_gradients(x64, v, block, tied, limit, temperature):
    states, matrix, token, weight = case(6, 5, v, tied=tied, spread=3.0)
    token = token if limit is None else jnp.minimum(token, limit - 1)
    args = (states, matrix, jnp.asarray(temperature), token, weight)
    ours = loss(lambda *a, **k: token_head(*a, limit=limit, tied=tied, block=block, **k))
    theirs = loss(lambda *a, temperature: whole(*a, temperature, limit, tied))
    got, expected = (quick_jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(*args) for f in (ours, theirs))
    assert_close(got, expected, 1e-12)


@pytest.mark.x64
@pytest.mark.parametrize(("tied", "limit"), [(True, None), (False, 80)])
def test_the_divergence_by_blocks_equals_that_of_whole_distributions(x64, tied, limit):
    known, reference, _, weight = case(6, 5, 97, tied=tied, spread=3.0)
    states, matrix, *_ = case(6, 5, 97, tied=tied, seed=1, spread=3.0)

    def expected(states, matrix):
        log = []
        for s, m in ((known, reference), (states, matrix)):
            z = s @ (m.T if tied else m) / 0.7
            log.append(jax.nn.log_softmax(z[:, :limit], axis=-1))
        each = jnp.sum(jnp.exp(log[0]) * (log[0] - log[1]), axis=-1)
        return jnp.sum(each * weight[0]), each

    def ours(states, matrix):
        options = {"temperature": 0.7, "limit": limit, "tied": tied, "block": 32}
        each = token_head_kl(known, reference, states, matrix, **options)
        return jnp.sum(each * weight[0]), each

    got, truth = (
        quick_jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(states, matrix) for f in (ours, expected)
    )
    assert_close(got, truth, 1e-12)
    assert not np.any(token_head_kl(states, matrix, states, matrix, tied=tied, limit=limit, block=32))


@pytest.mark.parametrize(("v", "block"), [(QWEN, None), (QWEN + 1, 9000)])
def test_a_vocabulary_of_qwens_size_and_one_that_nothing_divides(v, block):
    states, matrix, token, weight = case(5, 8, v)
    args = (states, matrix, jnp.float32(1), token, weight)
    ours = loss(lambda *a, **k: token_head(*a, block=block, **k))
    theirs = loss(lambda *a, temperature: whole(*a, temperature, None, True))
    got, expected = (quick_jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(*args) for f in (ours, theirs))
    assert_close(got, expected, 1e-5)


def test_a_large_logit_in_a_late_block_rescales_what_came_before():
    states = jnp.ones((1, 1))
    matrix = jnp.asarray([[0.0], [1.0], [300.0], [299.0]])
    got = token_head(states, matrix, jnp.asarray([3]), block=2)
    assert_close(got, whole(states, matrix, jnp.asarray([3]), 1.0, None, True), 1e-6)
    back = token_head(states, -matrix, jnp.asarray([3]), block=2)
    assert_close(back, whole(states, -matrix, jnp.asarray([3]), 1.0, None, True), 1e-6)


def test_a_token_above_the_limit_has_no_probability_and_no_gradient():
    states, matrix, *_ = case(2, 4, 40)
    token = jnp.asarray([3, 35])

    def logps(states, matrix):
        return token_head(states, matrix, token, limit=30, block=16)[0]

    def both(states, matrix):
        out, pull = jax.vjp(logps, states, matrix)
        return out, *pull(jnp.asarray([0.0, 1.0]))

    out, by_states, by_matrix = quick_jit(both)(states, matrix)
    assert np.isfinite(out[0])
    assert np.isneginf(out[1])
    assert not np.any(by_states)
    assert not np.any(by_matrix)


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_is_accumulated_in_float32_and_rounded_once(tied):
    """Against the same numbers in float32: sums kept in bfloat16 would be off by 1e-2."""
    half = case(64, 32, 300, tied=tied, dtype=jnp.bfloat16)
    full = (half[0].astype(jnp.float32), half[1].astype(jnp.float32), *half[2:])

    def run(states, matrix, token, weight):
        return loss(lambda *a, **k: token_head(*a, tied=tied, block=64, **k))(states, matrix, 1.0, token, weight)

    grad = quick_jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
    (got, grads), (expected, wide_grads) = grad(*half), grad(*full)
    assert_close(got, expected, 1e-5)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), grads), wide_grads, 4e-3)  # one rounding: 2^-9


@pytest.mark.parametrize("tied", [True, False])
def test_memory_of_the_compiled_program_stays_below_64_mib(tied):
    """N=1024, D=256, V=151936, forward and backward with entropy; whole logits take 1,780 MiB."""
    n, d = 1024, 256
    shapes = [((n, d), jnp.float32), ((QWEN, d) if tied else (d, QWEN), jnp.float32), ((n,), jnp.int32)]
    abstract = [jax.ShapeDtypeStruct(*s) for s in shapes]

    def run(states, matrix, token):
        logp, _, entropy = token_head(states, matrix, token, tied=tied)
        return jnp.mean(jnp.exp(logp)) - 0.01 * jnp.mean(entropy)

    compiled = jax.jit(jax.value_and_grad(run, argnums=(0, 1))).lower(*abstract).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 2**20


def test_blocks_are_a_share_of_a_large_vocabulary_and_all_of_a_small_one():
    assert (block_size(QWEN), block_size(4096), block_size(100)) == (4748, 1024, 100)
