"""The streamed kernel equals the definition on every kind of model, row, weight and metric, however it is cut up."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import VOCAB, along, flat, gradient_matrix, row_scores, small_model, some_rows

from jaxrl.influence import tiling
from jaxrl.influence.cost import ghost_leaves, row_bytes, tiles
from jaxrl.influence.gradients import leaf_names, one_gradient, row_weights
from jaxrl.influence.kernels import _block_index, compiled_kernel, gradient_kernel
from jaxrl.influence.slopes import fit_slope
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import abstract_model, cast, init_model, with_config
from jaxrl.models.packing import pack, unpack
from jaxrl.types import Rows

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
N, M = 6, 5
MANY = 300  # a vocabulary of which few tokens occur, as in real models: their entries alone are multiplied


def rows_of_two_widths() -> tuple[Rows, Rows]:
    return some_rows(N), some_rows(M, seed=1, width=11)


def assert_near(found, expected, tolerance=1e-12) -> None:
    """Relative Frobenius norm of the difference."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.all(np.isfinite(found))
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def assert_all_methods_agree(model, a, b, methods=("streamed", "ghost", "chunked", "columns"), **options) -> None:
    """Every method gives the kernel, norms and parts of ``reference``."""
    expected = gradient_kernel(model, a, b, method="reference", blocks="leaf", **options)
    for method in methods:
        if method == "ghost" and options.get("precondition") is not None:
            continue
        kernel = gradient_kernel(model, a, b, method=method, blocks="leaf", **options)
        assert_near(kernel.values, expected.values)
        assert_near(kernel.sq_norms_a, expected.sq_norms_a)
        assert_near(kernel.sq_norms_b, expected.sq_norms_b)
        assert_near(sum(kernel.blocks.values()), expected.values)
        for name, part in expected.blocks.items():
            np.testing.assert_allclose(kernel.blocks[name], part, rtol=0, atol=1e-12 * np.abs(expected.values).max())


def positive(model):
    """A diagonal metric whose entries differ."""
    return jax.tree.map(lambda x: 0.5 + x**2, model)


def signed_weights(rows: Rows) -> jax.Array:
    return jax.random.normal(jax.random.key(3), rows.tokens.shape)


FEW = [
    {"tied": False, "qk_norm": True, **BIASES},
    {"tied": True, "num_kv_heads": 2, "qk_norm": True, "windows": (None, 3), "vocab_limit": 10, "qkv_bias": True},
]
ALL = [
    {"tied": tied, "num_kv_heads": heads, "qk_norm": qk_norm, **biases}
    for tied, heads, qk_norm, biases in itertools.product((True, False), (1, 2), (False, True), ({}, BIASES))
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW, ids=["untied-bias-qknorm", "windows-limit"])
def test_streaming_gives_the_reference_kernel(kind):
    model, (a, b) = small_model(**kind), rows_of_two_widths()
    if "vocab_limit" in kind:  # scored ids lie below the limit
        a, b = (Rows(jnp.where(x.mask(), x.tokens % 10, x.tokens), x.start, x.length) for x in (a, b))
    assert_all_methods_agree(model, a, b, methods=("streamed",), weights=(signed_weights(a), None))


@pytest.mark.slow
@pytest.mark.parametrize("metric", [False, True], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("kind", ALL, ids=[str(i) for i in range(len(ALL))])
def test_all_methods_agree_on_every_kind_of_model_weight_metric_and_remat(kind, metric):
    """Rows of one width on both sides, for fewer programs; two widths are tested beside it."""
    model, a, b = small_model(**kind), some_rows(N), some_rows(N, seed=1)
    diagonal = positive(model) if metric else None
    cases = [("none", ("streamed", "chunked") if metric else ("streamed", "ghost", "chunked", "columns"))]
    cases += [] if metric else [("full", ("streamed",))]
    for remat, methods in cases:
        for options in (
            {"normalise": "sum"},
            {"normalise": "tok"},
            {"weights": (signed_weights(a), signed_weights(b))},
        ):
            assert_all_methods_agree(
                with_config(model, remat=remat), a, b, methods=methods, precondition=diagonal, **options
            )
    jax.clear_caches()  # no other case runs these programs


@pytest.mark.slow
def test_a_metric_and_a_temperature_enter_streamed_kernels():
    model, (a, b) = small_model(), rows_of_two_widths()
    assert_all_methods_agree(model, a, b, methods=("streamed",), precondition=positive(model), temperature=(0.7, 1.3))


@pytest.mark.slow
def test_a_streamed_kernel_of_rows_with_themselves_is_symmetric_and_has_no_negative_eigenvalue():
    model, a = small_model(tied=False), some_rows(N)
    assert_all_methods_agree(model, a, a, methods=("streamed", "ghost"))
    kernel = gradient_kernel(model, a, a, method="streamed")
    values = np.asarray(kernel.values)
    assert_near(values, values.T)
    assert np.linalg.eigvalsh((values + values.T) / 2).min() >= -1e-12 * np.trace(values)
    assert_near(np.diag(kernel.cosine()), np.ones(N))
    assert_near(np.diag(values), kernel.sq_norms_b)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in ("metric", "itself", "limit")])
