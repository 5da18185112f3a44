"""Attention by platform: every implementation that runs here against plain sums, merging, and which one is taken."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import FULL, PLAIN, every_row, largest, some_model
from tolerances import SAME

from jaxrl.influence.gradients import one_gradient, predicted_change, scores
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.mesh import make_mesh, partition, to_mesh
from jaxrl.models import attention, decoder
from jaxrl.models.attention import (
    choose_decode,
    choose_rows,
    decode_attention,
    merge,
    prefix_attention,
    row_attention,
    write_token,
)
from jaxrl.models.decoder import abstract_model, hidden, with_config
from jaxrl.models.layers import attention as plain
from jaxrl.models.ragged import ragged_attention, tile_at

E, SLOTS = 8, 12
SLOW = pytest.mark.slow
HEADS = ((6, 2), (4, 4), (4, 1))  # query and key-value heads
LENGTH = np.array([0, 1, 5, 12, 7, 9], np.int32)
FIRST = np.array([0, 0, 2, 3, 7, 8], np.int32)  # rows 0 and 4 see nothing


@pytest.fixture
def interpreted(monkeypatch):
    """TPU kernels run in Pallas's interpreter."""
    monkeypatch.setattr(attention, "INTERPRET", True)


# one program each: outside of jit every operation is compiled apart
decode = jax.jit(decode_attention, static_argnames="implementation")
joined = jax.jit(merge)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def softmax_sum(q, keys, values):
    """One query against a list of keys, in float64: the mixture of values and the log-sum-exp of the scores."""
    scores = np.asarray(keys, np.float64) @ np.asarray(q, np.float64) / np.sqrt(len(q))
    if not len(scores):
        return np.zeros(values.shape[1]), -np.inf
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ np.asarray(values, np.float64), scores.max() + np.log(weights.sum())


def decode_oracle(q, k, v, length, first):
    share = q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    for b, h in np.ndindex(*q.shape[:2]):
        seen, g = slice(first[b], max(length[b], first[b])), h // share
        out[b, h], lse[b, h] = softmax_sum(q[b, h], k[b, g].T[seen], v[b, g][seen])
    return out, lse


def rows_oracle(q, k, v, segments, window):
    share, out = q.shape[2] // k.shape[2], np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        g = h // share
        seen = [s for s in range(t + 1) if window is None or t - s < window]
        seen = [s for s in seen if segments is None or segments[b, s] == segments[b, t]]
        out[b, t, h] = softmax_sum(q[b, t, h], k[b, seen, g], v[b, seen, g])[0]
    return out


def cached(heads, groups, rows=6, slots=SLOTS, dtype=jnp.float32):
    return (
        normal(0, rows, heads, E, dtype=dtype),
        normal(1, rows, groups, E, slots, dtype=dtype),
        normal(2, rows, groups, slots, E, dtype=dtype),
    )


def assert_parts_equal(found, expected, atol=SAME["float32"]):
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=atol)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=atol)  # minus infinity equals itself


# ---------------------------------------------------------------- one token a row


DECODE_CASES = [
    *[("xla", heads) for heads in HEADS],
    ("pallas", HEADS[0]),
    ("jax", HEADS[0]),
    *[pytest.param(name, heads, marks=SLOW) for name in ("pallas", "jax") for heads in HEADS[1:]],
]


@pytest.mark.parametrize(("name", "heads"), DECODE_CASES)
def test_decoding_equals_plain_sums_and_a_row_that_sees_nothing_gives_zero(name, heads, interpreted):
    q, k, v = cached(*heads)
    for first in (FIRST * 0, FIRST) if name != "jax" else (FIRST * 0,):
        given = None if name == "jax" else first
        found = decode(q, k, v, LENGTH, first=given, implementation=name)
        expected = decode_oracle(*map(np.asarray, (q, k, v)), LENGTH, first)
        assert np.isneginf(expected[1]).any()
        assert_parts_equal(found, expected)


