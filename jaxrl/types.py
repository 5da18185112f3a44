"""The containers that cross module borders, and the shape legend they share.

Legend: P prompts a step, G rollouts a prompt, N = P*G rows, S prompt tokens, T response tokens,
L the row width, V vocabulary, M probe rows, D layers.

A *row* is prompt + response, contiguous from index 0 and right-padded. Its response is
``start <= t < length``; the end-of-sequence token is the last counted token. Index ``t`` always
speaks of token ``t``: ``logps[..., t] = log p(tokens[t] | tokens[<t])``. Masks come from lengths,
never from token ids.

All containers are pytrees. Their annotations are documentation: JAX rebuilds containers with
placeholder leaves inside transformations, so nothing is checked on construction. Call
``check_shapes`` where data enters the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

# Why a response ended. Stored as i32 so that it travels with the arrays.
STOP_EOS = 0  # a stop id was sampled; it is the last counted token
STOP_LENGTH = 1  # max_new_tokens reached without a stop id
STOP_NONE = 2  # no response was sampled (a slot that the prefilter emptied)
STOP_NAMES = ("eos", "length", "none")

container = jax.tree_util.register_dataclass


def wide(*dtypes: Any) -> jnp.dtype:
    """The dtype to accumulate in: float64 if any of ``dtypes`` is, float32 otherwise."""
    return jnp.dtype("float64" if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else "float32")


@container
@dataclass(frozen=True)
class Prompts:
    """Prompts of one step, right-padded."""

    tokens: Int[Array, "P S"]
    length: Int[Array, " P"]
    uid: Int[Array, " P"]


@container
@dataclass(frozen=True)
class Rows:
    """Token rows to be scored; any leading axes (``[N]`` or ``[P G]``)."""

    tokens: Int[Array, "*N L"]
    start: Int[Array, "*N"]
    length: Int[Array, "*N"]

    def mask(self) -> Bool[Array, "*N L"]:
        """True on response tokens, ``start <= t < length``."""
        t = jnp.arange(self.tokens.shape[-1], dtype=jnp.int32)
        t = t.reshape((1,) * self.start.ndim + (-1,))
        start, length = (jnp.asarray(x)[..., None].astype(jnp.int32) for x in (self.start, self.length))
        return (t >= start) & (t < length)

    def response_length(self) -> Int[Array, "*N"]:
        """Number of response tokens, the end-of-sequence token included."""
        return jnp.maximum(self.length - self.start, 0)

    def flat(self) -> Rows:
        """The same rows with one leading axis."""
        return flatten_leading(self, self.start.ndim)

    def __getitem__(self, index: Any) -> Rows:
        return jax.tree.map(lambda x: x[index], self)


@container
@dataclass(frozen=True)
class Packed:
    """N sequences laid one after the other in R rows of one width; made by ``jaxrl.models.packing.pack``.

    ``position`` counts within a sequence, ``segment`` numbers the sequences of a row from 0 (-1 on
    padding). Sequence i lies in row ``row[i]`` from ``offset[i]`` on; ``start`` and ``length`` are
    those of ``Rows``: prompt tokens, and prompt plus response.
    """

    tokens: Int[Array, "R L"]
    position: Int[Array, "R L"]
    segment: Int[Array, "R L"]
    row: Int[Array, " N"]
    offset: Int[Array, " N"]
    start: Int[Array, " N"]
    length: Int[Array, " N"]


@container
@dataclass(frozen=True)
class Rollouts:
    """Sampled responses. ``logps`` are of the distribution sampled from (nats, 0 off the response)."""

    rows: Rows
    logps: Float[Array, "P G L"]
    stop: Int[Array, "P G"]


@container
@dataclass(frozen=True)
class Samples:
    """Responses that something other than the policy wrote, and which of them are correct."""

    rows: Rows  # [P B]
    correct: Bool[Array, "P B"]


@container
@dataclass(frozen=True)
class Pairs:
    """M preferences: row 0 of each is the chosen response, row 1 the rejected one, of one prompt.

    ``ref_logps`` are of the reference model, nats, 0 off the response. ``data_logps`` are whole-response
    log-probs under the policy that wrote the data, where they were supplied. A pair that is not ``valid`` is
    a place that the step's prompts did not fill.
    """

    rows: Rows  # [M 2]
    ref_logps: Float[Array, "M 2 L"]
    valid: Bool[Array, " M"]
    data_logps: Float[Array, "M 2"] | None = None


@container
@dataclass(frozen=True)
class Graded:
    """Rollouts with rewards, and whatever else the algorithm's pieces declared that they need."""

    rollouts: Rollouts
    uid: Int[Array, " P"]
    reward: Float[Array, "P G"]
    correct: Bool[Array, "P G"]
    prefiltered: Bool[Array, " P"]  # True: passed the prefilter and was sampled
    old_logps: Float[Array, "P G L"] | None = None  # of the policy before the first mini-batch, by the trainer
    greedy_correct: Bool[Array, " P"] | None = None
    ref_logps: Float[Array, "P G L"] | None = None
    values: Float[Array, "P G L"] | None = None  # at token t: of the state before it, by the critic
    end_values: Float[Array, "P G"] | None = None  # of the states after the last token
    greedy_reward: Float[Array, " P"] | None = None  # of the policy's greedy response
    token_reward: Float[Array, "P G L"] | None = None  # beside ``reward``, at single tokens; set by ``prepare``
    chance: Float[Array, " P"] | None = None  # uniform in [0, 1), a function of seed, step and prompt
    matched: Int[Array, ""] | None = None  # prompts that another run kept at this step
    base: Rollouts | None = None  # samples of the base model on the same prompts, [P B]
    base_correct: Bool[Array, "P B"] | None = None
    base_logps: Float[Array, "P B L"] | None = None  # of the base's samples under the base, by the trainer
    stream: Samples | None = None  # samples of the base model on prompts of a stream of their own
    teacher: Samples | None = None  # samples of the teacher on the same prompts
    demonstrations: Samples | None = None  # solutions that the task brings for the same prompts
    pairs: Pairs | None = None  # preferences of a file
    probe: Rows | None = None  # the run's probe, [M]
    probe_logps: Float[Array, "M L"] | None = None  # of the probe under the base


