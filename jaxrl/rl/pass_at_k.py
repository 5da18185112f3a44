"""Advantages whose expected gradient is that of pass@k instead of pass@1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import one_of, within
from jaxrl.rl.token_rewards import Advantage
from jaxrl.types import Graded


@dataclass(frozen=True, kw_only=True)
class PassK(Advantage):
    """Rewards of a group transformed so that their policy gradient is unbiased for pass@k's (PKPO; arXiv 2505.15201).

    With c of n responses correct, a correct one gets ``k/n`` and a wrong one ``k/n rho(n-1, c, k-1)``, rho being the
    share of subsets of that size that hold a correct response. ``baseline`` ``leave_one_out`` keeps what a response
    adds to the subsets of size k that it is in, ``k/n (1 - rho(n-1, c-1, k-1))`` for a correct one and 0 for a wrong
    one (the paper's "loo minus one"): the same expectation, less variance.
    """

    tag = "pass_at_k"
    k: int = 4
    baseline: str = "none"

    def __post_init__(self) -> None:
        within("algorithm.advantage.k", self.k, 1)
        one_of("algorithm.advantage.baseline", self.baseline, ("none", "leave_one_out"))

    @property
    def least_group(self) -> int:
        return self.k

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        n = _checked(graded, self.k)
        others = rho_table(n - 1, self.k - 1)
        if self.baseline == "none":
            right, wrong = np.ones(n + 1), np.append(others, 0.0)
        else:
            right, wrong = np.append(0.0, 1 - others), np.zeros(n + 1)
        return _by_count(graded, self.k / n * right, self.k / n * wrong)


@dataclass(frozen=True, kw_only=True)
class PassKTraining(Advantage):
    """Analytic advantages of all groups of k out of a prompt's n responses (pass@k training; arXiv 2508.10751).

    ``R = rho(n, c, k)``, ``sigma = sqrt(R (1 - R))``; a correct response gets ``(1 - R) / sigma``, a wrong one
    ``(1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / sigma``; 0 where sigma is 0.
    """

    tag = "pass_at_k_training"
    k: int = 4

    def __post_init__(self) -> None:
        within("algorithm.advantage.k", self.k, 1)

    @property
    def least_group(self) -> int:
        return self.k

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G 1"]:
        n, k = _checked(graded, self.k), self.k
        mean = rho_table(n, k)
        sigma = np.sqrt(mean * (1 - mean))
        wrong = (
            1 - mean - np.array([math.comb(max(n - c - 1, 0), k - 1) / math.comb(n - 1, k - 1) for c in range(n + 1)])
        )
        some = np.where(sigma > 0, sigma, 1)
        return _by_count(graded, *(np.where(sigma > 0, x / some, 0) for x in (1 - mean, wrong)))


def rho_table(n: int, k: int) -> Float[np.ndarray, " c"]:
    """``rho(n, c, k) = 1 - C(n-c, k) / C(n, k)`` for c = 0..n: the share of k-subsets with a correct one among c."""
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])


def _checked(graded: Graded, k: int) -> int:
    n = graded.correct.shape[1]
    if k > n:
        raise ValueError(
            f"algorithm.advantage.k: pass@{k} is not defined for {n} responses a prompt; set rollout.n to {k} or more"
        )
    return n


def _by_count(graded: Graded, right: np.ndarray, wrong: np.ndarray) -> Float[Array, "P G 1"]:
    """By the number of correct responses of the group: what a correct and what a wrong one get."""
    count = jnp.sum(graded.correct, axis=1, keepdims=True)
    tables = (jnp.asarray(table, graded.reward.dtype)[count] for table in (right, wrong))
    return jnp.where(graded.correct, *tables)[..., None]
