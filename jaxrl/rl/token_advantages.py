"""Advantages of single tokens: rewards to go whitened over the batch, and those of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.rl.pieces import one_of, within
from jaxrl.rl.token_rewards import Advantage, token_rewards, total_reward
from jaxrl.types import STOP_LENGTH, Graded

BASELINES, PER = ("none", "group_mean"), ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class BatchWhiten(Advantage):
    """Rewards to go, centred and scaled over the whole batch (REINFORCE++; arXiv 2501.03262).

    ``baseline`` ``group_mean`` first subtracts the mean reward of the prompt's group (which needs groups of two or
    more). ``per``: mean and variance (sample, plus ``eps`` inside the root) weigh every ``token`` alike, as verl does,
    or every ``sequence`` by its whole reward, as in the paper's formula. A batch of equal values has advantage 0.
    """

    tag = "batch_whiten"
    baseline: str = "none"
    per: str = "token"
    eps: float = 1e-8

    def __post_init__(self) -> None:
        one_of("algorithm.advantage.baseline", self.baseline, BASELINES)
        one_of("algorithm.advantage.per", self.per, PER)
        within("algorithm.advantage.eps", self.eps, 0)

    @property
    def least_group(self) -> int:
        return 2 if self.baseline == "group_mean" else 1

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G L"]:
        mask = graded.rollouts.rows.mask()
        used = mask if used is None else used & mask
        values, whole = rewards_to_go(graded), total_reward(graded)
        if self.baseline == "group_mean":
            if whole.shape[1] < 2:
                raise ValueError(
                    "algorithm.advantage.baseline: group_mean compares the responses of one prompt, got 1 a prompt; "
                    "set rollout.n to 2 or more, or baseline: none"
                )
            mean = jnp.mean(whole, axis=1, keepdims=True)
            values, whole = values - mean[..., None], whole - mean
        counted = used if self.per == "token" else jnp.any(used, axis=-1)
        return whitened(values, used, *moments(values if self.per == "token" else whole, counted), eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class Gae(Advantage):
    """Generalised advantages of a critic, ``A_t = delta_t + gamma lam A_{t+1}`` (arXiv 1506.02438).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, V_t being the value of the state before token t. After the last token V is
    0; with ``bootstrap`` a response that the length limit cut off has the critic's value there. ``whiten``: centre
    and scale over the counted tokens of the batch (sample variance, 1e-8 inside the root). What the critic is fitted
    to is ``A + V`` before that.
    """

    tag = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    bootstrap: bool = False

    def __post_init__(self) -> None:
        within("algorithm.advantage.gamma", self.gamma, 0, 1)
        within("algorithm.advantage.lam", self.lam, 0, 1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"values", "end_values"} if self.bootstrap else {"values"})

    def __call__(self, graded: Graded, used: Bool[Array, "P G L"] | None = None) -> Float[Array, "P G L"]:
        mask = graded.rollouts.rows.mask()
        used = mask if used is None else used & mask
        found = self._raw(graded)
        return whitened(found, used, *moments(found, used)) if self.whiten else jnp.where(used, found, 0)

    def returns(self, graded: Graded) -> Float[Array, "P G L"]:
        return jnp.where(graded.rollouts.rows.mask(), self._raw(graded) + graded.values.astype(graded.reward.dtype), 0)

    def _raw(self, graded: Graded) -> Float[Array, "P G L"]:
        mask, reward = graded.rollouts.rows.mask(), token_rewards(graded)
        values = jnp.where(mask, graded.values, 0).astype(reward.dtype)
        after = jnp.zeros(graded.reward.shape, reward.dtype)
        if self.bootstrap:
            after = jnp.where(graded.rollouts.stop == STOP_LENGTH, graded.end_values, 0).astype(reward.dtype)
        following = jnp.concatenate([mask[..., 1:], jnp.zeros_like(mask[..., :1])], axis=-1)
        shifted = jnp.concatenate([values[..., 1:], jnp.zeros_like(values[..., :1])], axis=-1)
        delta = reward + self.gamma * jnp.where(following, shifted, after[..., None]) - values

        def back(carry: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            inside, change = now
            carry = jnp.where(inside, change + self.gamma * self.lam * carry, 0)
            return carry, carry

        steps = (jnp.moveaxis(mask, -1, 0), jnp.moveaxis(delta, -1, 0))
        return jnp.moveaxis(jax.lax.scan(back, jnp.zeros_like(after), steps, reverse=True)[1], 0, -1)


def rewards_to_go(graded: Graded) -> Float[Array, "P G L"]:
    """``sum_{s >= t} r_s`` at every response token; 0 elsewhere."""
    rewards = token_rewards(graded)
    return jnp.where(graded.rollouts.rows.mask(), jnp.flip(jnp.cumsum(jnp.flip(rewards, -1), axis=-1), -1), 0)


def moments(values: Float[Array, "*N"], counted: Bool[Array, "*N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and sample variance of the counted values; a variance of exactly 0 where they are all equal."""
    count = jnp.sum(counted).astype(values.dtype)
    mean = jnp.sum(jnp.where(counted, values, 0)) / jnp.maximum(count, 1)
    square = jnp.sum(jnp.where(counted, (values - mean) ** 2, 0)) / jnp.maximum(count - 1, 1)
    low, high = (f(jnp.where(counted, values, bad)) for f, bad in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
    return mean, jnp.where(low < high, square, 0)


def whitened(
    values: Float[Array, "P G L"],
    used: Bool[Array, "P G L"],
    mean: Float[Array, ""],
    variance: Float[Array, ""],
    *,
    eps: float = 1e-8,
) -> Float[Array, "P G L"]:
    """``(values - mean) / sqrt(variance + eps)`` where used; 0 throughout where nothing varies."""
    scale = jnp.sqrt(jnp.where(variance > 0, variance + eps, 1))
    return jnp.where(used & (variance > 0), (values - mean) / scale, 0)
