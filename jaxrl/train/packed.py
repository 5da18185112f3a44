"""Packed rows between host and mesh: what a run's ``optimiser.packing`` makes of a step's rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jaxrl.errors import UsageError
from jaxrl.mesh import RULES, to_host
from jaxrl.models.passes import Passes, plan_passes
from jaxrl.rl.optimiser import Optimiser, Packing
from jaxrl.types import Rows, Term


def term_layouts(terms: tuple[Term, ...], optimiser: Optimiser, mesh: Mesh | None) -> tuple[Passes, ...] | None:
    """How the rows of each term are packed, on the mesh; None without packing. Rows of weight 0 are left out."""
    if optimiser.packing is None:
        return None
    used = to_host([jnp.any(term.batch.weight != 0, axis=1) for term in terms])
    return tuple(
        layout(term.batch.rows, some, optimiser.packing, optimiser.microbatch, mesh)
        for term, some in zip(terms, used, strict=True)
    )


def layout(
    rows: Rows, used: Bool[np.ndarray, " N"] | None, packing: Packing, at_once: int | None, mesh: Mesh | None
) -> Passes:
    """How those of the ``[N L]`` rows that are ``used`` (None: all) are packed, on the mesh."""
    held = to_host(rows)
    used = np.ones(len(held.start), bool) if used is None else used
    passes = plan_passes(held, used, width=packing.width, at_once=at_once, devices=row_devices(mesh))
    return jax.tree.map(jnp.asarray, passes) if mesh is None else passes.on(mesh)


def abstract_layouts(
    terms: tuple[Term, ...], optimiser: Optimiser, prompt: int, mesh: Mesh
) -> tuple[Passes, ...] | None:
    """The shapes of ``term_layouts`` where every row is as long as it can be, from ``prompt`` tokens on."""
    if optimiser.packing is None:
        return None

    def one(term: Term) -> Passes:
        n, width = term.batch.weight.shape
        rows = Rows(np.zeros((n, width), np.int32), np.full(n, prompt, np.int32), np.full(n, width, np.int32))
        found = layout(rows, None, optimiser.packing, optimiser.microbatch, mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), found)

    return tuple(one(term) for term in terms)


def row_devices(mesh: Mesh | None) -> int:
    """The number of devices that rows are split over."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in RULES["rows"])


def check_packing(optimiser: Optimiser, longest: int, mesh: Mesh) -> None:
    """Raise ``UsageError`` when a row of ``longest`` tokens does not fit, or passes do not split over the devices."""
    if optimiser.packing is None:
        return
    if optimiser.packing.width < longest:
        raise UsageError(
            f"optimiser.packing.width: a prompt and rollout.max_new_tokens take up to {longest} tokens, which do not "
            f"fit into {optimiser.packing.width}; raise it"
        )
    split = row_devices(mesh)
    if optimiser.microbatch is not None and optimiser.microbatch % split:
        raise UsageError(
            f"optimiser.microbatch: {optimiser.microbatch} packed rows cannot be split over the {split} devices of "
            f"mesh.data and mesh.fsdp; use a multiple of {split}"
        )
