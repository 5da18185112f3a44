"""Generation: what a sample may and may not depend on, and that it is what the trainer scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compiles
from near_ties import assert_same_up_to_near_ties, next_logits, response

from jaxrl import keys
from jaxrl.mesh import make_mesh, shard_tree, to_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import hidden, init_model, logits, param_axes, with_config
from jaxrl.models.logps import token_logps
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Greedy, Temperature, TopK, TopP
from jaxrl.types import STOP_EOS, STOP_LENGTH, Prompts

# every feature that could tell positions or slots apart: windows, grouped heads, q/k norm, a vocabulary limit
CONFIG = ModelConfig(
    family="qwen3", vocab_size=40, vocab_limit=37, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True, windows=(None, 4), max_positions=14, init_std=0.25,
)  # fmt: skip
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 11, 4], [30, 2]]
UIDS = [4, 17, 0, 9]
STOPS = (0, 6, 9)
NEW = 8  # the longest prompt and its response just fit the context
STRATEGIES = [Greedy(), Temperature(value=1.0), Temperature(value=0.7), TopK(k=5, temperature=1.3), TopP(p=0.8)]
HOT = Temperature(value=5.0)  # so hot that every id turns up
KEY = keys.root(7)


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, keys.root(1))


@pytest.fixture
def double(x64, model):
    """The same parameters in double precision."""
    return with_config(jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), model), dtype="float64")


def padded(prompts, width=6, uids=UIDS):
    """``Prompts`` of a fixed width; the padding holds a real id, which must not matter."""
    tokens = np.full((len(prompts), width), 12, np.int32)
    for i, p in enumerate(prompts):
        tokens[i, : len(p)] = p
    return Prompts(tokens, np.asarray([len(p) for p in prompts], np.int32), np.asarray(uids, np.int32)[: len(prompts)])


def sample(model, prompts=None, strategy=STRATEGIES[1], *, n=3, **changes):
    """Rollouts of a call that nearly all tests share the shape, hence the program, of."""
    options = {"key": KEY, "max_new_tokens": NEW, "stop_ids": STOPS} | changes
    return generate(model, padded(PROMPTS) if prompts is None else prompts, strategy, n=n, **options)


def assert_rows_equal(a, b, pairs):
    """Row ``i`` of ``a`` is bitwise row ``j`` of ``b``."""
    for i, j in pairs:
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x[i], y[j])


# ---- what a sample does not depend on: fixed shapes


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_at_fixed_shapes_order_and_neighbours_change_no_bit(model, strategy):
    base = sample(model, None, strategy)
    order = [2, 0, 3, 1]
    moved = sample(model, padded([PROMPTS[i] for i in order]), strategy, uids=[UIDS[i] for i in order])
    assert_rows_equal(base, moved, [(i, order.index(i)) for i in range(4)])
    crowd = [[20, 21, 22, 23, 24, 25], [3], PROMPTS[0], [8, 8, 8, 8]]
    others = sample(model, padded(crowd), strategy, uids=[50, 51, UIDS[0], 53])
    assert_rows_equal(base, others, [(0, 2)])


def test_a_second_call_repeats_the_first(model):
    assert_rows_equal(sample(model), sample(model), [(i, i) for i in range(4)])


def test_no_cache_survives_a_weight_change(model):
    changed = jax.tree.map(lambda x: x * 1.5, model)
    before = sample(changed)
    sample(model)
    after = sample(changed)
    assert_rows_equal(before, after, [(i, i) for i in range(4)])
    assert not np.array_equal(before.logps, sample(model).logps)


# ---- across shapes


def one_by_one(model, strategy):
    """The same samples, and two more a prompt, from calls of one prompt in wider padding."""
    calls = [sample(model, padded([p], 11, [u]), strategy, n=5) for p, u in zip(PROMPTS, UIDS, strict=True)]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *calls)


def check_across_shapes(model, strategy):
    """The share of rows that do not depend on the shape of the call at all."""
    base = sample(model, None, strategy)
    other = jax.tree.map(lambda x: x[:, :3], one_by_one(model, strategy))
    return assert_same_up_to_near_ties(model, strategy, base, other, key=KEY, uids=UIDS)


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_with_other_padding_prompts_and_samples_rows_agree_up_to_near_ties(model, strategy):
    assert check_across_shapes(model, strategy) >= 0.9  # near-ties are rare


@pytest.mark.slow
@pytest.mark.x64
def test_with_other_padding_prompts_and_samples_tokens_are_equal_in_double_precision(x64, double):
    assert check_across_shapes(double, Temperature()) == 1


def check_across_meshes(model, meshes):
    """Against (data, fsdp, tensor) meshes, prompts split over the first two; the shares of identical rows."""
    base = sample(model)
    for shape in meshes:
        mesh = make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])
        sharded = shard_tree(mesh, param_axes(model.config), model)
        other = sample(sharded, to_mesh(mesh, padded(PROMPTS)))
        assert len(other.rows.tokens.sharding.device_set) == np.prod(shape)
        assert other.rows.tokens.sharding.shard_shape(other.rows.tokens.shape)[0] == 4 // (shape[0] * shape[1])
        yield assert_same_up_to_near_ties(model, Temperature(), base, jax.device_get(other), key=KEY, uids=UIDS)


@pytest.mark.slow
def test_on_one_two_and_four_devices_rows_agree_up_to_near_ties(model):
    assert min(check_across_meshes(model, [(1, 2, 1), (1, 2, 2)])) >= 0.9


@pytest.mark.slow
@pytest.mark.x64
def test_on_one_two_and_four_devices_tokens_are_equal_in_double_precision(x64, double):
    assert list(check_across_meshes(double, [(1, 2, 1), (2, 2, 1)])) == [1, 1]


def test_the_near_tie_check_rejects_what_is_no_near_tie(model):
    base = sample(model)
    row = (0, 1, int(base.rows.start[0, 1]))
    other_token = dataclasses.replace(base.rows, tokens=base.rows.tokens.at[row].add(1))
    other_logp = base.logps.at[row].add(3e-5)
    for wrong in (dataclasses.replace(base, rows=other_token), dataclasses.replace(base, logps=other_logp)):
        with pytest.raises(AssertionError, match=r"no near-tie|Not equal to tolerance"):
            assert_same_up_to_near_ties(model, Temperature(), base, wrong, key=KEY, uids=UIDS)


# ---- an oracle without cache, padding or loop


def oracle_probs(scores, strategy):
    """The distribution of a strategy from logits ``[V]``, by sorting."""
    temperature = getattr(strategy, "temperature", getattr(strategy, "value", 1.0))
    p = np.exp((scores - scores.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if isinstance(strategy, TopK):
        p = np.where(p >= p[order[strategy.k - 1]], p, 0)
    if isinstance(strategy, TopP):
        count = int(np.argmax(np.cumsum(p[order]) >= strategy.p))
        p = np.where(p >= p[order[count]], p, 0)
    return p / p.sum()


def oracle(model, prompt, strategy, row_key, max_new):
    """One response: a full forward pass a token, the draw by numpy on the sorted support."""
    row, logps = list(prompt), []
    for t in range(max_new):
        p = oracle_probs(np.asarray(next_logits(model, np.asarray(row)))[0], strategy)
        uniform = float(jax.random.uniform(jax.random.fold_in(row_key, t), (), jnp.float64))
        greedy = isinstance(strategy, Greedy)
        row.append(int(np.argmax(p)) if greedy else int(np.searchsorted(np.cumsum(p), uniform, side="right")))
        logps.append(np.log(p[row[-1]]))
        if row[-1] in STOPS:
            return row[len(prompt) :], logps, STOP_EOS
    return row[len(prompt) :], logps, STOP_LENGTH


@pytest.mark.x64
@pytest.mark.parametrize("max_new", [1, NEW])
def test_generation_equals_a_plain_loop_of_full_forward_passes(x64, double, max_new):
    reasons = set()
    for strategy in (Temperature(), TopP(p=0.8)) if max_new == NEW else (Temperature(),):
        out = sample(double, None, strategy, max_new_tokens=max_new, step=3)
        for (p, g), stop in np.ndenumerate(np.asarray(out.stop)):
            row_key = keys.at(KEY, "rollout", 3, UIDS[p], g)
            tokens, logps, reason = oracle(double, PROMPTS[p], strategy, row_key, max_new)
            got_tokens, got_logps = response(out, p, g)
            assert (tokens, reason) == (got_tokens.tolist(), stop)
            np.testing.assert_allclose(got_logps, logps, rtol=0, atol=1e-10)
            assert out.rows.tokens[p, g, : len(PROMPTS[p])].tolist() == PROMPTS[p]
            assert out.rows.start[p, g] == len(PROMPTS[p])
            reasons.add(reason)
    assert max_new < NEW or reasons == {STOP_EOS, STOP_LENGTH}  # both ends were met


# ---- sampler and scorer speak of one distribution


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_log_probs_are_the_trainers_at_any_temperature(model, temperature):
    out = sample(model, strategy=Temperature(value=temperature))
    scored = token_logps(model, out.rows.flat(), temperature=temperature)
    np.testing.assert_allclose(out.logps.reshape(scored.shape), scored, rtol=0, atol=1e-5)
    assert np.abs(scored).max() > 1  # there is something to compare


def test_greedy_log_probs_are_of_the_untempered_model(model):
    out = sample(model, strategy=Greedy())
    scored = token_logps(model, out.rows.flat())
    np.testing.assert_allclose(out.logps.reshape(scored.shape), scored, rtol=0, atol=1e-5)
    assert_rows_equal(*(jax.tree.map(lambda x, g=g: x[:, g], out) for g in (0, 1)), [(i, i) for i in range(4)])


@pytest.mark.parametrize("strategy", STRATEGIES[3:], ids=str)
def test_truncated_log_probs_are_of_the_truncated_distribution(model, strategy):
    out = sample(model, strategy=strategy)
    rows = out.rows.flat()
    scores = np.asarray(logits(model, hidden(model, rows.tokens)), np.float64)
    expected = np.zeros(rows.tokens.shape)
    for i, t in np.argwhere(np.asarray(rows.mask())):
        expected[i, t] = np.log(oracle_probs(scores[i, t - 1], strategy)[rows.tokens[i, t]])
    np.testing.assert_allclose(out.logps.reshape(expected.shape), expected, rtol=0, atol=1e-5)


def test_ids_above_the_tokenizers_size_are_never_sampled(model):
    """Even very hot, when each of the others turns up; and asking to stop at one changes nothing."""
    out = sample(model, None, HOT, n=10, stop_ids=(37, 38, 39))
    response = np.asarray(out.rows.tokens)[np.asarray(out.rows.mask())]
    assert response.size == 4 * 10 * NEW
    assert set(response.tolist()) == set(range(37))
    assert np.isfinite(out.logps).all()


def test_half_precision_compute_still_returns_single_precision_log_probs(model):
    out = jax.eval_shape(sample, with_config(model, dtype="bfloat16"))
    assert out.logps.dtype == jnp.float32


# ---- ends


def test_every_stop_id_ends_a_response_and_is_its_last_token(model):
    out = sample(model, strategy=HOT, n=10)
    ends = set()
    for p, g in np.ndindex(out.stop.shape):
        tokens, _ = response(out, p, g)
        assert not set(tokens[:-1].tolist()) & set(STOPS)
        assert (out.stop[p, g] == STOP_EOS) == (int(tokens[-1]) in STOPS)
        assert out.stop[p, g] == STOP_EOS or len(tokens) == NEW
        ends |= {int(tokens[-1])} & set(STOPS)
        off = ~np.asarray(out.rows[p, g].mask())
        assert not np.asarray(out.logps[p, g])[off].any()
        assert not np.asarray(out.rows.tokens[p, g, int(out.rows.length[p, g]) :]).any()
    assert ends == set(STOPS)


def test_a_stop_id_as_the_first_token_makes_a_response_of_one_token(model):
    first = int(sample(model, None, Greedy()).rows.tokens[0, 0, 3])
    out = sample(model, None, Greedy(), stop_ids=(first, 38, 39))
    assert (out.rows.length - out.rows.start)[0].tolist() == [1, 1, 1]
    assert (out.stop[0] == STOP_EOS).all()
    assert out.logps[0, 0, 3] < 0
    assert not out.logps[0, 0, 4:].any()


def test_an_end_id_that_is_also_padding_or_in_the_prompt_counts_where_it_was_sampled(model):
    """The output's padding is 0; with 0 as stop id it ends a response once, and never a prompt."""
    out = sample(model, padded([[0, 0, 5], [0], [0, 7], [3, 0]]), HOT, n=10, stop_ids=(0, 38, 39))
    assert out.rows.start[:, 0].tolist() == [3, 1, 2, 2]
    ended = np.asarray(out.stop) == STOP_EOS
    assert 0 < ended.sum() < ended.size
    last = np.take_along_axis(np.asarray(out.rows.tokens), np.asarray(out.rows.length)[..., None] - 1, axis=2)[..., 0]
    np.testing.assert_array_equal(last == 0, ended)
    at_last = np.take_along_axis(np.asarray(out.logps), np.asarray(out.rows.length)[..., None] - 1, axis=2)
    assert (at_last < 0).all()


