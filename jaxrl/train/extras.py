"""What the pieces of an algorithm need beside the policy's rollouts: samples of others, demonstrations, pairs, the probe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Key

from jaxrl import keys
from jaxrl.data.prompts import pad_right
from jaxrl.rl.losses import reference_of
from jaxrl.sampling.strategies import Temperature
from jaxrl.train.rounds import response_tokens
from jaxrl.types import Graded, Pairs, Prompts, Rows, Samples

if TYPE_CHECKING:
    from jaxrl.train.collect import Collector


@dataclass(frozen=True)
class Extras:
    """Adds them to a step's graded rollouts; a function of models, root key and step."""

    collector: Collector
    reference: Any
    root: Key[Array, ""]
    step: int

    def __call__(self, graded: Graded) -> tuple[Graded, int]:
        """``graded`` with what the algorithm needs, and the tokens that were generated for it."""
        c, needs, spent = self.collector, self.collector.algorithm.needs, 0
        prompts = self._prompts(graded)
        found: dict[str, Any] = {}
        if "base_samples" in needs:
            base, right, tokens = self._drawn(prompts, "base", "base", "base_samples")
            found |= {"base": base, "base_correct": right}
            spent += tokens
            if "base_logps" in needs:
                found["base_logps"] = self._scored(c.place(base.rows))
        if "stream_samples" in needs:
            pool = c.task.pools["train"]
            others = pool.take(keys.at(self.root, "stream"), self.step, len(prompts.uid))
            base, right, tokens = self._drawn(others, "base", "stream", "stream_samples")
            found["stream"] = Samples(base.rows, right)
            spent += tokens
        if "teacher_samples" in needs:
            taught, right, tokens = self._drawn(prompts, "teacher", "teacher", "teacher_samples")
            found["teacher"] = Samples(taught.rows, right)
            spent += tokens
        if "demonstrations" in needs:
            found["demonstrations"] = self._demonstrations(prompts)
        if "pairs" in needs:
            found["pairs"] = self._pairs(len(prompts.uid))
        if "probe" in needs and c.probe is not None:
            found |= {"probe": c.probe[0], "probe_logps": c.probe[1]}
        return replace(graded, **found), spent

    def _prompts(self, graded: Graded) -> Prompts:
        """The step's prompts, those that a refill brought included, at the pool's width."""
        pool = self.collector.task.pools["train"]
        at = {uid: i for i, uid in enumerate(pool.uid.tolist())}
        return pool.select(np.array([at[uid] for uid in np.asarray(graded.uid).tolist()]))

    def _drawn(self, prompts: Prompts, who: str, name: str, need: str) -> tuple[Any, np.ndarray, int]:
        """Samples of a frozen model at temperature 1, whole distribution; which are correct, and their tokens."""
        c = self.collector
        c.base_engine.load(reference_of(self.reference, who), self.step)
        count = c.algorithm.samples(need)
        rollouts = c.sample(c.base_engine, prompts, Temperature(value=1.0), count, keys.at(self.root, name), self.step)
        c.base_engine.sleep()
        return rollouts, c.correct(prompts, rollouts), response_tokens(rollouts)

    def _scored(self, rows: Rows) -> Array:
        """Log-probs of ``[P B]`` rows under the base, at temperature 1."""
        c = self.collector
        flat = c.score_flat(reference_of(self.reference, "base"), rows.flat())
        return flat.reshape(rows.tokens.shape)

    def _demonstrations(self, prompts: Prompts) -> Samples:
        """Solutions that the task brings, as rows as wide as rollouts; one that does not fit counts as missing."""
        c = self.collector
        count, room = c.algorithm.samples("demonstrations"), c.spec.max_new_tokens
        key = keys.at(self.root, "demonstrations", self.step)
        width = prompts.tokens.shape[1] + room
        rows, right = [], []
        solutions = c.task.demonstrations(prompts.uid, count, key)
        for tokens, length, given in zip(prompts.tokens, prompts.length, solutions, strict=True):
            for solution in given:
                fits = 0 < len(solution) <= room
                rows.append([*tokens[:length].tolist(), *(solution if fits else [])])
                right.append(fits)
        tokens, length = pad_right(rows, width)
        start = np.repeat(np.asarray(prompts.length, np.int32), count)
        made = jax.tree.map(lambda x: x.reshape(len(prompts.uid), count, *x.shape[1:]), Rows(tokens, start, length))
        return Samples(made, np.array(right).reshape(len(prompts.uid), count))

    def _pairs(self, count: int) -> Pairs:
        """Preferences of the step out of the task's file."""
        c = self.collector
        rows, data = c.task.pairs.take(keys.at(self.root, "pairs"), self.step, count)
        scored = c.score_flat(reference_of(self.reference, "base"), c.place(rows).flat())
        return Pairs(rows, scored.reshape(rows.tokens.shape), np.ones(count, bool), data)
