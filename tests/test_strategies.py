"""Strategies draw from exactly the distribution that they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compiles
from scipy import stats

from jaxrl import keys
from jaxrl.sampling.generate import uniforms
from jaxrl.sampling.strategies import STRATEGIES, Greedy, Temperature, TopK, TopKTopP, TopP, inverse_cdf, nucleus_edge

VOCAB = 300  # more than two blocks, the last of them short
DRAWS = 20_000


def test_the_table_of_strategies_names_every_class():
    assert STRATEGIES == {
        "greedy": Greedy, "temperature": Temperature, "top_k": TopK, "top_p": TopP, "top_k_top_p": TopKTopP
    }  # fmt: skip


@pytest.fixture(scope="module")
def scores():
    """Logits ``[VOCAB]`` with a wide spread; the ids from 290 on do not exist."""
    out = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 1.5
    out[290:] = -np.inf
    return out


def exact(scores, temperature=1.0, keep=None):
    p = np.exp((scores.astype(np.float64) - scores.max()) / temperature)
    p /= p.sum()
    if keep is not None:
        p = np.where(np.isin(np.arange(p.size), keep(p)), p, 0)
    return p / p.sum()


def top(k):
    return lambda p: np.argsort(-p)[:k]


def nucleus(mass):
    return lambda p: np.argsort(-p)[: int(np.searchsorted(np.cumsum(np.sort(p)[::-1]), mass)) + 1]


def top_nucleus(k, mass):
    """The nucleus of what the k best leave."""

    def keep(p):
        best = np.argsort(-p)[:k]
        return best[nucleus(mass)(p[best] / p[best].sum())]

    return keep


@jax.jit
def sampled(strategy, logits, uniform):
    """A strategy as data: one program a class."""
    return strategy(logits, uniform)


drawn = jax.jit(inverse_cdf)


@jax.jit
def processed(strategy, logits):
    return strategy.process(logits)


def draw(strategy, scores, seed=0):
    """Tokens and log-probabilities of many rows with the same logits and a key each."""
    uniform = uniforms(keys.root(seed), jnp.zeros(1, jnp.int32), n=DRAWS, count=1, dtype=jnp.float32)[0, :, 0]
    logits = jnp.broadcast_to(jnp.asarray(scores)[None], (DRAWS, VOCAB))
    return (np.asarray(x) for x in sampled(strategy, logits, uniform))


def chi_square_p_value(tokens, p):
    """Of the counts under ``p``, ids expected less than 5 times put together."""
    counts, expected = np.bincount(tokens, minlength=p.size), p * tokens.size
    rare = expected < 5
    bins = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    if bins[1][-1] == 0:
        bins = [x[:-1] for x in bins]
    return stats.chisquare(*bins).pvalue


CASES = [
    (Temperature(value=1.0), {}),
    (Temperature(value=0.5), {"temperature": 0.5}),
    (Temperature(value=2.0), {"temperature": 2.0}),
    (TopK(k=20), {"keep": top(20)}),
    (TopK(k=9, temperature=1.5), {"temperature": 1.5, "keep": top(9)}),
    (TopP(p=0.7), {"keep": nucleus(0.7)}),
    (TopP(p=0.4, temperature=2.0), {"temperature": 2.0, "keep": nucleus(0.4)}),
    (TopP(p=1.0), {}),
    pytest.param(
        TopKTopP(k=20, p=0.6, temperature=1.5),
        {"temperature": 1.5, "keep": top_nucleus(20, 0.6)},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("strategy", "how"), CASES, ids=lambda x: str(x) if not isinstance(x, dict) else "")
def test_draws_follow_the_exact_distribution(scores, strategy, how):
    p = exact(scores, **how)
    tokens, logps = draw(strategy, scores)
    assert set(tokens.tolist()) <= set(np.flatnonzero(p).tolist())
    assert chi_square_p_value(tokens, p) > 1e-3
    np.testing.assert_allclose(logps, np.log(p[tokens]), rtol=0, atol=1e-5)


def test_the_chi_square_test_sees_a_temperature_off_by_a_tenth(scores):
    tokens, _ = draw(Temperature(value=1.1), scores)
    assert chi_square_p_value(tokens, exact(scores)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "how"), CASES, ids=lambda x: str(x) if not isinstance(x, dict) else "")
def test_many_draws_from_512_classes_follow_the_exact_distribution(strategy, how):
    """At ten times the draws the test sees a temperature off by a tenth, even where few ids are left."""
    scores = np.random.default_rng(4).normal(size=512).astype(np.float32) * 1.5
    uniform = uniforms(keys.root(5), jnp.zeros(1, jnp.int32), n=10 * DRAWS, count=1, dtype=jnp.float32)[0, :, 0]
    logits = jnp.broadcast_to(processed(strategy, jnp.asarray(scores)[None]), (DRAWS, 512))
    tokens = np.concatenate([np.asarray(drawn(logits, part)[0]) for part in uniform.reshape(10, -1)])
    assert chi_square_p_value(tokens, exact(scores, **how)) > 1e-4
    off = exact(scores, **how | {"temperature": 1.1 * how.get("temperature", 1)})
    assert not off[tokens].all() or chi_square_p_value(tokens, off) < 1e-4


# ---- numbers as data


DATA = [
    (Temperature(value=0.7), Temperature(value=2.0)),
    (TopK(k=5), TopK(k=200, temperature=0.3)),
    (TopP(p=0.3), TopP(p=1.0, temperature=1.5)),
    (TopKTopP(k=5, p=0.9), TopKTopP(k=9, p=0.2, temperature=2.0)),
]


DTYPES = [np.float32, pytest.param(np.float64, marks=[pytest.mark.x64, pytest.mark.slow])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_program_serves_all_numbers_of_a_strategy(dtype):
    """Under strict promotion, in the dtype of the logits, and to the bits of the numbers written into the program."""
    with jax.enable_x64(dtype == np.float64):
        scores = jnp.asarray(np.random.default_rng(6).normal(size=(3, 40)).astype(dtype))
        for first, second in DATA:
            processed(first, scores)
            with count_compiles() as compiled:
                out = processed(second, scores)
            assert not compiled
            assert out.dtype == dtype
            arrays = jax.tree.map(jnp.asarray, second)
            for other in (processed(arrays, scores), jax.jit(second.process)(scores)):
                assert other.dtype == dtype
                np.testing.assert_array_equal(out, other)


@pytest.mark.parametrize("strategy", [Greedy(), *(s for pair in DATA for s in pair)], ids=str)
def test_a_strategy_is_a_comparable_config_and_a_tree_of_its_numbers(strategy):
    again = dataclasses.replace(strategy)
    assert (strategy, hash(strategy)) == (again, hash(again))
    leaves, kind = jax.tree.flatten(strategy)
    assert leaves == list(dataclasses.asdict(strategy).values())
    assert kind.unflatten(leaves) == strategy
    kind.unflatten([object()] * len(leaves))  # as jax does within transformations
    jax.eval_shape(lambda s: s, strategy)


# ---- supports


def oracle(scores, k=None, p=None, temperature=1.0):
    """The support ``[rows, V]`` by sorting."""
    keep = np.isfinite(scores)
    if k is not None:
        keep &= scores >= np.sort(scores, axis=1)[:, ::-1][:, min(k, scores.shape[1]) - 1 :][:, :1]
    if p is not None:
        probs = exact_rows(np.where(keep, scores, -np.inf), temperature)
        best_first = np.sort(probs, axis=1)[:, ::-1]
        count = np.argmax(np.cumsum(best_first, axis=1) >= min(p, 1 - 1e-12), axis=1)
        keep &= probs >= np.take_along_axis(best_first, count[:, None], axis=1)
    return keep


@pytest.mark.parametrize("dtype", DTYPES)
def test_supports_are_those_of_a_sort(dtype):
    """Logits of both signs, the whole range of floats and neighbours in it, ids that do not exist; both zeros are tied."""
    with jax.enable_x64(dtype == np.float64):
        scores = np.random.default_rng(7).normal(size=(50, 130)).astype(dtype) * 3 - 2
        scores[:, 120:] = -np.inf
        scores[0, :120] = np.where(np.arange(120) % 2, -0.0, 0.0)
        far = 10.0 ** np.arange(1, 31)
        scores[1, :120] = np.concatenate([far, 1 + np.arange(60) * np.finfo(dtype).eps, -far])
        for k in (1, 3, 64, 119, 120, 121, 130, 10**9):
            np.testing.assert_array_equal(support(TopK(k=k, temperature=0.5), scores), oracle(scores, k))
        for p in (0.05, 0.5, 0.9, 0.99):
            np.testing.assert_array_equal(support(TopP(p=p, temperature=2.0), scores), oracle(scores, None, p, 2.0))
            both = support(TopKTopP(k=20, p=p, temperature=0.7), scores)
            np.testing.assert_array_equal(both, oracle(scores, 20, p, 0.7))
        np.testing.assert_array_equal(support(TopP(p=1.0), scores), np.isfinite(scores))


def support(strategy, scores):
    return np.isfinite(np.asarray(processed(strategy, jnp.asarray(scores))))


def tied_scores(rows=200, vocab=12):
    """Logits of a few distinct values, so that ties are everywhere; some ids do not exist."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, (rows, vocab)).astype(np.float32)
    scores[:, -2:] = -np.inf
    return scores