@pytest.mark.parametrize("name", ["xla", "jax", pytest.param("pallas", marks=SLOW)])
def test_a_length_beyond_the_cache_is_the_whole_cache(name, interpreted):
    q, k, v = cached(*HEADS[0])
    whole = decode_oracle(*map(np.asarray, (q, k, v)), LENGTH * 0 + SLOTS, FIRST * 0)
    given = None if name == "jax" else FIRST * 0
    assert_parts_equal(decode(q, k, v, LENGTH * 0 + SLOTS + 5, first=given, implementation=name), whole)
    if name != "jax":
        beyond = decode(q, k, v, LENGTH * 0 + SLOTS + 5, first=FIRST * 0 + SLOTS + 3, implementation=name)
        assert np.isneginf(beyond[1]).all()
        assert not np.asarray(beyond[0]).any()


@pytest.mark.parametrize("name", ["xla", pytest.param("pallas", marks=SLOW)])
def test_decoding_in_half_precision_accumulates_in_float32(name, interpreted):
    q, k, v = cached(6, 2, dtype=jnp.bfloat16)
    found = decode(q, k, v, jnp.asarray(LENGTH), implementation=name)
    exact = decode_oracle(*(np.asarray(x, np.float64) for x in (q, k, v)), LENGTH, np.zeros_like(LENGTH))
    assert all(x.dtype == jnp.float32 for x in found)
    np.testing.assert_allclose(found[1], exact[1], rtol=0, atol=1e-5)  # bfloat16 sums would be off by 0.01
    np.testing.assert_allclose(found[0], exact[0], rtol=0, atol=2e-2)


def test_a_row_fetches_the_tiles_with_something_to_see_and_no_other():
    for low, high in ((0, 4), (4, 12), (9, 16), (5, 6), (0, 16)):
        at = [int(tile_at(j, np.int32(low), np.int32(high), 4)) for j in range(4)]
        seen = [j for j in range(4) if 4 * j < high and 4 * (j + 1) > low]
        assert sorted(set(at)) == seen  # a tile that is there already is not fetched again
        assert [at[j] for j in seen] == seen
        assert at == sorted(at)
    assert {int(tile_at(j, np.int32(0), np.int32(0), 4)) for j in range(4)} == {0}


def test_what_lies_in_tiles_with_nothing_to_see_changes_nothing():
    q, k, v = cached(4, 2, rows=3, slots=16)
    length, first = jnp.asarray([4, 12, 16], jnp.int32), jnp.asarray([0, 4, 9], jnp.int32)
    spoilt = np.arange(4)[None, :] * 4  # tiles of 4 slots
    unseen = (spoilt >= np.asarray(length)[:, None]) | (spoilt + 4 <= np.asarray(first)[:, None])
    slot = np.repeat(unseen, 4, axis=1)
    bad_k = np.where(slot[:, None, None], np.float32("nan"), k)
    bad_v = np.where(slot[:, None, :, None], np.float32("nan"), v)
    run = jax.jit(partial(ragged_attention, interpret=True, tile=4))
    clean = run(q, k, v, length, first)
    assert_parts_equal(run(q, bad_k, bad_v, length, first), clean, atol=0)
    assert_parts_equal(clean, decode(q, k, v, length, first=first, implementation="xla"))


@pytest.mark.parametrize("heads", [HEADS[0], *[pytest.param(heads, marks=SLOW) for heads in HEADS[1:]]])
def test_queries_of_one_stored_prompt_attend_as_each_would_alone(heads):
    _, k, v = cached(*heads)
    m = 3
    q = normal(5, len(LENGTH), m, heads[0], E)
    first = np.stack([FIRST, FIRST * 0, FIRST + 1], axis=1)
    for given in (None, first):
        out, lse = map(np.asarray, jax.jit(prefix_attention)(q, k, v, LENGTH, first=given))
        for j in range(m):
            one = None if given is None else given[:, j]
            assert_parts_equal((out[:, j], lse[:, j]), decode(np.asarray(q)[:, j], k, v, LENGTH, first=one))


def test_keys_split_in_two_at_any_point_merge_to_the_whole():
    cuts = np.arange(SLOTS + 1, dtype=np.int32)
    q, k, v = (np.repeat(np.asarray(x)[:1], len(cuts), axis=0) for x in cached(4, 2))
    whole = np.full_like(cuts, SLOTS)
    left, right = decode(q, k, v, cuts, first=whole * 0), decode(q, k, v, whole, first=cuts)
    expected = decode(q, k, v, whole, first=whole * 0)[0]
    np.testing.assert_allclose(joined(*left, *right), expected, rtol=0, atol=SAME["float32"])
    np.testing.assert_allclose(joined(*right, *left), expected, rtol=0, atol=SAME["float32"])


