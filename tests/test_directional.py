"""Directional derivatives by reverse mode equal forward mode's, also where forward mode is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import small_model, some_rows

from jaxrl.influence import directional
from jaxrl.influence.directional import reverse_change
from jaxrl.influence.gradients import parameter_change, predicted_change
from jaxrl.models.decoder import Decoder, cast, with_config
from jaxrl.models.layers import attention
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
EVERYTHING = dict(
    tied=False, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, windows=(None, 3), vocab_limit=11, family="qwen3"
)  # fmt: skip


def random_like(tree, seed: int):
    """Random numbers everywhere: biases are not zero and norm gains not one."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.5, x.shape), x.dtype), tree)


def random_model(**changes) -> Decoder:
    return random_like(jax.eval_shape(lambda: small_model(**changes)), 7)


def scaled(direction, by: float):
    return jax.tree.map(lambda d: d * by, direction)


def assert_close(a, b, tolerance=1e-12) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, equal_nan=False)


@pytest.fixture(scope="module")
def world():
    """A tied model, rows, a direction, and the change that forward mode predicts."""
    with jax.enable_x64(True):
        model = random_model()
        rows, direction = some_rows(5), random_like(model, 5)
        return model, rows, direction, predicted_change(model, direction, rows)


@pytest.fixture(scope="module")
def full():
    """The same for a model with every kind of parameter, scored with weights at a temperature."""
    with jax.enable_x64(True):
        model, rows = random_model(**EVERYTHING), some_rows(5)
        beyond = np.arange(8)[None] >= np.asarray(rows.length)[:, None]
        tokens = np.where(beyond, 11, np.asarray(rows.tokens) % 11)
        tokens[:, 1] = 11  # ids at the limit may stand off the response
        rows = Rows(jnp.asarray(tokens), rows.start, rows.length)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=rows.tokens.shape))
        return model, rows, random_like(model, 5), weights


warm_logps = partial(token_logps, temperature=0.7)


def assert_modes_agree(model, rows, direction, weights) -> None:
    expected = predicted_change(model, direction, rows, weights=weights, logps=warm_logps)
    assert np.abs(expected).max() > 1e-2
    assert_close(reverse_change(model, direction, rows, weights=weights, temperature=0.7), expected)


def test_reverse_mode_gives_the_forward_derivative_of_a_tied_model(world):
    model, rows, direction, expected = world
    assert_close(reverse_change(model, direction, rows), expected)


def test_reverse_mode_gives_the_forward_derivative_for_every_kind_of_parameter(full):
    model, rows, direction, weights = full
    assert_modes_agree(model, rows, direction, weights)


LEAVES = ["embed", "norm", "head", "attn_norm", "q_norm", "k_norm", "q_bias", "o", "o_bias", "down", "down_bias"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_one_parameter_moved_alone_changes_scores_as_forward_mode_says(full, leaf):
    model, rows, direction, weights = full

    def only(path, x):
        return x if leaf in jax.tree_util.keystr(path, simple=True, separator=".").split(".") else np.zeros_like(x)

    alone = jax.tree_util.tree_map_with_path(only, jax.device_get(direction))
    assert sum(bool(np.any(x)) for x in jax.tree.leaves(alone)) == 1
    assert_modes_agree(model, rows, alone, weights)


def test_passes_over_some_rows_and_chunks_of_the_head_change_nothing(world, monkeypatch):
    model, rows, direction, expected = world
    monkeypatch.setattr(directional, "CHUNK", 3)
    directional._slopes.clear_cache()
    found = reverse_change(model, direction, rows, chunk=2, normalise="tok")
    assert_close(found, np.asarray(expected) / np.asarray(rows.response_length()))
    directional._slopes.clear_cache()


@jax.custom_vjp
def one_way(q, k, v, mask):
    """Attention with a reverse rule and no forward rule, as fused kernels have."""
    return attention(q, k, v, mask)


def one_way_forward(q, k, v, mask):
    return jax.vjp(lambda *x: attention(*x, mask), q, k, v)


one_way.defvjp(one_way_forward, lambda pull, cotangent: (*pull(cotangent), None))


def one_way_rows(shape, segments=None):
    causal = jnp.broadcast_to(jnp.tri(shape[1], dtype=bool)[None], (*shape, shape[1]))
    return lambda window: lambda q, k, v: (one_way(q, k, v, causal), None)


def test_attention_without_a_forward_rule_is_no_obstacle(world, monkeypatch):
    model, rows, direction, expected = world
    assert_close(reverse_change(model, direction, rows, attend=one_way_rows), expected)

    def fused_logps(model, rows):
        return token_logps(model, rows)

    monkeypatch.setattr("jaxrl.models.decoder.row_attention", one_way_rows)
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        predicted_change(model, direction, rows, logps=fused_logps)


def test_steps_of_any_scale_lose_nothing(world):
    model, rows, direction, expected = world
    for scale in (1e-30, -1e20):
        assert_close(reverse_change(model, scaled(direction, scale), rows) / scale, expected)
    assert not np.any(reverse_change(model, scaled(direction, 0.0), rows))


@pytest.mark.slow
def test_half_precision_compute_keeps_tiny_differences_of_the_masters(world):
    model, rows, direction, expected = world
    model = with_config(cast(model, jnp.float32), dtype="bfloat16")
    found = reverse_change(model, scaled(direction, 1e-12), rows)
    assert found.dtype == jnp.float32
    assert_close(np.asarray(found) / 1e-12, expected, 0.05)


@pytest.mark.slow
def test_a_difference_of_masters_keeps_what_the_compute_dtype_would_swallow(world):
    model, rows, direction, expected = world
    before, direction = (cast(x, jnp.float32) for x in (model, direction))
    after = jax.tree.map(lambda p, d: p + 1e-5 * d, before, direction)
    change = parameter_change(after, before)
    found = reverse_change(with_config(before, dtype="bfloat16"), change, rows)
    assert_close(np.asarray(found) / 1e-5, expected, 0.05)
    halves = (jax.tree.map(lambda p: p.astype(jnp.bfloat16), x) for x in (after, before))
    rounded = parameter_change(*halves)
    assert {x.dtype for x in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
    assert np.mean([float(jnp.mean(x == 0)) for x in jax.tree.leaves(rounded)]) > 0.9


def test_rows_without_a_response_do_not_change(world):
    model, rows, direction, expected = world
    silent = Rows(rows.tokens, rows.start, rows.length.at[2].set(3))
    assert_close(reverse_change(model, direction, silent), np.where(np.arange(5) == 2, 0, expected))


def test_what_does_not_fit_is_named(world):
    model, rows, direction, _ = world
    with pytest.raises(ValueError, match="there are no rows"):
        reverse_change(model, direction, rows[:0])
    with pytest.raises(ValueError, match="direction: the parameter 'embed' is missing"):
        reverse_change(model, {"norm": model.norm}, rows)
    with pytest.raises(ValueError, match="weights: expected one a token"):
        reverse_change(model, direction, rows, weights=jnp.ones(5))
    with pytest.raises(TypeError, match="expected a Decoder, got dict; use predicted_change"):
        reverse_change({"w": jnp.ones(3)}, direction, rows)
