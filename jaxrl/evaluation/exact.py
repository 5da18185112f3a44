"""Exact evaluation on MSA-0: no sampling, so no sampling error.

A prompt has 20 correct responses, so a model's probability ``p`` of being right is a sum of 20 terms,
pass@k is ``1 - (1 - p)^k``, and the decomposition of interference (SCIENCE R2, A5) is an identity.
Token log-probabilities come from the model's own ``token_logps``; sums over tokens and responses are
taken in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxrl import stats
from jaxrl.data import synthetic
from jaxrl.data.synthetic import FAMILIES, MODE_CODE, MODE_LANGUAGE, PROMPT_LENGTH, PROMPTS, Msa0
from jaxrl.errors import GateFailed
from jaxrl.evaluation.sequence_kl import p_times
from jaxrl.models.decoder import Decoder
from jaxrl.models.logps import token_logps
from jaxrl.types import Rows

K_MAX = 256  # largest k of pass@k that the gates vouch for


@dataclass(frozen=True)
class Exact:
    """What a model does on each prompt, exactly.

    ``logps``: log-probability (nats) of each correct response, ten by language, then ten by code.
    ``mode_share``: probability that the first token is LNG, is COD.
    """

    logps: Float[np.ndarray, "X 20"]
    mode_share: Float[np.ndarray, "X 2"]

    def __getitem__(self, uid: Int[np.ndarray, " Y"]) -> Exact:
        """The same for some of the prompts."""
        return Exact(self.logps[uid], self.mode_share[uid])

    @cached_property
    def log_p(self) -> Float[np.ndarray, " X"]:
        """Log-probability of a correct response, nats."""
        return np.logaddexp.reduce(self.logps, axis=-1)

    @property
    def p(self) -> Float[np.ndarray, " X"]:
        """Probability of a correct response: pass@1 at temperature 1 (A8)."""
        return np.exp(self.log_p)

    def pass_at_k(self, k: int) -> Float[np.ndarray, " X"]:
        """Probability that one of ``k`` independent responses is correct (A9, exact)."""
        if k < 1:
            raise ValueError(f"pass@k: expected k >= 1, got {k}")
        with np.errstate(divide="ignore"):
            return -np.expm1(k * np.log1p(-np.minimum(self.p, 1.0)))

    @property
    def code_share(self) -> Float[np.ndarray, " X"]:
        """Probability that a response starts with COD (A14)."""
        return self.mode_share[:, MODE_CODE]

    @property
    def mode_correct(self) -> Float[np.ndarray, "X 2"]:
        """Joint probability of a strategy (language, code) and a correct answer."""
        by_mode = self.logps.reshape(-1, 2, 10)
        return np.exp(np.logaddexp.reduce(by_mode, axis=-1))

    @property
    def mode_accuracy(self) -> Float[np.ndarray, "X 2"]:
        """Probability of a correct answer given the strategy (A15); NaN where a strategy has no mass."""
        share = self.mode_share
        return np.divide(self.mode_correct, share, out=np.full_like(share, np.nan), where=share > 0)

    @property
    def given_correct(self) -> Float[np.ndarray, "X 20"]:
        """Log-probability of each correct response given that the response is correct, nats."""
        with np.errstate(invalid="ignore"):  # a prompt without any mass on correct responses
            return self.logps - self.log_p[:, None]

    @property
    def effective_correct(self) -> Float[np.ndarray, " X"]:
        """Effective number of correct responses, ``exp H(pi(.|correct))``, 1 to 20 (A17)."""
        return np.exp(-np.sum(p_times(self.given_correct, self.given_correct), axis=-1))


def exact(model: Decoder) -> Exact:
    """Exact probabilities on all 320 prompts; index by prompt number."""
    responses = synthetic.correct_responses(np.arange(PROMPTS))
    by_token = _score(model, responses)
    first = by_token[:, [0, 10], 0]  # the first correct response by language, and by code
    return Exact(by_token.sum(axis=-1), np.exp(first))


def well_formed_mass(model: Decoder) -> Float[np.ndarray, " 320"]:
    """Probability that a response reads ``[LNG | COD, digit, digit, EOS]``, for each prompt."""
    mass = np.zeros(PROMPTS)
    for part in synthetic.well_formed_responses().reshape(10, 20, -1):  # the shape that ``exact`` compiled
        responses = np.broadcast_to(part, (PROMPTS, *part.shape))
        mass += np.exp(_score(model, responses).sum(axis=-1)).sum(axis=-1)
    return mass


def exact_metrics(
    table: Exact, splits: Mapping[str, Int[np.ndarray, " X"]], ks: Iterable[int], *, seed: int = 0
) -> dict[str, dict[str, stats.Interval]]:
    """``{split: {"pass@k": interval, ..., "mode_share": interval}}``: means over prompts, bootstrap over prompts.

    The values are exact; the intervals speak of other prompts of the same kind.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, uid in splits.items():
        part = table[uid]
        columns = {f"pass@{k}": part.pass_at_k(k) for k in ks} | {"mode_share": part.code_share}
        out[name] = {key: stats.cluster_bootstrap(values, seed=seed) for key, values in columns.items()}
    return out


