"""Direct alignment: a term of preferences, whose rows are pairs of responses to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.mean import Mean
from jaxrl.models.scoring import FORWARD, Scorer
from jaxrl.rl.losses import TokenLoss
from jaxrl.rl.metrics import effective_sample_size
from jaxrl.rl.pair_losses import Dpo, Importance, PairObjective, margin
from jaxrl.rl.pieces import one_of, within
from jaxrl.rl.regularisers import Regulariser
from jaxrl.types import Batch, Graded, Pairs, Rows, Term

SOURCES = ("base", "file")


@dataclass(frozen=True, kw_only=True)
class PairLoss(TokenLoss):
    """An objective of pairs: rows ``[M 2]``, chosen before rejected, scored at temperature 1.

    ``ref_logps`` are the reference's; ``old_logps`` sum, over a response, to its log-prob under the policy that wrote
    the data. The weight of a pair lies on the last token of its chosen response and nowhere else. ``average`` takes
    means over tokens in the place of sums (as TRL does for IPO): ``beta`` then means another thing.
    """

    tag = "pair"
    refreshes = True
    objective: PairObjective = field(default_factory=Dpo)
    importance: Importance | None = None
    average: bool = False

    def tokens(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> Float[Array, "M 2 L"]:
        policy = self.sums(score(model, batch.rows.flat()).reshape(batch.weight.shape), batch.rows)
        known = self.sums(batch.ref_logps.astype(policy.dtype), batch.rows)
        loss = jax.vmap(self.objective)(policy[:, 0], policy[:, 1], known[:, 0], known[:, 1])
        return jnp.broadcast_to(loss[:, None, None], batch.weight.shape)

    def sums(self, logps: Float[Array, "M 2 L"], rows: Rows, *, whole: bool = False) -> Float[Array, "M 2"]:
        """Log-probs of responses, or their means over tokens; ``whole``: sums whatever ``average`` says."""
        mask = rows.mask()
        total = jnp.sum(jnp.where(mask, logps, 0), axis=-1)
        if not self.average or whole:
            return total
        return total / jnp.maximum(jnp.sum(mask, axis=-1), 1).astype(total.dtype)

    def refresh(
        self, model: Any, reference: Any, batch: Batch, *, temperature: float, score: Scorer = FORWARD
    ) -> tuple[Batch, dict[str, Mean]]:
        """Importance weights by the current policy, and what it makes of the pairs.

        ``pair/margin`` (nats), ``pair/accuracy`` (share with a positive one), ``pair/chosen`` and ``pair/rejected``
        (changes against the reference, nats); with importance ``pair/weight``, ``pair/ess`` (share of the pairs),
        ``pair/clipped`` (share) and ``pair/log_ratio`` (nats), all over valid pairs.
        """
        valid = jnp.any(batch.weight != 0, axis=(1, 2))
        policy = self.sums(score(model, batch.rows.flat()).reshape(batch.weight.shape), batch.rows, whole=True)
        known = self.sums(batch.ref_logps.astype(policy.dtype), batch.rows, whole=True)
        h = margin(policy[:, 0], policy[:, 1], known[:, 0], known[:, 1])
        metrics = {
            "pair/margin": Mean.of(h, valid),
            "pair/accuracy": Mean.of(h > 0, valid),
            "pair/chosen": Mean.of(policy[:, 0] - known[:, 0], valid),
            "pair/rejected": Mean.of(policy[:, 1] - known[:, 1], valid),
        }
        if self.importance is None:
            return batch, metrics
        change = policy - self.sums(batch.old_logps.astype(policy.dtype), batch.rows, whole=True)
        change = jnp.where(valid[:, None], change, 0)
        w = jnp.where(valid, jnp.exp(self.importance.log_ratio(change)), 0)
        count = jnp.maximum(jnp.sum(valid), 1).astype(w.dtype)
        metrics |= {
            "pair/weight": Mean.of(w, valid),
            "pair/ess": Mean.scalar(effective_sample_size(w) / count),
            "pair/clipped": Mean.of(self.importance.clipped(change), valid),
            "pair/log_ratio": Mean.of(jnp.sum(change, axis=1), valid),
        }
        if self.importance.self_normalise:
            total = jnp.sum(w)
            w = w * count / jnp.where(total > 0, total, 1)
        return replace(batch, weight=batch.weight * w.astype(batch.weight.dtype)[:, None, None]), metrics


@dataclass(frozen=True, kw_only=True)
class Preference(Regulariser):
    """The mean of a pair objective over the valid pairs of the mini-batch (arXiv 2305.18290, 2310.12036, 2506.08681).

    ``source`` ``base`` makes up to ``pairs`` pairs a prompt of ``samples`` base samples, the i-th correct response
    against the i-th wrong one; prompts that lack either have none. ``file`` reads the task's preference file, one
    pair a prompt of the step. The data's policy is the file's, where it brings log-probs, else the reference.
    """

    tag = "preference"
    objective: PairObjective = field(default_factory=Dpo)
    importance: Importance | None = None
    average: bool = False
    source: str = "base"
    pairs: int = 1
    samples: int = 8

    def __post_init__(self) -> None:
        one_of("algorithm.regularisers.preference.source", self.source, SOURCES)
        within("algorithm.regularisers.preference.pairs", self.pairs, 1)
        within("algorithm.regularisers.preference.samples", self.samples, 2)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"base_samples", "base_logps"} if self.source == "base" else {"pairs"})

    def __call__(self, coef: float, graded: Graded, mask: Bool[Array, "P G L"], keep: Bool[Array, " P"]) -> Term:
        found = self.of(graded)
        dtype = found.ref_logps.dtype
        rows, width = found.rows, found.rows.tokens.shape[-1]
        last = jnp.arange(width, dtype=jnp.int32)[None, None] == rows.length[..., None] - 1
        count = jnp.maximum(jnp.sum(found.valid), 1).astype(dtype)
        chosen = jnp.array([[[True], [False]]])
        weight = jnp.where(last & chosen & found.valid[:, None, None], coef / count, 0)
        data = found.ref_logps
        if found.data_logps is not None:
            data = jnp.where(last, found.data_logps[..., None].astype(dtype), 0)
        batch = Batch(
            rows=rows, advantage=jnp.zeros_like(weight), old_logps=data, weight=weight, ref_logps=found.ref_logps
        )
        return Term(batch, PairLoss(objective=self.objective, importance=self.importance, average=self.average))

    def of(self, graded: Graded) -> Pairs:
        """The pairs of a mini-batch."""
        if self.source == "file":
            return graded.pairs
        base, right = graded.base.rows, jnp.asarray(graded.base_correct)[:, : self.samples]
        written = base.response_length()[:, : self.samples] > 0
        picks, there = [], []
        for fit in (right & written, ~right & written):
            picks.append(jnp.argsort(~fit, axis=1, stable=True)[:, : self.pairs])
            there.append(jnp.arange(self.pairs)[None] < jnp.sum(fit, axis=1, keepdims=True))

        def pick(x: Array) -> Array:
            index = [p.reshape(*p.shape, *(1,) * (x.ndim - 2)) for p in picks]
            both = jnp.stack([jnp.take_along_axis(x, i, axis=1) for i in index], axis=2)
            return both.reshape(-1, *both.shape[2:])

        arrays = (base.tokens, base.start, base.length, graded.base_logps)
        tokens, start, length, logps = (pick(jnp.asarray(x)) for x in arrays)
        return Pairs(Rows(tokens, start, length), logps, (there[0] & there[1]).reshape(-1))

    def metrics(self, graded: Graded) -> dict[str, Mean]:
        """``pair/filled``: the share of places for pairs that the step's prompts filled."""
        return {"pair/filled": Mean.of(self.of(graded).valid)}