def test_merging_with_an_empty_part_changes_nothing_and_two_empty_parts_give_zero():
    out, lse = np.asarray(normal(0, 5, 4, E)), np.asarray(normal(1, 5, 4)) * 80
    empty = np.zeros_like(out), np.full_like(lse, -np.inf)
    assert np.array_equal(joined(out, lse, *empty), out)
    assert np.array_equal(joined(*empty, out, lse), out)
    assert np.array_equal(joined(*empty, *empty), empty[0])


def test_rows_that_see_nothing_have_gradients_that_are_numbers():
    q, k, v = cached(4, 2)
    length = jnp.asarray(LENGTH)

    def total(q, k, v):
        parts = [decode_attention(q, k, v, n, first=jnp.asarray(FIRST)) for n in (length, length - 1)]
        return jnp.sum(merge(*parts[0], *parts[1]))

    assert all(np.isfinite(g).all() for g in jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v))
    q, k, v = normal(0, 2, 3, 4, E), normal(1, 2, 3, 2, E), normal(2, 2, 3, 2, E)
    seen = np.stack([np.ones((3, 3), bool), np.zeros((3, 3), bool)])
    value, grads = jax.jit(jax.value_and_grad(lambda *qkv: jnp.sum(plain(*qkv, seen)[1]), (0, 1, 2)))(q, k, v)
    assert value == 0
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", ["xla", "pallas"])
@pytest.mark.parametrize("mesh", [None, pytest.param((2, 2, 2), marks=SLOW)])
def test_tokens_are_written_at_their_slots_of_their_layer_and_read_there(name, mesh, interpreted):
    depth, rows, groups, slots, layer = 3, 4, 2, 256, 1
    new_k, new_v = normal(0, rows, groups, E), normal(1, rows, groups, E)
    k, v = normal(2, depth, rows, groups, E, slots), normal(3, depth, rows, groups, slots, E)
    slot = np.array([0, 130, 255, 256], np.int32)  # the last lies outside and is dropped
    expected_k, expected_v = np.array(k), np.array(v)
    for b in range(3):
        expected_k[layer, b, :, :, slot[b]], expected_v[layer, b, :, slot[b]] = new_k[b], new_v[b]

    @jax.jit
    def step(q, new_k, new_v, k, v, slot):
        k, v = write_token(new_k, new_v, k, v, slot, layer=layer, implementation=name)
        return k, v, decode_attention(q, k, v, slot + 1, layer=layer, implementation=name)

    given = normal(4, rows, 4, E), new_k, new_v, k, v, slot
    if mesh is not None:
        place = [("rows", "heads"), *[("rows", "kv_heads")] * 2, *[(None, "rows", "kv_heads")] * 2, ("rows",)]
        given = [to_mesh(make_mesh(*mesh), x, axes) for x, axes in zip(given, place, strict=True)]
    found_k, found_v, found = step(*given)
    assert np.array_equal(found_k, expected_k)
    assert np.array_equal(found_v, expected_v)
    alone = decode_oracle(np.asarray(given[0]), expected_k[layer], expected_v[layer], slot + 1, slot * 0)
    assert_parts_equal(found, alone)
    if mesh is not None and name == "pallas":
        assert found_k.sharding.spec == jax.sharding.PartitionSpec(None, ("data", "fsdp"), "tensor")


# ---------------------------------------------------------------- whole rows

SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]], np.int32)
ROW_CASES = [(HEADS[0], None, None), (HEADS[1], SEGMENTS, None), (HEADS[2], None, 3), (HEADS[0], SEGMENTS, 4)]


def rows_of(heads, groups, width=SEGMENTS.shape[1], dtype=jnp.float32):
    return (
        normal(0, 2, width, heads, E, dtype=dtype),
        normal(1, 2, width, groups, E, dtype=dtype),
        normal(2, 2, width, groups, E, dtype=dtype),
    )


