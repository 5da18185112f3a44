"""A real pretrained model: SmolLM2-135M against transformers, on GSM8K problems.

``JAXRL_SMOLLM2`` names the model's folder; without it, without torch or without the problems the
tests are skipped and say so.
"""

import json
import os
import pathlib

import jax
import numpy as np
import pytest

from jaxrl import keys
from jaxrl.models.hf import load_model, save_model
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Greedy

pytestmark = [pytest.mark.slow, pytest.mark.parity]
PROMPTS, NEW = 8, 64
NEAR_TIE = 1e-4  # gap of the two highest logits


@pytest.fixture(scope="module")
def folder() -> pathlib.Path:
    named = os.environ.get("JAXRL_SMOLLM2")
    if not named:
        pytest.skip("JAXRL_SMOLLM2 does not name a folder with SmolLM2-135M")
    return pathlib.Path(named)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def test_greedy_continuations_are_those_of_transformers_up_to_a_near_tie(folder, model, shared):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    lines = (shared / "data" / "gsm8k_test.jsonl").read_text().splitlines()[:PROMPTS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(f"Question: {json.loads(line)['problem']}\nAnswer:")["input_ids"] for line in lines]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = theirs.generation_config.eos_token_id
    rollouts = generate(model, prompts, Greedy(), n=1, key=keys.root(0), max_new_tokens=NEW, stop_ids=[end])
    rows = jax.tree.map(np.asarray, rollouts.rows)
    for i, prompt in enumerate(prompts):
        got = rows.tokens[i, 0, rows.start[i, 0] : rows.length[i, 0]].tolist()
        with torch.no_grad():
            out = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)
        want = out[0, len(prompt) :].tolist()
        at = next((t for t, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if at is None:
            assert got == want, f"prompt {i}: one continuation ends early"
            continue
        with torch.no_grad():
            top = theirs(torch.tensor([prompt + want[:at]])).logits[0, -1].topk(2).values
        gap = float(top[0] - top[1])
        assert gap < NEAR_TIE, f"prompt {i}: token {at} is {got[at]}, expected {want[at]}; its top-2 gap is {gap:.2e}"


def test_the_checkpoint_survives_a_round_trip_byte_for_byte(folder, model, tmp_path):
    out = save_model(model, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
