"""What this library's workers time for ``step``: one GRPO step as the training loop takes it.

python -m jaxrl.bench.own_step '{"world": FILE, "case": NAME, "memory": BYTES or null}'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.bench.own_rollout import versions
from jaxrl.bench.peers.protocol import read_job, serve
from jaxrl.bench.workloads import root
from jaxrl.models.decoder import Decoder, with_config
from jaxrl.models.hf import load_model
from jaxrl.models.scoring import Reverse
from jaxrl.rl.losses import Clip
from jaxrl.rl.optimiser import Optimiser, Packing, make_optimiser
from jaxrl.rl.update import STATIC, update
from jaxrl.train.packed import term_layouts
from jaxrl.types import Batch, Rows, Term, TrainState

OURS = "jaxrl, packed rows in micro-batches"
MICRO = "jaxrl, padded rows in micro-batches"
WHOLE = "jaxrl, padded rows at once"
World = Mapping[str, Any]


def batch(world: World) -> Batch:
    """The rows with weights that average over the tokens of a response, then over responses (GRPO's own)."""
    rows = Rows(*(jnp.asarray(world[name], jnp.int32) for name in ("tokens", "start", "length")))
    mask = rows.mask().astype(jnp.float32)
    weight = mask / jnp.sum(mask, axis=1, keepdims=True) / mask.shape[0]
    advantage = jnp.broadcast_to(jnp.asarray(world["advantage"])[:, None], mask.shape)
    return Batch(rows=rows, advantage=advantage, old_logps=jnp.asarray(world["old_logps"]), weight=weight)


def optimiser(name: str, world: World) -> Optimiser:
    """What a case asks of the training loop; packed rows are as wide as the given ones."""
    config, width = world["config"], world["tokens"].shape[1]
    return Optimiser(
        lr=config["lr"],
        clip=config["clip"],
        microbatch=None if name == WHOLE else config["microbatch"],
        packing=Packing(width=width) if name == OURS else None,
    )


def case(name: str, world: World, model: Decoder) -> Callable[[], float]:
    """A call that takes one step, to its end, and returns its loss; the state goes on from call to call.

    Packing is planned in every call, as the training loop does.
    """
    config, chosen = world["config"], optimiser(name, world)
    tx = make_optimiser(chosen, total=1)
    state = TrainState(jnp.int32(0), model, tx.init(model), root())
    terms = (Term(batch(world), Clip(low=config["epsilon"], high=config["epsilon"])),)
    program = jax.jit(update, static_argnames=STATIC, donate_argnums=0)
    score = Reverse(responses=int(np.max(world["tokens"].shape[1] - world["start"])))

    def call() -> float:
        nonlocal state
        packed = term_layouts(terms, chosen, None)
        state, metrics = program(
            state, terms, None, tx=tx, temperature=1.0, microbatch=chosen.microbatch, score=score, layouts=packed
        )
        return float(jax.block_until_ready((state, metrics))[1]["policy/loss"].total)

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
