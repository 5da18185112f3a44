"""What every rollout engine takes and gives: token ids in, token ids and log-probabilities out.

An engine holds one version of the policy at a time, streams samples in whatever order they finish, and can
give its memory back between steps. Our own (``jaxrl.sampling.engine``) and a server behind HTTP
(``jaxrl.sampling.remote``) are used through the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxrl.sampling.strategies import Strategy

UID_LIMIT = 2**31  # uids are i32 on the device

# What an engine may be able to do; `Engine.caps` names those it can.
CAPS = (
    "logprobs",  # samples carry log-probabilities
    "processed_logprobs",  # ... of the distribution sampled (after temperature and truncation), not of the raw policy
    "per_request_seed",  # a sample's randomness is its own: f(key, uid, index, position)
    "shared_prefix",  # n samples of a prompt pay for one prefill
    "in_process",  # parameters are taken as arrays, without a file between
    "sleep",  # `sleep` gives memory back
)


@dataclass(frozen=True, eq=False)
class Request:
    """``n`` responses to one prompt: samples ``first .. first + n - 1`` of prompt ``uid``.

    ``prompt`` are token ids i32[S], ``max_new`` tokens bound each response.
    """

    uid: int
    prompt: Int[np.ndarray, " S"]
    n: int
    max_new: int
    first: int = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """One finished response.

    ``tokens`` i32[T] end with the stop id that ended them (``stop`` is ``STOP_EOS``) or were cut (``STOP_LENGTH``).
    ``logps`` [T], nats, are of the distribution sampled from where ``processed``, else of the policy itself at
    temperature 1; None where the engine gives none. ``version`` is that of the parameters that sampled it.
    """

    uid: int
    index: int
    tokens: Int[np.ndarray, " T"]
    logps: Float[np.ndarray, " T"] | None
    stop: int
    version: int
    processed: bool = True


@dataclass(frozen=True, eq=False)
class Sampling:
    """How tokens are drawn: a strategy, the ids that end a response, and where randomness comes from.

    The key of token t of sample g of prompt uid is ``fold_in(at(key, "rollout", step, uid, g), t)``.
    """

    strategy: Strategy
    stop_ids: tuple[int, ...]
    key: Key[Array, ""]
    step: int = 0


class Engine(Protocol):
    """Something that samples from a policy. ``caps`` is a subset of ``CAPS``."""

    caps: frozenset[str]

    def reserve(self, *, prompts: int, width: int, max_new: int) -> None:
        """Expect streams of up to so many prompts, of ``width`` tokens, with ``max_new`` more; a hint."""
        ...

    def load(self, params: Any, version: int) -> None:
        """Take over the parameters (a ``Decoder``); whatever was cached under older ones is void."""
        ...

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples as they finish, each request's ``n`` of them exactly once.

        Raises ``ValueError`` for a request that ``check_requests`` refuses, before any sampling.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory of caches (and of parameters, where they are a copy) until ``wake`` or ``load``."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``."""
        ...


def check_requests(
    requests: Sequence[Request], stop_ids: Sequence[int], *, vocab_size: int | None = None, room: int | None = None
) -> None:
    """Raise ``ValueError``, naming the request, for what no engine can sample.

    Empty prompts, ``n`` or ``max_new`` below 1, uids outside [0, 2^31), one sample asked for twice, no stop ids, ids
    outside a vocabulary of ``vocab_size``, and a prompt that with its response exceeds ``room`` tokens of context.
    """
    if not len(stop_ids):
        raise ValueError("stop_ids: expected at least one id; take it from the generation config or the tokenizer")
    _check_ids("stop_ids", np.asarray(stop_ids), vocab_size)
    asked: dict[int, list[range]] = {}
    for i, r in enumerate(requests):
        name = f"request {i} (uid {r.uid})"
        if not 0 <= r.uid < UID_LIMIT:
            raise ValueError(f"{name}: expected a uid from 0 to {UID_LIMIT - 1}")
        if np.ndim(r.prompt) != 1 or (not np.issubdtype(np.asarray(r.prompt).dtype, np.integer) and len(r.prompt)):
            raise ValueError(f"{name}: expected a prompt of token ids i32[S], got {np.asarray(r.prompt)!r:.60}")
        if len(r.prompt) == 0:
            raise ValueError(f"{name}: expected a prompt of at least one token, got none")
        if r.n < 1 or r.max_new < 1 or r.first < 0 or r.first + r.n > UID_LIMIT:
            raise ValueError(f"{name}: expected n >= 1, max_new >= 1, first >= 0; got {r.n}, {r.max_new}, {r.first}")
        _check_ids(f"{name}: prompt", np.asarray(r.prompt), vocab_size)
        if room is not None and len(r.prompt) + r.max_new > room:
            raise ValueError(
                f"{name}: {len(r.prompt)} prompt tokens and max_new {r.max_new} exceed the model's context of {room}; "
                "shorten one of them"
            )
        mine = range(r.first, r.first + r.n)
        for other in asked.setdefault(r.uid, []):
            if max(mine.start, other.start) < min(mine.stop, other.stop):
                raise ValueError(
                    f"{name}: samples {mine.start}..{mine.stop - 1} overlap {other.start}..{other.stop - 1}"
                )
        asked[r.uid].append(mine)


def _check_ids(name: str, ids: np.ndarray, vocab_size: int | None) -> None:
    if vocab_size is not None and ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(
            f"{name}: id {wrong} is outside the vocabulary of {vocab_size}; is this the model's own tokenizer?"
        )