def check_against_plain_sums(name, heads, segments, window):
    """An implementation and ``xla`` against plain sums, and the gradients of one against those of the other."""
    q, k, v = rows_of(*heads)
    given = None if segments is None else jnp.asarray(segments)
    weight = normal(3, *q.shape)

    def total(name):
        def run(*qkv):
            return row_attention(*qkv, segments=given, window=window, implementation=name)

        return jax.value_and_grad(lambda *qkv: (jnp.sum((out := run(*qkv)) * weight), out), (0, 1, 2), has_aux=True)

    expected = rows_oracle(*map(np.asarray, (q, k, v)), segments, window)
    ((_, out), grads), ((_, plainly), plain_grads) = (jax.jit(total(n))(q, k, v) for n in (name, "xla"))
    np.testing.assert_allclose(out, expected, rtol=0, atol=SAME["float32"])
    np.testing.assert_allclose(plainly, expected, rtol=0, atol=SAME["float32"])
    for found, wanted in zip(grads, plain_grads, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=SAME["float32"])


def test_whole_rows_with_segments_and_a_window_equal_plain_sums():
    check_against_plain_sums("jax", *ROW_CASES[-1])


@SLOW
@pytest.mark.parametrize(("heads", "segments", "window"), ROW_CASES[:-1])
def test_whole_rows_equal_plain_sums(heads, segments, window):
    check_against_plain_sums("jax", heads, segments, window)


@SLOW
@pytest.mark.parametrize(("heads", "segments", "window"), ROW_CASES)
def test_splash_equals_plain_sums(heads, segments, window, interpreted):
    check_against_plain_sums("splash", heads, segments, window)


@SLOW
def test_splash_on_rows_of_several_blocks(interpreted):
    q, k, v = rows_of(4, 2, width=300)
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 300)), axis=1), jnp.int32)
    for window in (None, 150):
        found, expected = (
            row_attention(q, k, v, segments=segments, window=window, implementation=name) for name in ("splash", "xla")
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=SAME["float32"])


@SLOW
def test_a_decoder_gives_the_same_gradients_with_splash_and_without(interpreted):
    model = some_model(dataclasses.replace(FULL, windows=(None, 3), remat="full"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, SEGMENTS.shape[1])), jnp.int32)
    segments = jnp.asarray(SEGMENTS)

    @jax.jit
    def grads(model):
        return jax.grad(lambda m: jnp.sum(jnp.sin(hidden(m, tokens, segments=segments))))(model)

    found = grads(with_config(model, attention="splash"))
    assert found.config.attention == "splash"
    assert largest(found, grads(model)) < 1e-4  # two layers, gradients up to 20


def test_kernels_take_a_window_that_is_a_number_and_decoders_cut_their_layers_where_it_changes():
    q, k, v = rows_of(4, 2)
    with pytest.raises(ValueError, match="splash needs a window that is a number"):
        row_attention(q, k, v, window=jnp.int32(3), implementation="splash")
    found = []

    def cut(model):
        found.extend(window for _, window in decoder._runs(model))
        return [layers.q[...] for layers, _ in decoder._runs(model)]

    config = dataclasses.replace(PLAIN, num_layers=5, windows=(None, None, 4, 4, None))
    assert [x.shape[0] for x in jax.eval_shape(cut, abstract_model(config))] == [2, 2, 1]
    assert found == [None, 4, None]
    assert decoder._runs(abstract_model(dataclasses.replace(PLAIN, windows=(4, 4))))[0][1] == 4


def test_row_scores_attend_plainly_whatever_the_model_is_set_to():
    """Fused kernels have no forward mode."""
    model, rows = with_config(abstract_model(PLAIN), attention="splash"), every_row(4)
    weights = np.ones(rows.tokens.shape, np.float32)

    def traced(f):
        return str(jax.make_jaxpr(f)(model))

    assert "pallas_call" in traced(lambda m: hidden(m, rows.tokens))
    assert "pallas_call" not in traced(lambda m: scores(m, rows, weights))
    assert "pallas_call" not in traced(lambda m: one_gradient(m, rows[0], weights[0]))


@SLOW
def test_kernels_and_predictions_are_those_of_plain_attention():
    """A model set to a kernel that this platform does not run."""
    model, rows = some_model(PLAIN), every_row(3)[np.asarray([1, 4])]
    fused = with_config(model, attention="splash")
    assert jnp.array_equal(predicted_change(fused, fused, rows), predicted_change(model, model, rows))
    for method in ("columns", "streamed"):
        found, expected = (gradient_kernel(m, rows, rows, method=method).values for m in (fused, model))
        np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------- which one is taken


