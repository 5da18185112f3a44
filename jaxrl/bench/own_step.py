"""What this library's workers time for ``step``: one GRPO step as the training loop takes it.

python -m jaxrl.bench.own_step '{"world": FILE, "case": NAME, "memory": BYTES or null}'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.bench.own_rollout import versions
from jaxrl.bench.peers.protocol import read_job, serve
from jaxrl.bench.workloads import root
from jaxrl.models.decoder import Decoder, with_config
from jaxrl.models.hf import load_model
from jaxrl.rl.losses import Clip
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.update import update
from jaxrl.types import Batch, Rows, Term, TrainState

OURS = "jaxrl"
MICRO = "jaxrl, micro-batches"
World = Mapping[str, Any]


def batch(world: World) -> Batch:
    """The rows with weights that average over the tokens of a response, then over responses (GRPO's own)."""
    rows = Rows(*(jnp.asarray(world[name], jnp.int32) for name in ("tokens", "start", "length")))
    mask = rows.mask().astype(jnp.float32)
    weight = mask / jnp.sum(mask, axis=1, keepdims=True) / mask.shape[0]
    advantage = jnp.broadcast_to(jnp.asarray(world["advantage"])[:, None], mask.shape)
    return Batch(rows=rows, advantage=advantage, old_logps=jnp.asarray(world["old_logps"]), weight=weight)


def case(name: str, world: World, model: Decoder) -> Callable[[], float]:
    """A call that takes one step, to its end, and returns its loss; the state goes on from call to call."""
    config = world["config"]
    tx = make_optimiser(Optimiser(lr=config["lr"], clip=config["clip"]), total=1)
    state = TrainState(jnp.int32(0), model, tx.init(model), root())
    terms = (Term(batch(world), Clip(low=config["epsilon"], high=config["epsilon"])),)
    program = jax.jit(update, static_argnames=("tx", "temperature", "microbatch"), donate_argnums=0)
    options = {"tx": tx, "temperature": 1.0, "microbatch": config["microbatch"] if name == MICRO else None}

    def call() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(program(state, terms, None, **options))
        return float(metrics["policy/loss"].total)

    return call


def main() -> None:
    """Serve the case that the command line names."""
    world, name = read_job()
    config = world["config"]
    if not config["accelerator"]:
        jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    model = load_model(config["model"], dtype=config["dtype"])
    call = case(name, world, with_config(model, remat=config["remat"]))
    steps, tokens = config["checked"], int((world["length"] - world["start"]).sum())

    def made() -> int:
        call()
        return tokens

    serve(made, versions(), check=lambda: [[call() for _ in range(steps)]])


if __name__ == "__main__":
    main()
