"""Logits against transformers, for every family and feature; skipped without torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import SIZES
from model_cases import largest
from tolerances import HUGGING_FACE

from jaxrl.models.decoder import hidden, logits, with_config
from jaxrl.models.hf import load_model, save_model

pytestmark = pytest.mark.parity
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FEATURES = {
    "llama3 rope scaling": ("llama", dict(rope_parameters=LLAMA3)),
    "rope theta": ("llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    "norm eps": ("llama", dict(rms_norm_eps=0.1)),
    "attention bias": ("llama", dict(attention_bias=True)),
    "attention bias with q/k norm": ("qwen3", dict(attention_bias=True)),
    "mlp bias": ("llama", dict(mlp_bias=True)),
    "explicit head size": ("llama", dict(head_dim=12)),
    "explicit head size with q/k norm": ("qwen3", dict(head_dim=12)),
    "one key-value head": ("qwen2", dict(num_key_value_heads=1)),
    "sliding window": ("mistral", dict(sliding_window=5)),
    "window on upper layers": ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)),
    "window on some layers": (
        "qwen3",
        dict(use_sliding_window=True, sliding_window=3, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
}
CASES = {
    f"{family} {'tied' if tied else 'untied'} {'MHA' if kv == 4 else 'GQA'}": (
        family,
        dict(tie_word_embeddings=tied, num_key_value_heads=kv),
    )
    for family in FAMILIES
    for tied in (True, False)
    for kv in (4, 2)
} | FEATURES
# what the feature is in our config, and a value without it
WITHOUT = {
    "llama3 rope scaling": dict(rope_scaling=None),
    "rope theta": dict(rope_theta=10000.0),
    "norm eps": dict(norm_eps=1e-6),
    "sliding window": dict(windows=()),
    "window on upper layers": dict(windows=()),
    "window on some layers": dict(windows=()),
}
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))
ours = jax.jit(lambda model, tokens: logits(model, hidden(model, tokens)))


class Case:
    """A random transformers model, its folder and what it computes."""

    def __init__(self, name, folder):
        torch = pytest.importorskip("torch")
        import transformers

        family, changes = CASES[name]
        sizes = SIZES | {"num_hidden_layers": 4 if "some layers" in name else 3}
        base = {"sliding_window": None} if family == "mistral" else {"head_dim": 8}
        config = transformers.AutoConfig.for_model(family, **(sizes | base | {"tie_word_embeddings": True} | changes))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.5, 0.3)
        self.logits = self.run(model)
        model.save_pretrained(folder)
        self.folder = folder
        self.model = load_model(folder)

    @staticmethod
    def run(model) -> np.ndarray:
        import torch

        with torch.no_grad():
            return model(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return request.param, Case(request.param, tmp_path_factory.mktemp("model"))


def test_logits_are_those_of_transformers(case):
    _, case = case
    got = ours(case.model, jnp.asarray(TOKENS, jnp.int32))
    assert np.abs(case.logits).max() > 1
    np.testing.assert_allclose(got, case.logits, rtol=0, atol=HUGGING_FACE)


def test_an_exported_folder_computes_the_same_in_transformers_and_imports_bitwise(case, tmp_path):
    import transformers

    _, case = case
    out = save_model(case.model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    np.testing.assert_array_equal(case.run(again), case.logits)
    assert largest(load_model(out), case.model) == 0
    assert load_model(out).config == case.model.config


def test_the_feature_matters_in_its_own_case(case):
    """Switched off, each feature moves the logits far beyond the tolerance; biases are not near zero."""
    name, case = case
    if name in WITHOUT:
        other = with_config(case.model, **WITHOUT[name])
        assert np.abs(ours(other, jnp.asarray(TOKENS, jnp.int32)) - case.logits).max() > 100 * HUGGING_FACE
    for leaf in ("q_bias", "o_bias", "down_bias", "q_norm"):
        value = getattr(case.model.layers, leaf)
        assert value is None or float(jnp.abs(value[...]).mean()) > 0.1
