"""The streamed kernel equals the definition on every kind of model, row, weight and metric, however it is cut up."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import VOCAB, along, flat, gradient_matrix, row_scores, small_model, some_rows

from jaxrl.influence import head, tiling
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


def rows_of_two_widths() -> tuple[Rows, Rows]:
    return some_rows(N), some_rows(M, seed=1, width=11)


def close(found, expected, tolerance=1e-12) -> None:
    """Relative Frobenius norm of the difference."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.all(np.isfinite(found))
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def agrees(model, a, b, methods=("streamed", "ghost", "chunked", "columns"), **options) -> None:
    """Every method gives the kernel, norms and parts of ``reference``."""
    expected = gradient_kernel(model, a, b, method="reference", blocks="leaf", **options)
    for method in methods:
        if method == "ghost" and options.get("precondition") is not None:
            continue
        kernel = gradient_kernel(model, a, b, method=method, blocks="leaf", **options)
        close(kernel.values, expected.values)
        close(kernel.sq_norms_a, expected.sq_norms_a)
        close(kernel.sq_norms_b, expected.sq_norms_b)
        close(sum(kernel.blocks.values()), expected.values)
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


@pytest.mark.parametrize(
    "kind", [FEW[0], pytest.param(FEW[1], marks=pytest.mark.slow)], ids=["untied-bias-qknorm", "windows-limit"]
)
def test_streaming_gives_the_reference_kernel(kind):
    model, (a, b) = small_model(**kind), rows_of_two_widths()
    if "vocab_limit" in kind:  # scored ids lie below the limit
        a, b = (Rows(jnp.where(x.mask(), x.tokens % 10, x.tokens), x.start, x.length) for x in (a, b))
    agrees(model, a, b, methods=("streamed",), weights=(signed_weights(a), None))


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
            agrees(with_config(model, remat=remat), a, b, methods=methods, precondition=diagonal, **options)
    jax.clear_caches()  # no other case runs these programs


@pytest.mark.slow
def test_a_metric_and_a_temperature_enter_streamed_kernels():
    model, (a, b) = small_model(), rows_of_two_widths()
    agrees(model, a, b, methods=("streamed",), precondition=positive(model), temperature=(0.7, 1.3))


@pytest.mark.slow
def test_a_streamed_kernel_of_rows_with_themselves_is_symmetric_and_has_no_negative_eigenvalue():
    model, a = small_model(tied=False), some_rows(N)
    agrees(model, a, a, methods=("streamed", "ghost"))
    kernel = gradient_kernel(model, a, a, method="streamed")
    values = np.asarray(kernel.values)
    close(values, values.T)
    assert np.linalg.eigvalsh((values + values.T) / 2).min() >= -1e-12 * np.trace(values)
    close(np.diag(kernel.cosine()), np.ones(N))
    close(np.diag(values), kernel.sq_norms_b)


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
    close(values[0], expected.values)
    close(norms[0], expected.sq_norms_a)
    close(norms[1], expected.sq_norms_b)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_row_tiles_change_nothing(rows):
    model, (a, b) = small_model(), rows_of_two_widths()
    each = row_bytes(model.config, 11)
    job = {"block": 4000, "memory": 2 * 4000 + rows * each}
    values, norms = run(model, a, b, **job)
    expected = gradient_kernel(model, a, b, method="reference")
    close(values[0], expected.values)
    close(norms[0], expected.sq_norms_a)
    close(norms[1], expected.sq_norms_b)
    itself = gradient_kernel(model, a, a, method="streamed", memory=4 * each)
    expected = gradient_kernel(model, a, a, method="reference")
    close(itself.values, expected.values)
    close(itself.sq_norms_a, expected.sq_norms_a)
    close(itself.sq_norms_b, expected.sq_norms_a)


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
def test_the_products_of_head_and_embedding_of_a_tied_matrix_are_counted(monkeypatch):
    """Two matrices with the same numbers give another kernel; dropping the cross products is seen."""
    model, (a, b) = small_model(), rows_of_two_widths()
    kernel = gradient_kernel(model, a, b, method="streamed", blocks="leaf")
    apart = with_config(small_model(tied=False), tied=False)
    apart = jax.tree.unflatten(jax.tree.structure(apart), _untied_leaves(model, apart))
    other = gradient_kernel(apart, a, b, method="streamed", blocks="leaf")
    cross = kernel.blocks["embed"] - other.blocks["embed"] - other.blocks["head"]
    assert np.abs(cross).max() > 1e-3 * np.abs(kernel.values).max()
    close(kernel.values - cross, other.values)
    monkeypatch.setattr(head, "tied_dense", lambda model, scored, embedded, sums, *rest: sums)
    dropped = run(with_config(model, norm_eps=1.001e-6), a, b, dense=True)[0][0]  # another config: traced anew
    assert np.linalg.norm(dropped - kernel.values) > 1e-3 * np.linalg.norm(kernel.values)


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
        close(kernel.values, expected.values)
        close(kernel.sq_norms_a, expected.sq_norms_a)
    close(gradient_kernel(model, packed, packed, method="streamed").values, gradient_kernel(model, a, a).values)