def test_a_tied_matrix_of_which_few_tokens_occur_gives_the_reference_kernel(case):
    """Under a metric and temperatures, of rows with themselves, and with prompt ids above the vocabulary limit."""
    limit = 200 if case == "limit" else None
    model, (a, b) = small_model(vocab_size=MANY, vocab_limit=limit), rows_of_two_widths()
    if limit:
        a = Rows(jnp.where(a.mask(), a.tokens, a.tokens + 250), a.start, a.length)
    heat = (0.7, 1.3) if case == "metric" else 1.0
    other = a if case == "itself" else b
    metric = positive(model) if case != "limit" else None
    assert_all_methods_agree(model, a, other, methods=("streamed",), precondition=metric, temperature=heat)


def run(model, a, b, **changes) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The streamed kernel with its cuts chosen by hand."""
    sides = tuple((rows, row_weights(unpack(rows) if hasattr(rows, "segment") else rows), 1.0) for rows in (a, b))
    options = {"memory": 2 << 30} | changes
    metric = options.pop("metric", None)
    return tiling.streamed(tiling.Streaming(model, sides, metric, _block_index(model, "total"), **options))


CUTS = {
    "vocabulary chunks": {"chunk": 5},
    "whole vocabulary once more": {"dense": True, "chunk": 7},
    "only tokens that occur": {"dense": False, "chunk": 4},
    "blocks of inputs": {"block": 3000},
    "one input at a time": {"block": 1},
    "all at once": {"dense": False, "chunk": 4, "block": 3000, "memory": 2 * 3000 + 5 * 66_000},
}


@pytest.mark.parametrize("cut", [pytest.param(x, marks=[] if x == "all at once" else pytest.mark.slow) for x in CUTS])
def test_how_the_work_is_cut_changes_nothing(cut):
    model, (a, b) = small_model(), rows_of_two_widths()
    expected = gradient_kernel(model, a, b, method="reference")
    values, norms = run(model, a, b, metric=None, **CUTS[cut])
    assert_near(values[0], expected.values)
    assert_near(norms[0], expected.sq_norms_a)
    assert_near(norms[1], expected.sq_norms_b)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_row_tiles_change_nothing(rows):
    model, (a, b) = small_model(), rows_of_two_widths()
    each = row_bytes(model.config, 11)
    job = {"block": 4000, "memory": 2 * 4000 + rows * each}
    values, norms = run(model, a, b, **job)
    expected = gradient_kernel(model, a, b, method="reference")
    assert_near(values[0], expected.values)
    assert_near(norms[0], expected.sq_norms_a)
    assert_near(norms[1], expected.sq_norms_b)
    itself = gradient_kernel(model, a, a, method="streamed", memory=4 * each)
    expected = gradient_kernel(model, a, a, method="reference")
    assert_near(itself.values, expected.values)
    assert_near(itself.sq_norms_a, expected.sq_norms_a)
    assert_near(itself.sq_norms_b, expected.sq_norms_a)


def test_tiles_cover_all_rows_within_what_fits_and_pass_as_few_as_possible():
    for n, m, fits in itertools.product((1, 3, 16), (1, 5, 64), (2, 3, 7, 20, 100)):
        a, b = tiles(n, m, fits, same=False)
        assert 1 <= a <= n
        assert 1 <= b <= m
        assert a + b <= max(fits, 2)
        cost = -(-n // a) * -(-m // b) * (a + b)
        others = [
            -(-n // x) * -(-m // min(m, fits - x)) * (x + min(m, fits - x)) for x in range(1, min(n, fits - 1) + 1)
        ]
        assert cost <= min(others)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [VOCAB, MANY], ids=["whole vocabulary", "tokens that occur"])
def test_the_products_of_head_and_embedding_of_a_tied_matrix_are_counted(vocab):
    """Two matrices with the same numbers give another kernel: without the cross products there is no difference."""
    model, (a, b) = small_model(vocab_size=vocab), rows_of_two_widths()
    kernel = gradient_kernel(model, a, b, method="streamed", blocks="leaf")
    apart = small_model(tied=False, vocab_size=vocab)
    apart = jax.tree.unflatten(jax.tree.structure(apart), _untied_leaves(model, apart))
    other = gradient_kernel(apart, a, b, method="streamed", blocks="leaf")
    cross = kernel.blocks["embed"] - other.blocks["embed"] - other.blocks["head"]
    assert np.abs(cross).max() > 1e-3 * np.abs(kernel.values).max()
    assert_near(kernel.values - cross, other.values)


def _untied_leaves(tied, untied) -> list[jax.Array]:
    named = {"embed": tied.embed[...], "norm": tied.norm[...], "head": tied.embed[...].T}
    layers = dict(zip(_layer_names(tied), jax.tree.leaves(tied.layers), strict=True))
    return [named[name] if name in named else layers[name] for name in leaf_names(untied)]


def _layer_names(model) -> list[str]:
    return [name for name in leaf_names(model) if name.startswith("layers.")]


@pytest.mark.slow
def test_packed_rows_give_the_kernel_of_the_same_rows_unpacked():
    model, (a, b) = small_model(qk_norm=True, qkv_bias=True, windows=(None, 3)), rows_of_two_widths()
    packed = pack(a, width=16)
    assert packed.tokens.shape[0] < N
    expected = gradient_kernel(model, a, b, method="reference", normalise="tok")
    for left, right in ((packed, b), (packed, pack(b, width=16))):
        kernel = gradient_kernel(model, left, right, method="streamed", normalise="tok")
        assert_near(kernel.values, expected.values)
        assert_near(kernel.sq_norms_a, expected.sq_norms_a)
    assert_near(gradient_kernel(model, packed, packed, method="streamed").values, gradient_kernel(model, a, a).values)


def test_rows_whose_weights_are_all_zero_give_zero():
    model, (a, b) = small_model(), rows_of_two_widths()
    weights = signed_weights(a).at[2].set(0)
    for method in ("streamed", "reference"):
        kernel = gradient_kernel(model, a, b, method=method, weights=weights)
        assert not np.any(kernel.values[2])
        assert kernel.sq_norms_a[2] == 0
        assert not np.any(kernel.cosine()[2])
        assert np.all(np.isfinite(kernel.values))


@pytest.mark.slow
def test_tokens_that_need_no_gradient_may_hold_anything_and_rows_of_a_like_length_share_a_program():
    model, (a, b) = small_model(), rows_of_two_widths()
    first = gradient_kernel(model, a, b, method="streamed").values
    noisy = Rows(jnp.where(jnp.arange(8, dtype=jnp.int32)[None] < a.length[:, None], a.tokens, 7), a.start, a.length)
    before = tiling.stream._cache_size()
    assert_near(gradient_kernel(model, noisy, b, method="streamed").values, first)
    wider = Rows(jnp.pad(a.tokens, [(0, 0), (0, 2)]), a.start, a.length)
    assert_near(gradient_kernel(model, a[::-1], b, method="streamed").values, first[::-1])
    assert tiling.stream._cache_size() == before
    assert_near(gradient_kernel(model, wider, b, method="streamed").values, first)


def test_the_cost_rule_takes_matrices_token_by_token_only_where_that_is_cheaper():
    config = ModelConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=64
    )
    assert ghost_leaves(config, 1, 1, 64, 64) == set("qkvo") | {"gate", "up", "down"}
    assert ghost_leaves(config, 1, 1, 150, 150) == set("qo") | {"gate", "up", "down"}  # k, v: harmonic mean 102
    assert ghost_leaves(config, 16, 16, 512, 512) == set()
    # n T below the harmonic mean of inputs and outputs, up to the direct way's own products
    assert ghost_leaves(config, 4, 4, 60, 60) == {"q", "o", "gate", "up", "down"}


def temporary(config: ModelConfig, n: int, width: int, block: int) -> int:
    """Bytes of the compiled program's temporary buffers, n rows on either side."""
    model = jax.jit(lambda key: cast(init_model(config, key), "float32"))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, n, width)).astype(np.int32)
    full = jnp.full(n, width, jnp.int32)
    a, b = (Rows(jnp.asarray(t), full // 2, full) for t in tokens)
    return compiled_kernel(model, a, b, block=block).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_no_temporary_buffer_holds_all_gradients():
    """Many parameters, short rows: what rows need is far below N * P."""
    config = ModelConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64
    )
    n, width = 8, 16
    gradients = 4 * 2 * n * sum(x.size for x in jax.tree.leaves(abstract_model(config)))
    assert 2 * n * row_bytes(config, width) < gradients / 16
    assert temporary(config, n, width, 4 << 20) < gradients / 8


@pytest.mark.slow
def test_no_temporary_buffer_holds_the_attention_scores_of_all_layers():
    """Few parameters, long rows, many layers: one layer's scores and their copies are what there is."""
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=16, num_heads=4, num_kv_heads=4, head_dim=8
    )
    n, width = 4, 192
    one_layer = 4 * 2 * n * config.num_heads * width * width
    held = temporary(config, n, width, 1 << 20)
    assert held < config.num_layers * one_layer / 2
    estimate = 2 * n * row_bytes(config, width)
    assert 0.5 * estimate < held < 2 * estimate + (2 << 20)