@dataclass(frozen=True)
class Decomposition:
    """Interference on correct responses, split in two (SCIENCE R2, A5); nats, one entry a prompt.

    ``change = log_ratio - narrowing``: the mean change of log-probability over the base's correct
    responses, the change of coverage ``log(p_now / p_base)``, and ``KL(base | correct || now | correct)``,
    which is never negative. A negative ``change`` alone says nothing about coverage.
    """

    change: Float[np.ndarray, " X"]
    log_ratio: Float[np.ndarray, " X"]
    narrowing: Float[np.ndarray, " X"]


def decompose(base: Exact, now: Exact) -> Decomposition:
    """The decomposition between two models on the same prompts, each part by its own definition."""
    weight = base.given_correct
    change = np.sum(p_times(weight, now.logps - base.logps), axis=-1)
    narrowing = np.sum(p_times(weight, weight - now.given_correct), axis=-1)
    return Decomposition(change, now.log_p - base.log_p, narrowing)


@dataclass(frozen=True)
class Gate:
    """A condition on a base model: ``low <= value <= high``. ``note`` says more, for the reader."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        above = self.low is None or self.value >= self.low
        return bool(above and (self.high is None or self.value <= self.high))

    def __str__(self) -> str:
        bounds = [f">= {self.low:.3g}"] if self.low is not None else []
        bounds += [f"<= {self.high:.3g}"] if self.high is not None else []
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}: {self.value:.4g}, expected {' and '.join(bounds)}{note}"


def gates(model: Decoder, task: Msa0, *, key: Key[Array, ""] | None = None, k_max: int = K_MAX) -> list[Gate]:
    """The conditions of SCIENCE D.1 on a base model, before any reinforcement learning.

    ``key`` is the root key that splits the task. The guess floor keeps large k honest: where only code is
    ever right in the data, language must not be right by chance more than ``1 / (4 k_max)`` of the time.
    """
    table, truth, split = exact(model), task.true_p(), task.split(key)
    family = synthetic.digits(np.arange(PROMPTS))[0]
    hard = np.isin(family, [i for i, f in enumerate(FAMILIES) if f.role == "hard" and f.trained])
    minerva = np.isin(family, [i for i, f in enumerate(FAMILIES) if f.role == "minerva"])
    wrong_only = np.isin(family, [i for i, f in enumerate(FAMILIES) if f.language == 0])
    guess = table.mode_correct[wrong_only, MODE_LANGUAGE]
    return [
        Gate("correlation with the teacher", float(np.corrcoef(table.p, truth)[0, 1]), low=0.95),
        Gate("pass@1 of the hard families", float(table.p[hard].mean()), 0.01, 0.1),
        Gate("pass@1 of the training split", float(table.p[split["train"]].mean()), 0.3, 0.5),
        Gate("pass@256 out of distribution", float(table[split["ood"]].pass_at_k(256).mean()), low=0.99),
        Gate("code share of the Minerva-like family", float(table.code_share[minerva].mean()), 0.2, 0.3),
        Gate("well-formed mass", float(well_formed_mass(model).mean()), low=0.98),
        Gate(
            "guess floor", float(guess.mean()), high=1 / (4 * k_max), note=f"mean; max {guess.max():.2e}; k <= {k_max}"
        ),
    ]


def require_gates(found: Iterable[Gate]) -> None:
    """Raise ``GateFailed``, naming gate and value, unless every gate holds."""
    found = list(found)
    failed = [gate for gate in found if not gate.ok]
    if failed:
        raise GateFailed(
            f"the base model fails {len(failed)} of {len(found)} gates: {'; '.join(map(str, failed))}. "
            "Nothing was trained on it; use another base seed, or train the base longer",
            {"gates": [asdict(gate) | {"ok": gate.ok} for gate in found]},
        )


def _score(model: Decoder, responses: Int[np.ndarray, "320 R 4"]) -> Float[np.ndarray, "320 R 4"]:
    """Log-probability of every response token, given the prompt of each leading index."""
    count = responses.shape[1]
    prompts = np.repeat(Msa0().tokens, count, axis=0)
    tokens = np.concatenate([prompts, responses.reshape(len(prompts), -1)], axis=1)
    start = np.full(len(tokens), PROMPT_LENGTH, np.int32)
    length = np.full(len(tokens), tokens.shape[1], np.int32)
    logps = _token_logps(model, Rows(jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(length)))
    return np.asarray(logps, np.float64)[:, PROMPT_LENGTH:].reshape(responses.shape)


@jax.jit
def _token_logps(model: Decoder, rows: Rows) -> Float[Array, "N L"]:
    return token_logps(model, rows)
