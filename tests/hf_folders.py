"""Random Hugging Face folders, written by the safetensors library from names and shapes spelled out here."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SIZES = dict(
    vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 44}},
    "added_tokens": [{"id": 45, "content": "<e>"}],
}


def config_json(family: str = "llama", **changes) -> dict:
    """A config.json object of a family, small."""
    return {
        "model_type": family, "architectures": [f"{NAMES[family]}ForCausalLM"], "hidden_act": "silu",
        "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        **SIZES, **({"sliding_window": None} if family == "mistral" else {}),
        **({"head_dim": 8} if family == "qwen3" else {}), **changes,
    }  # fmt: skip


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a checkpoint with this config."""
    d, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    e = c.get("head_dim", d // c["num_attention_heads"])
    q, k = c["num_attention_heads"] * e, c["num_key_value_heads"] * e
    family, attention_bias = c["model_type"], c.get("attention_bias", False)
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for i in range(c["num_hidden_layers"]):
        p, a, m = (f"model.layers.{i}.{part}" for part in ("", "self_attn.", "mlp."))
        out |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        out |= {a + "q_proj.weight": (q, d), a + "k_proj.weight": (k, d), a + "v_proj.weight": (k, d)}
        out |= {a + "o_proj.weight": (d, q)}
        out |= {m + "gate_proj.weight": (f, d), m + "up_proj.weight": (f, d), m + "down_proj.weight": (d, f)}
        if attention_bias or family == "qwen2":
            out |= {a + "q_proj.bias": (q,), a + "k_proj.bias": (k,), a + "v_proj.bias": (k,)}
        if attention_bias and family != "qwen2":
            out |= {a + "o_proj.bias": (d,)}
        if c.get("mlp_bias"):
            out |= {m + "gate_proj.bias": (f,), m + "up_proj.bias": (f,), m + "down_proj.bias": (d,)}
        if family == "qwen3":
            out |= {a + "q_norm.weight": (e,), a + "k_norm.weight": (e,)}
    return out


def random_tensors(config: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal(0, 0.3) everywhere."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes(config).items()}


def write_folder(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> pathlib.Path:
    """A model folder; with several shards, every n-th tensor goes to the n-th one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = names[s::shards]
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def side_files(folder: pathlib.Path) -> dict[str, str]:
    """Writes what a folder holds beside config and weights; returns name -> content."""
    files = {
        "generation_config.json": '{"eos_token_id": [2, 45], "temperature": 0.7}',
        "tokenizer.json": json.dumps(TOKENIZER),
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


BFLOAT16 = ml_dtypes.bfloat16
