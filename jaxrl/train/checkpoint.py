"""Checkpoints through Orbax: the whole training state, array by array under readable names."""

from __future__ import annotations

import pathlib
import re
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl.errors import JaxrlError
from jaxrl.train.experiment import CheckpointSpec
from jaxrl.train.record import WriteFailed
from jaxrl.types import TrainState


class Checkpoints:
    """``checkpoints/`` of a run. Step ``s`` holds the state before update ``s``; step 0 the base model."""

    def __init__(self, folder: pathlib.Path, spec: CheckpointSpec) -> None:
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=spec.keep_last,
            keep_period=spec.keep_every,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,  # a kill while saving leaves one
        )
        handler = ocp.StandardCheckpointHandler()  # named, so that a checkpoint can be described before it is read
        self.manager = ocp.CheckpointManager(self.folder, item_handlers=handler, options=options)

    def save(self, state: TrainState) -> None:
        """Store the state under its own step; an existing step is left as it is.

        Raises ``WriteFailed`` when the file system refuses, and leaves nothing of this step.
        """
        step = int(state.step)
        if step in self.manager.all_steps():
            return
        try:
            self.manager.save(step, args=ocp.args.StandardSave(flatten(state)))
            self.manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:  # a full disk has many names below Orbax
            for part in self.folder.glob(f"{step}.*tmp*"):
                shutil.rmtree(part, ignore_errors=True)
            raise WriteFailed.of(self.folder / str(step), error) from error

    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(self.manager.all_steps())

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state at ``step`` (default: the latest), with the shardings and dtypes of ``like``.

        ``like`` may hold ``jax.ShapeDtypeStruct`` leaves. Raises ``JaxrlError`` when the step is not there or
        the stored arrays have other names or shapes.
        """
        steps = self.steps()
        step = steps[-1] if step is None and steps else step
        if not steps:
            raise JaxrlError(f"{self.folder}: this run has no checkpoint yet; train it on with --resume")
        if step not in steps:
            raise JaxrlError(f"{self.folder}: no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
        wanted, path = flatten(like), self.folder / str(step)
        try:
            stored = {name: tuple(entry.shape) for name, entry in self.manager.item_metadata(step).items()}
            _check_fit({name: tuple(leaf.shape) for name, leaf in wanted.items()}, stored, path)
            flat = self.manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            said = " ".join(str(error).split())[:300]
            raise JaxrlError(
                f"{path}: the checkpoint cannot be read: {said}; resume from another, or remove it"
            ) from error
        return unflatten(like, flat)

    def close(self) -> None:
        self.manager.close()


def _check_fit(wanted: dict[str, Any], stored: dict[str, Any], path: pathlib.Path) -> None:
    """Raise ``JaxrlError`` naming the first array that one side lacks or has in another shape."""
    for name in sorted(wanted.keys() | stored.keys()):
        mine, theirs = wanted.get(name), stored.get(name)
        if mine != theirs:
            expected = "no such array" if mine is None else f"shape {mine}"
            found = "is not there" if theirs is None else f"has shape {theirs}"
            raise JaxrlError(
                f"{path}: {name} {found}, expected {expected}; the checkpoint is of another model or optimiser"
            )


def flatten(state: TrainState) -> dict[str, Any]:
    """Every array under a readable name; random keys as their data."""
    plain = jax.tree.map(_key_data, state)
    paths = jax.tree_util.tree_flatten_with_path(plain)[0]
    return {name_of(path): leaf for path, leaf in paths}


def unflatten(like: TrainState, flat: dict[str, Any]) -> TrainState:
    """The inverse of ``flatten``, shaped like ``like``."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = [_as_key(leaf, flat[name_of(path)]) for path, leaf in paths]
    return jax.tree.unflatten(structure, leaves)


def name_of(path: tuple[Any, ...]) -> str:
    """``model.layers.q`` from a pytree path."""
    return re.sub(r"[^A-Za-z0-9_]+", ".", jax.tree_util.keystr(path)).strip(".").removesuffix(".value")


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _as_key(like: Any, leaf: Any) -> Any:
    return jax.random.wrap_key_data(leaf) if _is_key(like) else leaf
