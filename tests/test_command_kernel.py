"""``jaxrl kernel`` on rows of text and on a run, what training stores of its kernels, and what is refused."""

import json
import pathlib
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizer import EOS, save_tiny
from train_world import GRPO, arrays, experiment, use_devices

import jaxrl
from jaxrl import cli, keys
from jaxrl.commands.runs import open_run
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.influence.batch import batch_prediction
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.influence.labels import label_blocks, label_order
from jaxrl.influence.probe import load_probe
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.hf import load_model, save_model
from jaxrl.rl.algorithms import prepare
from jaxrl.sampling.strategies import Temperature
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.collect import Collector
from jaxrl.train.experiment import CheckpointSpec, EvalSpec, InfluenceSpec, RolloutSpec
from jaxrl.types import Kernel, Rows

SHAPE = ModelConfig(
    family="llama", vocab_size=263, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, max_positions=64,
)  # fmt: skip
SUMS = [
    {"prompt": f"{a}+{b}=", "response": str(a + b), "group": "even" if a % 2 == 0 else "odd", "correct": b < 5}
    for a in range(3)
    for b in (1, 7)
]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


def command(*words) -> dict:
    """What a command returns, from its words on the command line."""
    return cli.run(cli.parse([str(word) for word in words]))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """An untrained decoder with a tokenizer of one token a byte."""
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(init_model(SHAPE, keys.root(0)), folder)
    return save_tiny(folder, stop=EOS)


