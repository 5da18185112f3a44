"""Old log-probs: what the ratios of a policy loss are measured against, and the correction that goes with it.

The sampler and the trainer compute one policy's log-probs by different programs. In float32 they differ by about
1e-5 nats a token, in bfloat16 by up to several hundredths, and an engine of others may be further off. A piece says
which of the two the ratio ``exp(logp - old_logp)`` is taken against, and may weigh tokens by the mismatch; it acts
once, in ``prepare``, without theta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import Piece, registry, within
from jaxrl.types import Graded

RANGE = 20.0  # nats; a log-ratio beyond it is cut off before exp


class OldLogps(Piece, ABC):
    """``(Graded, mask bool[P, G, L]) -> (old_logps float[P, G, L], factor float[P, G, L] | None)``.

    ``factor`` multiplies the policy term's weights; None is 1. The normaliser of the weights does not change.
    """

    cap: float = math.inf  # what a token's factor is at most
    max_gap: float = math.inf  # |sampler - trainer|, nats, above which a run stops

    @abstractmethod
    def __call__(
        self, graded: Graded, mask: Bool[Array, "P G L"]
    ) -> tuple[Float[Array, "P G L"], Float[Array, "P G L"] | None]: ...


@dataclass(frozen=True, kw_only=True)
class Trainer(OldLogps):
    """Recomputed by the trainer before the first mini-batch: the first ratio is 1, whatever the sampler's precision."""

    tag = "trainer"
    needs = frozenset({"trainer_logps"})

    def __call__(self, graded: Graded, mask: Bool[Array, "P G L"]) -> tuple[Float[Array, "P G L"], None]:
        return graded.old_logps, None


@dataclass(frozen=True, kw_only=True)
class Sampler(OldLogps):
    """The sampler's own: ratios correct its mismatch themselves, and a scoring pass is saved.

    Where a step scores its rows anyway (``probe.every``), a token whose two log-probs differ by more than ``max_gap``
    nats stops the run: the default suits float32, and a bfloat16 model needs a bound chosen for it.
    """

    tag = "sampler"
    needs = frozenset({"sampler_logps"})
    max_gap: float = 1e-3

    def __post_init__(self) -> None:
        within("algorithm.old_logps.max_gap", self.max_gap, 0)

    def __call__(self, graded: Graded, mask: Bool[Array, "P G L"]) -> tuple[Float[Array, "P G L"], None]:
        return graded.rollouts.logps, None


@dataclass(frozen=True, kw_only=True)
class Tis(OldLogps):
    """Recomputed, with weights times ``min(exp(trainer - sampler), cap)`` a token (truncated importance sampling).

    Yao et al. 2025, fengyao.notion.site/off-policy-rl; ``rollout_is: token`` with threshold 2 in verl.
    """

    tag = "tis"
    needs = frozenset({"trainer_logps", "sampler_logps"})
    cap: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.cap < math.inf:
            raise ValueError(f"algorithm.old_logps.cap: expected a number above 0, got {self.cap!r}")

    def __call__(
        self, graded: Graded, mask: Bool[Array, "P G L"]
    ) -> tuple[Float[Array, "P G L"], Float[Array, "P G L"]]:
        ratio = importance_ratio(graded.old_logps, graded.rollouts.logps, mask)
        return graded.old_logps, jnp.minimum(ratio, self.cap)


def importance_ratio(
    trained: Float[Array, "*N L"], sampled: Float[Array, "*N L"], mask: Bool[Array, "*N L"]
) -> Float[Array, "*N L"]:
    """``exp(trained - sampled)`` where ``mask``, else 1; the difference (nats) cut off at ``RANGE`` both ways."""
    return jnp.exp(jnp.clip(jnp.where(mask, trained - sampled.astype(trained.dtype), 0), -RANGE, RANGE))


OLD_LOGPS = registry(Trainer, Sampler, Tis)