# ---- keys


def test_later_samples_continue_those_of_a_larger_call(model):
    whole, later = one_by_one(model, Temperature()), sample(model, first=3)
    cut = jax.tree.map(lambda x: x[:, 3:], whole), jax.tree.map(lambda x: x[:, :2], later)
    share = assert_same_up_to_near_ties(model, Temperature(), *cut, key=KEY, uids=UIDS, first=3)
    assert share >= 0.8  # of eight rows


def test_at_fixed_shapes_a_sample_is_the_same_in_any_call_that_holds_it(model):
    whole, later = sample(model, None, HOT, n=10), sample(model, None, HOT, n=10, first=4)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(later), strict=True):
        np.testing.assert_array_equal(x[:, 4:], y[:, :6])


def test_samples_differ_by_root_step_uid_and_sample_index_and_by_nothing_else(model):
    def drawn(**changes):
        out = sample(model, padded([PROMPTS[0]] * 4), HOT, n=10, stop_ids=(37, 38, 39), **changes)
        return out, {np.asarray(x).tobytes() for x in out.rows.tokens.reshape(40, -1)}

    base, rows = drawn()
    assert len(rows) == 40
    moved, _ = drawn(uids=[1, 2, 3, UIDS[0]])
    assert_rows_equal(base, moved, [(0, 3)])
    for changes in ({"step": 1}, {"key": keys.root(8)}, {"uids": [1, 2, 3, 5]}, {"first": 10}):
        assert not rows & drawn(**changes)[1]


