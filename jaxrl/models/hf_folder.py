"""Model folders: found on disk or on the hub, their side files, and their replacement as a whole."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from jaxrl.errors import JaxrlError

# What a model folder holds beside config and weights; copied from the folder a model came from.
CARRIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "*.tiktoken",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*", "LICENSE*",
)  # fmt: skip
HUB_FILES = ("*.json", "*.safetensors", *CARRIED)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The local folder of a path or hub id; a hub model is downloaded into the hub's cache, or found there."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise JaxrlError(f"{path}: is a file; expected the folder that holds config.json and the weights")
    if not isinstance(path, str) or not HUB_ID.fullmatch(path):
        raise JaxrlError(f"{path}: no such folder; expected a Hugging Face model folder or a hub id like org/name")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the client raises a different family of errors for each of its transports
        reason = str(error).strip().splitlines() or [""]
        raise JaxrlError(
            f"{path}: no such folder here, and the hub did not give it ({type(error).__name__}: {reason[0][:200]}). "
            "Offline, give the path of a folder that holds the model; for a gated model log in with `hf auth login`"
        ) from error


def carry(origin: Path | None, folder: Path) -> None:
    """Copy tokenizer, generation config and licence of ``origin``, where it has them."""
    if origin is None:
        return
    for pattern in CARRIED:
        for file in sorted(origin.glob(pattern)):
            copy = folder / file.relative_to(origin)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def replace(scratch: Path, target: Path) -> None:
    """Put ``scratch`` in the place of ``target``; what was there stays until the new folder stands beside it."""
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    if target.is_dir():
        target.rename(old)
    elif target.exists():
        target.unlink()
    scratch.rename(target)
    shutil.rmtree(old, ignore_errors=True)
