"""``kernel``: the exact gradient kernel between rows of text, or between a run's batch and its probe."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.commands.compared import Compared, of_files, of_run
from jaxrl.commands.found import (
    PICTURES,
    Found,
    drawn,
    drawn_steps,
    found_page,
    label_tables,
    layer_table,
    summary,
)
from jaxrl.commands.models import free
from jaxrl.commands.runs import is_run
from jaxrl.commands.steps import Step, step_table, store_verified, verified
from jaxrl.commands.timed import timed
from jaxrl.errors import JaxrlError, UsageError, nearest
from jaxrl.influence.kernels import METHODS, gradient_kernel
from jaxrl.models.hf_folder import replace
from jaxrl.report.render import write
from jaxrl.train.arrays import ArrayStore
from jaxrl.train.kernels import first_rows, step_kernels, store_kernel, store_step
from jaxrl.train.record import WriteFailed, write_json


def kernel(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Compute, store, draw and sum up. Nothing takes its name before it is whole."""
    if arguments.method not in METHODS:
        raise UsageError(f"--method {arguments.method}: {nearest(arguments.method, METHODS)}")
    if arguments.out is not None:
        may_write(arguments.out, arguments.overwrite)
    need_verify(arguments)
    compared = of_run(arguments) if is_run(arguments.model) else of_files(arguments)
    out, steps = arguments.out or compared.out, []
    with whole(out, arguments.overwrite) as scratch:
        arrays = ArrayStore(scratch)
        found = (of_rows if compared.term is None else of_step)(compared, arguments, arrays)
        if arguments.verify:
            steps = verified(compared, found[0].kernel, arguments)
            store_verified(arrays, steps)
        labels = {one.array: {"a": one.sides[0].labels, "b": one.sides[1].labels} for one in found}
        write_json(scratch / ".zgroup", {"zarr_format": 2})
        write_json(scratch / ".zattrs", {**compared.about, "labels": labels})
    files = draw(out, compared.about, found, steps)
    return {
        **compared.about,
        "out": str(out),
        "pictures": [str(file) for file in files],
        "page": str(page_of(out)),
        "kernels": {one.title: summary(one) for one in found},
        **{f"cosines by label, {one.title}": tables for one in found if (tables := label_tables(one))},
        **{f"shares of layers, {one.title}": layer_table(one) for one in found if one.kernel.blocks},
        **({"predicted against measured": step_table(steps)} if steps else {}),
        **({"time": timed(compared, options(arguments))} if arguments.time else {}),
    }


def need_verify(arguments: argparse.Namespace) -> None:
    """Raise ``UsageError`` for options that have no place here."""
    for name in ("lr", "adam_lr", "weight_decay"):
        if getattr(arguments, name) is not None and not arguments.verify:
            raise UsageError(f"--{name.replace('_', '-')} is of a step that --verify takes; add --verify")
    for name in ("verify", "time"):
        if getattr(arguments, name) and is_run(arguments.model):
            raise UsageError(
                f"--{name}: {arguments.model} is a run folder, whose steps `jaxrl check` measures; to take a step on rows of "
                "your own, give the model folder that `jaxrl export` makes of it"
            )


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says to ``gradient_kernel``."""
    memory = {} if arguments.memory is None else {"memory": arguments.memory}
    blocks = "layer" if arguments.layers else "total"
    return {"method": arguments.method, "normalise": arguments.normalise, "blocks": blocks, **memory}


def of_rows(compared: Compared, arguments: argparse.Namespace, arrays: ArrayStore) -> list[Found]:
    """The kernel of two sets of rows, or of one with itself, stored."""
    a, b = compared.sides
    one = Found(
        gradient_kernel(compared.model, a.rows, b.rows, **options(arguments)), (a, b), "A x A" if a is b else "A x B"
    )
    check_finite(one)
    store_kernel(arrays, "kernel", "layers", one.kernel, {"labels_a": a.labels, "labels_b": b.labels})
    store_norms(arrays, one)
    return [one]


def of_step(compared: Compared, arguments: argparse.Namespace, arrays: ArrayStore) -> list[Found]:
    """The kernels of a step's batch with the probe and of the probe with itself, as training takes them, stored."""
    batch, probe = compared.sides
    step = step_kernels(
        compared.model,
        compared.term,
        probe.rows,
        rows=arguments.limit or compared.rows,
        temperature=compared.temperature,
        **options(arguments),
    )
    probe = probe.chosen(step.probe_rows)
    found = [Found(step.probe, (probe, probe), "probe x probe", "probe_kernel", "-probe")]
    if step.cross is not None:
        cross = first_rows(step.cross, len(step.batch_rows))
        found.insert(0, Found(cross, (batch.chosen(step.batch_rows), probe), "batch x probe"))
    for one in found:
        check_finite(one)
    store_step(arrays, step)
    store_norms(arrays, found[0])
    return found


