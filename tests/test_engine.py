"""The slot engine: whatever its layout, it draws what a plain batch draws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compiles
from near_ties import assert_same_up_to_near_ties
from two_processes import run_in_two_processes

from jaxrl import keys
from jaxrl.errors import JaxrlError
from jaxrl.mesh import make_mesh, shard_tree
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model, param_axes, with_config
from jaxrl.models.logps import token_logps
from jaxrl.sampling import programs
from jaxrl.sampling.ahead import compile_engine
from jaxrl.sampling.engine import SlotEngine, SlotSpec
from jaxrl.sampling.generate import as_prompts, generate
from jaxrl.sampling.requests import Request, Sampling
from jaxrl.sampling.rollouts import drawn, sample
from jaxrl.sampling.schedule import Asked, Reserve, bucket, least_part, shapes
from jaxrl.sampling.slots import empty_slots, empty_store
from jaxrl.sampling.strategies import Greedy, Temperature, TopP
from jaxrl.types import STOP_EOS, STOP_LENGTH, STOP_NONE, Rows

# everything that could tell positions or slots apart: windows, grouped heads, q/k norm, a vocabulary limit
CONFIG = ModelConfig(
    family="qwen3", vocab_size=40, vocab_limit=37, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True, windows=(None, 4), max_positions=64, init_std=0.25,
)  # fmt: skip
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 11, 4], [30, 2], [1, 2, 3]]
UIDS = [4, 17, 0, 9, 33]
STOPS = (0, 6)
NEW, N = 40, 4
KEY = keys.root(7)
WARM = Temperature(value=0.9)

# the others run with the slow tests
FAST = ("fewer slots than samples", "prompts copied", "one shape")
LAYOUTS = {
    "fewer slots than samples": SlotSpec(slots=6, chunk=3, admit=2),
    "one chunk at a time": SlotSpec(slots=6, chunk=4, ahead=0),
    "three chunks ahead": SlotSpec(slots=8, chunk=2, admit=1, ahead=3),
    "prompts copied": SlotSpec(slots=6, chunk=3, share=False),
    "all at once": SlotSpec(slots=64, chunk=16),
    "three lengths": SlotSpec(slots=6, chunk=1, admit=1, ahead=0, pools=3),
    "three lengths, prompts copied": SlotSpec(slots=16, chunk=1, ahead=0, pools=3, share=False),
    "one shape": SlotSpec(slots=6, chunk=5, fixed=True),
}


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, keys.root(1))


@pytest.fixture
def double(x64, model):
    return in_double(model)


def in_double(model):
    """The same parameters in double precision."""
    return with_config(jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), model), dtype="float64")


def engine_of(model, spec=None, mesh=None, version=0):
    engine = SlotEngine(spec, mesh)
    engine.load(model, version)
    return engine


def by_engine(model, spec=None, strategy=WARM, *, n=N, mesh=None, prompts=PROMPTS, uids=UIDS, **changes):
    options = {"key": KEY, "max_new_tokens": NEW, "stop_ids": STOPS} | changes
    return sample(engine_of(model, spec, mesh), as_prompts(prompts, uids), strategy, n=n, **options)


def at_once(model, strategy=WARM, *, n=N):
    """The same samples from one batch in one program."""
    options = {"key": KEY, "max_new_tokens": NEW, "stop_ids": STOPS, "uids": UIDS}
    return jax.device_get(generate(model, PROMPTS, strategy, n=n, **options))


def assert_equal(got, want, atol):
    np.testing.assert_array_equal(got.rows.tokens, want.rows.tokens)
    np.testing.assert_array_equal(got.rows.start, want.rows.start)
    np.testing.assert_array_equal(got.rows.length, want.rows.length)
    np.testing.assert_array_equal(got.stop, want.stop)
    np.testing.assert_allclose(got.logps, want.logps, rtol=0, atol=atol)


# ---- what is drawn


@pytest.fixture(scope="module")
def plain(model):
    """What a plain batch draws, in double precision."""
    with jax.enable_x64(True):
        return at_once(in_double(model))


@pytest.mark.x64
@pytest.mark.parametrize("name", [pytest.param(k, marks=[] if k in FAST else [pytest.mark.slow]) for k in LAYOUTS])
def test_every_layout_draws_the_tokens_of_a_plain_batch_in_double_precision(double, plain, name):
    assert {STOP_EOS, STOP_LENGTH} == set(plain.stop.ravel().tolist())
    assert_equal(by_engine(double, LAYOUTS[name]), plain, 1e-12)


@pytest.fixture(scope="module")
def plain_single(model):
    """What a plain batch draws in single precision, by strategy."""
    return functools.cache(lambda strategy: at_once(model, strategy))


FIRST = ("fewer slots than samples", WARM)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        FIRST,
        *(pytest.param(name, WARM, marks=pytest.mark.slow) for name in LAYOUTS if name != FIRST[0]),
        *(pytest.param(FIRST[0], s, marks=pytest.mark.slow) for s in (Greedy(), TopP(p=0.8))),
    ],
    ids=str,
)
def test_in_single_precision_layouts_agree_up_to_near_ties(model, plain_single, name, strategy):
    got = by_engine(model, LAYOUTS[name], strategy)
    same = assert_same_up_to_near_ties(model, strategy, plain_single(strategy), got, key=KEY, uids=UIDS)
    assert same >= 0.8


def test_at_one_shape_order_and_neighbours_change_no_bit(model):
    spec = dataclasses.replace(LAYOUTS["one shape"], share=True)
    whole = by_engine(model, spec)
    order = [3, 0, 4, 2, 1]
    turned = by_engine(model, spec, prompts=[PROMPTS[i] for i in order], uids=[UIDS[i] for i in order])
    crowd = [[20, 21, 22, 23, 24, 25], PROMPTS[2], [3], [8, 8], [9, 9, 9]]
    among = by_engine(model, spec, prompts=crowd, uids=[50, UIDS[2], 51, 52, 53])
    for p, row in enumerate(order):
        assert_equal(jax.tree.map(lambda x, p=p: x[p], turned), jax.tree.map(lambda x, r=row: x[r], whole), 0)
    assert_equal(jax.tree.map(lambda x: x[1], among), jax.tree.map(lambda x: x[2], whole), 0)


def test_a_second_stream_repeats_the_first_bit_for_bit(model):
    spec = LAYOUTS["fewer slots than samples"]
    assert_equal(by_engine(model, spec), by_engine(model, spec), 0)


def test_log_probs_are_the_trainers(model):
    out = by_engine(model, LAYOUTS["fewer slots than samples"])
    rows = Rows(*(jnp.asarray(x) for x in jax.tree.leaves(out.rows))).flat()
    scored = token_logps(model, rows, temperature=WARM.value)
    np.testing.assert_allclose(out.logps.reshape(scored.shape), scored, rtol=0, atol=1e-5)
    assert np.abs(scored).max() > 1


@pytest.mark.slow
@pytest.mark.x64
def test_deep_models_loop_over_their_layers(x64):
    config = dataclasses.replace(CONFIG, num_layers=10, windows=(None, 4) * 5, dtype="float64")
    deep = init_model(config, keys.root(2))
    options = {"key": KEY, "max_new_tokens": 6, "stop_ids": STOPS}
    want = jax.device_get(generate(deep, PROMPTS, WARM, n=2, uids=UIDS, **options))
    assert_equal(by_engine(deep, SlotSpec(slots=4, chunk=2, pools=2), n=2, max_new_tokens=6), want, 1e-12)


@pytest.mark.slow
def test_programs_compiled_ahead_of_time_from_shapes_are_those_of_a_stream(model):
    shapes_ = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    spec = SlotSpec(slots=8, chunk=3)
    made = compile_engine(
        shapes_, spec, prompts=2, width=9, n=4, max_new_tokens=20, stop_ids=STOPS, strategy=Temperature()
    )
    assert set(made) == {"prefill", "decode"}
    weights = programs.weights_of(model)
    store, slots = empty_store(CONFIG, 2, 16, jnp.float32), empty_slots(CONFIG, 8, 24)
    store = made["prefill"](
        weights, store, np.ones((2, 16), np.int32), np.full(2, 9, np.int32), np.arange(2, dtype=np.int32)
    )
    sharing = programs.Sharing(np.zeros((2, 4), np.int32), np.zeros(8, np.int32))
    _, out = made["decode"](weights, slots, store, sharing, Temperature(), np.asarray(STOPS, np.int32), np.int32(1))
    assert out.token.shape == (8, 3)
    assert not out.count.any()  # no row is live


@pytest.mark.x64
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("share", [True, False])
def test_on_a_mesh_tokens_are_the_same_in_double_precision(double, plain, shape, share):
    mesh = make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])
    sharded = shard_tree(mesh, param_axes(double.config), double)
    assert_equal(by_engine(sharded, SlotSpec(slots=8, chunk=4, share=share), mesh=mesh), plain, 1e-12)


PROCESS = """
import numpy as np
from test_engine import CONFIG, by_engine
from jaxrl import keys
from jaxrl.mesh import make_mesh, shard_tree, to_host
from jaxrl.models.decoder import init_model, param_axes
from jaxrl.sampling.engine import SlotSpec
model = to_host(init_model(CONFIG, keys.root(1)))
mesh = make_mesh(2, 2, 1)
out = by_engine(shard_tree(mesh, param_axes(CONFIG), model), SlotSpec(slots=8, chunk=4), mesh=mesh)
np.savez(sys.argv[2], *jax.tree.leaves(out))
"""


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(model, tmp_path):
    one = at_once(model)
    for name in run_in_two_processes(PROCESS, tmp_path):
        with np.load(f"{name}.npz") as file:
            got = jax.tree.unflatten(jax.tree.structure(one), [file[name] for name in file.files])
        assert assert_same_up_to_near_ties(model, WARM, one, got, key=KEY, uids=UIDS) >= 0.8


# ---- streams


def test_samples_stream_out_as_they_end_each_once_with_the_version_of_its_parameters(model):
    engine = engine_of(model, LAYOUTS["fewer slots than samples"], version=12)
    requests = [Request(u, np.asarray(p, np.int32), N, NEW) for p, u in zip(PROMPTS, UIDS, strict=True)]
    steps = []
    for found in engine.stream(requests, Sampling(WARM, STOPS, KEY)):
        assert found.version == 12
        assert found.processed
        assert len(found.tokens) == len(found.logps)
        steps.append((found.uid, found.index, len(found.tokens)))
    assert sorted(s[:2] for s in steps) == sorted((u, g) for u in UIDS for g in range(N))
    assert steps[-1][2] > steps[0][2]  # the first did not wait for the last


def test_later_samples_and_split_requests_are_those_of_one_request(model):
    spec = LAYOUTS["one shape"]
    whole = by_engine(model, spec)
    requests = [
        Request(u, np.asarray(p, np.int32), 1, NEW, first=g) for g in (3, 1) for p, u in zip(PROMPTS, UIDS, strict=True)
    ]
    found = {(s.uid, s.index): s for s in engine_of(model, spec).stream(requests, Sampling(WARM, STOPS, KEY))}
    assert set(found) == {(u, g) for u in UIDS for g in (1, 3)}
    for (u, g), s in found.items():
        p = UIDS.index(u)
        tokens = whole.rows.tokens[p, g, whole.rows.start[p, g] : whole.rows.length[p, g]]
        shared = min(len(tokens), len(s.tokens), 4)
        np.testing.assert_array_equal(tokens[:shared], s.tokens[:shared])


def test_each_request_has_its_own_length(model):
    limits = [1, 2, 7, 40, 1]
    requests = [Request(u, np.asarray(p, np.int32), 3, m) for p, u, m in zip(PROMPTS, UIDS, limits, strict=True)]
    found = list(engine_of(model, SlotSpec(slots=4, chunk=3)).stream(requests, Sampling(WARM, (39,), KEY)))
    assert sorted((s.uid, len(s.tokens), s.stop) for s in found) == sorted(
        (u, m, STOP_LENGTH) for u, m in zip(UIDS, limits, strict=True) for _ in range(3)
    )


def test_prompts_that_are_not_chosen_stay_without_a_response(model):
    out = by_engine(model, chosen=[3, 1])
    assert (out.stop[[0, 2, 4]] == STOP_NONE).all()
    assert (out.rows.length == out.rows.start)[[0, 2, 4]].all()
    assert (out.stop[[1, 3]] != STOP_NONE).all()


@pytest.mark.slow
def test_a_stop_id_as_first_token_makes_a_response_of_one_token(model):
    first = int(by_engine(model, strategy=Greedy(), n=1).rows.tokens[0, 0, 3])
    out = by_engine(model, strategy=Greedy(), n=2, stop_ids=(first, 39))
    assert (out.rows.length - out.rows.start)[0].tolist() == [1, 1]
    assert (out.stop[0] == STOP_EOS).all()


# ---- compiles


def test_within_its_buckets_nothing_is_compiled_again(model):
    engine = engine_of(model, SlotSpec(slots=8, chunk=3))
    engine.reserve(prompts=5, width=16, max_new=20)
    prompts = as_prompts([[1] * 9, [2] * 3], [0, 1])
    options = {"n": 4, "key": KEY, "max_new_tokens": 20}

    def run(prompts, strategy, **changes):
        return sample(engine, prompts, strategy, **(options | {"stop_ids": STOPS} | changes))

    run(as_prompts(PROMPTS, UIDS), Temperature(value=1.0))
    run(prompts, Temperature(value=1.0))
    other = jax.tree.map(lambda x: x * 1.1, model)
    with count_compiles() as compiled:
        run(as_prompts(PROMPTS, UIDS), Temperature(value=0.5))
        run(prompts, Temperature(value=3.0), stop_ids=(2, 3), max_new_tokens=11)
        run(as_prompts([[3] * 16], [8]), Temperature(value=1.5), step=4)
        engine.load(other, 1)
        run(as_prompts(PROMPTS, UIDS), Temperature(value=0.7))
    assert compiled == []


@pytest.mark.parametrize("total", [1, 3, 64, 100])
def test_parts_and_buckets_are_few_and_hold_what_they_must(total):
    sizes = {least_part(total, count, 2) for count in range(1, total + 1)}
    assert len(sizes) <= 1 + np.ceil(np.log2(total))
    assert all(least_part(total, count, 2) >= count for count in range(1, total + 1))
    assert all(n <= bucket(n) <= max(16, 1.5 * n) for n in range(1, 3000))
    assert len({bucket(n) for n in range(1, 3000)}) == 16


@pytest.mark.parametrize(
    ("samples", "slots", "filled"),
    [([128] + [1] * 499, 128, 128), ([256] * 16, 128, 128), ([16] * 4, 64, 64), ([1000], 64, 64), ([8] * 32, 64, 64)],
)
def test_as_many_prompts_are_stored_as_it_takes_to_fill_the_slots(samples, slots, filled):
    asked = [Asked(p, np.zeros(5, np.int32), [(g, 30) for g in range(n)]) for p, n in enumerate(samples)]
    size = shapes(asked, SlotSpec(slots=slots), Reserve())
    if not size.share:
        assert size.slots >= filled
        return
    rows = sorted((min(n, size.group) for n in samples), reverse=True)[: size.prompts]
    assert sum(rows) >= filled
    assert size.prompts * size.group <= 4 * slots  # what a step's shared attention is padded to


def test_shapes_depend_on_the_reserve_not_on_how_many_prompts_are_left():
    def sizes(prompts):
        asked = [Asked(p, np.zeros(10 + p, np.int32), [(g, 30) for g in range(4)]) for p in range(prompts)]
        return shapes(asked, SlotSpec(slots=32), Reserve(prompts=8, width=20, max_new=50))

    assert sizes(1) == sizes(3) == sizes(8)


# ---- what cannot be sampled


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(3, np.zeros(0, np.int32), 1, 4), r"request 0 \(uid 3\): expected a prompt of at least one token"),
        (Request(3, np.ones(60, np.int32), 1, 5), r"60 prompt tokens and max_new 5 exceed the model's context of 64"),
        (Request(3, np.ones(2, np.int32), 0, 5), r"expected n >= 1, max_new >= 1, first >= 0; got 0, 5, 0"),
        (Request(3, np.ones(2, np.int32), 1, 0), r"expected n >= 1, max_new >= 1, first >= 0; got 1, 0, 0"),
        (Request(-1, np.ones(2, np.int32), 1, 5), r"expected a uid from 0 to"),
        (Request(3, np.full(2, 40, np.int32), 1, 5), r"id 40 is outside the vocabulary of 40"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_named_before_anything_runs(model, request_, message):
    with pytest.raises(ValueError, match=message):
        engine_of(model).stream([request_], Sampling(WARM, STOPS, KEY))


def test_a_sample_asked_for_twice_no_stop_ids_and_a_sleeping_engine_are_refused(model):
    one = Request(3, np.ones(2, np.int32), 2, 5)
    with pytest.raises(ValueError, match=r"request 1 \(uid 3\): samples 1..2 overlap 0..1"):
        engine_of(model).stream([one, dataclasses.replace(one, first=1)], Sampling(WARM, STOPS, KEY))
    with pytest.raises(ValueError, match="stop_ids: expected at least one id"):
        engine_of(model).stream([one], Sampling(WARM, (), KEY))
    engine = engine_of(model)
    engine.sleep()
    with pytest.raises(RuntimeError, match="call load"):
        engine.stream([one], Sampling(WARM, STOPS, KEY))
    engine.wake()
    assert len(list(engine.stream([one], Sampling(WARM, STOPS, KEY)))) == 2
    with pytest.raises(ValueError, match=r"rollout.engine.slots: expected at least 1, got 0"):
        SlotSpec(slots=0)
    with pytest.raises(ValueError, match=r"rollout.engine.fixed: a fixed layout has one pool"):
        SlotSpec(fixed=True, pools=2)


def test_parameters_that_are_not_finite_are_an_error_that_names_the_sample_and_the_version(model):
    broken = jax.tree.map(lambda x: x, model)
    broken.norm[...] = broken.norm[...] * jnp.nan
    requests = [Request(3, np.ones(2, np.int32), 2, 5)]
    for strategy in (WARM, Greedy(), TopP(p=0.5)):
        stream = engine_of(broken, version=7).stream(requests, Sampling(strategy, STOPS, KEY))
        with pytest.raises(JaxrlError, match=r"of prompt 3: .*response token 0 is not finite.*version 7"):
            list(stream)


def test_keys_and_prompts_of_another_kind_are_refused(model):
    one = Request(3, np.ones(2, np.int32), 2, 5)
    with pytest.raises(ValueError, match=r"key: expected a threefry key"):
        engine_of(model).stream([one], Sampling(WARM, STOPS, jax.random.key(0, impl="rbg")))
    for wrong in (np.array([1.7]), np.ones((1, 2), np.int32)):
        with pytest.raises(ValueError, match=r"request 0 \(uid 3\): expected a prompt of token ids"):
            engine_of(model).stream([dataclasses.replace(one, prompt=wrong)], Sampling(WARM, STOPS, KEY))
    with pytest.raises(ValueError, match="first >= 0"):
        engine_of(model).stream([dataclasses.replace(one, first=2**31 - 1)], Sampling(WARM, STOPS, KEY))


def test_nothing_to_sample_is_no_error(model):
    assert list(engine_of(model).stream([], Sampling(WARM, STOPS, KEY))) == []
    assert (
        list(
            drawn(
                engine_of(model), as_prompts(PROMPTS), WARM, n=1, chosen=[], key=KEY, max_new_tokens=2, stop_ids=STOPS
            )
        )
        == []
    )
