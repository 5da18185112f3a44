"""Safetensors files, read and written one tensor at a time.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, a JSON header
that gives every tensor's dtype, shape and byte range, then the bytes. Reading maps the file into
memory, so a slice of a tensor touches only its own pages and a process reads only the shards it
holds; writing never holds more than one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl.errors import JaxrlError

# Name in a header -> numpy dtype, in the order in which the library stores them (widest first keeps every
# tensor aligned). The floating-point formats that a plain checkpoint may use.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its file, byte range and type code of the header."""

    file: Path
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of one file, by name. Raises ``JaxrlError`` when the file is cut short or malformed."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise JaxrlError(f"{file}: not a safetensors file, or cut short within its header ({size} bytes)")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, 8 + length, fields) for name, fields in header.items()}
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise JaxrlError(f"{file}: malformed safetensors header ({error})") from None
    last = max((e.end for e in entries.values()), default=8 + length)
    if last > size:
        raise JaxrlError(f"{file}: cut short, the header promises {last} bytes and there are {size}; copy it again")
    return entries


def _entry(file: Path, start: int, fields: Mapping[str, Any]) -> Entry:
    begin, end = fields["data_offsets"]
    entry = Entry(file, fields["dtype"], tuple(fields["shape"]), start + begin, start + end)
    if entry.code in DTYPES and end - begin != math.prod(entry.shape) * DTYPES[entry.code].itemsize:
        raise ValueError(f"{end - begin} bytes for shape {entry.shape} of {entry.code}")
    return entry


def read_folder(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model folder, from one file or from the shards that the index names.

    Raises ``JaxrlError`` naming a shard that is missing or does not hold what the index says.
    """
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        there = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"))
        raise JaxrlError(
            f"{folder}: expected {SINGLE} or {INDEX}, found {', '.join(there) or 'no weights'}; "
            "convert other formats to safetensors first"
        )
    weight_map = _weight_map(folder / INDEX)
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        names = [name for name, file in weight_map.items() if file == shard]
        if not (folder / shard).exists():
            raise JaxrlError(
                f"{folder}: shard {shard} is missing; {INDEX} places {len(names)} tensors there "
                f"({names[0]}, ...). Copy or download the model again"
            )
        header = read_header(folder / shard)
        absent = [name for name in names if name not in header]
        if absent:
            raise JaxrlError(f"{folder / shard}: {INDEX} places {absent[0]} here, but the file does not hold it")
        entries |= header
    return entries


def _weight_map(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise JaxrlError(f"{file}: expected a JSON object with a 'weight_map' of tensor to file ({error!r})") from None


def open_tensor(entry: Entry) -> np.ndarray:
    """The tensor as a read-only array that is mapped, not read."""
    dtype = DTYPES[entry.code]
    if entry.begin == entry.end:
        return np.empty(entry.shape, dtype)
    raw = np.memmap(entry.file, np.uint8, "r", offset=entry.begin, shape=(entry.end - entry.begin,))
    return raw.view(dtype).reshape(entry.shape)


@dataclass(frozen=True)
class Spec:
    """A tensor to be written: shape and numpy dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split_shards(specs: Mapping[str, Spec], max_bytes: int) -> list[dict[str, Spec]]:
    """Consecutive tensors in groups of at most ``max_bytes``; a larger tensor is alone in its group."""
    shards: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        if shards[-1] and sum(s.nbytes for s in shards[-1].values()) + spec.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = spec
    return shards


class Writer:
    """Writes the tensors of a model folder in any order, each to its place.

    All files get their headers on entry. Byte for byte what the ``safetensors`` library writes.
    """

    def __init__(self, folder: Path, shards: Sequence[Mapping[str, Spec]]):
        self._files: list[Any] = []
        self._places: dict[str, tuple[Any, int, Spec]] = {}
        count = len(shards)
        for i, specs in enumerate(shards):
            name = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            header, offsets = layout(specs)
            file = (folder / name).open("wb")
            self._files.append(file)
            file.write(header)
            self._places |= {key: (file, len(header) + offsets[key], spec) for key, spec in specs.items()}
        if count > 1:
            (folder / INDEX).write_text(json.dumps(self._index(), indent=2) + "\n")

    def _index(self) -> dict[str, Any]:
        weight_map = {name: Path(file.name).name for name, (file, _, _) in sorted(self._places.items())}
        total = sum(spec.nbytes for _, _, spec in self._places.values())
        return {"metadata": {"total_size": total}, "weight_map": weight_map}

    def put(self, name: str, array: np.ndarray) -> None:
        """Write one tensor, cast to the dtype announced for it."""
        file, offset, spec = self._places[name]
        if array.shape != spec.shape:
            raise ValueError(f"{name}: announced as {spec.shape}, got {array.shape}")
        file.seek(offset)
        file.write(np.ascontiguousarray(array.astype(spec.dtype, copy=False)).reshape(-1).view(np.uint8))

    def close(self) -> None:
        """Close the files; a write that the disk could not take is reported here at the latest."""
        for file in self._files:
            file.close()


def layout(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the offset of each tensor after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    rank = list(DTYPES)
    for name in sorted(specs, key=lambda n: (rank.index(CODES[specs[n].dtype.name]), n)):
        spec = specs[name]
        offsets[name], end = end, end + spec.nbytes
        header[name] = {
            "dtype": CODES[spec.dtype.name],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
