"""Ways to the same log-probs: one that every transformation of jax passes through, and one for gradients and none.

A ``Scorer`` is frozen data, static under jit, and is passed to where log-probs are needed. ``FORWARD`` scores in
chunks of positions with nothing but primitives: kernels, forward mode and second derivatives take it. ``REVERSE``
scores by blocks of the vocabulary (``token_head``), at response positions only where a bound on their number is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jaxrl.mesh import partition
from jaxrl.models.decoder import Decoder, hidden
from jaxrl.models.head import token_head
from jaxrl.models.head_kl import token_head_kl
from jaxrl.models.logps import (
    check_divergence,
    check_scored,
    state_values,
    token_kl,
    token_logps,
    token_reverse_kl,
    token_scores,
    token_values,
)
from jaxrl.types import Rows


class Scorer(ABC):
    """``score(model, rows, temperature=1.0) -> logps [N L]``, nats at response positions and 0 elsewhere.

    All functions return at least float32, float64 where the parameters are, and speak of token t at index t.
    """

    def __call__(self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0) -> Float[Array, "N L"]:
        return self.scores(model, rows, temperature=temperature)[0]

    @abstractmethod
    def scores(
        self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
        """Log-prob of each response token and entropy of the distribution it is scored under, nats."""

    @abstractmethod
    def kl(
        self, reference: Decoder, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        """``KL(reference || model)`` of the next-token distributions, nats. No gradient reaches the reference."""

    @abstractmethod
    def reverse_kl(
        self, model: Decoder, reference: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        """``KL(model || reference)`` of the next-token distributions, nats. No gradient reaches the reference."""

    @abstractmethod
    def values(self, model: Decoder, rows: Rows) -> Float[Array, "N L"]:
        """What the value head says of the state before token t, in the rewards' unit."""