def jsonl(path: pathlib.Path, records: list) -> pathlib.Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def tokens_of(text: str) -> list[int]:
    """One token a byte, after the seven special ones in the order of their characters."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [7 + alphabet.index(c) for c in text]  # digits and signs stand for themselves


def rows_of(records: list[dict], end: tuple[int, ...] = (EOS,)) -> Rows:
    """The rows of texts without spaces, by hand."""
    pairs = [(tokens_of(r["prompt"]), [*tokens_of(r["response"]), *end]) for r in records]
    width = max(len(p) + len(r) for p, r in pairs)
    tokens = np.array([p + r + [0] * (width - len(p) - len(r)) for p, r in pairs], np.int32)
    start = np.array([len(p) for p, _ in pairs], np.int32)
    return jax.tree.map(jnp.asarray, Rows(tokens, start, start + np.array([len(r) for _, r in pairs], np.int32)))


# ---------------------------------------------------------------- rows of text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "streamed"])
def test_a_stored_kernel_is_that_of_the_texts_tokens(model, tmp_path, method):
    out = tmp_path / "K.zarr"
    a, b = jsonl(tmp_path / "a.jsonl", SUMS), jsonl(tmp_path / "b.jsonl", SUMS[1:4])
    words = ("--layers", "--normalise", "tok", "--method", method, "--memory", "1G", "--out", out)
    said = command("kernel", model, "--a", a, "--b", b, *words)["kernels"]["A x B"]
    expected = gradient_kernel(load_model(model), rows_of(SUMS), rows_of(SUMS[1:4]), normalise="tok", blocks="layer")
    stored, about = ArrayStore(out), json.loads((out / "layers" / ".zattrs").read_text())
    np.testing.assert_allclose(stored.read("kernel"), expected.values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stored.read("sq_norms_a"), expected.sq_norms_a, rtol=1e-4)
    np.testing.assert_allclose(stored.read("sq_norms_b"), expected.sq_norms_b, rtol=1e-4)
    np.testing.assert_allclose(stored.read("layers").sum(0), stored.read("kernel"), rtol=1e-4, atol=1e-5)
    assert about["blocks"] == list(expected.blocks) == ["embed", "layers.0", "layers.1", "norm"]
    assert (about["method"], about["why"]) == (said["method"], said["why"])
    assert about["method"] == ("reference" if method == "auto" else method)
    assert 0 < about["noise"] < 1e-4
    assert said["signs_below_noise"] < 18


@pytest.fixture
def counted(monkeypatch):
    """Token counts of the responses in the place of gradients, so that nothing is compiled; ids in two blocks."""

    def fake(model, a, b, *, blocks, normalise, **options):
        left, right = _counts(a), _counts(b)
        parts = {name: jnp.asarray(left[:, i::2] @ right[:, i::2].T) for i, name in enumerate(("even", "odd"))}
        norms = [jnp.asarray((f**2).sum(1)) for f in (left, right)]
        values, parts = jnp.asarray(left @ right.T), parts if blocks == "layer" else None
        return Kernel(values, "counts", "float32", normalise, *norms, blocks=parts, noise=0.1, why="a test")

    monkeypatch.setattr(sys.modules["jaxrl.commands.kernel"], "gradient_kernel", fake)


def _counts(rows: Rows) -> np.ndarray:
    mask = np.asarray(rows.mask())
    rows = zip(np.asarray(rows.tokens), mask, strict=True)
    return np.array([np.bincount(line[m], minlength=SHAPE.vocab_size) for line, m in rows], float)


def test_a_kernel_is_stored_with_norms_layers_labels_and_pictures(model, counted, tmp_path):
    out = tmp_path / "K.zarr"
    a, b = jsonl(tmp_path / "a.jsonl", SUMS), jsonl(tmp_path / "b.jsonl", SUMS[1:4])
    said = command("kernel", model, "--a", a, "--b", b, "--layers", "--normalise", "tok", "--out", out)
    left, right = _counts(rows_of(SUMS)), _counts(rows_of(SUMS[1:4]))
    stored, about = ArrayStore(out), json.loads((out / "layers" / ".zattrs").read_text())
    np.testing.assert_array_equal(stored.read("kernel"), left @ right.T)
    np.testing.assert_array_equal(stored.read("sq_norms_a"), (left**2).sum(1))
    np.testing.assert_array_equal(stored.read("sq_norms_b"), (right**2).sum(1))
    np.testing.assert_array_equal(stored.read("layers")[1], left[:, 1::2] @ right[:, 1::2].T)
    assert about["blocks"] == ["even", "odd"]
    assert {name: about[name] for name in ("method", "why", "dtype", "precision", "normalise", "noise")} == {
        "method": "counts", "why": "a test", "dtype": "float32", "precision": "highest", "normalise": "tok", "noise": 0.1,
    }  # fmt: skip
    assert about["labels_b"] == {"group": ["even", "odd", "odd"], "correct": [False, True, False], "prompt": [1, 2, 3]}
    assert json.loads((out / ".zattrs").read_text())["model"] == str(model)
    pictures = [tmp_path / f"K-{name}.png" for name in ("cosines", "spectrum", "layers")]
    assert said["pictures"] == [str(p) for p in pictures]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    assert sum(block["|K|"] for block in said["shares of layers, A x B"].values()) == pytest.approx(1)


def test_rows_with_themselves_are_summed_up_by_structure_and_label(model, counted, tmp_path):
    out = tmp_path / "K"
    said = command("kernel", model, "--a", jsonl(tmp_path / "a.jsonl", SUMS), "--limit", 5, "--out", out)
    kernel = ArrayStore(out).read("kernel")
    norms = np.sqrt(np.diag(kernel))
    cosine = kernel / np.outer(norms, norms)
    found = said["kernels"]["A x A"]
    assert found["rows"] == "5 x 5"
    assert found["trace"] == pytest.approx(np.diag(kernel).mean(), rel=1e-5)
    off = ~np.eye(5, dtype=bool)
    assert found["mean_cos"] == pytest.approx(cosine[off].mean(), rel=1e-4)
    assert found["noise_floor"] == 0.1
    assert found["signs_below_noise"] == (np.abs(cosine) <= 0.1).sum()
    same = np.array([[r["group"] == s["group"] for r in SUMS[:5]] for s in SUMS[:5]])
    labels = said["cosines by label, A x A"]
    assert labels["group"]["same"]["mean_cos"] == pytest.approx(cosine[same & off].mean(), rel=1e-4)
    assert labels["group"]["cross"]["mean_cos"] == pytest.approx(cosine[~same].mean(), rel=1e-4)
    assert labels.keys() == {"group", "correct", "prompt"}
    assert labels["prompt"].keys() == {"cross"}


def test_the_same_prompt_in_both_files_is_the_same_prompt(model, counted, tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", SUMS[:3]), jsonl(tmp_path / "b.jsonl", [SUMS[2], SUMS[0]])
    labels = command("kernel", model, "--a", a, "--b", b, "--out", tmp_path / "K")["cosines by label, A x B"]
    assert labels["prompt"]["same"]["pairs"] == 2
    assert labels["prompt"]["same"]["mean_cos"] == pytest.approx(1, abs=1e-5)
    assert labels["prompt"]["cross"]["pairs"] == 4
    assert labels["prompt"].keys() == {"same", "cross"}
    assert "even, odd" in labels["group"]


def test_a_bad_row_leaves_nothing_behind(model, tmp_path):
    bad = jsonl(tmp_path / "a.jsonl", [SUMS[0], {"prompt": "1"}])
    with pytest.raises(JaxrlError, match=r"a\.jsonl, line 2: field 'response' is missing"):
        command("kernel", model, "--a", bad, "--out", tmp_path / "K")
    with pytest.raises(UsageError, match="--max-tokens 65: the model's context holds 64 tokens"):
        command("kernel", model, "--a", bad, "--max-tokens", 65, "--out", tmp_path / "K")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(tmp_path):
    small = init_model(replace(SHAPE, vocab_size=100), keys.root(0))
    save_tiny(save_model(small, tmp_path / "model"), stop=EOS)
    with pytest.raises(JaxrlError, match="its tokenizer has 263 ids, the model's vocabulary 100; use the tokenizer"):
        command("kernel", tmp_path / "model", "--a", jsonl(tmp_path / "a.jsonl", SUMS), "--out", tmp_path / "K")


def test_a_parameter_that_is_not_finite_is_named_with_its_layer(model, tmp_path):
    broken = load_model(model)
    down = broken.layers.down
    down.set_value(down.get_value().at[1, 3, 2].set(jnp.nan))
    save_tiny(save_model(broken, tmp_path / "model"), stop=EOS)
    with pytest.raises(JaxrlError, match=r"the parameter layers\.down of layer 1 holds NaN or infinity \(1 of 1024"):
        command("kernel", tmp_path / "model", "--a", jsonl(tmp_path / "a.jsonl", SUMS), "--out", tmp_path / "K")


def test_a_kernel_that_is_not_finite_is_not_stored(model, counted, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "_counts", lambda rows: np.array([[1.0], [np.inf]]))
    with pytest.raises(JaxrlError, match="the kernel A x A is not finite at row 0 of the first side and row 1 of the"):
        command("kernel", model, "--a", jsonl(tmp_path / "a.jsonl", SUMS[:2]), "--out", tmp_path / "K")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_finished_kernel_is_replaced_only_on_request_and_by_a_whole_one(model, counted, tmp_path, monkeypatch):
    a, out = jsonl(tmp_path / "a.jsonl", SUMS[:2]), tmp_path / "K.zarr"
    words = ("kernel", model, "--a", a, "--out", out)
    command(*words)
    first = ArrayStore(out).read("kernel")
    (tmp_path / "K-layers.png").write_text("of an earlier kernel")
    with pytest.raises(UsageError, match=r"K\.zarr: is there already; add --overwrite to replace it"):
        command(*words)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["jaxrl.commands.kernel"], "store_kernel", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command(*words, "--overwrite")
    np.testing.assert_array_equal(ArrayStore(out).read("kernel"), first)
    command(*words, "--overwrite", "--limit", 1)
    assert ArrayStore(out).read("kernel").shape == (1, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "K-cosines.png", "K-spectrum.png", "K.html", "K.zarr", "a.jsonl",
    ]  # fmt: skip


def test_a_folder_that_holds_no_kernel_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    with pytest.raises(UsageError, match="is no kernel that `jaxrl kernel` wrote, so it is not replaced"):
        command("kernel", tmp_path, "--a", "a.jsonl", "--out", tmp_path / "mine", "--overwrite")
    assert (tmp_path / "mine" / "file").read_text() == "kept"


def test_wrong_words_are_answered_before_a_model_is_loaded(tmp_path):
    with pytest.raises(UsageError, match="--method colums: did you mean 'columns'"):
        command("kernel", tmp_path / "none", "--a", "a.jsonl", "--method", "colums")
    with pytest.raises(UsageError, match="give the rows with --a FILE"):
        command("kernel", tmp_path)
    with pytest.raises(UsageError, match=r"--step 3: .* is no run folder, and only a run has steps"):
        command("kernel", tmp_path, "--a", "a.jsonl", "--step", 3)
    with pytest.raises(UsageError, match="argument --memory: expected bytes such as 512M or 2G, got '2X'"):
        cli.parse(["kernel", "M", "--memory", "2X"])
    sizes = [cli.parse(["kernel", "M", "--memory", text]).memory for text in ("512M", "2G", "1.5k", "7", "1GiB")]
    assert sizes == [512 << 20, 2 << 30, 1536, 7, 1 << 30]


# ---------------------------------------------------------------- labels


def test_pairs_count_once_and_unlabelled_rows_not_at_all():
    cosine = np.array([[1.0, 0.5, -0.1, 9], [0.5, 1, 0.2, 9], [-0.1, 0.2, 1, 9], [9, 9, 9, 9]])
    labels = ["x", "x", "y", None]
    found = label_blocks(cosine, labels, labels, itself=True)
    assert found["same"] == {"pairs": 1, "mean_cos": 0.5, "mean_abs_cos": 0.5, "negative": 0}
    assert found["cross"]["pairs"] == 2
    assert found["cross"]["mean_cos"] == pytest.approx(0.05)
    assert found["cross"]["negative"] == 0.5
    assert found["x, y"] == found["cross"]
    assert label_blocks(cosine, labels, labels, itself=False)["same"]["pairs"] == 5


def test_rows_are_ordered_by_label_in_order_of_appearance():
    assert label_order(["b", "a", "b", "a"]).tolist() == [0, 2, 1, 3]
    assert label_order(["b", "a", "b", "a"], [2, 1, 1, 1]).tolist() == [0, 2, 1, 3]
    assert label_order(["b", "a", "b"], ["late", "late", "early"]).tolist() == [0, 2, 1]


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """Two steps of GRPO on MSA-0, sampled a little cold, with every trained row in the kernel at each step."""
    x = experiment(
        GRPO,
        steps=2,
        rollout=RolloutSpec(prompts=8, n=4, max_new_tokens=5, strategy=Temperature(value=0.8)),
        influence=InfluenceSpec(every=1, rows=32),
        eval=EvalSpec(every=0, n=2, k=(1, 2)),
        checkpoint=CheckpointSpec(every=1, keep_last=3),
    )
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        return jaxrl.train(x, out=tmp_path_factory.mktemp("run") / "run", quiet=True)


def about(run: pathlib.Path, name: str) -> dict:
    return json.loads((run / "arrays.zarr" / name / ".zattrs").read_text())


@pytest.mark.slow
def test_training_stores_layers_that_sum_to_the_kernel_and_what_explains_it(run):
    stored = arrays(run)
    for kernel, layers in (("kernel", "layers"), ("probe_kernel", "probe_layers")):
        whole, parts = stored[f"{kernel}/1"], stored[f"{layers}/1"]
        assert parts.shape == (3, *whole.shape)
        np.testing.assert_allclose(parts.sum(0), whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
        assert about(run, f"{layers}/1")["blocks"] == ["embed", "layers.0", "norm"]
        said = about(run, f"{kernel}/1")
        assert said["method"] != "auto"
        assert {"why", "noise", "dtype", "compute", "precision", "normalise", "held_fixed"} <= said.keys()
        assert (len(said["sq_norms_a"]), len(said["sq_norms_b"])) == whole.shape
        assert max(len(said["batch_rows"]), len(said["probe_rows"])) == 32 or whole.shape[1] == 16
    norms = np.diag(stored["probe_kernel/1"])
    np.testing.assert_allclose(about(run, "kernel/1")["sq_norms_b"], norms, rtol=1e-4)


@pytest.mark.slow
def test_stored_weights_turn_the_kernel_into_the_policy_terms_prediction(run):
    opened = open_run(run, 1)
    x, setup = opened.experiment, opened.setup
    collector = Collector(setup.task, x.algorithm, x.rollout, x.reward)
    terms = prepare(x.algorithm, collector(opened.state.model, None, setup.root, 1).graded)[0]
    probe = jax.tree.map(jnp.asarray, load_probe(run / "probe.npz").rows)
    expected = np.asarray(batch_prediction(opened.state.model, terms[:1], probe, temperature=0.8))
    stored, said = arrays(run), about(run, "weights/1")
    assert said["trained"] == len(said["batch_rows"]) == 32
    assert said["uneven"] < 1e-4
    assert np.abs(stored["weights/1"]).max() > 0
    found = stored["weights/1"] @ stored["kernel/1"]
    np.testing.assert_allclose(found, expected[said["probe_rows"]], atol=2e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_layers_are_left_out_on_request(tmp_path):
    x = experiment(
        GRPO, steps=1, influence=InfluenceSpec(every=1, rows=2, layers=False), eval=EvalSpec(every=0, n=2, k=(1, 2))
    )
    stored = arrays(jaxrl.train(x, out=tmp_path / "run", quiet=True))
    assert "kernel/0" in stored
    assert not [name for name in stored if "layers" in name]


@pytest.mark.slow
def test_a_runs_kernel_computed_again_is_what_training_stored(run, tmp_path):
    out = tmp_path / "K.zarr"
    said = command("kernel", run, "--step", 1, "--layers", "--out", out)
    again, stored = ArrayStore(out), arrays(run)
    for name in ("kernel", "probe_kernel", "layers", "probe_layers", "weights"):
        scale = np.abs(stored[f"{name}/1"]).max()
        np.testing.assert_allclose(again.read(name), stored[f"{name}/1"], rtol=1e-3, atol=1e-4 * scale)
    assert (said["model"], said["step"]) == (str(run), 1)
    assert said["kernels"].keys() == {"batch x probe", "probe x probe"}
    labels = json.loads((out / ".zattrs").read_text())["labels"]["kernel"]
    batch, probe = arrays(run)["correct"][1], load_probe(run / "probe.npz")
    assert labels["a"]["correct"] == ["correct" if right else "incorrect" for right in batch.ravel()]
    assert set(labels["a"]["set"]) == {"train"}
    assert labels["b"]["prompt"] == np.asarray(probe.uid).tolist()
    assert len(set(labels["b"]["set"])) > 1
    names = {f"K{side}-{name}.png" for side in ("", "-probe") for name in ("cosines", "spectrum", "layers")}
    assert {pathlib.Path(p).name for p in said["pictures"]} == names == {p.name for p in tmp_path.glob("*.png")}


@pytest.mark.slow
def test_a_step_that_the_run_lacks_is_answered_with_those_it_has(run):
    with pytest.raises(JaxrlError, match=r"no checkpoint of step 7; there are: 1, 2"):
        command("kernel", run, "--step", 7)
    with pytest.raises(UsageError, match=r"--a: .* is a run folder, whose batch is compared with its probe"):
        command("kernel", run, "--a", "a.jsonl")
