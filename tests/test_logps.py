"""``token_logps`` and its siblings: one definition, chunked, masked by lengths, differentiable both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    VOCAB,
    every_row,
    gradient,
    hidden,
    largest,
    some_model,
    table_model,
    token_kl,
    token_logps,
    token_scores,
)
from tolerances import GOLDEN, SAME

from jaxrl.models import logps
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import abstract_model, cast, logits, with_config
from jaxrl.types import Rows

ROWS = every_row()


@pytest.fixture(scope="module")
def model():
    return some_model()


def dense(model, rows, temperature=1.0):
    """Next-token log-probabilities ``[N L V]``, shifted so that index t speaks of token t."""
    scores = np.asarray(logits(model, hidden(model, rows.tokens)), np.float64) / temperature
    scores -= scores.max(-1, keepdims=True)
    table = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.concatenate([np.full_like(table[:, :1], np.nan), table[:, :-1]], axis=1)


def picked(table, rows):
    lp = np.take_along_axis(table, np.asarray(rows.tokens)[..., None], -1)[..., 0]
    return np.where(np.asarray(rows.mask()), lp, 0)


def two_rows(tokens, start, length):
    return Rows(jnp.asarray(tokens, jnp.int32), jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32))


# Values


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_every_span_scores_its_response_tokens_and_nothing_else(model, temperature):
    """All starts and lengths, empty responses and the last position included."""
    got = token_logps(model, ROWS, temperature=temperature)
    assert got.shape == ROWS.tokens.shape
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, picked(dense(model, ROWS, temperature), ROWS), rtol=0, atol=SAME["float32"])


@pytest.mark.parametrize("width", [1, 2])
def test_the_shortest_rows_are_scored(model, width):
    rows = every_row(width)
    np.testing.assert_allclose(token_logps(model, rows), picked(dense(model, rows), rows), rtol=0, atol=SAME["float32"])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient(model, rows)))


@pytest.mark.slow
@pytest.mark.x64
def test_double_precision_parameters_give_double_precision_scores(x64):
    model = cast(some_model(), jnp.float64)
    got = token_logps(model, ROWS)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, picked(dense(model, ROWS), ROWS), rtol=0, atol=SAME["float64"])


@pytest.mark.x64
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_chunk_size_changes_neither_scores_nor_gradients(x64, chunk):
    model = cast(some_model(), jnp.float64)
    got, want = token_logps(model, ROWS, chunk=chunk), token_logps(model, ROWS)
    np.testing.assert_allclose(got, want, rtol=0, atol=SAME["float64"])
    got = jax.jit(jax.grad(lambda m, r: logps.token_logps(m, r, chunk=chunk).sum()))(model, ROWS)
    want = gradient(model, ROWS)
    assert largest(got, want) < SAME["float64"]


def test_temperature_divides_single_precision_logits(model):
    """With bfloat16 compute the tempered scores are those of the float32 logits, to the last bit."""
    half = with_config(model, dtype="bfloat16")
    scores = logits(half, hidden(half, ROWS.tokens)[:, :-1])
    assert scores.dtype == jnp.float32
    want = jax.nn.log_softmax(scores / 0.7, axis=-1)
    want = jnp.take_along_axis(want, ROWS.tokens[:, 1:, None], -1)[..., 0]
    got = token_logps(half, ROWS, temperature=0.7)[:, 1:]
    np.testing.assert_allclose(got, jnp.where(ROWS.mask()[:, 1:], want, 0), rtol=0, atol=1e-6)


# Masks and padding


def test_scores_are_causal_to_the_last_bit(model):
    later = ROWS.tokens.at[:, 4:].set((ROWS.tokens[:, 4:] + 1) % VOCAB)
    before, after = token_logps(model, ROWS), token_logps(model, Rows(later, ROWS.start, ROWS.length))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (jnp.abs(before - after)[:, 4:] > 1e-3).any()


def test_what_stands_in_the_padding_changes_no_bit(model):
    off = jnp.arange(6)[None] >= ROWS.length[:, None]
    for filler in (0, VOCAB - 1):
        padded = Rows(jnp.where(off, filler, ROWS.tokens), ROWS.start, ROWS.length)
        np.testing.assert_array_equal(token_logps(model, padded), token_logps(model, ROWS))


def test_any_amount_of_right_padding_leaves_the_scores(model):
    want = token_logps(model, ROWS)
    for extra in (1, 10):
        wide = Rows(jnp.pad(ROWS.tokens, [(0, 0), (0, extra)], constant_values=3), ROWS.start, ROWS.length)
        got = token_logps(model, wide)
        np.testing.assert_allclose(got[:, :6], want, rtol=0, atol=SAME["float32"])
        np.testing.assert_array_equal(got[:, 6:], 0)


def test_masks_come_from_lengths_when_padding_and_end_share_an_id(model):
    """The end token is the last counted one and has a score; the same id after it has none."""
    end = 2
    rows = two_rows([[5, 9, end, end, end, end], [5, 9, end, 8, end, end]], [2, 2], [3, 5])
    got = token_logps(model, rows)
    np.testing.assert_array_equal(got != 0, [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]])


def test_rows_without_a_response_give_zeros_and_no_nan(model):
    rows = two_rows(ROWS.tokens[:3], [2, 6, 1], [2, 6, 1])
    for got in (token_logps(model, rows), *token_scores(model, rows), token_kl(model, model, rows)):
        np.testing.assert_array_equal(got, 0)
    limited = with_config(model, vocab_limit=VOCAB - 3)
    for x in jax.tree.leaves(gradient(limited, rows)):
        np.testing.assert_array_equal(x, 0)


def test_ids_above_the_tokenizers_size_have_no_probability(model):
    limited = with_config(model, vocab_limit=VOCAB - 3)
    scores = logits(limited, hidden(limited, ROWS.tokens))
    assert bool(jnp.isneginf(scores[..., -3:]).all())
    assert bool(jnp.isfinite(scores[..., :-3]).all())
    rows = every_row(vocab=VOCAB - 3)
    lp, entropy = token_scores(limited, rows)
    np.testing.assert_allclose(lp, picked(dense(limited, rows), rows), rtol=0, atol=SAME["float32"])
    assert bool((lp >= token_logps(model, rows)).all()), "mass of the unknown ids goes to the known ones"
    assert float(entropy.max()) <= np.log(VOCAB - 3) + 1e-6
    above = Rows(rows.tokens.at[:, 1:].set(VOCAB - 1), rows.start, rows.length)
    np.testing.assert_array_equal(jnp.isneginf(token_logps(limited, above)), rows.mask())


def test_a_vocabulary_limit_keeps_gradients_finite(model):
    limited, rows = with_config(model, vocab_limit=VOCAB - 3), every_row(vocab=VOCAB - 3)

    def everything(m):
        lp, entropy = token_scores(m, rows)
        return lp.sum() + entropy.sum() + token_kl(limited, m, rows).sum()

    for x in jax.tree.leaves(jax.jit(jax.grad(everything))(limited)):
        assert bool(jnp.isfinite(x).all())


# Derivatives


@pytest.mark.x64
def test_forward_and_reverse_mode_agree(x64):
    model, direction = (cast(some_model(seed=s), jnp.float64) for s in (0, 1))
    total = jax.jit(lambda m: token_logps(m, ROWS).sum())
    _, forward = jax.jit(lambda m, d: jax.jvp(total, (m,), (d,)))(model, direction)
    inner = jax.tree.map(jnp.vdot, gradient(model, ROWS), direction)
    np.testing.assert_allclose(forward, sum(jax.tree.leaves(inner)), rtol=1e-10)
    eps = 1e-6
    moved = [jax.tree.map(lambda x, d, s=s: x + s * eps * d, model, direction) for s in (1, -1)]
    slope = (total(moved[0]) - total(moved[1])) / (2 * eps)
    np.testing.assert_allclose(forward, slope, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.x64
def test_gradients_of_rows_add_up_to_the_gradient_of_their_sum(x64):
    model = cast(some_model(), jnp.float64)
    each = jax.jit(jax.vmap(lambda m, r: gradient(m, r[None]), (None, 0)))(model, ROWS)
    assert largest(jax.tree.map(lambda x: x.sum(0), each), gradient(model, ROWS)) < SAME["float64"]


# Entropy and divergence


@pytest.mark.x64
def test_entropy_of_the_worked_distributions(x64):
    """SCIENCE.md A18: .7/.2/.1, one-hot and uniform, and their mean."""
    far = -1e4  # exp of it is exactly 0
    model = table_model(np.asarray([np.log([0.7, 0.2, 0.1]), [0, far, far], np.log([1 / 3] * 3)]))
    rows = two_rows([[0, 1, 2, 0, 0]], [1], [4])
    entropy = np.asarray(logps.token_entropy(model, rows))[0]
    np.testing.assert_allclose(entropy, [0, 0.801819, 0, 1.098612, 0], rtol=0, atol=GOLDEN)
    np.testing.assert_allclose(entropy.sum() / 3, 0.633477, rtol=0, atol=GOLDEN)


@pytest.mark.x64
def test_kl_of_the_worked_distributions(x64):
    """SCIENCE.md A20: KL(p, q), KL(q, p), cross-entropy and entropy for p = .6/.3/.1 and q = .8/.15/.05."""
    p, q = ([0.6, 0.3, 0.1], [0.8, 0.15, 0.05])
    rows = two_rows([[0, 1]], [1], [2])
    a, b = (table_model(np.log(np.tile(x, (3, 1)))) for x in (p, q))
    forward, reverse = token_kl(a, b, rows)[0, 1], token_kl(b, a, rows)[0, 1]
    entropy = logps.token_entropy(a, rows)[0, 1]
    np.testing.assert_allclose(
        [forward, reverse, forward + entropy, entropy], [0.104650, 0.091516, 1.002595, 0.897946], rtol=0, atol=GOLDEN
    )


@pytest.mark.parametrize("limit", [None, VOCAB - 3])
def test_entropy_and_kl_equal_their_dense_formulas(limit):
    a, b = (with_config(some_model(seed=s), vocab_limit=limit) for s in (0, 1))
    rows = every_row(vocab=VOCAB - 3)
    mask = np.asarray(rows.mask())
    p, q = (np.where(mask[..., None], dense(m, rows), 0)[..., :limit] for m in (a, b))
    kl = np.where(mask, (np.exp(p) * (p - q)).sum(-1), 0)
    entropy = np.where(mask, -(np.exp(p) * p).sum(-1), 0)
    np.testing.assert_allclose(token_kl(a, b, rows, chunk=2), kl, rtol=0, atol=SAME["float32"])
    np.testing.assert_allclose(logps.token_entropy(a, rows), entropy, rtol=0, atol=SAME["float32"])
    np.testing.assert_allclose(token_kl(a, a, rows), 0, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.x64
def test_no_gradient_reaches_the_reference_and_the_models_is_that_of_the_cross_entropy(x64):
    reference, model = (cast(some_model(seed=s), jnp.float64) for s in (0, 1))
    both = jax.jit(jax.grad(lambda r, m: token_kl(r, m, ROWS).sum(), argnums=(0, 1)))
    to_reference, got = both(reference, model)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(to_reference))
    p = jax.nn.softmax(logits(reference, hidden(reference, ROWS.tokens)), axis=-1)[:, :-1]

    def cross_entropy(m):
        lq = jax.nn.log_softmax(logits(m, hidden(m, ROWS.tokens)), axis=-1)[:, :-1]
        return -jnp.sum(jnp.where(ROWS.mask()[:, 1:], jnp.sum(p * lq, axis=-1), 0))

    assert largest(got, jax.jit(jax.grad(cross_entropy))(model)) < SAME["float64"]


# Memory

BIG = ModelConfig(
    vocab_size=16384, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
)
N, L, CHUNK = 4, 257, logps.CHUNK // 8
ALL_LOGITS = N * (L - 1) * BIG.vocab_size * 4
PASSES = {
    "scores": lambda m, ref, r, c: logps.token_logps(m, r, chunk=c),
    "scores and entropy": lambda m, ref, r, c: logps.token_scores(m, r, chunk=c),
    "divergence": lambda m, ref, r, c: logps.token_kl(ref, m, r, chunk=c),
    "gradient": lambda m, ref, r, c: jax.grad(lambda m: logps.token_logps(m, r, chunk=c).sum())(m),
    "gradient of entropy": lambda m, ref, r, c: jax.grad(lambda m: logps.token_scores(m, r, chunk=c)[1].sum())(m),
    "gradient of divergence": lambda m, ref, r, c: jax.grad(lambda m: logps.token_kl(ref, m, r, chunk=c).sum())(m),
    "forward mode": lambda m, ref, r, c: jax.jvp(lambda m: logps.token_logps(m, r, chunk=c), (m,), (ref,)),
}


@pytest.mark.parametrize("name", PASSES)
def test_logits_of_all_positions_never_exist_at_once(name):
    """Read from the compiled program, for every pass; unchunked, the same program needs them all."""
    model = abstract_model(BIG)
    rows = Rows(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((N, L), (N,), (N,))))

    def temporary(chunk: int) -> int:
        compiled = jax.jit(lambda m, ref, r: PASSES[name](m, ref, r, chunk)).lower(model, model, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(CHUNK) < ALL_LOGITS / 3 < ALL_LOGITS <= temporary(L)


@pytest.mark.parametrize(
    ("tokens", "start", "length", "message"),
    [
        ([[1, 2, 3, 4000]], [2], [4], "row 0 holds id 4000"),
        ([[1, 2, 3, -1]], [2], [4], "row 0 holds id -1"),
        ([[1, 2, 3, 4]], [2], [5], "length 5 and width 4"),
        ([[1, 2, 3, 4]], [0], [4], "start 0"),
        ([[1, 2, 3, 4]], [2, 2], [4, 4], "2 starts"),
    ],
)
def test_rows_that_are_none_are_refused_not_scored(model, tokens, start, length, message):
    rows = Rows(np.array(tokens), np.array(start), np.array(length))
    with pytest.raises(ValueError, match=message):
        logps.token_logps(model, rows)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_a_temperature_that_is_none_is_refused(model, temperature):
    rows = Rows(np.array([[1, 2, 3]]), np.array([1]), np.array([3]))
    with pytest.raises(ValueError, match="temperature: expected a number above 0"):
        logps.token_logps(model, rows, temperature=temperature)
