"""Count sketches: unbiased, with intervals that hold; the hash knows coordinates and no tiling."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import along, gradient_matrix, small_model, some_rows
from train_world import arrays, experiment, use_devices

import jaxrl
from jaxrl.influence.cost import row_bytes
from jaxrl.influence.gradients import leaf_names, row_weights
from jaxrl.influence.hashing import leaf_seed, sketch_block
from jaxrl.influence.sketch import Sketch, gradient_sketch, sketch_kernel
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.experiment import InfluenceSpec
from jaxrl.train.sketches import load_sketch, step_sketches, store_sketches
from jaxrl.types import Batch, Rows

pytestmark = [pytest.mark.x64, pytest.mark.usefixtures("x64")]
SEEDS = 2000


def assert_close(a, b, tolerance=1e-12) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, equal_nan=False)


@pytest.fixture(scope="module")
def world():
    """A model, six rows and their gradients, one flat row each."""
    with jax.enable_x64(True):
        model, rows = small_model(), some_rows(6)
        return model, rows, gradient_matrix(model, rows)


def sketched(model, rows, **options) -> Sketch:
    """In tiles of four rows, so that all tests share one program."""
    return gradient_sketch(model, rows, size=128, memory=4 * 8 * sum(x.size for x in jax.tree.leaves(model)), **options)


def oracle(model, gradients: np.ndarray, seed: int, size: int) -> np.ndarray:
    """The sketch of flat gradients: leaf by leaf, layer by layer."""
    out, at = np.zeros((len(gradients), size)), 0
    for name, leaf in zip(leaf_names(model), jax.tree.leaves(model), strict=True):
        layers = leaf.shape[0] if name.startswith("layers.") else 1
        parts = gradients[:, at : at + leaf.size].reshape(len(gradients), layers, 1, -1)
        at += leaf.size
        for i in range(layers):
            block = jnp.asarray(parts[:, i])
            out += np.asarray(sketch_block(block, leaf_seed=leaf_seed(seed, name), layer=i, size=size))
    return out


@jax.jit
def _many(gradients):
    norms = jnp.sum(gradients**2, axis=1)

    def one(seed):
        values = sketch_block(gradients[:, None], leaf_seed=seed, size=64)
        found = Sketch(values, norms, seed=0, normalise="sum", parameters=gradients.shape[1])
        return jnp.stack(sketch_kernel(found, found))

    return jax.lax.map(one, jnp.arange(SEEDS, dtype=jnp.uint32) * jnp.uint32(2654435761))


@pytest.fixture(scope="module")
def many(world):
    """Kernels of 64 numbers a row under many seeds as (estimate, low, high), and the exact kernel, at unit norms."""
    with jax.enable_x64(True):
        unit = world[2] / np.linalg.norm(world[2], axis=1, keepdims=True)
        return np.moveaxis(np.asarray(_many(jnp.asarray(unit))), 1, 0), unit @ unit.T


def test_the_mean_over_seeds_is_the_kernel(many):
    (values, _, _), exact = many
    error = values.mean(axis=0) - exact
    assert np.abs(error / (values.std(axis=0) / np.sqrt(SEEDS))).max() < 3.5  # of 21 different entries
    assert np.sqrt(np.mean(error**2)) < 0.006


def test_intervals_hold_the_kernel_in_95_percent_of_cases(many):
    (_, low, high), exact = many
    inside = (low <= exact) & (exact <= high)
    pairs = inside[:, *np.triu_indices(6, 1)]
    assert 0.93 < pairs.mean() < 0.97
    assert pairs.mean(axis=0).min() > 0.92


def test_the_variance_is_what_the_intervals_are_made_of(many):
    (values, _, _), exact = many
    ratio = values.var(axis=0) / ((1 + exact**2) / 64)
    assert 0.85 < ratio[np.triu_indices(6, 1)].mean() < 1.05


def tilings(block):
    """Ways of cutting ``[n 6 10]`` of a parameter whose coordinates count from 100 on: (part, arguments)."""
    yield [(block[:, i : i + 4], dict(offset=100 + 10 * i)) for i in (0, 4)]
    yield [(block[:, :, j : j + 3], dict(offset=100 + j, strides=(10, 1))) for j in (0, 3, 6, 9)]
    turned = jnp.swapaxes(block, 1, 2)
    yield [(turned[:, j : j + 7], dict(offset=100 + j, strides=(1, 10))) for j in (0, 7)]
    odd = jnp.asarray([5, 0, 2]), jnp.asarray([1, 3, 4])
    yield [(block[:, i], dict(offset=100 + 10 * i)) for i in odd]
    yield [(block.reshape(-1, 1, 60), dict(offset=jnp.asarray(100)))]
    padded = jnp.pad(block, [(0, 0), (0, 2), (0, 0)])
    yield [(padded, dict(offset=100))]


def test_no_tiling_enters_the_hash():
    block = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 10)))
    whole = sketch_block(block, leaf_seed=7, layer=1, offset=100, size=16)
    for tiling in tilings(block):
        parts = [sketch_block(part, leaf_seed=7, layer=jnp.asarray(1), size=16, **where) for part, where in tiling]
        assert_close(sum(parts), whole)
    for other in (dict(leaf_seed=8, layer=1, offset=100), dict(leaf_seed=7, offset=100), dict(leaf_seed=7, layer=1)):
        assert np.abs(sketch_block(block, size=16, **other) - whole).max() > 0.1


def test_the_hash_stays_as_it_was():
    """Stored sketches are compared with those of later versions."""
    assert leaf_seed(0, "embed") == 2875335466
    hashed = sketch_block(jnp.eye(6)[:, None], leaf_seed=leaf_seed(3, "layers.q"), layer=2, offset=2**31, size=1000)
    assert [int(np.flatnonzero(row)[0] * row.sum()) for row in np.asarray(hashed)] == [-360, 908, 849, -24, -901, 285]


def test_buckets_are_even_and_signs_of_leaves_and_layers_independent():
    count = 1 << 14

    def hashed(seed, layer):  # how often each bucket is hit, less its mean, with signs
        return np.asarray(sketch_block(jnp.ones((1, 1, count)), leaf_seed=seed, layer=layer, size=64))[0]

    several = [hashed(leaf_seed(0, name), layer) for name in ("embed", "layers.q", "layers.k") for layer in (0, 1, 2)]
    for sums in several:  # sums of count / 64 signs
        assert 0.6 < np.mean(sums**2) / (count / 64) < 1.5
    off = np.corrcoef(several)[np.triu_indices(9, 1)]
    assert np.abs(off).max() < 0.5


@pytest.mark.slow
def test_a_sketch_is_the_sum_over_leaves_and_layers_whatever_the_tiles_of_rows(world):
    model, rows, gradients = world
    found = sketched(model, rows)
    assert_close(found.values, oracle(model, gradients, 0, 128))
    assert_close(found.sq_norms, np.sum(gradients**2, axis=1))
    assert (found.size, found.seed, found.parameters) == (128, 0, gradients.shape[1])
    lengths = np.asarray(rows.response_length())[:, None]
    for given in (dict(normalise="tok"), dict(weights=row_weights(rows, "tok"))):
        other = sketched(model, rows, **given)
        assert_close(np.asarray(other.values) * lengths, found.values)
        assert other.normalise == given.get("normalise", "weights")


@pytest.mark.slow
def test_another_seed_is_another_hash_and_all_rows_at_once_change_nothing(world):
    model, rows, gradients = world
    found = gradient_sketch(model, rows, size=128, seed=5)
    assert_close(found.values, oracle(model, gradients, 5, 128))
    assert np.abs(found.values - oracle(model, gradients, 0, 128)).max() > 1e-3


@pytest.mark.slow
def test_sketches_of_two_steps_give_the_kernel_across_them(world):
    model, rows, gradients = world
    later = along(model, jax.tree.map(jnp.ones_like, model), 0.02)
    exact = gradients @ gradient_matrix(later, rows).T
    sketches = sketched(model, rows), sketched(later, rows)
    values, low, high = sketch_kernel(*sketches)
    assert np.mean((low <= exact) & (exact <= high)) > 0.8
    assert np.all(np.abs(values - exact) < 2 * (high - low))
    assert np.all(np.diag(low) > 0)  # a row is still like itself


def test_a_stored_sketch_comes_back_whole(world):
    model, rows, _ = world
    found = sketched(model, rows)
    back = Sketch.of(np.asarray(found.values), json.loads(json.dumps(found.attributes())))
    assert_close(sketch_kernel(found, back)[1], sketch_kernel(found, found)[1], 1e-6)
    assert found.attributes()["size"] == 128


def test_low_precision_gradients_are_added_in_single_precision():
    block = jnp.ones((1, 1, 1 << 14), jnp.bfloat16) * jnp.bfloat16(1.0078125)
    exact = sketch_block(block.astype(jnp.float64), leaf_seed=1, size=2)
    assert_close(sketch_block(block, leaf_seed=1, size=2), exact, 1e-6)


def test_a_step_stores_the_sketches_of_its_trained_rows_and_of_the_probe(world, tmp_path):
    model, rows, _ = world
    trained = jnp.asarray([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])[:, None] * row_weights(rows)
    batch = Batch(rows=rows, advantage=trained, old_logps=trained, weight=trained)
    whole = sketched(model, rows)
    store_sketches(ArrayStore(tmp_path / "arrays.zarr"), step_sketches(model, batch, rows, rows=4, size=128), 20)
    found, chosen = load_sketch(tmp_path, 20)
    assert chosen == [1, 3, 4]
    assert_close(found.values, whole.values[np.array(chosen)])
    found, chosen = load_sketch(tmp_path, 20, "probe_sketch")
    assert chosen == [0, 2, 3, 5]
    assert_close(sketch_kernel(found, whole)[2], sketch_kernel(whole, whole)[2][np.array(chosen)])
    nothing = dataclasses.replace(batch, weight=0 * trained)
    assert list(step_sketches(model, nothing, rows, rows=4, size=128)) == ["probe_sketch"]
    with pytest.raises(FileNotFoundError, match=r"no sketch of step 21; steps that have one: \[20\]"):
        load_sketch(tmp_path, 21)


@pytest.mark.slow
def test_training_keeps_sketches_that_agree_with_its_exact_kernels(tmp_path, monkeypatch):
    use_devices(monkeypatch, 1)
    with jax.enable_x64(False):
        x = experiment(influence=InfluenceSpec(every=3, rows=8, sketch=512), steps=4)
        run = jaxrl.train(x, out=tmp_path / "run", quiet=True)
    inside = []
    for step in (0, 3):
        exact = arrays(run)[f"kernel/{step}"]
        (mine, _), (probes, _) = load_sketch(run, step), load_sketch(run, step, "probe_sketch")
        assert mine.values.shape == (len(exact), 512)
        _, low, high = sketch_kernel(mine, probes)
        inside.append((low <= exact) & (exact <= high))
    assert np.mean(inside) > 0.85
    _, low, _ = sketch_kernel(*(load_sketch(run, step, "probe_sketch")[0] for step in (0, 3)))
    assert np.all(np.diag(low) > 0)  # three steps later a probe is still like itself


@pytest.mark.parametrize(("field", "value"), [("seed", 1), ("normalise", "tok"), ("parameters", 9)])
def test_sketches_of_different_hashes_are_not_combined(world, field, value):
    one = Sketch(np.ones((2, 4)), np.ones(2), seed=0, normalise="sum", parameters=8)
    with pytest.raises(ValueError, match=f"sketches differ in {field}, .* and {value!r}"):
        sketch_kernel(one, dataclasses.replace(one, **{field: value}))
    with pytest.raises(ValueError, match="sketches differ in size, 4 and 5"):
        sketch_kernel(one, dataclasses.replace(one, values=np.ones((2, 5))))


def test_what_does_not_fit_is_named(world):
    model, rows, _ = world
    with pytest.raises(ValueError, match="size: expected at least 1 number"):
        gradient_sketch(model, rows, size=0)
    with pytest.raises(ValueError, match="rows: there are no rows"):
        gradient_sketch(model, rows[:0], size=8)
    with pytest.raises(ValueError, match="rows: row 1 has no response token"):
        gradient_sketch(model, Rows(rows.tokens, rows.start, rows.length.at[1].set(3)), size=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [{}, {"vocab_size": 300}, {"tied": False, "qkv_bias": True, "mlp_bias": True, "qk_norm": True}]
)
def test_sketches_of_streamed_gradients_are_those_of_explicit_ones(kind):
    """Same hash, whatever the blocks: whole, transposed (the head), only tokens that occur, in row tiles."""
    model, rows = small_model(**kind), some_rows(6, width=11)
    explicit = gradient_sketch(model, rows, size=32, method="chunked", temperature=0.7)
    memory = 4 * row_bytes(model.config, 11)  # room for three rows
    for limit in (None, memory):
        streamed = gradient_sketch(model, rows, size=32, method="streamed", temperature=0.7, memory=limit)
        np.testing.assert_allclose(streamed.values, explicit.values, rtol=0, atol=1e-12 * np.abs(explicit.values).max())
        np.testing.assert_allclose(streamed.sq_norms, explicit.sq_norms, rtol=1e-12)


def test_a_streamed_sketch_refuses_other_scores():
    with pytest.raises(ValueError, match="method 'streamed' takes a Decoder"):
        gradient_sketch(small_model(), some_rows(2), size=8, method="streamed", logps=lambda m, r: token_logps(m, r))
    with pytest.raises(ValueError, match="method: did you mean 'streamed'"):
        gradient_sketch(small_model(), some_rows(2), size=8, method="stream")
