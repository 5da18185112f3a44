"""Tokenizers: special tokens once, stop ids from the model's folder, ids in range, bare sentencepiece models."""

import jax
import pytest
import sentencepiece
from tiny_tokenizer import BOS, DATED, EOS, IM_END, save_tiny

from jaxrl import keys
from jaxrl.data.datasets import Problem
from jaxrl.data.prompts import build_pool, encode_prompt, load_tokenizer
from jaxrl.data.templates import make_template
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny"), stop=[EOS, IM_END]))


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory):
    """A sentencepiece model trained on a few sentences."""
    folder = tmp_path_factory.mktemp("piece")
    text = folder / "text.txt"
    text.write_text("\n".join(f"What is {a} plus {b}? The answer is {a + b}." for a in range(12) for b in range(12)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=40, minloglevel=2, byte_fallback=False
    )
    return folder / "tokenizer.model"


@pytest.mark.parametrize("text", ["2 + 2 = 4", "naïve ∑ x_i², 漢字", "", "a\n\n  b\t", "\\boxed{\\frac{1}{2}}"])
def test_text_survives_a_round_trip(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_no_special_token_is_added_unless_asked_for(tiny):
    assert BOS not in tiny.encode("abc")
    assert tiny.encode("abc", special=True) == [BOS, *tiny.encode("abc")]


def test_a_chat_template_that_writes_bos_gives_exactly_one(tmp_path):
    tokenizer = load_tokenizer(save_tiny(tmp_path, chat_template=DATED))
    ids = encode_prompt("What is 1 + 1?", tokenizer, make_template("llama-3.2"))
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_a_plain_prompt_starts_as_the_tokenizer_starts_any_text(tiny):
    ids = encode_prompt("What is 1 + 1?", tiny, make_template("plain"))
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


@pytest.mark.parametrize(("stop", "expected"), [(None, {EOS}), (IM_END, {IM_END}), ([EOS, IM_END], {EOS, IM_END})])
def test_stop_ids_come_from_the_generation_config_else_from_the_tokenizer(tmp_path, stop, expected):
    assert load_tokenizer(save_tiny(tmp_path, stop=stop)).stop_ids == expected


def test_stop_ids_can_be_given(tmp_path):
    assert load_tokenizer(save_tiny(tmp_path, eos=False), stop_ids=[IM_END]).stop_ids == {IM_END}


def test_without_any_stop_id_the_message_says_where_one_belongs(tmp_path):
    with pytest.raises(JaxrlError, match=r"no stop id in generation_config\.json .* give stop_ids"):
        load_tokenizer(save_tiny(tmp_path, eos=False))


def test_special_tokens_are_left_out_of_text_unless_asked_for(tiny):
    ids = [BOS, *tiny.encode("hi"), IM_END]
    assert tiny.decode(ids) == "hi"
    assert tiny.decode(ids, skip_special=False) == "<bos>hi<|im_end|>"


def test_ids_beyond_the_tokenizer_have_no_text(tiny):
    assert tiny.vocab_size == 7 + 256
    with pytest.raises(ValueError, match="id 263 is outside the tokenizer's 263 ids"):
        tiny.decode([263])


def test_without_a_chat_template_the_message_offers_the_plain_one(tmp_path):
    tokenizer = load_tokenizer(save_tiny(tmp_path, chat_template=None))
    with pytest.raises(UsageError, match=r"no chat template.*choose template: plain"):
        encode_prompt("What is 1 + 1?", tokenizer, make_template("paper"))
    assert encode_prompt("What is 1 + 1?", tokenizer, make_template("plain"))


def test_a_sentencepiece_model_takes_a_prompt_through_a_model_and_back(piece_file):
    tokenizer = load_tokenizer(piece_file)
    assert tokenizer.stop_ids == {2}
    problems = [Problem("0", "What is 3 plus 4?", "7"), Problem("1", "What is 11 plus 11?", "22")]
    template = make_template("plain", examples=[{"problem": "What is 1 plus 1?", "answer": "2"}])
    pool = build_pool(problems, tokenizer, template)
    prompts = pool.all()
    assert (prompts.tokens[:, 0] == 1).all()  # <s>, once
    assert tokenizer.decode(tokenizer.encode("What is 3 plus 4?")) == "What is 3 plus 4?"
    config = ModelConfig(
        vocab_size=48, vocab_limit=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=8, max_positions=256,
    )  # fmt: skip
    model = init_model(config, keys.root(0))
    rows = Rows(prompts.tokens, prompts.length * 0 + 1, prompts.length)
    logps = jax.device_get(jax.jit(token_logps)(model, rows))
    mask = jax.device_get(rows.mask())
    assert (logps[mask] < 0).all()
    assert (logps[~mask] == 0).all()


def test_a_folder_with_a_sentencepiece_model_alone_is_read_as_one(piece_file):
    tokenizer = load_tokenizer(piece_file.parent)
    assert tokenizer.vocab_size == 40
    assert tokenizer.encode("plus", special=True)[0] == 1
    ids = [1, *tokenizer.encode("What is 3"), 2]
    assert tokenizer.decode(ids) == "What is 3"
    assert tokenizer.decode(ids, skip_special=False) == "<s>What is 3</s>"


def test_a_sentencepiece_model_has_no_chat_template(piece_file):
    with pytest.raises(UsageError, match="no chat template"):
        make_template("chat").render("x", load_tokenizer(piece_file))


def test_a_file_that_is_no_sentencepiece_model_is_named(tmp_path):
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(JaxrlError, match=r"broken\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path / "broken.model")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(JaxrlError, match=r"weights\.bin: expected a sentencepiece \.model file or a folder"):
        load_tokenizer(tmp_path / "weights.bin")


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path):
    with pytest.raises(JaxrlError, match="no such file or folder, and not a hub id of the form owner/name"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(JaxrlError, match=r"empty: this folder has no tokenizer: expected tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")


def test_a_hub_id_without_the_hub_says_so(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(JaxrlError, match=r"owner/name: .*the hub could not be read \(ConnectionError: no route"):
        load_tokenizer("owner/name")