def store_norms(arrays: ArrayStore, one: Found) -> None:
    """The squared gradient norms of both sides as arrays of their own."""
    arrays.put("sq_norms_a", one.kernel.sq_norms_a)
    arrays.put("sq_norms_b", one.kernel.sq_norms_b)


def check_finite(one: Found) -> None:
    """Raise ``JaxrlError`` naming the first pair of rows whose entry is NaN or infinite."""
    bad = np.argwhere(~np.asarray(jnp.isfinite(one.kernel.values)))
    if len(bad):
        raise JaxrlError(
            f"the kernel {one.title} is not finite at row {bad[0, 0]} of the first side and row {bad[0, 1]} of the second "
            f"({len(bad)} entries are not); a gradient there overflows {one.kernel.compute or one.kernel.dtype}"
        )


def draw(out: pathlib.Path, about: Mapping[str, Any], found: list[Found], steps: list[Step]) -> list[pathlib.Path]:
    """The pictures and the page beside ``out``; those of an earlier kernel of this name that are not drawn again go."""
    shown = [(one, drawn(one)) for one in found]
    pictures = {out.with_name(f"{stem_of(out)}{one.stem}-{p.name}.png"): p for one, some in shown for p in some}
    if steps:
        pictures[out.with_name(f"{stem_of(out)}-steps.png")] = drawn_steps(steps)
    for file, picture in pictures.items():
        write(file, picture.png)
    for name in PICTURES:
        for stem in ("", "-probe"):
            stale = out.with_name(f"{stem_of(out)}{stem}-{name}.png")
            if stale not in pictures:
                stale.unlink(missing_ok=True)
    write(page_of(out), found_page(about, shown, steps).encode())
    return list(pictures)


def page_of(out: pathlib.Path) -> pathlib.Path:
    """The HTML page beside ``out``."""
    return out.with_name(f"{stem_of(out)}.html")


def stem_of(out: pathlib.Path) -> str:
    """What the files beside ``out`` are called: its name, without ``.zarr``."""
    return out.name.removesuffix(".zarr")


def may_write(out: pathlib.Path, overwrite: bool) -> None:
    """Raise ``UsageError`` when ``out`` is there and not to be replaced, or is nothing that this command wrote."""
    free(out, overwrite)
    beside = [page_of(out), *(out.with_name(f"{stem_of(out)}-{name}.png") for name in PICTURES)]
    if not out.exists():  # nothing of these can be an earlier kernel's
        for file in beside:
            if file.exists() and not overwrite:
                raise UsageError(f"{file}: is there already and would be replaced; give --overwrite or another --out")
    if out.exists() and not any((out / name / ".zarray").is_file() for name in ("kernel", "probe_kernel")):
        raise UsageError(f"{out}: is no kernel that `jaxrl kernel` wrote, so it is not replaced; name another --out")


@contextlib.contextmanager
def whole(out: pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
    """A temporary folder that takes the name ``out`` when the block ends well, and is gone when it does not."""
    may_write(out, overwrite)
    scratch = out.parent / f".{out.name}.{os.getpid()}.part"
    try:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        except OSError as error:
            raise WriteFailed.of(out, error) from error
        yield scratch
        try:
            replace(scratch, out)
        except OSError as error:
            raise WriteFailed.of(out, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
