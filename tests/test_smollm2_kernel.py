"""The kernel of a real pretrained model: SmolLM2-135M on GSM8K solutions, float32, all parameters.

``JAXRL_SMOLLM2`` names the model's folder; without it, or without the problems, the tests are skipped
and say so.
"""

import json
import os
import pathlib
from itertools import islice

import jax
import numpy as np
import pytest
from test_command_kernel import command, jsonl
from train_world import use_devices

from jaxrl.data.prompts import load_tokenizer
from jaxrl.data.rows import read_rows
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.models.hf import load_model
from jaxrl.train.arrays import ArrayStore

pytestmark = pytest.mark.slow
ROWS, LONGEST = 4, 96
ROUNDING = 2e-6  # of an entry over its two norms: float32 sums over 135 million parameters, taken in two orders
GAP = 1e-4  # the kernel's prediction against forward mode along the same update, relative


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    named = os.environ.get("JAXRL_SMOLLM2")
    if not named:
        pytest.skip("JAXRL_SMOLLM2 does not name a folder with SmolLM2-135M")
    return pathlib.Path(named)


@pytest.fixture(scope="module")
def files(shared, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """Questions with their gold solutions, different ones on the two sides."""
    out = tmp_path_factory.mktemp("rows")
    lines = (shared / "data" / "gsm8k_train2000.jsonl").read_text().splitlines()
    short = (p for p in map(json.loads, lines) if len(p["problem"]) < 200)
    problems = list(islice(short, 2 * ROWS))
    rows = [{"prompt": f"Question: {p['problem']}\nAnswer:", "response": f" {p['solution']}"} for p in problems]
    return jsonl(out / "a.jsonl", rows[:ROWS]), jsonl(out / "b.jsonl", rows[ROWS:])


@pytest.fixture(scope="module")
def found(folder, files, tmp_path_factory) -> tuple[dict, ArrayStore]:
    """What the command says and stores."""
    out = tmp_path_factory.mktemp("kernel") / "K.zarr"
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        words = ("--method", "streamed", "--max-tokens", LONGEST, "--layers", "--verify", "--out", out)
        said = command("kernel", folder, "--a", files[0], "--b", files[1], *words)
    return said, ArrayStore(out)


def test_the_streamed_kernel_is_that_of_gradients_taken_one_at_a_time(folder, files, found, monkeypatch):
    use_devices(monkeypatch, 1)
    stored, model = found[1], load_model(folder)
    sizes = {"vocab_size": model.config.vocab_size, "context": model.config.max_positions, "max_tokens": LONGEST}
    a, b = (read_rows(file, lambda: load_tokenizer(folder), **sizes).rows for file in files)
    pick = np.array([0, ROWS - 1])
    a, b = (jax.tree.map(lambda x: x[pick], rows) for rows in (a, b))
    expected = gradient_kernel(model, a, b, method="columns", noise=0)
    scale = np.sqrt(np.outer(expected.sq_norms_a, expected.sq_norms_b))
    difference = np.abs(stored.read("kernel")[np.ix_(pick, pick)] - expected.values) / scale
    assert difference.max() < ROUNDING
    np.testing.assert_allclose(stored.read("layers").sum(0), stored.read("kernel"), rtol=1e-5)


def test_a_step_does_what_the_kernel_says(found):
    steps = found[0]["predicted against measured"]
    for name in ("SGD", "AdamW"):
        assert steps[name]["kernel"]["median relative error"] < 0.05
        assert steps[name]["kernel"]["sign agreement"] == 1
        assert steps[name]["update"]["gap to kernel"] < GAP
        assert steps[name]["kernel"]["noise floor"] < 0.01 * steps[name]["kernel"]["median |predicted|"]
