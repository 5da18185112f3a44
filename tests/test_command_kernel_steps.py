"""``jaxrl kernel --verify`` and ``--time``, and the page beside a kernel."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_command_kernel import SHAPE, SUMS, command, jsonl, rows_of
from tiny_tokenizer import EOS, save_tiny
from train_world import use_devices

from jaxrl import keys
from jaxrl.commands.compared import Side
from jaxrl.commands.steps import Step, objective
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.influence.gradients import row_weights
from jaxrl.models.decoder import init_model
from jaxrl.models.hf import load_model, save_model
from jaxrl.models.logps import token_logps
from jaxrl.report import kernels, style
from jaxrl.train.arrays import ArrayStore
from jaxrl.types import Kernel, Rows

ADVANTAGES = [1.5, -0.5, None, 2.0, 0.0, -1.0]
WEIGHED = [r | ({} if a is None else {"advantage": a}) for r, a in zip(SUMS, ADVANTAGES, strict=True)]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """An untrained decoder with a tokenizer of one token a byte."""
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(init_model(SHAPE, keys.root(0)), folder)
    return save_tiny(folder, stop=EOS)


def step_of(name: str, measured: list[float], **predicted: list[float]) -> Step:
    found = {way: np.array(values) for way, values in predicted.items()}
    return Step(name, lr=0.5, given=False, size=2.0, predicted=found, measured=np.array(measured), floor=1e-6)


# ---------------------------------------------------------------- without a model


def test_a_row_without_an_advantage_weighs_one_and_all_are_shared_by_the_number_of_rows():
    side = Side(rows_of(SUMS), {"advantage": ADVANTAGES})
    np.testing.assert_allclose(objective(side), np.array([1.5, -0.5, 1, 2, 0, -1]) / 6)
    np.testing.assert_allclose(objective(Side(rows_of(SUMS), {})), np.full(6, 1 / 6))
    with pytest.raises(JaxrlError, match="every row of --a has advantage 0"):
        objective(Side(rows_of(SUMS[:2]), {"advantage": [0.0, 0]}))


@pytest.mark.parametrize("value", ["high", True, float("nan")])
def test_an_advantage_that_is_no_number_is_named_with_its_line(model, tmp_path, value):
    bad = jsonl(tmp_path / "a.jsonl", [SUMS[0], SUMS[1] | {"advantage": value}])
    with pytest.raises(JaxrlError, match=r"a\.jsonl, line 2: field 'advantage' must be a finite number"):
        command("kernel", model, "--a", bad, "--out", tmp_path / "K")


def test_a_line_of_the_table_says_how_far_predictions_are_off():
    step = step_of("SGD", [1.0, -2.0, 4.0], kernel=[1.1, -2.0, -4.0], update=[1.1, -2.0, 4.0])
    row = step.row("kernel")
    assert row["median relative error"] == pytest.approx(0.1)
    assert row["median |predicted|"] == 2.0
    assert row["sign agreement"] == pytest.approx(2 / 3)
    assert row["correlation"] == pytest.approx(np.corrcoef([1, -2, 4], [1.1, -2, -4])[0, 1])
    assert row["gap to kernel"] == 0
    assert step.row("update")["gap to kernel"] == pytest.approx(8 / np.sqrt(1.1**2 + 2**2 + 4**2))
    assert step_of("SGD", [0.0, 0.0], kernel=[1.0, 1.0]).error("kernel") == np.inf


def test_every_row_is_drawn_at_its_prediction_and_measurement(monkeypatch):
    drawn: list[Figure] = []
    picture = style.picture
    monkeypatch.setattr(style, "picture", lambda figure, *rest: (drawn.append(figure), picture(figure, *rest))[1])
    first, second = np.array([[0.1, -0.2, 0.3], [0.1, -0.25, 0.2]]), np.array([[1.0, 2.0], [1.5, 2.0]])
    kernels.predicted_steps("steps", [("SGD", *first), ("AdamW", *second)], "Says what it shows.")
    for panel, (predicted, measured) in zip(drawn[0].axes, (first, second), strict=True):
        np.testing.assert_allclose(panel.collections[0].get_offsets(), np.stack([predicted, measured], 1))
        np.testing.assert_array_equal(panel.lines[0].get_xdata(), panel.lines[0].get_ydata())
        low, high = panel.get_xlim()
        assert low < min(0, measured.min()) <= max(predicted.max(), measured.max()) < high


@pytest.fixture
def fake(monkeypatch):
    """A kernel of ones and steps of fixed numbers, so that nothing is compiled."""

    def ones(model, a: Rows, b: Rows, *, blocks, normalise, **options):
        values = jnp.ones((len(a.start), len(b.start)))
        parts = {"embed": values / 4, "norm": values * 3 / 4} if blocks == "layer" else None
        norms = jnp.ones(len(a.start)), jnp.ones(len(b.start))
        return Kernel(values, "ones", "float32", normalise, *norms, blocks=parts, noise=0.1, why="a test")

    steps = [
        step_of(name, [1.0, 2.0], kernel=[1.25, 2.5], update=[1.0, 2.0], change=[1.0, 2.5]) for name in ("SGD", "AdamW")
    ]
    module = sys.modules["jaxrl.commands.kernel"]
    monkeypatch.setattr(module, "gradient_kernel", ones)
    monkeypatch.setattr(module, "verified", lambda *a: steps)


@pytest.mark.slow
def test_steps_are_stored_and_drawn_and_go_with_the_next_kernel_that_takes_none(model, fake, tmp_path):
    words = ("kernel", model, "--a", jsonl(tmp_path / "a.jsonl", SUMS[:2]), "--out", tmp_path / "K.zarr")
    said = command(*words, "--verify")
    stored = ArrayStore(tmp_path / "K.zarr")
    for step in ("sgd", "adamw"):
        np.testing.assert_array_equal(stored.read(f"measured/{step}"), [1, 2])
        np.testing.assert_array_equal(stored.read(f"predicted/{step}-kernel"), [1.25, 2.5])
        np.testing.assert_array_equal(stored.read(f"predicted/{step}-change"), [1, 2.5])
        about = json.loads((tmp_path / "K.zarr" / "measured" / step / ".zattrs").read_text())
        assert about == {"lr": 0.5, "lr_given": False, "size": 2.0, "noise_floor": 1e-6}
    assert said["predicted against measured"]["SGD"]["kernel"]["median relative error"] == 0.25
    assert (tmp_path / "K-steps.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "K-steps.png") in said["pictures"]
    assert "predicted against measured" not in command(*words, "--overwrite")
    assert not (tmp_path / "K-steps.png").exists()
    assert "Predicted against measured" not in (tmp_path / "K.html").read_text()


def test_the_page_holds_pictures_and_tables_and_needs_no_other_file(model, fake, tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", SUMS), jsonl(tmp_path / "b.jsonl", SUMS[:2])
    said = command("kernel", model, "--a", a, "--b", b, "--layers", "--verify", "--out", tmp_path / "K.zarr")
    page = (tmp_path / "K.html").read_text()
    assert said["page"] == str(tmp_path / "K.html")
    assert page.count('src="data:image/png;base64,') == 4  # cosines, spectrum, layers, steps
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert len(re.findall("<table>", page)) == 6  # summary, layers, group, correct, prompt, steps
    cells = re.findall(r"<td[^>]*>\s*([^<]*?)\s*(?:<|$)", page)
    assert "0.750" in cells  # the share of norm
    assert "0.250" in cells  # the error of the kernel's prediction
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"K-{name}.png" for name in ("cosines", "layers", "spectrum", "steps")), "K.html", "K.zarr", "a.jsonl", "b.jsonl",
    ]  # fmt: skip


def test_steps_are_of_rows_of_text_and_their_rates_of_steps(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"experiment": {}}')
    for option in ("--verify", "--time"):
        with pytest.raises(UsageError, match=f"{option}: .* is a run folder, whose steps `jaxrl check` measures"):
            command("kernel", tmp_path / "run", option)
    for option in ("--lr", "--adam-lr", "--weight-decay"):
        with pytest.raises(UsageError, match=f"{option} is of a step that --verify takes; add --verify"):
            command("kernel", "model", "--a", "a.jsonl", option, "0.1")
    with pytest.raises(UsageError, match="argument --lr: expected a number above 0, got '0'"):
        command("kernel", "model", "--a", "a.jsonl", "--verify", "--lr", 0)


# ---------------------------------------------------------------- with a model


@pytest.mark.slow
@pytest.mark.parametrize("normalise", ["sum", "tok"])
def test_measured_changes_are_those_of_steps_taken_by_hand(model, tmp_path, normalise):
    rates, decay = {"sgd": 2e-3, "adamw": 2e-4}, 0.3
    words = ("--verify", "--lr", rates["sgd"], "--adam-lr", rates["adamw"], "--weight-decay", decay)
    a, b = jsonl(tmp_path / "a.jsonl", WEIGHED), jsonl(tmp_path / "b.jsonl", SUMS[1:4])
    said = command("kernel", model, "--a", a, "--b", b, *words, "--normalise", normalise, "--out", tmp_path / "K.zarr")[
        "predicted against measured"
    ]
    theta, rows, others = load_model(model), rows_of(SUMS), rows_of(SUMS[1:4])
    weight = jnp.array([1.5, -0.5, 1, 2, 0, -1]) / 6

    def score(theta, rows):
        return jnp.sum(token_logps(theta, rows) * row_weights(rows, normalise), axis=-1)

    gradient = jax.grad(lambda theta: weight @ score(theta, rows))(theta)
    after = {
        "sgd": jax.tree.map(lambda p, g: p + rates["sgd"] * g, theta, gradient),
        "adamw": jax.tree.map(lambda p, g: p + rates["adamw"] * (g / (jnp.abs(g) + 1e-8) - decay * p), theta, gradient),
    }
    stored = ArrayStore(tmp_path / "K.zarr")
    np.testing.assert_allclose(
        stored.read("predicted/sgd-kernel"), rates["sgd"] * weight @ stored.read("kernel"), rtol=1e-5
    )
    for name, stepped in after.items():
        expected = np.asarray(score(stepped, others)) - np.asarray(score(theta, others))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(stored.read(f"measured/{name}"), expected, atol=1e-3 * scale)
        row = said["SGD" if name == "sgd" else "AdamW"]
        size = np.sqrt(sum(np.sum((np.asarray(x) - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (stepped, theta)), strict=True)))  # fmt: skip
        assert row["kernel"]["|dtheta|"] == pytest.approx(float(size), rel=1e-3)
        assert row["kernel"]["lr"] == rates[name]
        assert row["kernel"]["lr given"]
        assert row["kernel"]["median relative error"] < 0.05
        assert row["update"]["gap to kernel"] < 1e-4
        assert row["change"]["gap to kernel"] < 1e-3
        assert 0 < row["kernel"]["noise floor"] < 1e-3 * scale


@pytest.mark.slow
def test_without_rates_the_median_score_changes_by_a_fixed_share(model, tmp_path):
    a = jsonl(tmp_path / "a.jsonl", SUMS)
    said = command("kernel", model, "--a", a, "--verify", "--time", "--method", "ghost", "--out", tmp_path / "K")
    rows = rows_of(SUMS)
    scores = np.asarray(token_logps(load_model(model), rows)).sum(-1)
    for step in said["predicted against measured"].values():
        assert step["kernel"]["median |predicted|"] == pytest.approx(0.003 * np.median(np.abs(scores)), rel=1e-3)
        assert not step["kernel"]["lr given"]
        assert step["kernel"]["median relative error"] < 0.05
    seconds = said["time"]["CPU-seconds"]
    assert seconds["gradient pass"]["times the gradient pass"]["value"] == 1
    ratio = seconds["kernel"]["times the gradient pass"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert 0.1 < said["time"]["peak memory, GiB"]["without the pass"] <= said["time"]["peak memory, GiB"]["with it"]
