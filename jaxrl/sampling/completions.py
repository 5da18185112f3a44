"""What is asked of a completions server, and what its answers must hold: token ids and their log-probabilities.

The fields are those of OpenAI's ``/v1/completions`` and vLLM's additions to it (seen with vLLM 0.32). Every field that
shapes the distribution is given: a server would otherwise take it from the model's generation config.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float, Int

from jaxrl.errors import JaxrlError
from jaxrl.sampling.client import Lost
from jaxrl.sampling.requests import Request
from jaxrl.sampling.strategies import Greedy, Strategy, Temperature, TopK, TopKTopP, TopP
from jaxrl.types import STOP_EOS, STOP_LENGTH

PATH = "/v1/completions"
SWITCH_ON = (
    "expected token ids, got text only; vLLM gives them from 0.10.2 on (`return_token_ids` was asked for), others "
    "where `return_tokens_as_token_ids` is honoured. Text is not read back: it need not have the same tokens"
)
ROUNDING = 1e-4  # nats above 0 that a log-probability may have by rounding
NO_MASS = -9999.0  # what vLLM writes for a log-probability of minus infinity


class BadAnswer(JaxrlError):
    """A server's answer that cannot be a sample of the policy."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One sample that was asked for: sample ``index`` of prompt ``uid``, at most ``max_new`` tokens, its own seed."""

    uid: int
    index: int
    prompt: list[int]
    max_new: int
    seed: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"request uid {self.uid}, sample {self.index}"


@dataclass(frozen=True, eq=False)
class Answer:
    """``tokens`` i32[T] with the stop id that ended them, ``logps`` f32[T] in nats, and why they ended."""

    tokens: Int[np.ndarray, " T"]
    logps: Float[np.ndarray, " T"]
    stop: int


def split(requests: Sequence[Request], key_data: Sequence[int], step: int) -> list[Asked]:
    """Every sample of ``requests`` by itself, in their order."""
    return [
        Asked(r.uid, index, [int(t) for t in r.prompt], r.max_new, sample_seed(key_data, step, r.uid, index))
        for r in requests
        for index in range(r.first, r.first + r.n)
    ]


def sample_seed(key_data: Sequence[int], step: int, uid: int, index: int) -> int:
    """The seed of one sample, a function of these numbers alone; below 2^53, so that any JSON reader keeps it."""
    words = [*(int(x) for x in key_data), zlib.crc32(b"rollout"), step, uid, index]
    high, low = np.random.SeedSequence(words).generate_state(2, np.uint32)
    return int(high) >> 11 << 32 | int(low)


