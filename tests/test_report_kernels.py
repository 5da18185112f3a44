"""Pictures of kernels: what they show is in the numbers, and a run's stored kernels reach its report."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_report import write_zarr

from jaxrl.influence.structure import cosines
from jaxrl.report import kernels, read_run, render, style

BLOCKS = ["embed", "layers.0", "layers.1", "norm"]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, by name, beside their pictures."""
    drawn: dict[str, Figure] = {}
    picture = style.picture

    def keeping(figure, name, caption):
        drawn[name] = figure
        return picture(figure, name, caption)

    monkeypatch.setattr(style, "picture", keeping)
    return drawn


def layers_of(n: int, m: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(4, n, 9)), rng.normal(size=(4, m, 9))
    right[:, : min(n, m)] = left[:, : min(n, m)]
    return np.einsum("bnp,bmp->bnm", left, right)


def shown(figure: Figure, panel: int = 0) -> np.ndarray:
    """The values of the image in a panel."""
    return np.asarray(figure.axes[panel].images[0].get_array())


# ---------------------------------------------------------------- one kernel


def test_a_heat_map_brings_equal_labels_together_on_both_sides(figures):
    values = np.arange(12.0).reshape(4, 3) / 12
    kernels.heat_map("map", values, (["x", "y", "x", "y"], ["b", "a", "b"]), "Says what it shows.")
    np.testing.assert_allclose(shown(figures["map"]), values[np.ix_([0, 2, 1, 3], [0, 2, 1])])
    axes = figures["map"].axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["x", "y"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["b", "a"]
    lines = {tuple(np.round(np.unique(line.get_ydata()), 2)) for line in axes.lines}
    assert (1.5,) in lines  # parts x from y


def test_the_diagonal_of_rows_with_themselves_sets_no_colour_limit(figures):
    cosine = np.full((6, 6), 0.02) + 0.98 * np.eye(6)
    for itself in (True, False):
        kernels.heat_map("map", cosine, (range(6), range(6)), "", itself=itself)
        limit = figures["map"].axes[0].images[0].get_clim()[1]
        assert limit == (pytest.approx(0.02) if itself else pytest.approx(1))


def test_spectra_are_eigenvalues_or_singular_values_in_falling_order(figures):
    cosine = np.array([[1, 0.6], [0.6, 1]])
    np.testing.assert_allclose(kernels.kernel_spectrum(cosine, itself=True), [1.6, 0.4])
    np.testing.assert_allclose(kernels.kernel_spectrum(np.array([[3.0, 0, 0], [0, 0, -4]]), itself=False), [4, 3])
    kernels.spectrum("s", [("first", np.array([0.1, 2, 1])), ("last", np.array([3.0, 0]))], "")
    first, last = figures["s"].axes[0].lines[:2]
    assert first.get_ydata().tolist() == [2, 1, 0.1]
    assert last.get_ydata()[1] > 0  # a zero has no place on a log axis, and is drawn at its foot


def test_shares_of_layers_are_shares_of_the_whole():
    layers = layers_of(5, 5)
    shares = kernels.layer_shares(layers, itself=True)
    whole, off = layers.sum(0), ~np.eye(5, dtype=bool)
    np.testing.assert_allclose(shares["squared norms"], np.einsum("bii->b", layers) / np.trace(whole))
    assert shares["|K|"].sum() == pytest.approx(1)
    np.testing.assert_allclose(shares["|K|"][1], np.abs(layers[1][off]).sum() / np.abs(layers[:, off]).sum())
    assert shares["K, signed"].sum() == pytest.approx(whole[off].sum() / np.abs(whole[off]).sum())
    assert "squared norms" not in kernels.layer_shares(layers[:, :3], itself=False)
    assert not any(values.any() for values in kernels.layer_shares(np.zeros((2, 3, 3)), itself=True).values())


@pytest.mark.parametrize("count", [1, 40])
def test_a_profile_names_its_blocks(figures, count):
    blocks = ["embed", *(f"layers.{i}" for i in range(count)), "norm"]
    kernels.layer_profile("p", blocks, {"|K|": np.full(len(blocks), 1 / len(blocks))}, "")
    names = [t.get_text() for t in figures["p"].axes[0].get_xticklabels()]
    assert names[0] == "embed"
    assert names[-1] == "norm"
    assert len(names) <= 26
    assert names[1] == "0"


# ---------------------------------------------------------------- of a run


def make_run(path, steps=(0, 20, 40), layers=True):
    """A run folder with the arrays of its kernels alone."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"experiment": {"seed": 0}}))
    (path / "metrics.jsonl").write_text('{"step": 0, "kind": "train", "reward/mean": 0.5}\n')
    m = 10
    correct = np.arange(m) % 2 == 1
    np.savez(path / "probe.npz", correct=correct, uid=np.arange(m))
    for i, step in enumerate(steps):
        parts = layers_of(6, 6, seed=i)
        write_zarr(path, f"probe_kernel/{step}", parts.sum(0))
        attributes = path / "arrays.zarr" / f"probe_kernel/{step}" / ".zattrs"
        attributes.write_text(json.dumps({"probe_rows": [0, 1, 2, 3, 4, 9]}))
        if layers:
            write_zarr(path, f"layers/{step}", layers_of(5, 6, seed=i))
            (path / "arrays.zarr" / f"layers/{step}" / ".zattrs").write_text(json.dumps({"blocks": BLOCKS}))
    return path


def test_a_runs_report_shows_its_kernels_with_correct_answers_together(figures, tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    items = kernels.training_items([run])
    names = [f"kernel-training-{name}" for name in ("cosines", "spectra", "layers")]
    assert [item.name for item in items] == names
    cosine = cosines(run.array("probe_kernel/20"))
    order = [0, 2, 4, 1, 3, 5]  # rows 0, 2, 4 of the probe are incorrect, 1, 3 and 9 are correct
    np.testing.assert_allclose(shown(figures[names[0]], 1), cosine[np.ix_(order, order)], rtol=1e-6)
    titles = [axes.get_title(loc="left") for axes in figures[names[0]].axes[:3]]
    assert titles == ["step 0", "step 20", "step 40"]
    shares = shown(figures[names[2]])
    assert shares.shape == (3, len(BLOCKS))
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(shares[2], kernels.layer_shares(run.array("layers/40"), itself=False)["|K|"])
    assert [t.get_text() for t in figures[names[2]].axes[0].get_xticklabels()] == ["embed", "0", "1", "norm"]


def test_the_page_has_the_section_where_there_are_kernels_and_only_there(tmp_path):
    page = render([make_run(tmp_path / "run", steps=(0,))], tmp_path / "with.html").read_text()
    assert "The kernel during training" in page
    assert (tmp_path / "figures" / "kernel-training-cosines.png").is_file()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 0, "kind": "train", "reward/mean": 0.5}\n')
    assert "The kernel during training" not in render([bare], tmp_path / "without.html").read_text()


def test_runs_are_shown_one_after_the_other_under_their_names(tmp_path):
    runs = [read_run(make_run(tmp_path / name, steps=(0, 5), layers=name == "b"), name) for name in "ab"]
    items = kernels.training_items(runs)
    assert [item.name.removeprefix("kernel-training-") for item in items] == [
        "cosines-1", "spectra-1", "cosines-2", "spectra-2", "layers-2",
    ]  # fmt: skip
    assert items[0].caption.startswith("a. Cosine")
    assert items[-1].caption.startswith("b. Where")


def test_a_kernel_that_does_not_say_which_probes_it_is_of_is_drawn_as_it_is(figures, tmp_path):
    path = make_run(tmp_path / "run", steps=(0,), layers=False)
    (path / "arrays.zarr" / "probe_kernel/0" / ".zattrs").unlink()
    run = read_run(path)
    kernels.training_items([run])
    np.testing.assert_allclose(
        shown(figures["kernel-training-cosines"]), cosines(run.array("probe_kernel/0")), rtol=1e-6
    )
