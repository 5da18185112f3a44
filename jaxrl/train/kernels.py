"""The exact kernels of one training step: of which rows, with which weights, and how they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrl.influence.batch import coefficients
from jaxrl.influence.gradients import at_temperature
from jaxrl.influence.kernels import gradient_kernel
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Decoder
from jaxrl.rl.losses import TokenLoss
from jaxrl.train.arrays import ArrayStore
from jaxrl.types import Batch, Kernel, Rows, Term


@dataclass(frozen=True)
class StepKernels:
    """Kernels of trained rows with probe rows, and of those probe rows with themselves.

    ``batch_rows`` and ``probe_rows`` index the batch and the probe; ``cross`` is None where the filters
    kept nothing, and may end with repetitions of its rows. ``weights[i]`` is the coefficient of row i in
    the policy term: an SGD step of rate eta changes the score of probe row j by ``eta sum_i weights[i]
    cross[i, j]`` to first order, when ``batch_rows`` are all ``trained`` rows and ``uneven``, the largest
    departure of a token's coefficient from its row's over the latter, is 0. None where the loss has no
    such form, or the kernel is of token means.
    """

    cross: Kernel | None
    probe: Kernel
    batch_rows: Int[np.ndarray, " n"]
    probe_rows: Int[np.ndarray, " m"]
    trained: int
    weights: Float[np.ndarray, " n"] | None
    uneven: float


def step_kernels(
    model: Decoder, term: Term, probe: Rows, *, rows: int, temperature: float = 1.0, **options: Any
) -> StepKernels:
    """Kernels of the first ``rows`` trained rows of a policy term and ``rows`` probes spread over the probe.

    Trained rows are scored at the rollouts' ``temperature``, probes at 1. ``options`` are those of
    ``gradient_kernel``. A short list of trained rows is repeated to one length, so that there is one program.
    """
    every = trained_rows(term.batch)
    chosen, followed = every[:rows], spread(len(probe.start), rows)
    probes = probe[followed]
    cross, weights, uneven = None, None, 0.0
    if len(chosen):
        slots = np.resize(chosen, min(rows, len(term.batch.weight)))
        part = Term(to_host(jax.tree.map(lambda x: x[slots], term.batch)), term.loss)
        cross = gradient_kernel(model, part.batch.rows, probes, temperature=(temperature, 1.0), **options)
        if options.get("normalise", "sum") == "sum":
            weights, uneven = policy_weights(model, part, temperature)
            weights = None if weights is None else weights[: len(chosen)]
    itself = gradient_kernel(model, probes, probes, **options)
    return StepKernels(cross, itself, chosen, followed, len(every), weights, uneven)


def policy_weights(model: Decoder, term: Term, temperature: float) -> tuple[Float[np.ndarray, " N"] | None, float]:
    """Coefficient of each row's summed log-probability in the loss, and how uneven its tokens are.

    ``(None, 0)`` for a loss that needs whole distributions.
    """
    if type(term.loss).__call__ is TokenLoss.__call__:
        return None, 0.0
    found = coefficients(model, term, logps=at_temperature(temperature))
    mask = np.asarray(term.batch.rows.mask()) & (found.row != 0)[:, None]
    return found.row, float(np.abs(np.asarray(found.token, np.float64)[mask] - 1).max(initial=0))


def trained_rows(batch: Batch) -> Int[np.ndarray, " n"]:
    """Rows with a weight: those that the filters kept."""
    return np.flatnonzero(to_host(jnp.any(batch.weight != 0, axis=-1)))


def spread(total: int, count: int) -> Int[np.ndarray, " m"]:
    """``count`` of ``total`` indices, evenly spaced: the probe is ordered by set and prompt."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int))


def store_step(arrays: ArrayStore, found: StepKernels, suffix: str = "") -> None:
    """Store ``kernel``, ``probe_kernel``, where there are any ``layers``, ``probe_layers`` and ``weights``; ``suffix``
    follows each name.
    """
    index = {"batch_rows": found.batch_rows.tolist(), "probe_rows": found.probe_rows.tolist(), "trained": found.trained}
    if found.cross is not None:
        cross = first_rows(found.cross, len(found.batch_rows))
        store_kernel(arrays, f"kernel{suffix}", f"layers{suffix}", cross, index)
    store_kernel(arrays, f"probe_kernel{suffix}", f"probe_layers{suffix}", found.probe, index)
    if found.weights is not None:
        arrays.put(f"weights{suffix}", found.weights, index | {"uneven": found.uneven})


def store_kernel(arrays: ArrayStore, name: str, layers: str, kernel: Kernel, more: Mapping[str, Any]) -> None:
    """Store the values under ``name`` and, where there are any, the blocks ``[blocks, N, M]`` under ``layers``.

    Attributes of both say how they were computed, to what error, the norms for cosines, and ``more``.
    """
    fields = ("method", "why", "dtype", "compute", "precision", "normalise", "noise")
    about = {field: getattr(kernel, field) for field in fields} | {
        "held_fixed": list(kernel.held_fixed),
        "sq_norms_a": np.asarray(kernel.sq_norms_a).tolist(),
        "sq_norms_b": np.asarray(kernel.sq_norms_b).tolist(),
        **more,
    }
    arrays.put(name, kernel.values, about)
    if kernel.blocks is not None:
        parts = np.stack([np.asarray(part) for part in kernel.blocks.values()])
        arrays.put(layers, parts, {"blocks": list(kernel.blocks), **about})


def first_rows(kernel: Kernel, n: int) -> Kernel:
    """The kernel of the first ``n`` rows of A, as host arrays."""
    blocks = None if kernel.blocks is None else {name: np.asarray(x)[:n] for name, x in kernel.blocks.items()}
    values, norms = np.asarray(kernel.values)[:n], np.asarray(kernel.sq_norms_a)[:n]
    return replace(kernel, values=values, sq_norms_a=norms, blocks=blocks)
