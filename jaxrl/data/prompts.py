"""From problems to padded token prompts: load a tokenizer, render, tokenise, pad, and take a step's share."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxrl import keys
from jaxrl.data.templates import Template
from jaxrl.data.tokenizer import SentencePieceBackend, Tokenizer, TransformersBackend
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.types import Prompts, Rows

TOKENIZER_FILES = ["*token*", "*.model", "vocab*", "merges*", "chat_template*", "generation_config.json", "config.json"]
VOCABULARIES = ["tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json"]  # any of them makes a tokenizer
IDS_SHOWN = 5  # ids that an error message lists


class PromptTooLong(JaxrlError):
    """Prompts longer than the limit. ``ids`` names all of them."""

    def __init__(self, message: str, ids: list[str]) -> None:
        super().__init__(message)
        self.ids = ids


@dataclass(frozen=True, eq=False)
class PromptPool:
    """Tokenised prompts and the order in which training takes them.

    ``width`` is the padded width of every batch, the same at every step so that nothing recompiles.
    Raises ``ValueError`` for no prompts, an empty prompt, a repeated uid, or a width that is too small.
    """

    tokens: Sequence[Sequence[int]]
    uid: Int[np.ndarray, " X"]
    width: int
    dropped: tuple[str, ...] = ()  # ids left out for their length

    def __post_init__(self) -> None:
        uid = np.asarray(self.uid)
        object.__setattr__(self, "uid", uid.astype(np.int32))
        if not len(self.tokens):
            raise ValueError("prompts: expected at least one, got none")
        if uid.shape != (len(self.tokens),) or len(np.unique(uid)) != len(uid):
            raise ValueError(
                f"prompts: expected one distinct uid for each of {len(self.tokens)} prompts, "
                f"got {len(np.unique(uid))} distinct of {uid.size}"
            )
        lengths = [len(t) for t in self.tokens]
        if min(lengths) == 0:
            raise ValueError(f"prompts: prompt {lengths.index(0)} is empty; its first response token has no context")
        if max(lengths) > self.width:
            raise ValueError(f"prompts: the longest has {max(lengths)} tokens, more than the width {self.width}")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _padded(self) -> tuple[np.ndarray, np.ndarray]:
        return pad_right(self.tokens, self.width)

    def all(self) -> Prompts:
        """Every prompt, in the order given."""
        return self.select(np.arange(len(self)))

    def select(self, index: Int[np.ndarray, " P"]) -> Prompts:
        """The prompts at these positions of the pool, as numpy arrays."""
        tokens, length = self._padded
        return Prompts(tokens[index], length[index], self.uid[index])

    def take(self, key: Key[Array, ""], step: int, n: int) -> Prompts:
        """The ``n`` prompts of one step: a pure function of the root key and the step.

        Each epoch is a fresh permutation without replacement. Where ``n`` does not divide the pool, the
        last ``len(pool) % n`` prompts of the permutation wait for the next epoch: a step never holds one
        prompt twice, whose rollouts would share their random keys.
        """
        if not 1 <= n <= len(self):
            raise UsageError(
                f"rollout.prompts: {n} prompts a step cannot be taken from {len(self)}; expected 1 to {len(self)}"
            )
        epoch, part = divmod(int(step), len(self) // n)
        order = jax.random.permutation(keys.at(key, "order", epoch), np.arange(len(self), dtype=np.int32))
        return self.select(np.asarray(order)[part * n : (part + 1) * n])


def build_pool(
    problems: Sequence[Any],
    tokenizer: Tokenizer,
    template: Template,
    *,
    max_prompt: int | None = None,
    too_long: str = "error",
) -> PromptPool:
    """Render and tokenise problems (``.id``, ``.problem``); a prompt's uid is its position in ``problems``.

    The width is the longest prompt's, or ``max_prompt`` tokens where given. A prompt beyond ``max_prompt``
    raises ``PromptTooLong`` with its id, or is left out and listed in ``pool.dropped`` (``too_long="drop"``).
    """
    if too_long not in ("error", "drop"):
        raise UsageError(f"too_long: expected 'error' or 'drop', got {too_long!r}")
    tokens = [encode_prompt(problem.problem, tokenizer, template) for problem in problems]
    limit = max(map(len, tokens), default=0) if max_prompt is None else max_prompt
    long = [i for i, t in enumerate(tokens) if len(t) > limit]
    ids = [str(problems[i].id) for i in long]
    if long and (too_long == "error" or len(long) == len(tokens)):
        longest = max(len(tokens[i]) for i in long)
        raise PromptTooLong(
            f"{len(long)} of {len(tokens)} prompts are longer than max_prompt = {limit} tokens (the longest has "
            f"{longest}): {_some(ids)}; raise the limit, or drop them with too_long: drop",
            ids,
        )
    kept = np.setdiff1d(np.arange(len(tokens)), long)
    return PromptPool([tokens[i] for i in kept], kept, limit, tuple(ids))


def encode_prompt(problem: str, tokenizer: Tokenizer, template: Template) -> list[int]:
    """Token ids of one problem under a template.

    A chat template writes its own special tokens, so none are added after it; a plain text gets the
    beginning-of-text token that the tokenizer puts before any text.
    """
    text = template.render(problem, tokenizer)
    return tokenizer.encode(text, special=not template.chat)


def pad_right(sequences: Sequence[Sequence[int]], width: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences from index 0 on, filled with ``pad``: ``(tokens i32[N, width], length i32[N])``."""
    length = np.array([len(s) for s in sequences], np.int32)
    if len(length) and length.max() > width:
        raise ValueError(f"pad_right: a sequence of {length.max()} tokens does not fit the width {width}")
    tokens = np.full((len(length), width), pad, np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, length


def pad_left(sequences: Sequence[Sequence[int]], width: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences up to the last index, ``pad`` before them: ``(tokens i32[N, width], length i32[N])``."""
    reversed_, length = pad_right([list(s)[::-1] for s in sequences], width, pad)
    return np.ascontiguousarray(reversed_[:, ::-1]), length


def response_tokens(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Responses moved to index 0: ``(tokens i32[*N, T], length i32[*N])`` with T the longest; 0 after a response."""
    tokens, start, length = (np.asarray(x) for x in (rows.tokens, rows.start, rows.length))
    count = np.maximum(length - start, 0)
    t = np.arange(int(count.max(initial=0)))
    index = np.minimum(start[..., None] + t, tokens.shape[-1] - 1)
    moved = np.take_along_axis(tokens, index, axis=-1)
    return np.where(t < count[..., None], moved, 0).astype(np.int32), count.astype(np.int32)


def load_tokenizer(source: str | pathlib.Path, *, stop_ids: Iterable[int] | None = None) -> Tokenizer:
    """A tokenizer from a model folder, a sentencepiece ``.model`` file, or a hub id.

    Stop ids come from ``generation_config.json`` beside it (one id or several), else from the tokenizer's
    own end-of-sequence token; ``stop_ids`` overrides both. Raises ``JaxrlError`` where there is nothing to
    load or no stop id is known.
    """
    path = _local(source)
    piece = _sentencepiece_file(path)
    backend = SentencePieceBackend(piece) if piece else TransformersBackend(_auto_tokenizer(path, source))
    folder = path if path.is_dir() else path.parent
    stop = frozenset(stop_ids) if stop_ids is not None else _stop_ids(folder, backend.eos_id)
    if not stop:
        raise JaxrlError(
            f"{source}: no stop id in generation_config.json and no end-of-sequence token in the tokenizer; "
            "give stop_ids, or add eos_token_id to generation_config.json"
        )
    return Tokenizer(backend, stop)


def _auto_tokenizer(path: pathlib.Path, source: str | pathlib.Path) -> Any:
    """What transformers loads. A folder without any of a tokenizer's files is refused in our own words."""
    if path.is_dir() and not any(True for pattern in VOCABULARIES for _ in path.glob(pattern)):
        raise JaxrlError(
            f"{source}: this folder has no tokenizer: expected tokenizer.json with tokenizer_config.json, or a "
            "sentencepiece .model file; name a model folder that has one"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise JaxrlError(
            f"{source}: no tokenizer could be loaded ({first}); expected tokenizer.json with "
            "tokenizer_config.json, or a sentencepiece .model file"
        ) from error


def _local(source: str | pathlib.Path) -> pathlib.Path:
    """The folder or file itself, or a hub repository's tokenizer files fetched into the hub's cache."""
    path = pathlib.Path(source)
    if path.exists():
        return path
    if str(source).count("/") != 1 or str(source).startswith((".", "~", "/")):
        raise JaxrlError(f"{source}: no such file or folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return pathlib.Path(snapshot_download(str(source), allow_patterns=TOKENIZER_FILES))
    except Exception as error:  # the client raises many kinds: no network, no such repository, gated
        raise JaxrlError(
            f"{source}: no such folder, and the hub could not be read ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]})"
        ) from error


def _sentencepiece_file(path: pathlib.Path) -> pathlib.Path | None:
    """The ``.model`` file to read directly; a folder that transformers can read itself has none."""
    if path.is_file():
        if path.suffix != ".model":
            raise JaxrlError(f"{path}: expected a sentencepiece .model file or a folder, got a file {path.suffix!r}")
        return path
    if (path / "tokenizer_config.json").exists() or (path / "tokenizer.json").exists():
        return None
    models = sorted(path.glob("*.model"))
    return models[0] if len(models) == 1 else None


def _stop_ids(folder: pathlib.Path, eos_id: int | None) -> frozenset[int]:
    file = folder / "generation_config.json"
    declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    if declared is None:
        declared = eos_id
    if declared is None:
        return frozenset()
    return frozenset(declared) if isinstance(declared, list) else frozenset({declared})


def _some(ids: list[str]) -> str:
    more = len(ids) - IDS_SHOWN
    return ", ".join(ids[:IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")
