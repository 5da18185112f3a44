"""Hugging Face folders in and out, without torch: values, layouts, dtypes, shards, side files, the hub."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import BFLOAT16, SIZES, config_json, random_tensors, side_files, write_folder
from jax.sharding import PartitionSpec
from model_cases import largest
from safetensors.numpy import load_file

from jaxrl.mesh import make_mesh
from jaxrl.models.config import Llama3Rope
from jaxrl.models.decoder import cast, hidden, init_model, with_config
from jaxrl.models.hf import load_model, save_model
from jaxrl.models.hf_config import from_hf, to_hf

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "tied llama": config_json(),
    "llama with every bias": config_json(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2": config_json("qwen2", tie_word_embeddings=False),
    "qwen3": config_json("qwen3", head_dim=12),
    "mistral": config_json("mistral", num_key_value_heads=4),
}


def assert_same_tensors(a: dict, b: dict) -> None:
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), err_msg=name)


def all_tensors(folder) -> dict:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


# Import


def test_parameters_are_the_tensors_with_heads_apart_and_inputs_first(tmp_path):
    """Checked against the definition y = W x, head by head, not against the table that the import uses."""
    tensors = random_tensors(VARIANTS["llama with every bias"])
    model = load_model(write_folder(tmp_path, VARIANTS["llama with every bias"], tensors))
    x = np.random.default_rng(1).normal(size=32).astype(np.float32)
    for i in range(3):
        attn = f"model.layers.{i}.self_attn"
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            weight, bias = (getattr(model.layers, n)[...][i] for n in (name, f"{name}_bias"))
            want = (tensors[f"{attn}.{name}_proj.weight"] @ x + tensors[f"{attn}.{name}_proj.bias"]).reshape(heads, 8)
            np.testing.assert_allclose(jnp.einsum("d,dhe->he", x, weight) + bias, want, rtol=0, atol=1e-5)
        want = tensors[f"{attn}.o_proj.weight"] @ x
        got = jnp.einsum("he,hed->d", x.reshape(4, 8), model.layers.o[...][i])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(model.layers.down[...][i].T, tensors[f"model.layers.{i}.mlp.down_proj.weight"])
    np.testing.assert_array_equal(model.embed[...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.head[...].T, tensors["lm_head.weight"])


def test_masters_are_float32_whatever_the_file_and_the_compute_dtype(tmp_path):
    tensors = random_tensors(VARIANTS["qwen2"], BFLOAT16)
    model = load_model(write_folder(tmp_path, VARIANTS["qwen2"], tensors), dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert model.config.dtype == "bfloat16"
    assert model.config.checkpoint_dtype == "bfloat16"
    np.testing.assert_array_equal(model.norm[...], tensors["model.norm.weight"].astype(np.float32))


@pytest.mark.x64
def test_double_precision_masters_on_request(x64, tmp_path):
    tensors = random_tensors(VARIANTS["tied llama"], np.float64)
    model = load_model(write_folder(tmp_path, VARIANTS["tied llama"], tensors), dtype="float64")
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float64")}
    np.testing.assert_array_equal(model.embed[...], tensors["model.embed_tokens.weight"])
    assert_same_tensors(tensors, all_tensors(save_model(model, tmp_path / "out")))


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path):
    tensors = random_tensors(VARIANTS["qwen3"])
    one = load_model(write_folder(tmp_path / "one", VARIANTS["qwen3"], tensors))
    three = load_model(write_folder(tmp_path / "three", VARIANTS["qwen3"], tensors, shards=3))
    assert largest(one, three) == 0


def test_import_onto_a_mesh_gives_each_device_its_part_of_the_same_numbers(tmp_path):
    """Two key-value heads do not divide by four devices, so they are held whole; the rest is split."""
    folder = write_folder(tmp_path, VARIANTS["qwen2"], random_tensors(VARIANTS["qwen2"], BFLOAT16))
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    model, plain = load_model(folder, mesh=mesh), load_model(folder)
    assert largest(jax.device_get(model), jax.device_get(plain)) == 0
    assert model.layers.q[...].sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert model.layers.k[...].sharding.spec == PartitionSpec(None, "fsdp", None, None)
    assert model.layers.q[...].addressable_shards[0].data.shape == (3, 16, 1, 8)
    assert jax.tree.structure(model) == jax.tree.structure(plain)


def test_a_head_stored_beside_tied_embeddings_is_accepted_when_it_repeats_them(tmp_path):
    tensors = random_tensors(VARIANTS["tied llama"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    model = load_model(write_folder(tmp_path, VARIANTS["tied llama"], tensors))
    assert model.head is None
    assert "lm_head.weight" not in all_tensors(save_model(model, tmp_path / "out"))


def test_ids_above_the_tokenizers_size_are_limited_away(tmp_path):
    folder = write_folder(tmp_path, VARIANTS["tied llama"], random_tensors(VARIANTS["tied llama"]))
    assert load_model(folder).config.vocab_limit is None
    side_files(folder)
    assert load_model(folder).config.vocab_limit == 46
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", 0.0]] * 48}}))
    assert load_model(folder).config.vocab_limit is None, "a tokenizer that fills the matrix limits nothing"
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 40}')
    (folder / "added_tokens.json").write_text('{"<x>": 41}')
    assert load_model(folder).config.vocab_limit == 46, "45 is an end of sequence in the generation config"


# Export


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_import_then_export_is_bitwise(tmp_path, name, dtype):
    tensors = random_tensors(VARIANTS[name], dtype)
    folder = write_folder(tmp_path / "in", VARIANTS[name], tensors)
    out = save_model(load_model(folder), tmp_path / "out")
    assert_same_tensors(tensors, all_tensors(out))
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((out / "config.json").read_text())["dtype"] == np.dtype(dtype).name


def test_import_then_export_is_bitwise_where_tensors_differ_in_dtype(tmp_path):
    tensors = random_tensors(VARIANTS["tied llama"], BFLOAT16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    model = load_model(write_folder(tmp_path / "in", VARIANTS["tied llama"], tensors))
    out = save_model(model, tmp_path / "out")
    assert_same_tensors(tensors, all_tensors(out))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", VARIANTS)
def test_export_then_import_is_bitwise_for_a_model_that_was_never_a_checkpoint(tmp_path, name):
    model = init_model(from_hf(VARIANTS[name]), jax.random.key(0))
    again = load_model(save_model(model, tmp_path / "out"))
    assert largest(model, again) == 0
    assert again.config == model.config


def test_an_export_in_another_dtype_rounds_and_says_so(tmp_path):
    model = load_model(write_folder(tmp_path / "in", VARIANTS["qwen2"], random_tensors(VARIANTS["qwen2"])))
    out = save_model(model, tmp_path / "out", dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), cast(model, jnp.bfloat16))
    assert largest(load_model(out), rounded) == 0


def test_an_export_above_the_shard_size_is_split_with_an_index(tmp_path):
    model = load_model(write_folder(tmp_path / "in", VARIANTS["qwen3"], random_tensors(VARIANTS["qwen3"])))
    out = save_model(model, tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((out / f).stat().st_size < 20_000 + 4_000 for f in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in all_tensors(out).values())
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    assert largest(load_model(out), model) == 0


def test_a_model_on_a_mesh_exports_what_it_was_imported_from(tmp_path):
    tensors = random_tensors(VARIANTS["mistral"], BFLOAT16)
    model = load_model(write_folder(tmp_path / "in", VARIANTS["mistral"], tensors), mesh=make_mesh(fsdp=2, tensor=4))
    assert_same_tensors(tensors, all_tensors(save_model(model, tmp_path / "out")))


def test_side_files_and_unused_attributes_travel_with_a_model_that_was_trained(tmp_path):
    config = config_json(eos_token_id=[2, 45], bos_token_id=None, use_cache=True, attention_dropout=0.0)
    folder = write_folder(tmp_path / "in", config, random_tensors(config))
    files = side_files(folder)
    (folder / "optimizer.bin").write_text("not part of a model")
    trained = jax.jit(lambda m: jax.tree.map(lambda x: x + 1, m))(load_model(folder))
    out = save_model(trained, tmp_path / "out", dtype="float32")
    assert {name: (out / name).read_text() for name in files} == files
    written = json.loads((out / "config.json").read_text())
    assert written["eos_token_id"] == [2, 45]
    assert written["attention_dropout"] == 0.0
    assert sorted(p.name for p in out.iterdir()) == sorted([*files, "config.json", "model.safetensors"])


def test_side_files_come_from_the_source_that_is_named(tmp_path):
    folder = write_folder(tmp_path / "in", VARIANTS["qwen2"], random_tensors(VARIANTS["qwen2"]))
    files = side_files(folder)
    fresh = init_model(from_hf(VARIANTS["qwen2"]), jax.random.key(0))
    out = save_model(fresh, tmp_path / "out", source=folder)
    assert {name: (out / name).read_text() for name in files} == files
    assert not list(save_model(fresh, tmp_path / "bare").glob("tokenizer*"))


def test_a_source_that_is_gone_is_said_and_the_weights_are_saved(tmp_path):
    model = load_model(write_folder(tmp_path / "in", VARIANTS["qwen2"], random_tensors(VARIANTS["qwen2"])))
    model = with_config(model, source=str(tmp_path / "moved"))
    with pytest.warns(UserWarning, match="moved, where the model came from, is gone.*not carried"):
        out = save_model(model, tmp_path / "out")
    assert largest(load_model(out), model) == 0


def test_an_overwritten_folder_is_replaced_whole(tmp_path):
    model = init_model(from_hf(VARIANTS["qwen2"]), jax.random.key(0))
    out = save_model(model, tmp_path / "out", max_shard_bytes=20_000)
    save_model(model, out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "no temporary folder stays behind"


# config.json


def test_both_spellings_of_rope_and_dtype_are_read_and_the_current_one_is_written():
    old = config_json(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "float32", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    config = from_hf(old)
    assert config == from_hf(new)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
    ))  # fmt: skip
    written = to_hf(config, "bfloat16", old)
    assert written["rope_parameters"] == new["rope_parameters"]
    assert written["dtype"] == "bfloat16"
    assert not {"rope_theta", "rope_scaling", "torch_dtype"} & set(written)
    assert from_hf(written) == config


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", dict(sliding_window=5), (5, 5, 5)),
        ("mistral", dict(sliding_window=None), ()),
        ("qwen2", dict(use_sliding_window=False, sliding_window=5, max_window_layers=1), ()),
        ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1), (None, 5, 5)),
        ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=3), ()),
        (
            "qwen3",
            dict(
                use_sliding_window=True,
                sliding_window=5,
                max_window_layers=1,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            (5, None, 5),
        ),
        ("llama", dict(layer_types=["full_attention"] * 3), ()),
    ],
)
def test_windows_follow_the_rules_of_each_family_and_survive_a_round_trip(family, changes, windows):
    raw = config_json(family, **changes)
    assert from_hf(raw).windows == windows
    assert from_hf(to_hf(from_hf(raw), "float32", raw)) == from_hf(raw)


def test_a_mistral_config_without_the_attribute_has_the_classes_window():
    raw = {k: v for k, v in config_json("mistral").items() if k != "sliding_window"}
    assert from_hf(raw).windows == (4096,) * 3


def test_what_a_family_implies():
    assert from_hf(config_json("qwen2")).qkv_bias
    assert not from_hf(config_json("qwen2")).o_bias
    assert from_hf(config_json("qwen3")).qk_norm
    assert not from_hf(config_json("qwen3")).qkv_bias
    biased = from_hf(config_json(attention_bias=True))
    assert biased.qkv_bias
    assert biased.o_bias
    assert from_hf(config_json(num_key_value_heads=None)).num_kv_heads == SIZES["num_attention_heads"]


def test_a_fresh_model_claims_no_token_ids_of_another_vocabulary():
    written = to_hf(from_hf(config_json()), "float32")
    assert {written[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {None}


# The hub


def test_a_hub_id_is_taken_from_the_hubs_cache(tmp_path, monkeypatch):
    import huggingface_hub

    folder = write_folder(tmp_path / "cache", VARIANTS["qwen2"], random_tensors(VARIANTS["qwen2"]))
    asked = []

    def snapshot(repo, allow_patterns):
        asked.append(repo)
        assert {"*.json", "*.safetensors", "tokenizer.model", "chat_template.jinja"} <= set(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert largest(load_model("some-lab/some-model"), load_model(folder)) == 0
    assert asked == ["some-lab/some-model"]


def test_a_loaded_model_runs(tmp_path):
    model = load_model(write_folder(tmp_path, VARIANTS["mistral"], random_tensors(VARIANTS["mistral"])))
    assert bool(jnp.isfinite(jax.jit(hidden)(model, jnp.ones((1, 4), jnp.int32))).all())
