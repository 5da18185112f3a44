"""What this library's workers time for ``head``: a clipped GRPO loss on hidden states, forward and backward.

python -m jaxrl.bench.own_head '{"world": FILE, "case": NAME, "memory": BYTES or null}'
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl.bench.peers.protocol import read_job, serve
from jaxrl.models.head import token_head

WHOLE = "whole logits"
CHUNKS = "chunks of 128 tokens"
BLOCKS = "blocks of the vocabulary"
ENTROPY = "blocks of the vocabulary, entropy too"
CASES = (WHOLE, CHUNKS, BLOCKS, ENTROPY)
CHUNK = 128


def whole(states: Array, matrix: Array, token: Array) -> Array:
    """Log-probs from all logits at once."""
    logps = jax.nn.log_softmax(states @ matrix.T, axis=-1)
    return jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0]


def chunks(states: Array, matrix: Array, token: Array) -> Array:
    """The same, ``CHUNK`` tokens at a time, each rematerialised in the backward pass."""
    score = jax.checkpoint(lambda x: whole(x[0], matrix, x[1]))
    size = min(CHUNK, len(token))
    parts = states.reshape(-1, size, states.shape[1]), token.reshape(-1, size)
    return jax.lax.map(score, parts).reshape(-1)


def loss(name: str, states: Array, matrix: Array, token: Array, old: Array, advantage: Array) -> Array:
    """Mean clipped loss; the case with entropy adds the mean entropy times a weight that is 0 when it runs."""
    scored = {WHOLE: whole, CHUNKS: chunks}
    logps, _, entropy = (
        (scored[name](states, matrix, token), 0, 0) if name in scored else token_head(states, matrix, token)
    )
    ratio = jnp.exp(logps - old)
    clipped = -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))
    return clipped - jnp.mean(entropy * jnp.where(old[0] > 0, 1.0, 0.0)) if name == ENTROPY else clipped


def arguments(tokens: int, hidden: int, vocab: int) -> tuple[Array, ...]:
    """States, embedding, tokens, old log-probs near the new ones, advantages."""
    draw = np.random.default_rng(0)
    states = draw.normal(size=(tokens, hidden)).astype(np.float32)
    matrix = (0.1 * draw.normal(size=(vocab, hidden))).astype(np.float32)
    token = draw.integers(0, vocab, tokens).astype(np.int32)
    logits = np.einsum("nd,nd->n", states, matrix[token])
    spread = 0.005 * np.sum(
        states**2, axis=1
    )  # of logits 0.1 |h| wide: the log-partition exceeds log V by half its square
    old = (logits - np.log(vocab) - spread + 0.1 * draw.normal(size=tokens)).astype(np.float32)
    return tuple(jnp.asarray(x) for x in (states, matrix, token, old, draw.normal(size=tokens).astype(np.float32)))


def case(name: str, given: tuple[Array, ...]) -> tuple[Callable[[], list[list[float]]], int | None]:
    """A call that returns the loss and the norms of both gradients, and the temporary bytes of its program."""
    program = jax.jit(jax.value_and_grad(lambda *x: loss(name, *x), argnums=(0, 1))).lower(*given).compile()

    def call() -> list[list[float]]:
        value, grads = jax.block_until_ready(program(*given))
        return [[float(value), *(float(np.linalg.norm(np.asarray(g).reshape(-1))) for g in grads)]]

    memory = program.memory_analysis()
    return call, None if memory is None else memory.temp_size_in_bytes


def main() -> None:
    """Serve the case that the command line names."""
    jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    world, name = read_job()
    size: dict[str, Any] = world["config"]
    call, temp_bytes = case(name, arguments(size["tokens"], size["hidden"], size["vocab"]))
    serve(call, {"jax": importlib.metadata.version("jax")}, temp_bytes)


if __name__ == "__main__":
    main()
