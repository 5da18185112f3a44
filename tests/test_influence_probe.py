"""The probe: built from samples, saved whole, read back, and the step's record of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.influence.lines import influence_line, probe_line
from jaxrl.influence.probe import build_probe, counted, gold_probe, load_probe, save_probe, scope_masks
from jaxrl.influence.structure import blocks, structure
from jaxrl.types import STOP_EOS, STOP_LENGTH, STOP_NONE, Rollouts, Rows


def rollouts(stop, width=6, seed=0) -> Rollouts:
    """Random rows with two prompt tokens; an unsampled slot has no response."""
    stop = np.asarray(stop)
    rng = np.random.default_rng(seed)
    length = np.where(stop == STOP_NONE, 2, np.where(stop == STOP_LENGTH, width, 4))
    rows = Rows(
        *(jnp.asarray(x, jnp.int32) for x in (rng.integers(0, 9, (*stop.shape, width)), np.full(stop.shape, 2), length))
    )
    return Rollouts(rows, jnp.zeros((*stop.shape, width)), jnp.asarray(stop, jnp.int32))


STOPS = [[STOP_EOS, STOP_LENGTH], [STOP_EOS, STOP_EOS], [STOP_NONE, STOP_NONE]]


@pytest.fixture
def probe():
    correct = np.array([[True, True], [False, True], [False, False]])
    return build_probe([(np.array([7, 3, 5]), rollouts(STOPS), correct)])


def test_truncated_samples_never_count_as_correct_and_empty_slots_are_dropped(probe):
    assert list(probe.uid) == [7, 7, 3, 3]
    assert list(probe.correct) == [True, False, False, True]
    assert list(probe.truncated) == [False, True, False, False]
    assert list(counted(probe)) == [True, False, True, True]
    assert counted(probe, include_truncated=True).all()


def test_sets_of_different_width_keep_their_token_ids(probe):
    wide = rollouts([[STOP_EOS, STOP_EOS]], width=9, seed=3)
    both = build_probe(
        [(np.array([7, 3, 5]), rollouts(STOPS), np.zeros((3, 2))), (np.array([11]), wide, np.ones((1, 2)))]
    )
    assert both.rows.tokens.shape == (6, 9)
    np.testing.assert_array_equal(both.rows.tokens[:4, :6], probe.rows.tokens)
    np.testing.assert_array_equal(both.rows.tokens[4:], wide.rows.tokens[0])
    assert list(both.uid[4:]) == [11, 11]


def test_a_saved_probe_is_read_back_bit_for_bit_and_leaves_no_other_file(probe, tmp_path):
    path = tmp_path / "run" / "probe.npz"
    save_probe(path, probe)
    save_probe(path, probe)  # replaces
    again = load_probe(path)
    for a, b in zip(jax.tree.leaves(probe), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    assert [p.name for p in path.parent.iterdir()] == ["probe.npz"]


def test_a_failed_save_keeps_the_old_probe_and_leaves_no_half_file(probe, tmp_path, monkeypatch):
    path = tmp_path / "probe.npz"
    save_probe(path, probe)
    old = path.read_bytes()

    def full(file, **_):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space"):
        save_probe(path, probe)
    assert path.read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1


def test_unreadable_probes_are_named_with_file_and_field(probe, tmp_path):
    path = tmp_path / "probe.npz"
    with pytest.raises(FileNotFoundError, match=r"probe\.npz: there is no such probe"):
        load_probe(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"probe\.npz: expected a probe.npz made by `jaxrl probe`, and this is no"):
        load_probe(path)
    np.savez(path, tokens=probe.rows.tokens, start=probe.rows.start)
    with pytest.raises(ValueError, match=r"probe\.npz: the field 'length' is missing"):
        load_probe(path)
    fields = {"start": probe.rows.start, "length": probe.rows.length, "uid": probe.uid, "correct": probe.correct}
    np.savez(path, tokens=probe.rows.tokens, truncated=probe.truncated[:2], **fields)
    with pytest.raises(ValueError, match=r"probe\.npz: truncated: expected one entry a row"):
        load_probe(path)


def test_building_from_nothing_or_from_other_shapes_is_refused():
    with pytest.raises(ValueError, match="no response was sampled"):
        build_probe([(np.array([5]), rollouts([[STOP_NONE]]), np.zeros((1, 1)))])
    with pytest.raises(ValueError, match="verdicts and a uid a prompt"):
        build_probe([(np.array([5]), rollouts(STOPS), np.zeros((3, 2)))])


def test_a_gold_probe_holds_correct_solutions_only(probe):
    gold = gold_probe(probe.rows, np.array([1, 1, 2, 3]))
    assert gold.correct.all()
    assert counted(gold).all()
    with pytest.raises(ValueError, match="every row needs a response"):
        gold_probe(Rows(probe.rows.tokens, probe.rows.start, probe.rows.start), np.arange(4))


def test_scopes_take_the_batch_out_of_every_other_set(probe):
    splits = {"train": np.array([7, 3]), "ood": np.array([9])}
    scopes = scope_masks(probe, splits, in_batch=np.array([3]))
    assert list(scopes["in_batch"]) == [False, False, True, True]
    assert list(scopes["train"]) == [True, True, False, False]
    assert not scopes["ood"].any()


def test_the_probe_line_holds_the_fixed_names_on_both_scales(probe):
    rng = np.random.default_rng(0)
    mask = np.asarray(probe.rows.mask())
    base, before, after = (np.where(mask, -rng.random(mask.shape), 0) for _ in range(3))
    scopes = scope_masks(probe, {"train": np.array([7, 3])}, in_batch=np.array([3]))
    line = probe_line(probe, base, before, after, scopes=scopes, update_norm=0.5, lr=0.1)
    for name in ("all", "interference", "interference_macro", "incorrect", "selectivity", "strength", "strength_rms"):
        for scale in ("sum", "tok"):
            assert f"probe/{name}_{scale}" in line
            assert f"probe/cumulative_{name}_{scale}" in line
    rows = np.array([0, 2, 3])  # without the truncated one
    change = (after - before).sum(-1)[rows]
    assert line["probe/all_sum"] == pytest.approx(change.mean())
    assert line["probe/all_sum/n"] == 3
    assert line["probe/cumulative_all_sum"] == pytest.approx((after - base).sum(-1)[rows].mean())
    assert line["kl/forward_base"] == pytest.approx((base - after).sum(-1).mean())  # truncated ones included
    assert line["probe/in_batch/all_sum"] == pytest.approx(change[1:].mean())
    assert line["probe/strength_per_update_sum"] == pytest.approx(line["probe/strength_sum"] / 0.25)
    tokens = mask[rows]
    ratio = np.exp((after - before)[rows][tokens])
    assert line["clip/probe_token"] == pytest.approx(np.mean((ratio < 0.8) | (ratio > 1.2)))
    whole = np.exp((after - base).sum(-1)[rows])
    assert line["clip/probe_cumulative_sequence"] == pytest.approx(np.mean((whole < 0.8) | (whole > 1.2)))
    assert all(np.isfinite(v) for v in line.values())


def test_an_unchanged_model_violates_no_clip_and_changes_nothing(probe):
    logps = np.where(np.asarray(probe.rows.mask()), -0.7, 0)
    line = probe_line(probe, logps, logps, logps)
    assert line["clip/probe_token"] == line["clip/probe_sequence"] == 0
    assert line["probe/strength_sum"] == line["probe/all_tok"] == 0


def test_comparison_with_the_prediction():
    predicted = np.array([0.1, -0.2, 0.3, 0.0])
    line = influence_line(2 * predicted, predicted, np.full(4, -200, np.float32))
    assert line["influence/median_ratio"] == pytest.approx(2)
    assert line["influence/correlation"] == pytest.approx(1)
    assert line["influence/sign_agreement"] == 1
    assert line["influence/relative_error"] == pytest.approx(0.5)
    assert line["influence/noise_floor"] == pytest.approx(200 * np.finfo(np.float32).eps / 0.3, rel=1e-6)
    assert influence_line(np.zeros(2), np.zeros(2)) == {"influence/rows": 2}


def test_structure_golden_numbers():
    """SCIENCE.md A.4."""
    small = structure(np.array([[2.0, 1.0], [1.0, 2.0]]))
    expected = {"erank": 1.754765, "stable": 1.333333, "participation": 1.6, "offdiag_mass": 0.333333, "mean_cos": 0.5}
    assert {k: small[k] for k in expected} == pytest.approx(expected, abs=5e-7)
    three = structure(np.array([[2, -0.5, 0.3], [-0.5, 1, 0.2], [0.3, 0.2, 4]]))
    expected = {
        "erank": 2.514291, "participation": 2.251838, "offdiag_mass": 0.222222, "mean_abs_cos": 0.186540,
        "mean_cos": -0.049162, "trace": 7 / 3,
    }  # fmt: skip
    assert {k: three[k] for k in expected} == pytest.approx(expected, abs=5e-7)


def test_scaling_all_gradients_changes_trace_and_norm_but_no_cosine_and_no_rank():
    g = np.random.default_rng(0).normal(size=(12, 40))
    one, ten = structure(g @ g.T), structure(100 * (g @ g.T))
    for name in one:
        factor = {"trace": 100, "median_norm": 10}.get(name, 1)
        assert ten[name] == pytest.approx(factor * one[name]), name


def test_same_prompt_and_cross_prompt_pairs_are_never_pooled():
    uid = np.array([1, 1, 2])
    cosine = np.array([[1, -0.5, 0.1], [-0.5, 1, 0.3], [0.1, 0.3, 1]])
    found = blocks(cosine, uid, uid)
    assert found["same/mean_cos"] == -0.5
    assert found["cross/mean_cos"] == pytest.approx(0.2)
    assert found["same/negative"] == 1
    assert np.isnan(blocks(cosine[:1], np.array([5]), uid)["same/mean_cos"])
    assert blocks(cosine[:1, :2], np.array([1]), uid[:2])["same/mean_cos"] == 0.25  # two sets: no diagonal to leave out
    with pytest.raises(ValueError, match="square"):
        structure(cosine[:2])
    with pytest.raises(ValueError, match="not symmetric"):
        structure(cosine + np.triu(np.ones((3, 3)), 1))