@pytest.mark.parametrize("k", [1, 2, 5, 9, 11, 12, 50])
def test_top_k_keeps_the_k_best_and_what_is_tied_to_the_last(k):
    scores = tied_scores()
    np.testing.assert_array_equal(support(TopK(k=k), scores), oracle(scores, k))


@pytest.mark.parametrize("p", [1e-30, 1e-3, 0.3, 0.62, 0.9, 0.999, 1 - 1e-9, 1.0])
def test_top_p_keeps_the_smallest_set_of_mass_p_and_what_is_tied_to_its_last(p):
    scores = tied_scores()
    probs = exact_rows(scores)
    best_first = np.sort(probs, axis=1)[:, ::-1]
    count = np.argmax(np.cumsum(best_first, axis=1) >= min(p, 1 - 1e-12), axis=1)
    last = np.take_along_axis(best_first, count[:, None], axis=1)
    np.testing.assert_array_equal(support(TopP(p=p), scores), (probs >= last - 1e-12) & np.isfinite(scores))


def exact_rows(scores, temperature=1.0):
    return np.stack([exact(row, temperature) for row in scores])


EDGES = [(0.25, 0.5), (0.5, 0.5), (0.51, 0.25), (0.75, 0.25), (0.875, 0.125), (0.9, 0.0625), (1e-12, 0.5), (1e-60, 0.5)]


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.x64)])
def test_the_nucleus_edge_is_exact_where_the_mass_is_met_exactly(dtype):
    with jax.enable_x64(dtype == np.float64):
        probs = jnp.asarray([[0.0625, 0.5, 0, 0.125, 0.0625, 0.25], [0.25, 0.25, 0, 0, 0.25, 0.25]], dtype)
        for p, edge in EDGES:
            assert jax.jit(nucleus_edge)(probs, p).tolist() == [edge, 0.25]