@dataclass(frozen=True)
class Forward(Scorer):
    """By chunks of positions; see ``jaxrl.models.logps``."""

    def __call__(self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0) -> Float[Array, "N L"]:
        return token_logps(model, rows, temperature=temperature)

    def scores(
        self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
        return token_scores(model, rows, temperature=temperature)

    def kl(
        self, reference: Decoder, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        return token_kl(reference, model, rows, temperature=temperature)

    def reverse_kl(
        self, model: Decoder, reference: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        return token_reverse_kl(model, reference, rows, temperature=temperature)

    def values(self, model: Decoder, rows: Rows) -> Float[Array, "N L"]:
        return token_values(model, rows)


class ByBlocks(Scorer):
    """By blocks of the vocabulary, at the positions that ``states`` picks and ``spread`` puts back.

    ``mesh``: the one that model and rows lie on, over which the head is then split; None leaves that to the compiler.
    """

    mesh: Mesh | None

    @abstractmethod
    def states(self, model: Decoder, rows: Rows) -> Float[Array, "P d"]:
        """Hidden states at the positions that are scored."""

    @abstractmethod
    def targets(self, rows: Rows) -> Int[Array, " P"]:
        """The tokens that those positions predict."""

    @abstractmethod
    def spread(self, values: Float[Array, " P"], rows: Rows) -> Float[Array, "N L"]:
        """A number a position, at the index of the token that it speaks of; 0 off the response."""

    def by_rows(self, states: Float[Array, "N L d"]) -> Float[Array, "N L d"]:
        """Split over the mesh by rows and not by width, as the partitioner may have left them."""
        if self.mesh is None:
            return states
        place = NamedSharding(self.mesh, partition(self.mesh, ("rows", None, None), states.shape))
        return jax.lax.with_sharding_constraint(states, place)

    def scores(
        self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> tuple[Float[Array, "N L"], Float[Array, "N L"]]:
        check_scored(model, rows, temperature)
        weight, tied = matrix(model)
        logp, _, entropy = token_head(
            self.states(model, rows),
            weight,
            self.targets(rows),
            temperature=temperature,
            limit=model.config.vocab_limit,
            tied=tied,
            mesh=self.mesh,
        )
        return self.spread(logp, rows), self.spread(entropy, rows)

    def kl(
        self, reference: Decoder, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        return self._divergence(reference, model, rows, temperature, turned=False)

    def reverse_kl(
        self, model: Decoder, reference: Decoder, rows: Rows, *, temperature: float | Array = 1.0
    ) -> Float[Array, "N L"]:
        return self._divergence(reference, model, rows, temperature, turned=True)

    def values(self, model: Decoder, rows: Rows) -> Float[Array, "N L"]:
        check_scored(model, rows, 1.0)
        return self.spread(state_values(model, self.states(model, rows)), rows)

    def _divergence(
        self, reference: Decoder, model: Decoder, rows: Rows, temperature: float | Array, *, turned: bool
    ) -> Float[Array, "N L"]:
        check_scored(model, rows, temperature)
        check_divergence(reference, model)
        (known, alike), (weight, tied) = matrix(reference), matrix(model)
        found = token_head_kl(
            self.states(reference, rows),
            known if alike == tied else known.T,
            self.states(model, rows),
            weight,
            temperature=temperature,
            limit=model.config.vocab_limit,
            tied=tied,
            mesh=self.mesh,
            turned=turned,
        )
        return self.spread(found, rows)


@dataclass(frozen=True)
class Reverse(ByBlocks):
    """Rows as they are, right-padded.

    ``responses``: no row's response is longer (a rollout's ``max_new_tokens``), which spares the head the prompts;
    None for any. Rows that break the bound score NaN.
    """

    responses: int | None = None
    mesh: Mesh | None = None

    def window(self, rows: Rows) -> tuple[Int[Array, " N"], int]:
        """The first position that is scored, and how many from there on: a fixed number that covers the response."""
        width = rows.tokens.shape[1]
        size = width - 1 if self.responses is None else min(self.responses, width - 1)
        return jnp.minimum(rows.start - 1, width - 1 - size).astype(jnp.int32), size

    def states(self, model: Decoder, rows: Rows) -> Float[Array, "P d"]:
        found, (first, size) = self.by_rows(hidden(model, rows.tokens)), self.window(rows)
        return _slices(found, first, size).reshape(-1, found.shape[-1])

    def targets(self, rows: Rows) -> Int[Array, " P"]:
        first, size = self.window(rows)
        return _slices(rows.tokens, first + 1, size).reshape(-1)

    def spread(self, values: Float[Array, " P"], rows: Rows) -> Float[Array, "N L"]:
        first, size = self.window(rows)
        n, width = rows.tokens.shape
        at = jnp.arange(width, dtype=jnp.int32)[None] - 1 - first[:, None]
        covered = (at >= 0) & (at < size)
        if size == 0:  # a row of one token predicts nothing
            return jnp.zeros((n, width), values.dtype)
        found = jnp.take_along_axis(values.reshape(n, size), jnp.clip(at, 0, size - 1), axis=1)
        return jnp.where(rows.mask(), jnp.where(covered, found, jnp.nan), 0)


@dataclass(frozen=True)
class WithEntropy:
    """``score.scores`` as a function that compares by what it does, for where functions are static."""

    score: Scorer

    def __call__(self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0) -> tuple[Array, Array]:
        return self.score.scores(model, rows, temperature=temperature)


@dataclass(frozen=True)
class StateValues:
    """``score.values`` likewise, called as log-probs are: a temperature means nothing to it."""

    score: Scorer

    def __call__(self, model: Decoder, rows: Rows, *, temperature: float | Array = 1.0) -> Float[Array, "N L"]:
        return self.score.values(model, rows)


FORWARD = Forward()
REVERSE = Reverse()


def matrix(model: Decoder) -> tuple[Array, bool]:
    """The head's matrix and whether it is the embedding, ``[V d]``, rather than one of its own, ``[d V]``."""
    return (model.embed[...], True) if model.head is None else (model.head[...], False)


def _slices(x: Float[Array, "N L *C"], first: Int[Array, " N"], size: int) -> Float[Array, "N T *C"]:
    """``size`` entries of each row from ``first`` on."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(x, first)
