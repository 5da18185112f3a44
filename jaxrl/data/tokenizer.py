"""One face for tokenizers of two kinds: transformers' own, and bare sentencepiece models.

Ids in, ids out: text is made only for rewards and logs, and never turned back into ids.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.errors import JaxrlError, UsageError

Message = dict[str, str]  # {"role": ..., "content": ...}


class Backend(Protocol):
    """What ``Tokenizer`` needs of a tokenizer library."""

    eos_id: int | None
    size: int

    def encode(self, text: str, special: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...

    def chat(self, messages: list[Message], variables: dict[str, str]) -> str: ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. ``stop_ids`` end a response; ``vocab_size`` is one more than the largest id.

    A model's matrices are often taller than ``vocab_size``: pass it on as the model's ``vocab_limit``,
    so that ids without a text are neither sampled nor scored.
    """

    backend: Backend
    stop_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return self.backend.size

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts before any text (never an end token)."""
        ids = self.backend.encode(text, special)
        if special and ids and ids[-1] == self.backend.eos_id:
            return ids[:-1]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids, by default without special tokens. Raises ``ValueError`` for an id out of range."""
        listed = [int(i) for i in ids]
        bad = [i for i in listed if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"decode: id {bad[0]} is outside the tokenizer's {self.vocab_size} ids")
        return self.backend.decode(listed, skip_special)

    def chat(self, messages: Sequence[Message], **variables: str) -> str:
        """Messages in the tokenizer's chat template, up to where the assistant starts to write.

        ``variables`` are the template's own (``date_string``). Raises ``UsageError`` without a template.
        """
        return self.backend.chat(list(messages), variables)


class TransformersBackend:
    """A tokenizer that transformers loaded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id
        self.size = max(tokenizer.get_vocab().values()) + 1

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[Message], variables: dict[str, str]) -> str:
        if not self.tokenizer.chat_template:
            raise UsageError(NO_CHAT_TEMPLATE)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)


class SentencePieceBackend:
    """A sentencepiece model read from its ``.model`` file."""

    def __init__(self, path: pathlib.Path) -> None:
        import sentencepiece

        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise JaxrlError(f"{path}: not a sentencepiece model ({error})") from error
        eos, bos = self.model.eos_id(), self.model.bos_id()
        self.eos_id = eos if eos >= 0 else None
        self.bos_id = bos if bos >= 0 else None
        self.size = self.model.get_piece_size()

    def encode(self, text: str, special: bool) -> list[int]:
        ids = list(self.model.encode(text))
        return [self.bos_id, *ids] if special and self.bos_id is not None else ids

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            return self.model.decode([i for i in ids if not self.model.is_control(i)])
        named = [self.model.id_to_piece(i) if self.model.is_control(i) else None for i in ids]
        parts: list[str] = []
        run: list[int] = []
        for i, name in zip([*ids, -1], [*named, ""], strict=True):
            if name is None:
                run.append(i)
                continue
            parts += [self.model.decode(run)] * bool(run) + [name]
            run = []
        return "".join(parts)

    def chat(self, messages: list[Message], variables: dict[str, str]) -> str:
        raise UsageError(NO_CHAT_TEMPLATE)


NO_CHAT_TEMPLATE = (
    "task.template: this tokenizer has no chat template, so the chat-based templates cannot be used with it; "
    "choose template: plain (with worked examples), or a model folder whose tokenizer has a chat template"
)
