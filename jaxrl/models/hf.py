"""Hugging Face model folders in and out.

Import maps the safetensors files into memory and copies each tensor straight into the shard that
needs it, as float32. Export writes tensor by tensor into a temporary folder that is renamed when
it is whole. Names and layouts are in ``hf_names``, the config in ``hf_config``.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.errors import JaxrlError, UsageError, nearest
from jaxrl.mesh import is_main, partition, to_host
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import Decoder, build, param_axes, param_shapes
from jaxrl.models.hf_config import read_config, to_hf
from jaxrl.models.hf_folder import carry, find_folder, replace
from jaxrl.models.hf_names import EMBED, HEAD, TABLE, stacked, tensor_shapes
from jaxrl.models.hf_tokenizer import tokenizer_size
from jaxrl.models.safetensor_io import DTYPES, Entry, Spec, Writer, open_tensor, read_folder, split_shards
from jaxrl.types import wide

DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES.values())
# Buffers that old exporters stored; they are recomputed from the config.
BUFFERS = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


def load_model(path: str | os.PathLike[str], *, dtype: str = "float32", mesh: Mesh | None = None) -> Decoder:
    """A model from a Hugging Face folder, or from a hub id through ``huggingface_hub``.

    Parameters become float32 masters whatever the file holds (float64 for ``dtype="float64"``, which
    needs ``jax.enable_x64``); ``dtype`` is what is computed in. With a ``mesh`` each process reads
    only the parts that its devices hold. Ids that the folder's tokenizer does not know get
    ``config.vocab_limit``: never sampled nor scored.

    Raises ``JaxrlError`` naming the file, tensor or attribute when the folder cannot be reached, the
    architecture or an attribute is unknown, or a shard or tensor is missing, extra or misshapen.
    """
    if dtype not in DTYPE_NAMES:
        raise UsageError(f"dtype: unknown {dtype!r}; {nearest(dtype, DTYPE_NAMES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise UsageError("dtype: float64 needs double precision switched on, by jax.enable_x64(True)")
    folder = find_folder(path)
    config, _ = read_config(folder / "config.json")
    entries = _checked(read_folder(folder), config, folder, dtype)
    known = tokenizer_size(folder)
    config = dataclasses.replace(
        config,
        dtype=dtype,
        vocab_limit=known if known is not None and known < config.vocab_size else None,
        source=str(folder.resolve()),
        checkpoint_dtype=_stored_dtype(entries),
    )
    axes = param_axes(config)
    leaves = {}
    for name, shape in param_shapes(config).items():
        place = None if mesh is None else NamedSharding(mesh, partition(mesh, _leaf(axes, name), shape))
        leaves[name] = _import_leaf(name, shape, entries, np.dtype(wide(dtype)), place)
    return build(config, leaves)


def _checked(entries: dict[str, Entry], config: ModelConfig, folder: Path, dtype: str) -> dict[str, Entry]:
    """The entries that ``config`` needs; raises on missing, extra and misshapen ones, naming them."""
    wanted = tensor_shapes(config)
    extra = [name for name in entries if name not in wanted and not BUFFERS.fullmatch(name)]
    if config.tied and HEAD in extra:
        extra.remove(HEAD)
        _check_tied(entries, folder)
    missing = [name for name in wanted if name not in entries]
    if missing:
        similar = f"; {nearest(missing[0], extra).split(' (')[0]}" if extra else ""
        raise JaxrlError(
            f"{folder}: tensor {missing[0]} of shape {wanted[missing[0]]} is missing"
            f"{_more(missing)}; the config asks for it{similar}"
        )
    if extra:
        found = entries[extra[0]]
        raise JaxrlError(
            f"{found.file}: unexpected tensor {extra[0]} of shape {found.shape}{_more(extra)}; "
            f"the config of a {config.family} model with these settings has no place for it"
        )
    for name, shape in wanted.items():
        found = entries[name]
        if found.shape != shape:
            raise JaxrlError(f"{found.file}: tensor {name} has shape {found.shape}, expected {shape} from config.json")
        if found.code not in DTYPES:
            raise JaxrlError(
                f"{found.file}: tensor {name} is stored as {found.code}; expected one of {', '.join(DTYPES)} "
                "(dequantise the checkpoint first)"
            )
        if found.code == "F64" and dtype != "float64":
            raise JaxrlError(f"{found.file}: tensor {name} is float64; load it with dtype='float64' or convert it")
    return {name: entries[name] for name in wanted}


def _check_tied(entries: Mapping[str, Entry], folder: Path) -> None:
    """A head beside tied embeddings must repeat them: else one of two models would be dropped silently."""
    embed, head = entries.get(EMBED), entries[HEAD]
    if embed is None:
        return  # reported as missing
    same = (embed.shape, embed.code) == (head.shape, head.code) and embed.code in DTYPES
    if not same or not np.array_equal(open_tensor(embed), open_tensor(head)):
        raise JaxrlError(
            f"{folder}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBED}; "
            "set tie_word_embeddings to false to use the head, or remove the tensor"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _stored_dtype(entries: Mapping[str, Entry]) -> str | tuple[tuple[str, str], ...]:
    dtypes = {name: DTYPES[entry.code].name for name, entry in entries.items()}
    kinds = set(dtypes.values())
    return kinds.pop() if len(kinds) == 1 else tuple(dtypes.items())


def _leaf(tree: Decoder, name: str) -> Any:
    """The value of a parameter, by its name."""
    for part in name.split("."):
        tree = getattr(tree, part)
    return tree.get_value()


def _import_leaf(
    name: str, shape: tuple[int, ...], entries: Mapping[str, Entry], dtype: np.dtype, place: NamedSharding | None
) -> jax.Array:
    """One parameter, stacked over layers, read part by part."""
    layout, inner = TABLE[name], shape[1:] if stacked(name) else shape

    def tensor(i: int | None) -> np.ndarray:
        return layout.imported(open_tensor(entries[layout.tensor.format(i=i)]), inner)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        out = np.empty([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], dtype)
        if not stacked(name):
            out[...] = tensor(None)[index]
        else:
            for row, i in enumerate(range(*index[0].indices(shape[0]))):
                out[row] = tensor(i)[index[1:]]
        return out

    if place is None:
        return jnp.asarray(read((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, place, read)


def save_model(
    model: Decoder,
    path: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Write a model as a Hugging Face folder and return its path.

    ``dtype`` None keeps what the checkpoint came in, so that import then export is bitwise; a model
    that was never a checkpoint is written in float32. From ``source`` (default: the folder that the
    model was loaded from) come generation config, tokenizer files and the attributes of config.json
    that the computation does not use. Above ``max_shard_bytes`` the weights are split into shards
    with an index. All processes call this; the first one writes.

    Raises ``JaxrlError`` when the folder exists and is not empty (unless ``overwrite``, which
    replaces it whole), when it cannot be written, and when the family cannot express the model.
    """
    config, target = model.config, Path(os.path.abspath(path))
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise UsageError(f"dtype: unknown {dtype!r}; {nearest(dtype, DTYPE_NAMES)}")
    stored = dtype or config.checkpoint_dtype or "float32"
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise JaxrlError(
            f"{target}: exists already; choose another folder, or overwrite it (overwrite=True, or --overwrite)"
        )
    origin = _origin(config, source)
    settings = _settings(config, stored, origin)
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        if is_main():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            (scratch / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            carry(origin, scratch)
        _export(model, scratch, stored, max_shard_bytes)
        if is_main():
            replace(scratch, target)
    except OSError as error:
        full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise JaxrlError(f"{target}: cannot write the model there: {full}; no part of it was left behind") from error
    finally:
        if is_main():
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _origin(config: ModelConfig, source: str | os.PathLike[str] | None) -> Path | None:
    """The folder to carry files from. Asked for, it must exist; remembered, it may be gone."""
    if source is not None:
        return find_folder(source)
    if config.source is not None and not Path(config.source).is_dir():
        warnings.warn(
            f"{config.source}, where the model came from, is gone: tokenizer and generation config are not carried "
            "along; name a folder that has them as `source`",
            stacklevel=3,
        )
        return None
    return None if config.source is None else Path(config.source)


def _settings(config: ModelConfig, stored: Any, origin: Path | None) -> dict[str, Any]:
    dtype = stored if isinstance(stored, str) else Counter(kind for _, kind in stored).most_common(1)[0][0]
    original = None if origin is None else read_config(origin / "config.json")[1]
    try:
        return to_hf(config, dtype, original)
    except ValueError as error:
        raise JaxrlError(f"this model cannot be exported: {error}") from None


def _export(model: Decoder, folder: Path, stored: Any, max_shard_bytes: int) -> None:
    """Write the weights, fetching one parameter at a time."""
    kinds = dict(stored) if not isinstance(stored, str) else {}
    shapes = tensor_shapes(model.config)
    specs = {name: Spec(shape, _numpy_dtype(kinds.get(name, stored))) for name, shape in shapes.items()}
    writer = Writer(folder, split_shards(specs, max_shard_bytes)) if is_main() else None
    try:
        for name in param_shapes(model.config):
            layout, value = TABLE[name], to_host(_leaf(model, name))
            parts = enumerate(value) if stacked(name) else [(None, value)]
            for i, part in parts:
                if writer is not None:
                    writer.put(layout.tensor.format(i=i), layout.exported(part))
    finally:
        if writer is not None:
            writer.close()


def _numpy_dtype(name: str) -> np.dtype:
    return next(dtype for dtype in DTYPES.values() if dtype.name == name)
