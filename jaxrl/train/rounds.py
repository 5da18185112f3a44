"""One generation batch as it was graded, and how a refill puts several together."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl import keys
from jaxrl.errors import UsageError
from jaxrl.rewards import Verdict
from jaxrl.train import grading
from jaxrl.train.arrays import ArrayStore
from jaxrl.types import Graded, Prompts, Rollouts


@dataclass(frozen=True)
class Round:
    """Prompts, what was sampled on them and the verdicts, on the host.

    ``greedy``: verdicts of the greedy responses, None where none was drawn. ``sampled``: prompts whose responses were
    drawn. ``spent``: generated tokens, greedy ones included. ``count``: generation batches that this one is made of,
    and ``paid`` the ``totals`` of them all where there are several.
    """

    prompts: Prompts
    rollouts: Rollouts
    verdicts: grading.Verdicts
    greedy: list[Verdict | None] | None
    sampled: Bool[np.ndarray, " P"]
    chance: Float[np.ndarray, " P"] | None
    matched: Int[np.ndarray, ""] | None
    spent: int
    count: int = 1
    paid: tuple[int, int, int] = (0, 0, 0)

    def graded(self, reward: Callable[[Verdict], float]) -> Graded:
        """What filters and advantages read of it; log-probs are added by the collector."""
        greedy = self.greedy
        return Graded(
            rollouts=self.rollouts,
            uid=self.prompts.uid,
            reward=grading.tabulate(self.verdicts, reward, 0.0).astype(np.float32),
            correct=grading.correct(self.verdicts),
            prefiltered=self.sampled,
            greedy_correct=None if greedy is None else np.array([v is not None and v.correct for v in greedy]),
            greedy_reward=None
            if greedy is None
            else np.array([0.0 if v is None else reward(v) for v in greedy], np.float32),
            chance=self.chance,
            matched=self.matched,
        )

    def filled(
        self, kept: Bool[np.ndarray, " P"], more: Round, fit: Bool[np.ndarray, " P"]
    ) -> tuple[Round, Bool[np.ndarray, " P"]]:
        """This round, its places that are not ``kept`` taken by those of ``more`` that ``fit``, and what is kept then."""
        at, source = np.flatnonzero(~kept), np.flatnonzero(fit)
        at, source = at[: len(source)], source[: len(at)]

        def put(mine: Any, other: Any) -> np.ndarray:
            mine = np.array(mine)
            mine[at] = np.asarray(other)[source]
            return mine

        def swap(mine: list[Any] | None, other: list[Any] | None) -> list[Any] | None:
            if mine is None or other is None:
                return None
            mine = list(mine)
            for i, j in zip(at, source, strict=True):
                mine[i] = other[j]
            return mine

        arrays = jax.tree.map(
            put,
            (self.prompts, self.rollouts, self.sampled, self.chance),
            (more.prompts, more.rollouts, more.sampled, more.chance),
        )
        joined = replace(
            self,
            prompts=arrays[0],
            rollouts=arrays[1],
            verdicts=swap(self.verdicts, more.verdicts),
            greedy=swap(self.greedy, more.greedy),
            sampled=arrays[2],
            chance=arrays[3],
            spent=self.spent + more.spent,
            count=self.count + more.count,
            paid=tuple(a + b for a, b in zip(self.totals, more.totals, strict=True)),
        )
        kept = kept.copy()
        kept[at] = True
        return joined, kept

    @property
    def totals(self) -> tuple[int, int, int]:
        """Prompts that were sampled, their responses, and how many of these are correct; of all rounds."""
        if self.count > 1:
            return self.paid
        verdicts = [v for row in self.verdicts for v in row if v is not None]
        return int(self.sampled.sum()), len(verdicts), sum(v.correct for v in verdicts)

    @property
    def notes(self) -> dict[str, tuple[float, float]]:
        """``rollout/rounds``, ``rollout/oversampling`` (sampled prompts a place), ``reward/sampled_correct``."""
        prompts, responses, right = self.totals
        return {
            "rollout/rounds": (float(self.count), 1.0),
            "rollout/oversampling": (float(prompts), float(len(self.sampled))),
            "reward/sampled_correct": (float(right), float(responses)),
        }


def chances(root: Key[Array, ""], step: int, uid: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Uniform in [0, 1) by prompt: a function of root key, step and prompt alone."""
    row = keys.at(root, "chance", step)
    return np.asarray(jax.vmap(lambda u: jax.random.uniform(keys.at(row, u)))(jnp.asarray(uid)))


def response_tokens(rollouts: Rollouts) -> int:
    """Tokens of all responses."""
    return int(np.asarray(rollouts.rows.response_length()).sum())


def kept_counts(run: str, *, steps: int, prompts: int) -> Int[np.ndarray, " steps"]:
    """How many prompts the run in folder ``run`` kept at each of its first ``steps`` steps.

    Raises ``UsageError`` when it is not there, is shorter, or takes another number of prompts a step.
    """
    try:
        kept = ArrayStore(pathlib.Path(run) / "arrays.zarr").read("kept")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"algorithm: the run to match, {run}, has no arrays.zarr/kept that can be read") from error
    if kept.shape[0] < steps or kept.shape[1] != prompts:
        raise UsageError(
            f"algorithm: the run to match, {run}, has {kept.shape[0]} steps of {kept.shape[1]} prompts; this one takes "
            f"{steps} of {prompts}"
        )
    return kept[:steps].sum(axis=1).astype(np.int32)