def test_rows_whose_weights_are_all_zero_give_zero():
    model, (a, b) = small_model(), rows_of_two_widths()
    weights = signed_weights(a).at[2].set(0)
    for method in ("streamed", "reference"):
        kernel = gradient_kernel(model, a, b, method=method, weights=weights)
        assert not np.any(kernel.values[2])
        assert kernel.sq_norms_a[2] == 0
        assert not np.any(kernel.cosine()[2])
        assert np.all(np.isfinite(kernel.values))


def test_tokens_that_need_no_gradient_may_hold_anything_and_rows_of_a_like_length_share_a_program():
    model, (a, b) = small_model(), rows_of_two_widths()
    first = gradient_kernel(model, a, b, method="streamed").values
    noisy = Rows(jnp.where(jnp.arange(8, dtype=jnp.int32)[None] < a.length[:, None], a.tokens, 7), a.start, a.length)
    before = tiling.stream._cache_size()
    close(gradient_kernel(model, noisy, b, method="streamed").values, first)
    wider = Rows(jnp.pad(a.tokens, [(0, 0), (0, 2)]), a.start, a.length)
    close(gradient_kernel(model, a[::-1], b, method="streamed").values, first[::-1])
    assert tiling.stream._cache_size() == before
    close(gradient_kernel(model, wider, b, method="streamed").values, first)


def test_the_cost_rule_takes_matrices_token_by_token_only_where_that_is_cheaper():
    config = ModelConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=64
    )
    assert ghost_leaves(config, 1, 1, 64, 64) == set("qkvo") | {"gate", "up", "down"}
    assert ghost_leaves(config, 1, 1, 150, 150) == set("qo") | {"gate", "up", "down"}  # k, v: harmonic mean 102
    assert ghost_leaves(config, 16, 16, 512, 512) == set()
    # n T below the harmonic mean of inputs and outputs, up to the direct way's own products
    assert ghost_leaves(config, 4, 4, 60, 60) == {"q", "o", "gate", "up", "down"}


@pytest.mark.slow
def test_no_temporary_buffer_holds_all_gradients_or_all_attention_scores():
    """S of the benchmarks, scaled down: neither N*P nor N*layers*T*T numbers at once."""
    config = ModelConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=512, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32
    )
    model = jax.jit(lambda key: cast(init_model(config, key), "float32"))(jax.random.key(0))
    n, width = 8, 96
    tokens = np.random.default_rng(0).integers(0, 2048, (2, n, width)).astype(np.int32)
    full = jnp.full(n, width, jnp.int32)
    a, b = (Rows(jnp.asarray(t), full // 2, full) for t in tokens)
    held = compiled_kernel(model, a, b, block=2 << 20).memory_analysis().temp_size_in_bytes
    size = sum(x.size for x in jax.tree.leaves(abstract_model(config)))
    gradients = 4 * 2 * n * size
    attention = 4 * 2 * n * config.num_layers * config.num_heads * width * width
    assert held < gradients / 8
    estimate = 2 * n * row_bytes(config, width)
    assert 0.5 * estimate < held < 2 * estimate + (4 << 20)
    assert held - estimate < attention


@pytest.mark.slow
def test_the_gradients_behind_the_kernel_are_those_of_the_definition():
    """Against flattened gradients taken one row at a time, not against another method of the same function."""
    model, (a, b) = small_model(tied=False, qk_norm=True), rows_of_two_widths()
    diagonal = positive(model)
    expected = (gradient_matrix(model, a) * flat(diagonal)) @ gradient_matrix(model, b).T
    close(gradient_kernel(model, a, b, method="streamed", precondition=diagonal).values, expected)
    assert VOCAB == model.config.vocab_size


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
