"""One call of a remote engine's ``stream``: many questions at once, each asked again until it is answered.

A question that finds no server, or loses it, waits and is asked again; what others answered stays. When a connection
broke, the server that answers next may be another one: before any further question its weights are seen to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from jaxrl.errors import JaxrlError
from jaxrl.sampling.client import Lost, insist
from jaxrl.sampling.completions import Asked, question, same_raw_and_processed
from jaxrl.sampling.requests import Sample
from jaxrl.sampling.strategies import Strategy

if TYPE_CHECKING:
    from jaxrl.sampling.remote import RemoteEngine

LAST_WORDS = 1.0  # seconds that a failed stream waits for samples on their way
NAMED = 20  # prompts that a message names


class ServerLost(JaxrlError):
    """The server did not come back in time. ``missing`` are the samples, (uid, index), that nobody was handed."""

    def __init__(self, message: str, missing: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StaleSample(JaxrlError):
    """A sample of a version older than allowed."""


def refuse_stale(sample: Sample, version: int, max_staleness: int) -> None:
    """Raise ``StaleSample`` where ``sample`` is more than ``max_staleness`` versions older than ``version``."""
    if version - sample.version > max_staleness:
        raise StaleSample(
            f"sample {sample.index} of uid {sample.uid} is of version {sample.version}, {version - sample.version} "
            f"behind version {version}; max_staleness allows {max_staleness}. Take samples before loading again"
        )


class RemoteStream:
    """Samples of ``asked``, as they finish; ``run`` once."""

    def __init__(
        self, engine: RemoteEngine, asked: Sequence[Asked], strategy: Strategy, stop_ids: Sequence[int]
    ) -> None:
        self.engine, self.strategy, self.stop_ids = engine, strategy, tuple(stop_ids)
        self.plain = same_raw_and_processed(strategy)
        self.left = {(a.uid, a.index): a for a in asked}
        self.waiting = deque(asked)
        self.done: queue.SimpleQueue[Sample | Exception] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.client = engine.client()

    def run(self) -> Iterator[Sample]:
        """Each sample once.

        Raises ``ServerLost``, with what is missing, when the server has been gone for longer than the engine's
        patience, after every finished sample was handed out; ``BadAnswer`` for an answer that is no sample,
        ``WrongVersion`` for a server with other weights, ``StaleSample`` for what was kept too long.
        """
        total, threads = len(self.left), []
        try:
            self._served()
            for _ in range(min(self.engine.spec.concurrency, total)):
                threads.append(threading.Thread(target=self._work, name="jaxrl-remote", daemon=True))
                threads[-1].start()
            while self.left:
                got = self.done.get()
                if isinstance(got, Exception):
                    yield from self._finished(threads)
                    raise self._failure(got, total)
                yield self._handed(got)
            with suppress(Lost):  # nothing is missing any more
                self.engine.still_served()
        finally:
            self._stop()

    def _served(self) -> None:
        try:
            insist(self.engine.confirm, self.engine.backoff, self.closed.wait)
        except Lost as error:
            raise self._failure(error, len(self.left)) from error

    def _work(self) -> None:
        while not self.closed.is_set():
            try:
                asked = self.waiting.popleft()
            except IndexError:
                return
            try:
                self.done.put(insist(partial(self._once, asked), self.engine.backoff, self.closed.wait))
            except Exception as error:
                self.done.put(error)
                return

    def _once(self, asked: Asked) -> Sample:
        if self.engine.in_doubt:
            self.engine.confirm(only_in_doubt=True)
        body = question(self.engine.spec.model, asked, self.strategy, self.stop_ids)
        return self.engine.ask(self.client, asked, body, self.stop_ids, plain=self.plain)

    def _handed(self, sample: Sample) -> Sample:
        refuse_stale(sample, self.engine.version, self.engine.spec.max_staleness)
        del self.left[sample.uid, sample.index]
        return sample

    def _finished(self, threads: Sequence[threading.Thread]) -> Iterator[Sample]:
        """What was answered before the failure and not handed out yet."""
        self._stop()
        until = time.monotonic() + LAST_WORDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        while not self.done.empty():
            got = self.done.get()
            if isinstance(got, Sample):
                yield self._handed(got)

    def _failure(self, error: Exception, total: int) -> Exception:
        if not isinstance(error, Lost):
            return error
        by_uid: dict[int, list[int]] = defaultdict(list)
        for uid, index in self.left:
            by_uid[uid].append(index)
        shown = "; ".join(f"uid {uid}: {', '.join(map(str, by_uid[uid]))}" for uid in list(by_uid)[:NAMED])
        more = f"; and {len(by_uid) - NAMED} more prompts" if len(by_uid) > NAMED else ""
        return ServerLost(
            f"the rollout server is gone: {error} (tried for {self.engine.spec.patience:g} s). {len(self.left)} of "
            f"{total} samples are missing ({shown}{more}); the others were handed out. Bring the server back and ask "
            "for these again, or allow more time (patience)",
            list(self.left),
        )

    def _stop(self) -> None:
        self.closed.set()
        self.client.close()
