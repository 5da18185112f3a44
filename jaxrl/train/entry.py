"""``jaxrl.train(experiment)``: the public call, which ``jaxrl train`` makes too.

It stands above every layer, so what it calls is loaded when it is called.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import TYPE_CHECKING, Any

from jaxrl.errors import JaxrlError
from jaxrl.jsonfile import read_object

if TYPE_CHECKING:
    from jaxrl.models.decoder import Decoder
    from jaxrl.train.experiment import Experiment


def experiment_of(file: pathlib.Path) -> dict[str, Any]:
    """What a run folder's ``config.json`` says under ``experiment``. Raises ``JaxrlError`` naming the file."""
    found = read_object(file).get("experiment")
    if not isinstance(found, dict):
        raise JaxrlError(
            f"{file}: expected the settings of a run under experiment, got {found!r}; it is no run's config"
        )
    return found


def train(
    experiment: Experiment,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    base: Decoder | None = None,
    quiet: bool = False,
) -> pathlib.Path:
    """Run an experiment and return its run folder (default ``runs/<time>``).

    The resolved experiment is kept in ``config.json``. ``resume`` goes on from the last checkpoint of ``out``, bit
    for bit as if it had never stopped, and refuses an experiment that has changed. ``base`` is a base model that
    the caller already has.

    Raises ``UsageError`` when ``out`` holds another run, nothing to resume or the run of another experiment, or when
    model, data and devices do not fit; ``GateFailed`` when the base may not be used; ``NotFinite`` naming step and
    metric when a number is NaN; ``WriteFailed`` naming the file when the disk is full.
    """
    config, loop = (importlib.import_module(f"jaxrl.{name}") for name in ("config", "train.loop"))
    echo = config.to_tree(experiment)
    held = None if out is None else pathlib.Path(out, "config.json")
    if resume and held is not None and held.is_file():
        config.check_resume(experiment_of(held), echo, out)
    return loop.train(experiment, echo, out=out, resume=resume, base=base, quiet=quiet)