def test_prompts_name_themselves_by_position_or_by_their_own_uid(model):
    by_position = sample(model, PROMPTS)
    assert_rows_equal(by_position, sample(model, uids=range(4)), [(i, i) for i in range(4)])
    by_uid = sample(model, PROMPTS, uids=UIDS)
    assert_rows_equal(by_uid, sample(model), [(i, i) for i in range(4)])


def test_new_prompts_steps_keys_and_samples_of_one_shape_compile_nothing(model):
    sample(model)
    new_key = jax.block_until_ready(keys.root(99))
    with count_compiles() as compiled:
        other = padded([[1, 2], [3] * 6, [9], [4]])
        jax.block_until_ready(sample(model, other, step=5, key=new_key, uids=[8, 7, 6, 5], first=9))
        jax.block_until_ready(sample(model, padded(PROMPTS[::-1]), step=6, stop_ids=(1, 2, 3)))
    assert not compiled
    with count_compiles() as compiled:
        jax.jit(lambda x: x * 3)(1.0)
    assert compiled  # the counter counts


def test_new_numbers_of_a_strategy_compile_nothing(model):
    sample(model, strategy=Temperature(value=0.7))
    sample(model, strategy=TopP(p=0.8))
    with count_compiles() as compiled:
        hot, wide = sample(model, strategy=Temperature(value=5.0)), sample(model, strategy=TopP(p=0.2, temperature=3.0))
    assert not compiled
    assert not np.array_equal(hot.rows.tokens, wide.rows.tokens)