@container
@dataclass(frozen=True)
class Batch:
    """All that theta sees: rows, and per-token numbers that were fixed without theta."""

    rows: Rows
    advantage: Float[Array, "N L"]
    old_logps: Float[Array, "N L"]
    weight: Float[Array, "N L"]
    ref_logps: Float[Array, "N L"] | None = None
    returns: Float[Array, "N L"] | None = None
    old_values: Float[Array, "N L"] | None = None


@container
@dataclass(frozen=True)
class Term:
    """One summand of a training step: ``sum_{n,t} weight * loss(...)`` over its own rows."""

    batch: Batch
    loss: Any = field(metadata={"static": True})


@container
@dataclass(frozen=True)
class Probe:
    """Fixed solutions whose log-probability is followed through training."""

    rows: Rows
    uid: Int[Array, " M"]
    correct: Bool[Array, " M"]
    truncated: Bool[Array, " M"]


@container
@dataclass(frozen=True)
class TrainState:
    """Everything that an optimiser step changes, and the root key (which it does not).

    ``critic``: the same of a critic on a trunk of its own.
    """

    step: Int[Array, ""]
    model: Any
    opt_state: Any
    key: Any
    critic: TrainState | None = None

    @property
    def critic_model(self) -> Any:
        """The critic's parameters, None without one on its own trunk."""
        return None if self.critic is None else self.critic.model


@dataclass(frozen=True)
class Kernel:
    """Gradient dot products ``values[i, j] = <grad phi_i, grad phi'_j>`` over all parameters.

    ``normalise`` is ``sum`` (phi = sum of token log-probs, nats), ``tok`` (mean over response
    tokens) or ``weights``. ``sq_norms_a[i] = |grad phi_i|^2``. ``blocks`` holds parts that sum to
    ``values``. ``dtype`` is that of the sums, ``compute`` that of the model's passes, ``precision``
    that of the matmuls; ``why`` says what picked ``method``. ``noise`` is the largest error of an
    entry over its two norms that a second computation of some entries showed, or None where there
    was none; ``held_fixed`` lists what was not differentiated.
    """

    values: Float[Array, "N M"]
    method: str
    dtype: str
    normalise: str
    sq_norms_a: Float[Array, " N"]
    sq_norms_b: Float[Array, " M"]
    blocks: dict[str, Array] | None = None
    noise: float | None = None
    held_fixed: tuple[str, ...] = ()
    compute: str = ""
    precision: str = "highest"
    why: str = ""

    def cosine(self) -> Float[Array, "N M"]:
        """Entries divided by both norms; 0 where a norm is 0."""
        scale = jnp.sqrt(self.sq_norms_a[:, None] * self.sq_norms_b[None, :])
        return jnp.where(scale > 0, self.values / jnp.where(scale > 0, scale, 1), 0)

    def unsure(self) -> Bool[Array, "N M"]:
        """True where ``|cosine|`` does not exceed the noise floor: the sign of such an entry means nothing.

        All False when no noise floor was measured.
        """
        return jnp.abs(self.cosine()) <= (-1.0 if self.noise is None else self.noise)


def flatten_leading(tree: Any, axes: int) -> Any:
    """Merge the first ``axes`` axes of every leaf into one."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[axes:])), tree)


def check_shapes(rows: Rows, *, vocab_size: int | None = None) -> None:
    """Check rows that enter the library from outside.

    Raises ``ValueError`` naming the field when ranks or leading axes disagree, when a dtype is not
    an integer, when ``0 <= start <= length <= L`` fails, or when a counted token is outside
    ``[0, vocab_size)``. ``start`` must be at least 1: the first token has no log-probability.
    """
    tokens, start, length = (jax.device_get(x) for x in (rows.tokens, rows.start, rows.length))
    for name, value, ndim in (("tokens", tokens, 2), ("start", start, 1), ("length", length, 1)):
        if value.ndim != ndim or value.dtype.kind not in "iu":
            raise ValueError(
                f"Rows.{name}: expected an integer array of rank {ndim}, got {value.dtype} of shape {value.shape}"
            )
    if not len(tokens) == len(start) == len(length):
        raise ValueError(
            f"Rows: {len(tokens)} token rows, {len(start)} starts and {len(length)} lengths; give one of each a row"
        )
    bad = np.flatnonzero((start < 1) | (start > length) | (length > tokens.shape[1]))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"Rows: row {i} has start {start[i]}, length {length[i]} and width {tokens.shape[1]}; "
            "expected 1 <= start <= length <= width"
        )
    used = np.arange(tokens.shape[1])[None, :] < length[:, None]
    wrong = used & ((tokens < 0) | (tokens >= (np.iinfo(np.int32).max if vocab_size is None else vocab_size)))
    if wrong.any():
        i, t = np.argwhere(wrong)[0]
        raise ValueError(
            f"Rows.tokens: row {i} holds id {tokens[i, t]}, outside the vocabulary of {vocab_size}; "
            "is this the model's own tokenizer?"
        )


def is_concrete(tree: Any) -> bool:
    """True outside of jax's transformations, where values can be looked at."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))
