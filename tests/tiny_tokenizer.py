"""Tokenizers small enough to build in a test: one token a byte, in the folder layout of the hub."""

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|tail|>", "<|eot|>"]
BOS, EOS, IM_START, IM_END = range(4)

# ChatML with a default system line, as Qwen2.5-Math has it.
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nDEFAULT<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Writes its own beginning-of-text token and the date of today unless told one, as Llama 3.2 does.
DATED = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|head|>system<|tail|>\\n\\nToday Date: ' + date_string + '\\n\\n<|eot|>' }}"
    "{% for m in messages %}{{ '<|head|>' + m.role + '<|tail|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}{% endif %}"
)


def save_tiny(folder: pathlib.Path, *, chat_template: str | None = CHATML, eos: bool = True, stop=None) -> pathlib.Path:
    """A tokenizer folder whose post-processor puts ``<bos>`` before any text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    named = {"bos_token": "<bos>"} | ({"eos_token": "<eos>"} if eos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if stop is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    return folder
