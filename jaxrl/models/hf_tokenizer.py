"""How many ids the tokenizer of a model folder knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrl.errors import JaxrlError


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id of the folder's tokenizer, added tokens included; None without one.

    Embedding matrices are often padded beyond it, and ids up there were never trained: they must be
    neither sampled nor scored. Ids that the configs name as ends of a sequence count as known.
    """
    known = _vocabulary(folder)
    if not known:
        return None
    known |= set(_object(folder / "added_tokens.json").values())
    known |= {int(i) for i in _object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})}
    for name in ("config.json", "generation_config.json"):
        ends = _object(folder / name).get("eos_token_id")
        known |= set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return max(known) + 1


def _vocabulary(folder: Path) -> set[int]:
    fast = _object(folder / "tokenizer.json")
    if fast:
        vocab = fast.get("model", {}).get("vocab", {})
        ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
        return ids | {token["id"] for token in fast.get("added_tokens", [])}
    if (folder / "vocab.json").exists():
        return set(_object(folder / "vocab.json").values())
    if (folder / "tokenizer.model").exists():
        from sentencepiece import SentencePieceProcessor

        return set(range(SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()))
    return set()


def _object(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the file does not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise JaxrlError(f"{file}: malformed JSON ({error})") from None
    return value if isinstance(value, dict) else {}
