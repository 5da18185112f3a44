"""Comparison of rollouts that came from differently shaped programs.

Rows of one matrix product differ in their last bits between batch sizes, paddings and meshes, so in
float32 a token can flip when its draw is a near-tie. What is promised, and checked here: up to the
first differing token of a row log-probabilities agree to 1e-5, and that token's uniform number lies
within 1e-5 of an edge of the distribution's CDF (greedy: the two highest logits are within 1e-4).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.models.decoder import Decoder, hidden, logits
from jaxrl.sampling.strategies import Greedy, Strategy
from jaxrl.types import Rollouts

LOGP_TOLERANCE = 1e-5  # nats
EDGE_TOLERANCE = 1e-5  # probability
GAP_TOLERANCE = 1e-4  # logits


def response(rollouts: Rollouts, p: int, g: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of one response."""
    rows = rollouts.rows
    span = slice(int(rows.start[p, g]), int(rows.length[p, g]))
    return np.asarray(rows.tokens[p, g, span]), np.asarray(rollouts.logps[p, g, span])


def next_logits(model: Decoder, tokens: np.ndarray) -> jax.Array:
    """Logits ``[1 V]`` after ``tokens``, by a full forward pass of a row of fixed width."""
    width = -(-len(tokens) // 16) * 16
    padded = jnp.asarray(np.pad(tokens, (0, width - len(tokens)))[None], jnp.int32)
    return _next_logits(model, padded, len(tokens) - 1)


@jax.jit
def _next_logits(model: Decoder, tokens: jax.Array, at: jax.Array) -> jax.Array:
    return logits(model, hidden(model, tokens)[:, at])


def margin(strategy: Strategy, scores: jax.Array, uniform: float) -> float:
    """How far a draw is from falling otherwise, as a multiple of what the clause calls a near-tie."""
    if isinstance(strategy, Greedy):
        low, high = np.sort(np.asarray(scores[0]))[-2:]
        return float(high - low) / GAP_TOLERANCE
    edges = np.cumsum(np.asarray(jax.nn.softmax(strategy.process(scores)))[0].astype(np.float64))[:-1]
    return float(np.abs(edges - uniform).min()) / EDGE_TOLERANCE


def assert_same_up_to_near_ties(
    model: Decoder,
    strategy: Strategy,
    a: Rollouts,
    b: Rollouts,
    *,
    key: jax.Array,
    uids: list[int],
    step: int = 0,
    first: int = 0,
) -> float:
    """Check the clause for every row of ``a`` and ``b`` (same prompts and samples); the share of identical rows."""
    assert a.stop.shape == b.stop.shape
    same = 0
    for p, g in np.ndindex(a.stop.shape):
        (tokens_a, logps_a), (tokens_b, logps_b) = response(a, p, g), response(b, p, g)
        shared = min(len(tokens_a), len(tokens_b))
        differ = np.flatnonzero(tokens_a[:shared] != tokens_b[:shared])
        end = differ[0] if differ.size else shared
        np.testing.assert_allclose(logps_a[:end], logps_b[:end], rtol=0, atol=LOGP_TOLERANCE)
        if not differ.size:
            assert len(tokens_a) == len(tokens_b), f"row {p, g} ends after {len(tokens_a)} or {len(tokens_b)} tokens"
            assert a.stop[p, g] == b.stop[p, g]
            same += 1
            continue
        prefix = np.asarray(a.rows.tokens[p, g, : int(a.rows.start[p, g]) + end])
        row_key = keys.at(key, "rollout", step, uids[p], first + g)
        uniform = jax.random.uniform(jax.random.fold_in(row_key, int(end)), (), logps_a.dtype)
        far = margin(strategy, next_logits(model, prefix), float(uniform))
        assert far <= 1, f"row {p, g} differs at token {end}, which is no near-tie: {far:.3g} tolerances away"
    return same / a.stop.size
