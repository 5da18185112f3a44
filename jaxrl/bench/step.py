"""One optimiser step in micro-batches, against the same step on the whole batch at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.bench.sizes import Sizes
from jaxrl.bench.timing import Row, against, interleaved
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_logps
from jaxrl.rl.losses import Clip
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.update import update
from jaxrl.types import Batch, Term, TrainState

WHOLE = "whole batch"

_update = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"))  # not donated: each call starts alike


def step(sizes: Sizes, repeats: int) -> list[Row]:
    """AdamW on the clipped loss. ``ratio``: CPU-seconds over those of the whole batch."""
    model, size = sizes.model(), sizes.microbatch
    tx = make_optimiser(Optimiser(lr=1e-3), total=1)
    state = TrainState(jnp.int32(0), model, tx.init(model), keys.root(0))
    run = partial(_update, state, (_term(sizes, model),), None, tx=tx, temperature=1.0)
    cases: dict[str, Any] = {WHOLE: run, f"micro-batches of {size} rows": partial(run, microbatch=size)}
    return against(interleaved(cases, repeats=repeats, target=sizes.target), WHOLE, "ratio")


def _term(sizes: Sizes, model: Decoder) -> Term:
    """Random rows with advantages of both signs, on-policy, averaged over tokens."""
    rows = sizes.rows(sizes.step_rows, 4)
    mask = rows.mask().astype(jnp.float32)
    signs = np.random.default_rng(5).choice([-1.0, 1.0], (sizes.step_rows, 1))
    batch = Batch(
        rows=rows,
        advantage=jnp.broadcast_to(jnp.asarray(signs, jnp.float32), mask.shape),
        old_logps=jax.jit(token_logps)(model, rows),
        weight=mask / jnp.sum(mask),
    )
    return Term(batch, Clip())