@pytest.mark.slow
def test_the_gradients_behind_the_kernel_are_those_of_the_definition():
    """Against flattened gradients taken one row at a time, not against another method of the same function."""
    model, (a, b) = small_model(tied=False, qk_norm=True), rows_of_two_widths()
    diagonal = positive(model)
    expected = (gradient_matrix(model, a) * flat(diagonal)) @ gradient_matrix(model, b).T
    assert_near(gradient_kernel(model, a, b, method="streamed", precondition=diagonal).values, expected)
    assert VOCAB == model.config.vocab_size


@pytest.mark.slow
def test_remainders_of_steps_along_a_row_fall_with_the_square_and_the_cube_of_the_step():
    """What is left of the change after eta A K: slope 2 one-sided, slope 3 of central differences."""
    model, (a, b) = small_model(tied=False), rows_of_two_widths()
    kernel = np.asarray(gradient_kernel(model, a[:1], b, method="streamed").values)[0]
    gradient = one_gradient(model, a[0], row_weights(a)[0])
    scale, before = 0.7, np.asarray(row_scores(model, b))
    eta = 10 ** np.arange(-8.0, -2.9, 0.5)
    moved = [
        np.stack([np.asarray(row_scores(along(model, gradient, sign * scale * e), b)) for e in eta]) for sign in (1, -1)
    ]
    predicted = eta[:, None] * scale * kernel
    one_sided = fit_slope(eta, moved[0] - before - predicted, predicted, before)
    central = fit_slope(eta, (moved[0] - moved[1]) / 2 - predicted, predicted, before)
    assert one_sided.value == pytest.approx(2.00, abs=0.02)
    assert central.value == pytest.approx(3.00, abs=0.05)
    wrong = fit_slope(eta, moved[0] - before - 1.01 * predicted, predicted, before)
    assert not abs(wrong.value - 2) <= 0.02


