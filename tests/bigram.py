"""A policy whose next token depends on the last one alone: every algorithm runs on it, and compiles in a moment."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.scoring import Scorer

VOCAB = 6


def policy(seed, scale=0.7):
    """``table[last, next]`` logits and ``value[last]``, in the default float dtype."""
    rng = np.random.default_rng(seed)
    table, value = rng.normal(size=(VOCAB, VOCAB)) * scale, rng.normal(size=VOCAB)
    return {"table": jnp.asarray(table, float), "value": jnp.asarray(value, float)}


@dataclass(frozen=True)
class Bigram(Scorer):
    """As a decoder's scorers: numbers at response positions, 0 elsewhere."""

    def scores(self, model, rows, *, temperature=1.0):
        logp, entropy = self._whole(model, rows, temperature), None
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        token = jnp.take_along_axis(logp, self._known(rows)[:, 1:, None], axis=-1)[..., 0]
        return self._spread(token, rows), self._spread(entropy, rows)

    def kl(self, reference, model, rows, *, temperature=1.0):
        p, q = (self._whole(m, rows, temperature) for m in (jax.lax.stop_gradient(reference), model))
        return self._spread(jnp.sum(jnp.exp(p) * (p - q), axis=-1), rows)

    def reverse_kl(self, model, reference, rows, *, temperature=1.0):
        p, q = (self._whole(m, rows, temperature) for m in (model, jax.lax.stop_gradient(reference)))
        return self._spread(jnp.sum(jnp.exp(p) * (p - q), axis=-1), rows)

    def values(self, model, rows):
        return self._spread(model["value"][self._known(rows)[:, :-1]], rows)

    def _whole(self, model, rows, temperature):
        return jax.nn.log_softmax(model["table"][self._known(rows)[:, :-1]] / temperature, axis=-1)

    @staticmethod
    def _known(rows):
        t = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
        return jnp.where(t < rows.length[:, None], rows.tokens, 0)  # what lies behind a response may be anything

    @staticmethod
    def _spread(values, rows):
        return jnp.where(rows.mask(), jnp.pad(values, ((0, 0), (1, 0))), 0)


BIGRAM = Bigram()