# ---- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, r"prompts: expected at least one token each; empty at \[1\]"),
        ({"prompts": []}, r"prompts: expected at least one token each; empty at all"),
        (
            {"prompts": Prompts(np.ones((1, 2), int), np.asarray([3]), np.zeros(1, int))},
            r"length 3 is beyond the width of 2",
        ),
        ({"n": 0}, r"expected n >= 1 and max_new_tokens >= 1, got 0 and 8"),
        ({"max_new_tokens": 0}, r"got 3 and 0"),
        ({"stop_ids": ()}, r"stop_ids: expected at least one id; take it from the generation config"),
        ({"stop_ids": (3, 40)}, r"stop_ids: id 40 is outside the vocabulary of 40"),
        ({"prompts": [[1, 41], [2]]}, r"prompts: id 41 is outside the vocabulary of 40; is this the model's own tok"),
        ({"prompts": [[1], [-2]]}, r"prompts: id -2 is outside the vocabulary"),
        ({"prompts": [[1], [2] * 7]}, r"prompt 1 has 7 tokens and max_new_tokens is 8, beyond .* context of 14"),
        ({"uids": [1]}, r"uids: 1 given for 4 prompts"),
        ({"uids": [1, 2, 3, 2**31]}, r"uids: expected integers from 0 to 2147483647, got 1\.\.2147483648"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_says_what_was_expected(model, changes, message):
    with pytest.raises(ValueError, match=message):
        sample(model, **changes)
