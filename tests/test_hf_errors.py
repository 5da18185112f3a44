"""Model folders that cannot be read or written: one message that names the file, the field and the way out."""

import errno
import json

import jax
import numpy as np
import pytest
from hf_folders import config_json, random_tensors, write_folder
from safetensors.numpy import save_file

from jaxrl.errors import JaxrlError, UsageError
from jaxrl.models import safetensor_io
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.hf import load_model, save_model
from jaxrl.models.hf_config import from_hf

CONFIG = config_json("llama", tie_word_embeddings=False)
Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def tensors():
    return random_tensors(CONFIG)


def model():
    return init_model(from_hf(CONFIG), jax.random.key(0))


def raises_with(folder, *parts, kind=JaxrlError, **options) -> str:
    """The message of the failure to load, which must hold every one of ``parts``."""
    with pytest.raises(kind) as caught:
        load_model(folder, **options)
    message = str(caught.value)
    for part in parts:
        assert part in message
    return message


# The folder


def test_no_such_folder(tmp_path):
    raises_with(str(tmp_path / "nowhere"), "nowhere: no such folder", "org/name")
    raises_with("nowhere", "no such folder")


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "weights").write_text("")
    raises_with(tmp_path / "weights", "is a file; expected the folder")


def test_a_hub_id_when_the_hub_does_not_answer(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find the requested files in the disk cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = raises_with("some-lab/some-model", "some-lab/some-model: no such folder here", "the hub did not give it")
    assert "Offline, give the path of a folder" in message
    assert "cannot find the requested files" in message


def test_no_config(tmp_path):
    raises_with(tmp_path, f"{tmp_path}: no config.json")


def test_no_weights_names_what_is_there_instead(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    raises_with(tmp_path, "expected model.safetensors", "found no weights")
    (tmp_path / "pytorch_model.bin").write_text("")
    raises_with(tmp_path, "found pytorch_model.bin", "convert")


def test_a_missing_shard_is_named_with_what_it_holds(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    raises_with(folder, "shard model-00002-of-00003.safetensors is missing", "places 10 tensors there")


def test_an_index_that_does_not_fit_its_shards(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    right = index["weight_map"][Q1]
    index["weight_map"][Q1] = next(s for s in set(index["weight_map"].values()) if s != right)
    file.write_text(json.dumps(index))
    raises_with(folder, f"places {Q1} here, but the file does not hold it")
    file.write_text("{}")
    raises_with(folder, "model.safetensors.index.json: expected a JSON object with a 'weight_map'")


# Files


def test_a_file_that_was_cut_short(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    raises_with(folder, "model.safetensors: cut short", f"promises {len(whole)} bytes and there are {len(whole) - 100}")
    (folder / "model.safetensors").write_bytes(whole[:50])
    raises_with(folder, "cut short within its header (50 bytes)")
    (folder / "model.safetensors").write_bytes(b"")
    raises_with(folder, "not a safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        b'{"x": {"dtype": "F32"}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
    ],
)
def test_a_malformed_header(tmp_path, tensors, header):
    folder = write_folder(tmp_path, CONFIG, tensors)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    raises_with(folder, "model.safetensors: malformed safetensors header")


# Tensors


def test_a_missing_tensor_is_named_with_its_shape(tmp_path, tensors):
    del tensors[Q1]
    raises_with(write_folder(tmp_path, CONFIG, tensors), f"tensor {Q1} of shape (32, 32) is missing")


def test_a_misspelt_tensor_is_matched_to_the_one_that_is_asked_for(tmp_path, tensors):
    tensors[Q1.replace("q_proj", "q_prj")] = tensors.pop(Q1)
    raises_with(write_folder(tmp_path, CONFIG, tensors), f"{Q1} of shape (32, 32) is missing", "did you mean", "q_prj")


def test_an_unexpected_tensor_is_named_with_its_shape(tmp_path, tensors):
    tensors |= {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32), "extra": np.zeros(1, np.float32)}
    raises_with(
        write_folder(tmp_path, CONFIG, tensors),
        "unexpected tensor",
        "(and 1 more)",
        "the config of a llama model with these settings has no place for it",
    )


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path, tensors):
    tensors[Q1] = np.zeros((32, 31), np.float32)
    raises_with(write_folder(tmp_path, CONFIG, tensors), f"tensor {Q1} has shape (32, 31), expected (32, 32)")


def test_a_transposed_tensor_is_not_taken_for_the_right_one(tmp_path, tensors):
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    raises_with(write_folder(tmp_path, CONFIG, tensors), f"tensor {name} has shape (32, 40), expected (40, 32)")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_quantised_tensors_are_refused_by_their_type(tmp_path, tensors, dtype):
    tensors[Q1] = tensors[Q1].astype(dtype)
    raises_with(
        write_folder(tmp_path, CONFIG, tensors), f"tensor {Q1} is stored as", "F64, F32, BF16, F16", "dequantise"
    )


def test_double_precision_tensors_are_not_rounded_silently(tmp_path, tensors):
    tensors[Q1] = tensors[Q1].astype(np.float64)
    raises_with(write_folder(tmp_path, CONFIG, tensors), f"tensor {Q1} is float64; load it with dtype='float64'")


def test_a_head_that_differs_from_the_embedding_it_is_said_to_be_tied_to(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG | {"tie_word_embeddings": True}, tensors)
    raises_with(
        folder, "config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight"
    )


def test_an_untied_checkpoint_needs_its_head(tmp_path, tensors):
    del tensors["lm_head.weight"]
    raises_with(write_folder(tmp_path, CONFIG, tensors), "tensor lm_head.weight of shape (48, 32) is missing")


# config.json

BAD_CONFIGS = {
    "architecture": (dict(model_type="qwen4"), "model_type: unknown architecture 'qwen4'; did you mean 'qwen", "llama"),
    "no architecture": (dict(model_type=None), "model_type: unknown architecture None", "llama, qwen2, qwen3, mistral"),
    "head": (
        dict(architectures=["LlamaForSequenceClassification"]),
        "architectures: expected ['LlamaForCausalLM'] for model_type 'llama'",
    ),
    "unknown attribute": (
        dict(attn_logit_softcapping=30.0),
        "attn_logit_softcapping: unknown attribute (value 30.0), which may change what the model computes",
    ),
    "misspelt attribute": (dict(rms_norm_epsilon=1e-5), "rms_norm_epsilon: unknown", "did you mean 'rms_norm_eps'?"),
    "activation": (dict(hidden_act="gelu"), "hidden_act: only silu is computed here, got 'gelu'"),
    "rope type": (
        dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope_parameters.rope_type: 'yarn' is not computed here; expected one of: default, llama3",
    ),
    "rope key": (
        dict(rope_scaling={"rope_type": "llama3", "factor": 4.0, "betafast": 1}),
        "rope_parameters.betafast: unknown for rope_type 'llama3'",
    ),
    "rope without factor": (dict(rope_scaling={"rope_type": "llama3"}), "factor: missing, expected a number"),
    "two ropes": (
        dict(rope_scaling={"rope_type": "default"}, rope_parameters={"rope_type": "default", "rope_theta": 1.0}),
        "rope_scaling and rope_parameters disagree",
    ),
    "partial rotation": (dict(partial_rotary_factor=0.5), "partial_rotary_factor: only None or 1.0 is computed here"),
    "quantisation": (dict(quantization_config={"bits": 4}), "quantization_config: only None is computed here"),
    "size as text": (dict(hidden_size="32"), "hidden_size: expected a positive integer, got '32'"),
    "no size": (dict(vocab_size=None), "vocab_size: missing, expected a positive integer"),
    "flag as number": (dict(tie_word_embeddings=1), "tie_word_embeddings: expected true or false, got 1"),
    "heads": (dict(num_key_value_heads=3), "4 query heads cannot be shared evenly by 3"),
    "llama window": (dict(sliding_window=8), "sliding_window: llama attends to everything, got 8"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_is_not_computed_here_is_refused(tmp_path, tensors, name):
    changes, *parts = BAD_CONFIGS[name]
    raises_with(write_folder(tmp_path, CONFIG | changes, tensors), f"{tmp_path / 'config.json'}: ", *parts)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", dict(attention_bias=False), "attention_bias: qwen2 has none to choose"),
        ("mistral", dict(attention_bias=True), "attention_bias: mistral has none to choose"),
        ("qwen2", dict(mlp_bias=True), "mlp_bias: only llama has it"),
        ("qwen3", dict(layer_types=["sliding_attention"] * 3), "sliding layers need use_sliding_window"),
        ("qwen3", dict(layer_types=["full_attention"]), "layer_types: expected 3 of"),
        ("mistral", dict(sliding_window=4, layer_types=["full_attention"] * 3), "mistral with sliding_window 4 does"),
    ],
)
def test_an_attribute_that_a_family_would_ignore_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf(config_json(family, **changes))


def test_a_config_that_is_no_json_object(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    raises_with(tmp_path, "config.json: malformed JSON")
    (tmp_path / "config.json").write_text("[]")
    raises_with(tmp_path, "config.json: expected a JSON object, got list")


def test_a_malformed_tokenizer_file_is_named(tmp_path, tensors):
    (write_folder(tmp_path, CONFIG, tensors) / "tokenizer.json").write_text("{")
    raises_with(tmp_path, "tokenizer.json: malformed JSON")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("bfloat61", "unknown 'bfloat61'; did you mean 'bfloat16'?"), ("float64", "float64 needs double precision")],
)
def test_an_impossible_dtype(tmp_path, dtype, message):
    raises_with(tmp_path, message, kind=UsageError, dtype=dtype)


# Writing


def raises_unsaved(folder, *parts, kind=JaxrlError, **options) -> None:
    """Saving there fails with a message that holds ``parts``, and leaves nothing new behind."""
    before = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else None
    with pytest.raises(kind) as caught:
        save_model(options.pop("model", None) or model(), folder, **options)
    for part in parts:
        assert part in str(caught.value)
    if before is not None:
        assert sorted(folder.parent.iterdir()) == before


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    raises_unsaved(tmp_path / "mine", "mine: exists already; choose another folder")
    assert (tmp_path / "mine" / "notes").read_text() == "keep"


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")])
def test_a_full_disk_or_a_forbidden_folder_leaves_nothing_behind(tmp_path, monkeypatch, code, said):
    def fail(self, name, array):
        raise OSError(code, "Permission denied")

    monkeypatch.setattr(safetensor_io.Writer, "put", fail)
    raises_unsaved(tmp_path / "out", "cannot write the model there", said, "no part of it was left behind")


def test_a_failed_overwrite_keeps_the_old_model(tmp_path, monkeypatch):
    out = save_model(model(), tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def fail(self, name, array):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(safetensor_io.Writer, "put", fail)
    raises_unsaved(out, "the disk is full", overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    raises_unsaved(tmp_path / "file" / "out", "cannot write the model there: Not a directory")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(qk_norm=True), "qk_norm=True cannot be written as a llama model"),
        (dict(qkv_bias=True), "qkv_bias=True"),
        (dict(windows=(4, None)), "windows=(4, None)"),
        (dict(family="mistral", windows=(4, None)), "windows=(4, None) cannot be written as a mistral model"),
        (dict(family="qwen2"), "qkv_bias=False cannot be written as a qwen2 model"),
        (dict(family="qwen2", qkv_bias=True, mlp_bias=True), "mlp_bias=True"),
    ],
)
def test_a_model_that_transformers_would_compute_otherwise_is_not_exported(tmp_path, changes, field):
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
        **changes,
    )  # fmt: skip
    raises_unsaved(
        tmp_path / "out", "this model cannot be exported", field, model=init_model(config, jax.random.key(0))
    )


def test_an_unknown_export_dtype_and_a_missing_source(tmp_path):
    raises_unsaved(tmp_path / "out", "unknown 'float8'", kind=UsageError, dtype="float8")
    raises_unsaved(tmp_path / "out", "no such folder", source=tmp_path / "nowhere")


def test_the_writer_makes_the_same_bytes_as_the_safetensors_library(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(dtype)
        for name, shape, dtype in [
            ("b", (3,), np.float16), ("a", (2, 3), np.float32), ("é", (1, 1), np.float64), ("empty", (0, 4), np.float32),
            ("scalar", (), np.float32), ("c", (5,), safetensor_io.DTYPES["BF16"]),
        ]
    }  # fmt: skip
    specs = {name: safetensor_io.Spec(x.shape, x.dtype) for name, x in tensors.items()}
    writer = safetensor_io.Writer(tmp_path, [specs])
    for name, x in tensors.items():
        writer.put(name, x)
    writer.close()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, entry in safetensor_io.read_header(tmp_path / "theirs").items():
        np.testing.assert_array_equal(safetensor_io.open_tensor(entry), tensors[name])
