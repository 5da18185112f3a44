"""Optimisers as one frozen record: AdamW or SGD, clipping by global norm, a learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl.rl.pieces import one_of, within

TYPES = ("adamw", "sgd")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Several sequences in rows of ``width`` tokens, as many as fit: less padding for the same tokens.

    ``width`` holds at least a prompt and a whole response.
    """

    width: int

    def __post_init__(self) -> None:
        within("optimiser.packing.width", self.width, 2)


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """What steps the parameters. Counts are in optimiser updates.

    ``schedule`` holds ``lr`` or decays it to ``final * lr`` at the last update; ``warmup`` updates
    ramp up linearly first, the first of them at ``lr / warmup`` (a zero step would waste a batch).
    ``weight_decay`` is decoupled (times lr) and acts on every parameter. ``clip`` bounds the global
    gradient norm. ``microbatch``: rows a forward pass, None for all at once; ``packing``: rows hold several
    sequences each (None: one, padded). Neither changes a number beyond rounding.

    Raises ``ValueError`` for unknown names and values out of range.
    """

    lr: float
    type: str = "adamw"
    schedule: str = "constant"
    warmup: int = 0
    final: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    microbatch: int | None = None
    packing: Packing | None = None

    def __post_init__(self) -> None:
        one_of("optimiser.type", self.type, TYPES)
        one_of("optimiser.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "warmup", "weight_decay", "clip", "eps"):
            within(f"optimiser.{name}", getattr(self, name), 0)
        for name in ("b1", "b2", "momentum", "final"):
            within(f"optimiser.{name}", getattr(self, name), 0, 1)
        within("optimiser.microbatch", self.microbatch, 1)


def learning_rate(spec: Optimiser, count: Int[Array, ""] | int, *, total: int) -> Float[Array, ""]:
    """The rate of update number ``count`` (from 0) of ``total``."""
    count = jnp.asarray(count).astype(jnp.result_type(float))
    ramp = jnp.minimum(1.0, (count + 1) / max(spec.warmup, 1))
    done = jnp.clip((count - spec.warmup) / max(total - 1 - spec.warmup, 1), 0, 1)
    left = {
        "constant": jnp.ones_like(done),
        "linear": 1 - done,
        "cosine": 0.5 * (1 + jnp.cos(jnp.pi * done)),
    }[spec.schedule]
    floor = 0.0 if spec.schedule == "constant" else spec.final
    return spec.lr * ramp * (floor + (1 - floor) * left)


def make_optimiser(spec: Optimiser, *, total: int) -> optax.GradientTransformation:
    """The optax transformation of ``spec`` for a run of ``total`` updates.

    Its state holds moments in the parameters' dtype (float32 masters). Order: clip, moments, decay,
    rate. ``optax.tree_utils.tree_get(opt_state, "mu")`` finds the Adam moments.
    """
    steps = [] if spec.clip is None else [optax.clip_by_global_norm(spec.clip)]
    if spec.type == "adamw":
        steps.append(optax.scale_by_adam(b1=spec.b1, b2=spec.b2, eps=spec.eps))
    elif spec.momentum:
        steps.append(optax.trace(decay=spec.momentum))
    if spec.weight_decay:
        steps.append(optax.add_decayed_weights(spec.weight_decay))
    steps.append(optax.scale_by_learning_rate(lambda count: learning_rate(spec, count, total=total)))
    return optax.chain(*steps)
