"""The fixed probe: solutions sampled from the base whose log-probability is followed through training."""

from __future__ import annotations

import os
import pathlib
import zipfile
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxrl.types import STOP_LENGTH, STOP_NONE, Probe, Rollouts, Rows, check_shapes

FIELDS = ("tokens", "start", "length", "uid", "correct", "truncated")


def build_probe(drawn: Iterable[tuple[Int[np.ndarray, " P"], Rollouts, Bool[np.ndarray, "P n"]]]) -> Probe:
    """A probe of host arrays from ``(uid [P], rollouts [P n], correct [P n])`` of one or more sets.

    Rows keep their token ids and order; sets of other widths are padded on the right. A truncated
    response never counts as correct: its score is that of a prefix. Slots without a sample are left out.
    Raises ``ValueError`` when nothing was sampled or shapes disagree.
    """
    parts = [_part(*one) for one in drawn]
    parts = [part for part in parts if len(part["uid"])]
    if not parts:
        raise ValueError("probe: no response was sampled; give at least one prompt and one sample a prompt")
    width = max(part["tokens"].shape[1] for part in parts)
    for part in parts:
        part["tokens"] = np.pad(part["tokens"], [(0, 0), (0, width - part["tokens"].shape[1])])
    return _probe({name: np.concatenate([part[name] for part in parts]) for name in FIELDS})


def _part(uid: Int[np.ndarray, " P"], rollouts: Rollouts, correct: Bool[np.ndarray, "P n"]) -> dict[str, np.ndarray]:
    """One set, flattened to rows."""
    host = jax.device_get(rollouts)
    uid, correct = np.asarray(uid), np.asarray(correct, bool)
    stop = np.asarray(host.stop)
    if correct.shape != stop.shape or uid.shape != stop.shape[:1]:
        raise ValueError(
            f"probe: {stop.shape} rollouts (prompts, samples) need as many verdicts and a uid a prompt, "
            f"got correct {correct.shape} and uid {uid.shape}"
        )
    sampled = (stop != STOP_NONE).ravel()
    truncated = stop == STOP_LENGTH
    rows = host.rows.flat()
    part = {
        "tokens": np.asarray(rows.tokens, np.int32),
        "start": np.asarray(rows.start, np.int32),
        "length": np.asarray(rows.length, np.int32),
        "uid": np.repeat(uid, stop.shape[1]),
        "correct": (correct & ~truncated).ravel(),
        "truncated": truncated.ravel(),
    }
    return {name: value[sampled] for name, value in part.items()}


def gold_probe(rows: Rows, uid: Int[np.ndarray, " M"]) -> Probe:
    """A4e: a probe of known correct solutions, enumerated or written by a teacher, rare ones included.

    It covers prompts on which the base was never seen to be right. Raises ``ValueError`` for rows
    that are malformed or empty.
    """
    host = jax.device_get(rows)
    arrays = {name: np.asarray(getattr(host, name)) for name in FIELDS[:3]}
    flags = {"uid": np.asarray(uid), "correct": np.ones(len(uid), bool), "truncated": np.zeros(len(uid), bool)}
    if not len(uid) or np.any(arrays["length"] <= arrays["start"]):
        raise ValueError("gold probe: every row needs a response, and there must be at least one row")
    return _probe(arrays | flags)


def counted(probe: Probe, *, include_truncated: bool = False) -> Bool[np.ndarray, " M"]:
    """Rows that metrics are over: those with a response, truncated ones only on request.

    The identity of R1 needs truncated rows; means over solutions do not want them.
    """
    some = np.asarray(probe.rows.length) > np.asarray(probe.rows.start)
    return some if include_truncated else some & ~np.asarray(probe.truncated)


def scope_masks(
    probe: Probe, splits: Mapping[str, Int[np.ndarray, " X"]], in_batch: Int[np.ndarray, " P"] | None = None
) -> dict[str, Bool[np.ndarray, " M"]]:
    """A7: where a row's prompt stands, as name -> bool[M].

    ``splits`` maps a set's name (``train``, ``heldout``, ``ood``) to its uids. With ``in_batch`` (the
    uids trained on this step) there is a scope of that name, and the other scopes exclude it.
    """
    uid = np.asarray(probe.uid)
    scopes = {name: np.isin(uid, np.asarray(members)) for name, members in splits.items()}
    if in_batch is None:
        return scopes
    here = np.isin(uid, np.asarray(in_batch))
    return {"in_batch": here} | {name: member & ~here for name, member in scopes.items()}


def save_probe(path: str | os.PathLike[str], probe: Probe) -> None:
    """Write ``probe.npz``: whole under a temporary name first, then renamed, so a kill leaves no half file."""
    path = pathlib.Path(path)
    host = jax.device_get(probe)
    arrays = {name: np.asarray(getattr(host.rows if hasattr(host.rows, name) else host, name)) for name in FIELDS}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_probe(path: str | os.PathLike[str]) -> Probe:
    """Read ``probe.npz`` as host arrays.

    Raises ``FileNotFoundError``, or ``ValueError`` naming the file and the field that is missing,
    misshapen or out of range.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such probe; `jaxrl probe` makes one")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: expected a probe.npz made by `jaxrl probe`, and this is no .npz file")
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in FIELDS if name in file.files}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a readable probe file ({error}); make it again with `jaxrl probe`") from error
    missing = [name for name in FIELDS if name not in arrays]
    if missing:
        raise ValueError(f"{path}: the field {missing[0]!r} is missing; expected {', '.join(FIELDS)}")
    try:
        return _probe(arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _probe(arrays: Mapping[str, np.ndarray]) -> Probe:
    rows = Rows(*(np.asarray(arrays[name], np.int32) for name in ("tokens", "start", "length")))
    check_shapes(rows)
    for name in ("uid", "correct", "truncated"):
        if arrays[name].shape != rows.start.shape:
            raise ValueError(f"{name}: expected one entry a row {rows.start.shape}, got {arrays[name].shape}")
    flags = (np.asarray(arrays[name], bool) for name in ("correct", "truncated"))
    return Probe(rows, np.asarray(arrays["uid"], np.int32), *flags)
