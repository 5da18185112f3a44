"""A step on packed rows is the step on padded ones: same loss, same gradient, and no program a length."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import PROMPT, b8, quick_jit, scored, tiny_model
from train_world import SELF, experiment, lines, use_devices

import jaxrl
from jaxrl.errors import UsageError
from jaxrl.mesh import make_mesh, shard_tree, to_mesh
from jaxrl.models.decoder import param_axes, with_config
from jaxrl.models.passes import packed_logps, plan_passes
from jaxrl.models.scoring import REVERSE
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.optimiser import Optimiser, Packing
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.update import loss_and_grad
from jaxrl.train.dryrun import dry_run
from jaxrl.train.packed import check_packing
from jaxrl.types import Rows

GRADIENT = quick_jit(loss_and_grad, static_argnames=("temperature", "microbatch"))
# Every kind of loss: a clipped ratio, whole distributions on base samples, and one against reference log-probs.
THREE = Algorithm(regularisers=((0.1, Kl(estimator="full", samples=2)), (0.2, Kl(direction="reverse", estimator="k2"))))


def terms_of(model, reference, algorithm=THREE):
    graded = scored(model, b8(), reference, noise=0.3, temperature=0.7)
    return prepare(algorithm, graded)[0]


def layouts(terms, width, at_once=None, devices=1):
    return [
        jax.tree.map(
            jnp.asarray,
            plan_passes(
                term.batch.rows,
                np.asarray(jnp.any(term.batch.weight != 0, axis=1)),
                width=width,
                at_once=at_once,
                devices=devices,
            ),
        )
        for term in terms
    ]


def assert_same(got, expected, tolerance):
    """Relative to the largest entry of all gradients."""
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected[1]))
    assert scale > 1e-3
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def random_rows(n, width, seed, shortest=1):
    """Rows with prompts of one to three tokens; some have no response."""
    rng = np.random.default_rng(seed)
    start = rng.integers(1, 4, n)
    length = np.minimum(start + rng.integers(shortest - 1, width - 2, n), width)
    tokens = rng.integers(1, 8, (n, width)) * (np.arange(width) < length[:, None])
    return Rows(*(x.astype(np.int32) for x in (tokens, start, length)))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("algorithm", "width", "at_once"),
    [
        (Algorithm(), 13, 2),
        *(pytest.param(THREE, *how, marks=pytest.mark.slow) for how in ((13, 2), (30, None), (8, 1))),
    ],
)
def test_packing_gives_the_loss_and_gradient_of_padding(x64, algorithm, width, at_once):
    """Per-token weights, temperature 0.7, whatever the micro-batch of either."""
    model, reference = tiny_model(0), tiny_model(1)
    terms = terms_of(model, reference, algorithm)
    padded = GRADIENT(model, terms, reference, temperature=0.7, microbatch=5)
    packed = GRADIENT(model, terms, reference, temperature=0.7, layouts=layouts(terms, width, at_once))
    assert_same(packed, padded, 1e-10)


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("remat", ["names", "dots", "full"])
def test_packed_rows_obey_the_remat_policy_and_keep_the_gradient(x64, remat):
    model = tiny_model(0)
    terms = terms_of(model, None, Algorithm())
    how = layouts(terms, 13, 2)
    expected = GRADIENT(model, terms, None, temperature=0.7, layouts=how)
    leaner = with_config(model, remat=remat)
    got = GRADIENT(leaner, terms, None, temperature=0.7, layouts=how)
    assert_same((got[0], with_config(got[1], remat="none")), expected, 1e-10)
    counts = [
        str(jax.make_jaxpr(lambda m: how[0][0].states(m, terms[0].batch.rows))(m)).count("remat")
        for m in (model, leaner)
    ]
    assert counts[0] == 0 < counts[1]


@pytest.mark.slow
def test_other_lengths_of_the_same_buckets_compile_nothing():
    """Draws whose fullest row has 12, 11, 10 and 12 positions, in more or fewer rows; then one in another bucket: 6."""
    model = tiny_model(0)
    step = quick_jit(lambda m, t, how: loss_and_grad(m, t, None, temperature=1.0, layouts=how)[0])
    (term,) = terms_of(model, None, Algorithm())
    counts = []
    draws = ([6] * 12, [6, 6] + [5] * 10, [6] + [5] * 11, [6] * 3 + [3] * 9, [3] * 12)
    for length in draws:
        rows = dataclasses.replace(term.batch.rows, length=jnp.asarray(length, jnp.int32))
        weight = jnp.where(rows.mask(), 0.1, 0)
        terms = (dataclasses.replace(term, batch=dataclasses.replace(term.batch, rows=rows, weight=weight)),)
        how = layouts(terms, 18, at_once=1)
        counts.append((int(how[0].count), step(model, terms, how).shape, step._cache_size()))
    assert [c[0] for c in counts] == [4, 4, 4, 3, 2]
    assert [c[2] for c in counts] == [1, 1, 1, 1, 2]


@pytest.mark.slow
def test_a_term_without_weight_runs_no_pass_and_gives_zero():
    model = tiny_model(0)
    (term,) = terms_of(model, None, Algorithm())
    terms = (
        dataclasses.replace(term, batch=dataclasses.replace(term.batch, weight=jnp.zeros_like(term.batch.weight))),
    )
    how = layouts(terms, 18, at_once=2)
    assert int(how[0].count) == 0
    losses, grads = GRADIENT(model, terms, None, temperature=1.0, layouts=how)
    assert losses[0] == 0
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_scores_of_packed_rows_are_those_of_padded_ones():
    model, rows = tiny_model(0), random_rows(9, 10, seed=3, shortest=2)
    passes = plan_passes(rows, np.arange(9) != 4, width=20, at_once=1)
    got = np.array(quick_jit(packed_logps)(model, rows, passes, temperature=0.7))
    expected = np.array(quick_jit(REVERSE)(model, jax.tree.map(jnp.asarray, rows), temperature=0.7))
    assert not got[4].any()
    assert expected[4].any()
    expected[4] = 0
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_every_response_token_lies_in_one_place_and_no_more_rows_are_used_than_promised(seed):
    rng = np.random.default_rng(seed)
    n, longest = int(rng.integers(1, 60)), int(rng.integers(4, 20))
    width, at_once = int(rng.integers(longest, 5 * longest)), [None, 1, 3][seed % 3]
    rows, used = random_rows(n, longest, seed), rng.random(n) < 0.9
    passes = plan_passes(rows, used, width=width, at_once=at_once)
    packed = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), passes.rows)
    count, most = packed.index.shape
    held = packed.index[packed.index >= 0]
    np.testing.assert_array_equal(np.sort(held), np.flatnonzero(used & (rows.length > rows.start)))
    got = np.zeros((n, longest), int)
    r, h = np.nonzero(packed.slot < width)
    assert (packed.place[r, h] < most * longest).all()
    k, t = np.divmod(packed.place[r, h], longest)
    i, at = packed.index[r, k], packed.slot[r, h]
    assert (packed.tokens[r, at + 1] == rows.tokens[i, t]).all()
    assert (packed.position[r, at] == t - 1).all()
    assert (packed.segment[r, at] == k).all()
    np.add.at(got, (i, t), 1)
    np.testing.assert_array_equal(got, np.asarray(rows.mask()) & np.isin(np.arange(n), held)[:, None])
    size = passes.rows.index.shape[1]
    assert (packed.index[int(passes.count) * size :] == -1).all()
    if at_once is not None:  # the shape knows nothing of the lengths
        assert count == -(-math.ceil(n / (width // longest)) // size) * size


def test_a_row_holds_no_more_short_sequences_than_there_is_room_for():
    """80 sequences of two tokens would fit into two rows of 128; a row has room for 32."""
    rows = Rows(np.ones((80, 20), np.int32), np.ones(80, np.int32), np.full(80, 2, np.int32))
    packed = plan_passes(rows, np.ones(80, bool), width=128).rows
    assert sorted((packed.index[0] >= 0).sum(axis=1)) == [16, 32, 32]


def test_what_cannot_be_packed_is_refused():
    rows = random_rows(3, 10, seed=0)
    with pytest.raises(ValueError, match=r"packing.width: rows of up to 10 tokens do not fit into 9"):
        plan_passes(rows, np.ones(3, bool), width=9)
    with pytest.raises(ValueError, match="microbatch: 3 packed rows cannot be split over 2 devices"):
        plan_passes(rows, np.ones(3, bool), width=10, at_once=3, devices=2)


@pytest.mark.slow
def test_packed_rows_on_a_mesh_give_the_same_loss_and_gradient():
    """Packed rows split over data and fsdp, heads and vocabulary over tensor."""
    model = tiny_model(0, num_kv_heads=2)
    terms = terms_of(model, None, Algorithm())
    expected = GRADIENT(model, terms, None, temperature=0.7, layouts=layouts(terms, 13, 4))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    there = shard_tree(mesh, param_axes(model.config), model)
    how = [layout.on(mesh) for layout in layouts(terms, 13, 4, devices=4)]
    assert how[0].rows.tokens.sharding.spec[1] == ("data", "fsdp")
    got = GRADIENT(there, to_mesh(mesh, terms), None, temperature=0.7, layouts=how)
    assert_same(got, expected, 2e-5)


def test_prompts_of_the_cases_have_another_length_than_their_rows():
    """The tests above say nothing of offsets if every sequence began at 0."""
    (term,) = terms_of(tiny_model(0), None, Algorithm())
    how = layouts((term,), 13, 2)[0]
    assert PROMPT == 2
    assert int(how.rows.index.shape[2]) > 1
    assert int((how.rows.segment > 0).sum()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_run_on_packed_rows_has_the_numbers_of_one_on_padded_rows(monkeypatch, tmp_path, microbatch):
    """Rollouts, filters, base samples, scores and updates of three steps, and the shapes that a dry run compiles."""
    use_devices(monkeypatch, 2)
    found = []
    for packing in (None, Packing(width=32)):
        # SGD: at step 0 the forward KL's gradient is rounding alone, which Adam would blow up
        optimiser = Optimiser(type="sgd", lr=0.1, microbatch=microbatch, packing=packing)
        x = experiment(SELF, steps=3, optimiser=optimiser)
        found.append(lines(jaxrl.train(x, out=tmp_path / str(packing), quiet=True), "train"))
        assert dry_run(x)["update memory, MiB"]["temporary"] > 0
    for padded, packed in zip(*found, strict=True):
        assert padded.keys() == packed.keys()
        for name in padded.keys() - {"kind", "time", "cost/seconds", "optim/param_changed"}:
            assert packed[name] == pytest.approx(padded[name], rel=1e-3, abs=1e-5), name


def test_packing_that_does_not_fit_the_run_is_refused_before_anything_is_sampled():
    mesh = make_mesh(data=4, fsdp=2, tensor=1)
    with pytest.raises(UsageError, match=r"optimiser.packing.width: .* up to 40 tokens, which do not fit into 32"):
        check_packing(Optimiser(lr=1e-3, packing=Packing(width=32)), 40, mesh)
    with pytest.raises(UsageError, match=r"optimiser.microbatch: 12 packed rows .* 8 devices .* multiple of 8"):
        check_packing(Optimiser(lr=1e-3, packing=Packing(width=64), microbatch=12), 40, mesh)
    check_packing(Optimiser(lr=1e-3, microbatch=12), 40, mesh)  # padded rows may be any number
