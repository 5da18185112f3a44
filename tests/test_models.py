"""The decoder: what a hidden state may depend on, the cache, rematerialisation, precision and configs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FULL, PLAIN, SIZES, VOCAB, every_row, extend, gradient, hidden, largest, some_model, token_logps
from tolerances import HALF, SAME

from jaxrl import keys
from jaxrl.mesh import make_mesh, shard_tree, to_mesh
from jaxrl.models.config import REMAT, ModelConfig
from jaxrl.models.decoder import (
    abstract_model,
    cast,
    embed_tokens,
    init_cache,
    init_model,
    logits,
    param_axes,
    param_shapes,
    with_config,
)

TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (3, 12)), jnp.int32)


@pytest.fixture(scope="module")
def model():
    return some_model()


# What a hidden state depends on


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_token_changes_no_earlier_hidden_state_by_a_bit(model, at):
    changed = TOKENS.at[:, at].set((TOKENS[:, at] + 1) % VOCAB)
    before, after = hidden(model, TOKENS), hidden(model, changed)
    np.testing.assert_array_equal(before[:, :at], after[:, :at])
    assert jnp.abs(before[:, at:] - after[:, at:]).max() > 1e-2


def test_rows_do_not_see_each_other(model):
    changed = TOKENS.at[1:].set(0)
    np.testing.assert_array_equal(hidden(model, TOKENS)[0], hidden(model, changed)[0])


def test_a_wider_row_leaves_its_hidden_states_as_they_were(model):
    wide = jnp.pad(TOKENS, [(0, 0), (0, 9)], constant_values=7)
    np.testing.assert_allclose(hidden(model, wide)[:, :12], hidden(model, TOKENS), rtol=0, atol=SAME["float32"])


def test_a_window_hides_what_lies_before_it():
    """Two layers of window 4 reach back six tokens; the seventh must not matter, the sixth must."""
    model = some_model(dataclasses.replace(FULL, windows=(4, 4)))
    first = hidden(model, TOKENS.at[:, 0].set((TOKENS[:, 0] + 1) % VOCAB)) - hidden(model, TOKENS)
    assert jnp.abs(first[:, 6]).max() > 1e-6
    np.testing.assert_array_equal(first[:, 7:], 0)


def test_layers_without_a_window_see_everything_beyond_max_positions_too():
    """A layer between windowed ones is unlimited whatever ``max_positions`` says."""
    config = dataclasses.replace(FULL, windows=(4, None), max_positions=2)
    model, tokens = some_model(config), jnp.tile(TOKENS, (1, 3))
    roomy = with_config(model, max_positions=64)
    np.testing.assert_array_equal(hidden(model, tokens), hidden(roomy, tokens))
    np.testing.assert_array_equal(decode(model, tokens[:, :8], 1), decode(roomy, tokens[:, :8], 1))


# Cache


def decode(model, tokens, chunk: int, pad: int = 0, spare: int = 0):
    """Hidden states by ``extend`` in chunks, after ``pad`` slots that hold nothing, in a cache with room to spare."""
    n, width = tokens.shape
    cache = init_cache(model, n, pad + width + spare)
    valid = jnp.broadcast_to((jnp.arange(pad + width + spare) >= pad)[None], (n, pad + width + spare))
    out = []
    for t in range(0, width, chunk):
        positions = jnp.broadcast_to(jnp.arange(t, t + chunk, dtype=jnp.int32)[None], (n, chunk))
        states, cache = extend(model, tokens[:, t : t + chunk], positions, cache, jnp.int32(pad + t), valid)
        out.append(states)
    return jnp.concatenate(out, axis=1)


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("chunk", [pytest.param(12, marks=pytest.mark.slow), 4, 1])
def test_prefill_and_decoding_reproduce_the_forward_pass(x64, chunk):
    model = cast(some_model(), jnp.float64)
    for pad, spare in ((0, 0), (5, 3)):
        states = decode(model, TOKENS, chunk, pad, spare)
        np.testing.assert_allclose(states, hidden(model, TOKENS), rtol=0, atol=SAME["float64"])


def test_prefill_and_decoding_reproduce_the_forward_pass_in_single_precision(model):
    for chunk in (12, 1):
        np.testing.assert_allclose(decode(model, TOKENS, chunk, 2), hidden(model, TOKENS), rtol=0, atol=2e-5)


def test_padded_queries_are_finite(model):
    """A left-padded slot sees nothing at all; it must not spread NaN."""
    valid = jnp.asarray(np.arange(12)[None] >= np.asarray([[4], [0], [11]]))
    positions = jnp.maximum(jnp.cumsum(valid, axis=1).astype(jnp.int32) - 1, 0)
    states, cache = extend(model, TOKENS, positions, init_cache(model, 3, 12), jnp.int32(0), valid)
    assert all(bool(jnp.isfinite(x).all()) for x in (states, cache.k, cache.v))
    np.testing.assert_allclose(states[0, 4:], hidden(model, TOKENS[:1, 4:])[0], rtol=0, atol=SAME["float32"])


# Rematerialisation, precision, sharding


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("remat", [r for r in REMAT if r != "none"])
def test_remat_policies_give_equal_gradients(x64, remat):
    model, rows = cast(some_model(), jnp.float64), every_row()
    assert largest(gradient(model, rows), gradient(with_config(model, remat=remat), rows)) < SAME["float64"]


@pytest.mark.slow
def test_remat_saves_memory_in_the_order_of_its_policies():
    config = dataclasses.replace(PLAIN, num_layers=8, intermediate_size=256)
    rows = jax.eval_shape(lambda: every_row(16))

    def temporary(remat: str) -> int:
        model = abstract_model(dataclasses.replace(config, remat=remat))
        return gradient.lower(model, rows).compile().memory_analysis().temp_size_in_bytes

    none, names, full = (temporary(remat) for remat in ("none", "names", "full"))
    assert full < names < none


def test_half_precision_compute_stays_close_and_scores_in_single_precision(model):
    rows, half = every_row(), with_config(model, dtype="bfloat16")
    exact, rough = token_logps(model, rows), token_logps(half, rows)
    assert hidden(half, rows.tokens).dtype == jnp.bfloat16
    assert rough.dtype == jnp.float32
    assert 0 < float(jnp.abs(exact - rough).max()) < HALF


def test_gradients_have_the_masters_dtype_whatever_is_computed_in(model):
    for x in jax.tree.leaves(jax.eval_shape(gradient, with_config(model, dtype="bfloat16"), every_row())):
        assert x.dtype == jnp.float32


def test_embedding_gradients_are_summed_in_single_precision():
    """One token 48 times: 48 updates summed in bfloat16 would lose bits that float32 keeps."""
    tokens = jnp.zeros((4, 12), jnp.int32)
    half = with_config(abstract_model(PLAIN), dtype="bfloat16")
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(4, 12, 32)), jnp.bfloat16)

    def embedded(table):
        bare = jax.tree.map(lambda x: table if x.shape == table.shape else x, half)
        return jnp.sum((embed_tokens(bare, tokens) * cotangent).astype(jnp.float32))

    got = jax.grad(embedded)(jnp.zeros((VOCAB, 32)))[0]
    want = np.asarray(cotangent, np.float32).reshape(-1, 32).sum(0)
    np.testing.assert_allclose(got, want, rtol=0, atol=SAME["float32"])


@pytest.mark.parametrize(
    "sizes",
    [
        dict(fsdp=2, tensor=2),
        dict(data=2, fsdp=2),
        dict(data=2, tensor=2),
    ],
)
@pytest.mark.slow
def test_a_sharded_model_scores_and_differentiates_like_an_unsharded_one(model, sizes):
    mesh = make_mesh(**({"fsdp": 1} | sizes), devices=jax.devices()[:4])
    rows = jax.tree.map(lambda x: x[:20], every_row())
    sharded, spread = shard_tree(mesh, param_axes(FULL), model), to_mesh(mesh, rows)
    np.testing.assert_allclose(token_logps(sharded, spread), token_logps(model, rows), rtol=0, atol=SAME["float32"])
    assert largest(jax.device_get(gradient(sharded, spread)), jax.device_get(gradient(model, rows))) < 1e-4


# Creation and configuration


def test_a_model_is_float32_with_the_declared_shapes_and_axes():
    model = init_model(FULL, keys.root(0))
    axes = param_axes(FULL)
    shapes = jax.tree.map(lambda a, x: len(a) == x.ndim, axes, model, is_leaf=lambda a: isinstance(a, tuple))
    assert all(jax.tree.leaves(shapes))
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert sorted(x.shape for x in jax.tree.leaves(model)) == sorted(param_shapes(FULL).values())
    assert jax.tree.structure(abstract_model(FULL)) == jax.tree.structure(model)


def test_a_tied_head_is_the_embedding_itself():
    tied, untied = init_model(PLAIN, keys.root(0)), some_model(FULL)
    assert tied.head is None
    assert untied.head is not None
    states = jnp.eye(32)[None, :3]
    np.testing.assert_array_equal(logits(tied, states)[0], tied.embed[...].T[:3])


def test_one_shape_changed_leaves_the_other_parameters_as_they_were():
    small, large = (init_model(dataclasses.replace(PLAIN, vocab_size=v), keys.root(5)) for v in (VOCAB, VOCAB + 8))
    assert largest(small.layers, large.layers) == 0


def test_with_config_keeps_the_arrays_and_the_origin_of_a_model_is_not_part_of_its_structure():
    model = init_model(PLAIN, keys.root(0))
    other = with_config(model, source="elsewhere", checkpoint_dtype="bfloat16")
    assert jax.tree.structure(model) == jax.tree.structure(other)
    assert other.config.source == "elsewhere"
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True))


def test_cast_changes_parameters_and_compute(model):
    half = cast(model, jnp.bfloat16)
    assert half.config.dtype == "bfloat16"
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(family="llame"), r"model\.family: expected one of llama, qwen2, qwen3, mistral, got 'llame'"),
        (dict(remat="some"), r"model\.remat: expected one of none, names, dots, full, got 'some'"),
        (dict(dtype="int8"), r"model\.dtype: expected float32.*got 'int8'"),
        (dict(num_kv_heads=3), r"model\.num_kv_heads: 4 query heads cannot be shared evenly by 3"),
        (dict(head_dim=7), r"model\.head_dim: .*even number, got 7"),
        (dict(windows=(4,)), r"model\.windows: expected 2 entries, got 1"),
        (dict(vocab_limit=VOCAB + 1), r"model\.vocab_limit: 41 is not within 1\.\.40"),
    ],
)
def test_an_impossible_config_is_refused_with_the_field_and_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(SIZES | changes))
