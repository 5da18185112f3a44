"""The Qwen2 of google-tunix with the weights of a Hugging Face folder."""

import importlib.metadata
import json
import os

import jax
from jax import numpy as jnp
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params


def load(folder):
    """The model, single precision; no rematerialisation, as in the other cases."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    rope = config.get("rope_parameters") or config
    shape = qwen2.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=rope["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=config["tie_word_embeddings"],
    )
    return params.create_model_from_safe_tensors(folder, shape, dtype=jnp.float32)


def versions():
    return {"google-tunix": f"{importlib.metadata.version('google-tunix')} on jax {jax.__version__}"}


class Tokenizer:
    """Token ids as text: Tunix takes strings only. ``pad`` is treated as padding wherever it occurs."""

    def __init__(self, pad):
        self.pad = pad

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return ""

    def bos_id(self):
        return None

    def eos_id(self):
        return -1  # never drawn

    def pad_id(self):
        return self.pad