def test_greedy_ties_go_to_the_lowest_id():
    scores = np.zeros((2, VOCAB), np.float32)
    scores[0, [7, 200, 299]] = 3
    tokens, logps = Greedy()(jnp.asarray(scores), jnp.zeros(2))
    assert tokens.tolist() == [7, 0]
    np.testing.assert_allclose(logps, [3 - np.log(297 + 3 * np.exp(3)), -np.log(300)], rtol=1e-6)


# ---- the draw


@pytest.mark.parametrize("vocab", [1, 2, 128, 129, 5000])
def test_the_draw_is_the_inverse_of_the_cdf(vocab):
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(1, vocab)).astype(np.float32) * 2
    cdf = np.cumsum(exact(scores[0]))
    uniform = rng.random(500).astype(np.float32)
    clear = np.abs(cdf[:-1, None] - uniform[None]).min(axis=0, initial=1) > 1e-6
    tokens, _ = jax.jit(inverse_cdf)(jnp.broadcast_to(scores, (500, vocab)), uniform)
    np.testing.assert_array_equal(np.asarray(tokens)[clear], np.searchsorted(cdf, uniform, side="right")[clear])
    assert clear.mean() > 0.9


def test_a_token_without_mass_is_never_drawn_wherever_the_uniform_falls():
    """A parallel prefix sum is not monotone in its last bits: it steps over masked ids too."""
    rng = np.random.default_rng(3)
    vocab, rows = 20_000, 200
    scores = rng.normal(size=vocab).astype(np.float32)
    scores[rng.random(vocab) < 0.7] = -np.inf
    scores[[0, -1]] = -np.inf
    prefix = np.asarray(jax.jit(jnp.cumsum)(jnp.asarray(np.where(np.isinf(scores), 0, exact(scores)), jnp.float32)))
    steps = np.flatnonzero(np.isinf(scores[1:]) & (np.diff(prefix) != 0))
    assert steps.size > rows  # the hazard is there
    extremes = np.asarray([0, 1e-30, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    uniform = np.concatenate([np.minimum(prefix[steps], prefix[steps + 1])[: rows - 3] / prefix[-1], extremes])
    tokens, logps = jax.jit(inverse_cdf)(jnp.broadcast_to(scores, (rows, vocab)), uniform)
    assert np.isfinite(scores[np.asarray(tokens)]).all()
    assert np.isfinite(logps).all()
    assert tokens[-3] == np.flatnonzero(np.isfinite(scores))[0]
    assert tokens[-1] == np.flatnonzero(np.isfinite(scores))[-1]


def test_logits_that_are_not_numbers_show_in_the_log_probability():
    tokens, logps = inverse_cdf(jnp.full((1, 5), jnp.nan), jnp.zeros(1))
    assert 0 <= int(tokens[0]) < 5
    assert np.isnan(logps[0])


@pytest.mark.parametrize("strategy", [s for s, _ in DATA], ids=str)
def test_one_logit_that_is_no_number_is_not_cut_off_quietly(strategy):
    scores = np.zeros((3, 40), np.float32)
    scores[0, 7], scores[1] = np.nan, np.nan
    _, logps = drawn(processed(strategy, jnp.asarray(scores)), jnp.zeros(3))
    assert np.isnan(logps).tolist() == [True, True, False]


# ---- errors


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: Temperature(value=t),
        lambda t: TopK(k=2, temperature=t),
        lambda t: TopP(p=0.5, temperature=t),
        lambda t: TopKTopP(k=2, p=0.5, temperature=t),
    ],
)
def test_a_temperature_that_is_not_above_zero_is_refused(make, value):
    with pytest.raises(ValueError, match=r"temperature: expected a number above 0, got .*; use the greedy strategy"):
        make(value)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.01, float("nan")])
def test_a_top_p_outside_its_range_is_refused(p):
    for make in (lambda p: TopP(p=p), lambda p: TopKTopP(k=2, p=p)):
        with pytest.raises(ValueError, match=r"top_p: expected 0 < p <= 1, got"):
            make(p)


def test_a_top_k_below_one_is_refused():
    for make in (lambda k: TopK(k=k), lambda k: TopKTopP(k=k, p=0.5)):
        for k in (0, -1, 2.5):
            with pytest.raises(ValueError, match=f"top_k: expected an integer k >= 1, got {k}"):
                make(k)
