"""What this library's workers time: the gradient pass that every kernel is measured against, and its own methods.

python -m jaxrl.bench.own '{"world": FILE, "case": NAME, "memory": BYTES or null}'
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.bench.peers.protocol import read_job, serve
from jaxrl.bench.world import as_model
from jaxrl.influence import kernels
from jaxrl.influence.gradients import row_gradients, row_weights, scores
from jaxrl.models.decoder import Decoder, with_config
from jaxrl.types import Rows

PASS, REFERENCE = "gradient pass", "reference"
Call = Callable[[], np.ndarray | None]
Sides = tuple[Rows, Rows]


def case(name: str, model: Decoder, sides: Sides) -> tuple[Call, int | None]:
    """A call that computes once, to the end, and the temporary bytes of its compiled program (None: unknown)."""
    return CASES.get(name, partial(_method, name))(model, sides)


def _pass(model: Decoder, sides: Sides) -> tuple[Call, int | None]:
    """The gradient of the summed scores of all N + M rows, layers rematerialised: one training step's worth."""
    both = jax.tree.map(lambda *x: jnp.concatenate(x), *sides)
    model = with_config(model, remat="full")

    def gradient(model: Decoder, rows: Rows) -> Any:
        weights = row_weights(rows)
        return jax.grad(lambda m: jnp.sum(scores(m, rows, weights)))(model)

    program = jax.jit(gradient).lower(model, both).compile()

    def call() -> None:
        jax.block_until_ready(program(model, both))

    return call, _temp_bytes(program)


def _reference(model: Decoder, sides: Sides) -> tuple[Call, int | None]:
    """``vmap(grad)`` as anybody would write it: every row's gradient on both sides, then all dot products."""

    def gram(model: Decoder, a: Rows, b: Rows) -> jax.Array:
        left, right = (jax.tree.leaves(row_gradients(model, rows, row_weights(rows))) for rows in (a, b))
        flat = [(x.reshape(len(x), -1), y.reshape(len(y), -1)) for x, y in zip(left, right, strict=True)]
        return sum((jnp.matmul(x, y.T, precision="highest") for x, y in flat), jnp.zeros((), flat[0][0].dtype))

    program = jax.jit(gram).lower(model, *sides).compile()
    return lambda: np.asarray(program(model, *sides)), _temp_bytes(program)


def _streamed(model: Decoder, sides: Sides) -> tuple[Call, int | None]:
    return _method("streamed", model, sides)[0], _temp_bytes(kernels.compiled_kernel(model, *sides))


def _method(name: str, model: Decoder, sides: Sides) -> tuple[Call, None]:
    """``gradient_kernel`` by one of its methods, all of the call: checks and squared norms too, no second computation."""

    def call() -> np.ndarray:
        return np.asarray(kernels.gradient_kernel(model, *sides, method=name, noise=0).values)

    return call, None


def _temp_bytes(program: jax.stages.Compiled) -> int | None:
    """Bytes beside arguments and results that the compiled program needs at once, where the platform says."""
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


CASES: dict[str, Callable[[Decoder, Sides], tuple[Call, int | None]]] = {
    PASS: _pass,
    REFERENCE: _reference,
    "streamed": _streamed,
}


def main() -> None:
    """Serve the case that the command line names."""
    jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    world, name = read_job()
    call, temp = case(name, *as_model(world))
    serve(call, {"jax": importlib.metadata.version("jax")}, temp)


if __name__ == "__main__":
    main()