def question(model: str, asked: Asked, strategy: Strategy, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The body that asks for one sample. Only ``stop_ids`` end it: the model's own end-of-sequence id does not."""
    return {
        "model": model, "prompt": asked.prompt, "max_tokens": asked.max_new, "n": 1, "seed": asked.seed,
        "stop_token_ids": [int(i) for i in stop_ids], "ignore_eos": True, "min_tokens": 0,
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    } | drawn_by(strategy)  # fmt: skip


def drawn_by(strategy: Strategy) -> dict[str, Any]:
    """A strategy in the server's words."""
    plain: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    match strategy:
        case Greedy():
            return plain | {"temperature": 0.0}
        case Temperature(value=value):
            return plain | {"temperature": float(value)}
        case TopK(k=k, temperature=value):
            return plain | {"temperature": float(value), "top_k": int(k)}
        case TopP(p=p, temperature=value):
            return plain | {"temperature": float(value), "top_p": float(p)}
        case TopKTopP(k=k, p=p, temperature=value):
            return plain | {"temperature": float(value), "top_k": int(k), "top_p": float(p)}
    raise ValueError(f"strategy: a completions server has no words for {type(strategy).__name__}")


def same_raw_and_processed(strategy: Strategy) -> bool:
    """Whether log-probabilities of the distribution sampled are those of the policy itself at temperature 1.

    So too for the greedy strategy, whose log-probabilities are the untempered model's.
    """
    return isinstance(strategy, Greedy) or (isinstance(strategy, Temperature) and float(strategy.value) == 1)


def read_answer(content: Any, asked: Asked, stop_ids: Sequence[int], vocab_size: int) -> Answer:
    """The one sample in an answer to ``question``.

    Raises ``BadAnswer``, naming the request: not one choice, no token ids, another prompt, ids outside the
    vocabulary, log-probabilities that are missing, not numbers, infinite or positive, tokens after a stop id, and a
    response that ended for another reason than a stop id or ``max_new``. Raises ``Lost`` where the server says that
    it gave the sample up.
    """
    choice = _only_choice(content, asked)
    finish = choice.get("finish_reason")
    if finish == "abort":
        raise Lost(f"{asked.name}: the server gave it up")
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != asked.prompt:
        _bad(asked, f"the prompt has {len(asked.prompt)} ids and the server read {len(echoed)}, or other ones")
    ids = token_ids(choice, asked.name)
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        _bad(asked, f"id {wrong} is outside the vocabulary of {vocab_size}; does the server hold this model?")
    logps = _logps(choice, asked, len(ids))
    return Answer(np.asarray(ids, np.int32), logps, _stop(ids, finish, asked, frozenset(stop_ids)))


def token_ids(choice: dict[str, Any], name: str) -> list[int]:
    """The ids of a response: given as such, or as ``token_id:<id>`` beside the log-probabilities."""
    ids = choice.get("token_ids")
    if ids is None:
        words = (choice.get("logprobs") or {}).get("tokens")
        if not words or not all(str(word).startswith("token_id:") for word in words):
            raise BadAnswer(f"{name}: {SWITCH_ON}")
        ids = [word.removeprefix("token_id:") for word in words]
    try:
        return [int(i) for i in ids]
    except (TypeError, ValueError):
        raise BadAnswer(f"{name}: expected token ids, got {str(ids)[:80]}") from None


def _only_choice(content: Any, asked: Asked) -> dict[str, Any]:
    choices = content.get("choices") if isinstance(content, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        _bad(asked, f"expected a completion with `choices`, got {str(content)[:120]}; is this a completions server?")
    if len(choices) != 1:
        _bad(asked, f"expected 1 sample, got {len(choices)}")
    return choices[0]


def _logps(choice: dict[str, Any], asked: Asked, count: int) -> Float[np.ndarray, " T"]:
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if values is None:
        _bad(asked, "expected log-probabilities, got none; let the server give them (vLLM: --max-logprobs 1 or more)")
    if len(values) != count:
        _bad(asked, f"{count} token ids, but {len(values)} log-probabilities")
    for t, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value) or value > ROUNDING or value <= NO_MASS:
            _bad(asked, f"the log-probability of token {t} is {value}; expected a finite number of at most 0")
    return np.minimum(np.asarray(values, np.float32), np.float32(0))


def _stop(ids: Sequence[int], finish: Any, asked: Asked, stop_ids: frozenset[int]) -> int:
    at = next((t for t, i in enumerate(ids) if i in stop_ids), None)
    if at is not None and at < len(ids) - 1:
        _bad(asked, f"token {at} is the stop id {ids[at]}, and {len(ids) - 1 - at} tokens follow it")
    if len(ids) > asked.max_new or not ids:
        _bad(asked, f"expected 1 to {asked.max_new} tokens, got {len(ids)}")
    if at is not None:
        return STOP_EOS
    if finish == "stop":
        _bad(
            asked,
            f"the server stopped after token {ids[-1]}, which is no stop id of this request; is it one of the server's "
            "own? Add it to the stop ids, or start the server without (vLLM: --generation-config vllm)",
        )
    if len(ids) < asked.max_new:
        _bad(
            asked,
            f"cut after {len(ids)} of {asked.max_new} tokens, finish reason {finish!r}; prompt and response must fit "
            "the server's context (vLLM: --max-model-len)",
        )
    return STOP_LENGTH


def _bad(asked: Asked, message: str) -> NoReturn:
    raise BadAnswer(f"{asked.name}: {message}")


def probe_question(model: str, prompt: list[int]) -> dict[str, Any]:
    """The body that asks for the log-probabilities of a prompt's own tokens, without sampling any."""
    asked = Asked(0, 0, prompt, 1, 0)
    return question(model, asked, Temperature(value=1.0), ()) | {"echo": True, "max_tokens": 0}


def read_probe(content: Any, prompt: list[int]) -> Float[np.ndarray, " T"]:
    """Log-probabilities f64[len(prompt) - 1], in nats, of all tokens but the first."""
    asked = Asked(0, 0, prompt, 1, 0)
    choice = _only_choice(content, asked)
    logprobs = choice.get("logprobs") or {}
    values = list(logprobs.get("token_logprobs") or [])[: len(prompt)]
    if len(values) != len(prompt):
        raise BadAnswer(
            f"the probe: expected log-probabilities of its {len(prompt)} tokens, got {len(values)}; "
            "does the server honour `echo`?"
        )
    tokens = token_ids({"logprobs": logprobs}, "the probe")[: len(prompt)]
    if tokens != prompt:
        raise BadAnswer(f"the probe: the server read {tokens[:8]}..., expected {prompt[:8]}...")
    found = np.asarray([math.nan if x is None else x for x in values[1:]], np.float64)
    if not np.all(np.isfinite(found)):
        raise BadAnswer("the probe: a log-probability is not a finite number; were broken weights loaded?")
    return found