class Nvidia:
    platform_version = "cuda 13000"


@pytest.mark.parametrize(
    ("backend", "dtype", "rows", "decode"),
    [
        ("cpu", "bfloat16", "xla", "xla"),
        ("gpu", "bfloat16", "cudnn", "xla"),
        ("gpu", "float16", "cudnn", "xla"),
        ("gpu", "float32", "xla", "xla"),
        ("tpu", "bfloat16", "splash", "pallas"),
        ("tpu", "float32", "splash", "pallas"),
        ("tpu", "float64", "xla", "xla"),
    ],
)
def test_auto_takes_the_fused_kernel_of_the_platform_for_the_dtypes_it_takes(monkeypatch, backend, dtype, rows, decode):
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"client": Nvidia})])
    assert choose_rows("auto", dtype, 64, backend).name == rows
    assert choose_decode("auto", dtype, 1024, backend).name == decode
    assert choose_rows("auto", dtype, 64, backend).reason
    for name in ("xla", "cudnn"):
        assert choose_rows(name, dtype, 64, backend) == choose_decode(name, dtype, 1024, backend) == (name, "asked for")


def test_auto_falls_back_where_a_kernel_has_no_shape_for_it(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"client": Nvidia})])
    assert "head_dim" in choose_rows("auto", "bfloat16", 100, "gpu").reason
    monkeypatch.setattr(Nvidia, "platform_version", "rocm 7")
    assert "NVIDIA" in choose_rows("auto", "bfloat16", 64, "gpu").reason
    assert choose_decode("auto", "bfloat16", 100, "tpu").name == "pallas"
    assert "multiple of 128" in choose_decode("auto", "bfloat16", 1000, "tpu").reason


def test_names_and_arguments_that_cannot_be_are_refused():
    q, k, v = rows_of(4, 2)
    one = cached(4, 2)
    length = jnp.asarray(LENGTH)
    with pytest.raises(ValueError, match=r"attention: did you mean 'splash'"):
        row_attention(q, k, v, implementation="splas")
    with pytest.raises(ValueError, match=r"attention: expected one of: auto, xla, jax, cudnn, pallas, got 'flash'"):
        decode_attention(*one, length, implementation="flash")
    with pytest.raises(ValueError, match="cudnn takes bfloat16 and float16, got float32"):
        row_attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="cudnn decodes without sliding windows"):
        decode_attention(*one, length, first=length, implementation="cudnn")
    with pytest.raises(ValueError, match="a cache of 600 slots"):
        decode_attention(*cached(4, 2, slots=600), length, implementation="pallas")
    with pytest.raises(ValueError, match=r"model\.attention: expected one of auto, xla, cudnn, splash, got 'flash'"):
        dataclasses.replace(PLAIN, attention="flash")


def test_kernels_refuse_double_precision(x64):
    q, k, v = rows_of(4, 2, dtype=jnp.float64)
    with pytest.raises(ValueError, match="splash computes in float32"):
        row_attention(q, k, v, implementation="splash")
    with pytest.raises(ValueError, match="pallas computes in float32"):
        decode_attention(*cached(4, 2, dtype=jnp.float64), jnp.asarray(LENGTH), implementation="pallas")


# ---------------------------------------------------------------- other machines


@SLOW
@pytest.mark.parametrize("groups", [2, 1])
def test_kernels_run_on_each_devices_part_of_a_mesh(groups, interpreted):
    """Rows over ``data`` and ``fsdp``, heads over ``tensor`` where it divides the key-value heads."""
    q, k, v = cached(4, groups, rows=4)
    length = jnp.asarray(LENGTH[:4])
    expected = decode(q, k, v, length, implementation="xla")
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    found = decode(*to_mesh(mesh, (q, k, v, length)), implementation="pallas")
    assert_parts_equal(found, expected)
    assert found[0].sharding.spec[0] == ("data", "fsdp")
    assert len(found[0].sharding.device_set) == 8