def test_what_streaming_cannot_do_right_is_refused():
    """A temperature that is none, packed rows beyond the memory, ids that are never sampled, numbers that are none."""
    model, (a, b) = small_model(vocab_limit=11), rows_of_two_widths()
    a, b = (Rows(jnp.minimum(x.tokens, 10), x.start, x.length) for x in (a, b))
    for temperature in (0.0, -1.0, float("nan"), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="temperature: expected a number above 0"):
            gradient_kernel(model, a, b, method="streamed", temperature=temperature)
    with pytest.raises(ValueError, match="memory: packed rows are taken at once"):
        gradient_kernel(model, pack(a, width=16), b, method="streamed", memory=1)
    never = Rows(a.tokens.at[2, 3].set(11), a.start, a.length)
    with pytest.raises(ValueError, match="rows_a: row 2 is scored on id 11, which the vocabulary limit of 11"):
        gradient_kernel(model, never, b)
    with pytest.raises(ValueError, match="weights: they hold NaN"):
        gradient_kernel(model, a, b, weights=signed_weights(a).at[1, 4].set(jnp.nan))
    with pytest.raises(ValueError, match="noise: expected"):
        gradient_kernel(model, a, b, noise=-1)


def test_padding_may_hold_anything_even_when_the_whole_vocabulary_occurs():
    model, (a, _) = small_model(), rows_of_two_widths()
    full = jnp.arange(8, dtype=jnp.int32)[None] + jnp.array([[0], [4]], jnp.int32)
    rows = Rows(full, jnp.array([1, 1], jnp.int32), jnp.array([8, 7], jnp.int32))
    odd = Rows(full.at[1, 7].set(-100), rows.start, rows.length)
    expected = gradient_kernel(model, a, rows, method="streamed").values
    assert_near(gradient_kernel(model, a, odd, method="streamed").values, expected)