def test_what_is_asked_of_cudnn(monkeypatch):
    """Lowered for CUDA without one: the kernel, its masks and its window."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    q, k, v = rows_of(6, 2, dtype=jnp.bfloat16)

    def lowered(f, *args):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    def loss(q, k, v, segments, window):
        out = row_attention(q, k, v, segments=segments, window=window, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    text = lowered(jax.grad(lambda q, k, v, s: loss(q, k, v, s, 4), (0, 1, 2)), q, k, v, jnp.asarray(SEGMENTS))
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
    assert r"\22mask_type\22: \22CAUSAL\22" in text
    assert r"\22sliding_window_length\22: 4" in text
    assert "2x12x6x8" in text  # eleven tokens and one of padding: a mask needs an even number
    text = lowered(lambda q, k, v: loss(q, k, v, None, None), q, k, v)
    assert "__cudnn$fmhaSoftmax" in text
    text = lowered(
        lambda *args: decode_attention(*args, implementation="cudnn"), *cached(6, 2, dtype=jnp.bfloat16), LENGTH
    )
    assert r"\22mask_type\22: \22PADDING\22" in text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs an NVIDIA GPU, and there is none")
def test_cudnn_equals_xla():
    for heads, segments, window in ROW_CASES:
        q, k, v = rows_of(*heads, dtype=jnp.bfloat16)
        given = None if segments is None else jnp.asarray(segments)
        found, expected = (
            row_attention(q, k, v, segments=given, window=window, implementation=name).astype(jnp.float32)
            for name in ("cudnn", "xla")
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-2)
        q, k, v = cached(*heads, dtype=jnp.bfloat16)
        found, expected = (
            decode_attention(q, k, v, jnp.asarray(LENGTH), implementation=name) for name in ("cudnn", "xla")
        )
        assert_parts_equal(found, expected, atol=3e-2)


@SLOW
def test_tpu_kernels_compile_for_a_tpu_that_is_not_there():
    pytest.importorskip("libtpu", reason="needs libtpu (the tpu extra), no TPU")
    from jaxrl.plan import topology_mesh

    mesh = topology_mesh("v5e:2x2", data=1, fsdp=2, tensor=2)

    def array(*shape, dtype=jnp.bfloat16, axes=()):
        split = partition(mesh, (*axes, *(None,) * (len(shape) - len(axes))), shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, split))

    def compiled(f, *args, **options):
        return jax.jit(f, **options).lower(*args).compile()

    rows = array(4, 200, 4, 64), array(4, 200, 2, 64), array(4, 200, 2, 64), array(4, 200, dtype=jnp.int32)

    def loss(q, k, v, segments):
        out = row_attention(q, k, v, segments=segments, window=100)  # auto: the arrays say where they are
        return jnp.sum(out.astype(jnp.float32))

    text = compiled(jax.grad(loss, (0, 1, 2)), *rows).as_text()
    assert text.count("tpu_custom_call") >= 3  # forward, and backward for the queries and for keys and values
    one = array(8, 4, 64), array(8, 2, 64, 640), array(8, 2, 640, 64), array(8, dtype=jnp.int32)
    assert "tpu_custom_call" in compiled(decode_attention, *one).as_text()

    def layers(q, new_k, new_v, k, v, slot):
        def one(layer, carry):
            q, k, v = carry
            k, v = write_token(new_k, new_v, k, v, slot, layer=layer)
            return decode_attention(q, k, v, slot + 1, layer=layer)[0].astype(q.dtype), k, v

        return jax.lax.fori_loop(0, 8, one, (q, k, v))

    one = array(8, 4, 128), array(8, 2, 128), array(8, 2, 128)
    axes = (None, "rows", "kv_heads")
    cache = array(8, 8, 2, 128, 1024, axes=axes), array(8, 8, 2, 1024, 128, axes=axes)
    program = compiled(layers, *one, *cache, array(8, dtype=jnp.int32), donate_argnums=(3, 4))
    held = program.memory_analysis()
    assert program.as_text().count("tpu_custom_call") == 2
    held_by_one = 2 * 2 * 8 * 8 * 2 * 1024 * 128 // 4  # bytes of both caches on one of four devices
    assert held.alias_size_in_bytes == held_by_one  # they stay where they are,
    assert held.temp_size_in_bytes < held_by_one // 32  # and no part of a layer is copied
