"""A rollout engine behind HTTP: a completions server as vLLM serves it, in its own environment or on its own machine.

Weights go to it as a Hugging Face folder, and what it then serves is checked. Each sample is a question of its own
with its own seed, so that a server that is lost costs only the samples that it had not finished.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --served-model-name policy --logprobs-mode processed_logprobs
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl.errors import JaxrlError
from jaxrl.mesh import is_main, process_count
from jaxrl.models.decoder import Decoder
from jaxrl.sampling.client import Backoff, Client, Lost, insist
from jaxrl.sampling.completions import PATH, Asked, question, read_answer, split
from jaxrl.sampling.export import drop_exports, export, probe_logps, some_probe
from jaxrl.sampling.remote_stream import RemoteStream
from jaxrl.sampling.requests import Request, Sample, Sampling, check_requests
from jaxrl.sampling.server import Reload, Server, Weights, WrongVersion, by_command
from jaxrl.sampling.strategies import Temperature

T = TypeVar("T")

TOLD_APART = 0.5  # temperature at which raw and processed log-probabilities are told apart
TOLD_BY = 8  # tokens that this is seen on


@dataclass(frozen=True, kw_only=True)
class RemoteSpec:
    """Where the server is and how it is used.

    - ``url`` (``http://host:port``) and ``model``, the name it serves; ``key_variable``: the environment variable
      that holds its API key.
    - ``folder``: where versions are exported to, ``server_folder``: the same folder as the server sees it;
      ``dtype`` of the export (None: the checkpoint's); ``keep``: versions kept on disk.
    - ``reload_command``: run to have the server use ``{folder}`` at ``{version}``, instead of vLLM's endpoints.
    - ``processed``: whether the server's log-probabilities are of the distribution sampled (vLLM's
      ``--logprobs-mode processed_logprobs``) or of the policy itself; None: found out by ``load``.
    - ``probe``: tokens by whose log-probabilities the served version is checked; ``tolerance``: nats, of the median of
      the differences (SmolLM2 in bfloat16 was seen at 0.03 to 0.11 on 32 tokens, with an older head from 0.16 on).
    - ``concurrency``: questions at once; ``timeout``: seconds for one; ``backoff``, ``ceiling``, ``patience``:
      seconds before the second attempt, at most between two, and after the first failure until giving up.
    - ``max_staleness``: versions that a sample may be behind when it is handed out.
    """

    url: str
    model: str
    folder: str
    server_folder: str | None = None
    dtype: str | None = None
    keep: int = 1
    reload_command: tuple[str, ...] = ()
    key_variable: str | None = None
    processed: bool | None = None
    probe: int = 64
    tolerance: float = 0.15
    concurrency: int = 64
    timeout: float = 600.0
    backoff: float = 0.5
    ceiling: float = 30.0
    patience: float = 900.0
    max_staleness: int = 1

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("probe", 2), ("concurrency", 1), ("max_staleness", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"rollout.engine.{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("tolerance", "timeout", "backoff", "ceiling", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollout.engine.{name}: expected a number above 0, got {getattr(self, name)}")

    def build(self, mesh: Mesh | None = None, *, reload: Reload | None = None) -> RemoteEngine:
        """The engine; ``reload(folder, version)``, where given, has the server use a folder."""
        return RemoteEngine(self, mesh, reload=reload)


class RemoteEngine:
    """``jaxrl.sampling.requests.Engine`` over HTTP. Several streams may run at once, and ``load`` while they do."""

    def __init__(self, spec: RemoteSpec, mesh: Mesh | None = None, *, reload: Reload | None = None) -> None:
        del mesh  # parameters are gathered for the export, whatever they are laid out on
        self.spec, self.folder = spec, Path(spec.folder)
        self.backoff = Backoff(base=spec.backoff, ceiling=spec.ceiling, patience=spec.patience)
        self.version = -1
        if reload is None and spec.reload_command:
            reload = by_command(spec.reload_command, spec.patience)
        self._reload, self._processed, self._found_out = reload, spec.processed, False
        self._control = self.client()
        self._server: Server | None = None
        self._weights: Weights | None = None
        self._vocab_size, self._room = 0, None
        self._written: list[int] = []
        self._gate, self._checking, self._counting = Gate(), threading.Lock(), threading.Lock()
        self._breaks = self._seen = 0  # connections that broke, and how many had when the server was last seen to
        self._asleep, self._can_sleep = False, True

    @property
    def caps(self) -> frozenset[str]:
        """What the server was found to do; before the first ``load``, what the spec says."""
        found = {"logprobs": True, "per_request_seed": True, "sleep": self._can_sleep}
        return frozenset(name for name, has in found.items() if has) | (
            {"processed_logprobs"} if self._processed else set()
        )

    def client(self) -> Client:
        """A client of its own, which can be closed by itself."""
        name = self.spec.key_variable
        if name is not None and not os.environ.get(name):
            raise JaxrlError(f"rollout.engine.key_variable: the environment variable {name} is not set")
        headers = {} if name is None else {"Authorization": f"Bearer {os.environ[name]}"}
        return Client(self.spec.url, self.spec.timeout, headers)

    def export(self, params: Decoder, version: int) -> Path:
        """Write a version without telling the server, which may be started from it. All processes call this."""
        return export(params, self.folder, version, self.spec.dtype)

    def reserve(self, *, prompts: int, width: int, max_new: int) -> None:
        """Nothing: a server takes whatever comes."""

    def load(self, params: Decoder, version: int) -> None:
        """Export the parameters, have the server use them, and see that it does. All processes call this.

        Waits for questions under way; those that follow are answered by the new version. Raises ``WrongVersion``
        with both numbers where the server's log-probabilities are not ours, ``JaxrlError`` where it does not answer
        or will not load.
        """
        spec, folder = self.spec, self.export(params, version)
        probe = some_probe(params, spec.probe)
        expected = probe_logps(params, probe, spec.dtype)
        label = f"{version}-{sha256(expected.astype(np.float32).tobytes()).hexdigest()[:12]}"
        seen = str(folder if spec.server_folder is None else f"{spec.server_folder.rstrip('/')}/{version}")
        weights = Weights(version, seen, label, expected)
        server = self._server or Server(
            self._control, spec.model, probe, spec.tolerance, patience=spec.patience, reload=self._reload
        )
        with self._gate.alone():
            if is_main():
                self._insist(lambda: self._tell(server, weights))
                self._insist(lambda: server.check(weights))  # by itself: a command that restarts it is run once
            if process_count() > 1:
                multihost_utils.sync_global_devices(f"jaxrl-remote-{version}")
            room = self._insist(server.room)
            self._server, self._weights, self.version = server, weights, version
            self._seen = self._breaks
            limit, own = params.config.vocab_limit, params.config.max_positions
            self._vocab_size, self._room = limit or params.config.vocab_size, min(own, room or own)
        self._find_processed(params, probe)
        self._written = [v for v in self._written if v != version] + [version]
        drop_exports(self.folder, self._written[: -spec.keep])
        self._written = self._written[-spec.keep :]

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples as they finish; see ``RemoteStream`` for what happens when the server is lost.

        Raises ``ValueError`` for requests that cannot be sampled, ``RuntimeError`` before ``load`` and while asleep.
        """
        if self._weights is None or self._asleep:
            raise RuntimeError("the server was given no parameters, or sleeps: call load (or wake)")
        requests = list(requests)
        check_requests(requests, sampling.stop_ids, vocab_size=self._vocab_size, room=self._room)
        key_data = np.asarray(jax.random.key_data(sampling.key)).reshape(-1)
        asked = split(requests, key_data, int(sampling.step))
        return RemoteStream(self, asked, sampling.strategy, sampling.stop_ids).run() if asked else iter(())

    def sleep(self) -> None:
        """Have the server give memory back where it can (vLLM: ``--enable-sleep-mode``); else nothing."""
        with self._gate.alone():
            if self._server is not None and self._can_sleep and is_main():
                self._asleep = self._can_sleep = self._insist(self._server.sleep)

    def wake(self) -> None:
        """Undo ``sleep``."""
        with self._gate.alone():
            if self._server is not None and self._asleep:
                self._insist(self._server.wake)
            self._asleep = False

    def confirm(self, *, only_in_doubt: bool = False) -> None:
        """See that the server serves the version loaded; where it does not, have it load that again.

        So a server that was restarted gets the weights back. Raises ``WrongVersion`` where that does not help, and
        ``Lost`` where the server does not answer.
        """
        with self._checking:
            breaks = self._breaks
            if only_in_doubt and not self.in_doubt:
                return
            try:
                self.still_served()
            except WrongVersion:
                self._repair()
            self._seen = breaks

    def ask(
        self, client: Client, asked: Asked, body: dict[str, Any], stop_ids: Sequence[int], *, plain: bool = False
    ) -> Sample:
        """One sample, asked for once; ``plain``: raw and processed log-probabilities are one under its strategy.

        Raises ``Lost`` where it may be asked for again, and what ``read_answer`` does.
        """
        with self._gate.among():
            version, processed = self.version, plain or bool(self._processed)
            try:
                content = client.post(PATH, body)
            except Lost as error:
                with self._counting:
                    self._breaks += error.broken
                raise
        found = read_answer(content, asked, stop_ids, self._vocab_size)
        return Sample(asked.uid, asked.index, found.tokens, found.logps, found.stop, version, processed)

    @property
    def in_doubt(self) -> bool:
        """Whether a connection broke since the served version was last seen to."""
        return self._breaks != self._seen

    def still_served(self) -> None:
        """Raise ``WrongVersion`` unless the server serves the version loaded, ``Lost`` where it does not answer."""
        with self._gate.among():
            server, weights = self._loaded()
            server.verify(weights)

    def _loaded(self) -> tuple[Server, Weights]:
        if self._server is None or self._weights is None:
            raise RuntimeError("the server was given no parameters: call load")
        return self._server, self._weights

    def _repair(self) -> None:
        with self._gate.alone():
            server, weights = self._loaded()
            try:
                server.verify(weights)  # again: a `load` may have come between
            except WrongVersion as error:
                warnings.warn(f"{error}; version {self.version} is loaded again", stacklevel=2)
                server.tell(weights)
                server.check(weights)

    def _tell(self, server: Server, weights: Weights) -> None:
        if self._asleep:
            server.wake()
            self._asleep = False
        server.tell(weights)

    def _insist(self, ask: Callable[[], T]) -> T:
        try:
            return insist(ask, self.backoff)
        except Lost as error:
            raise JaxrlError(f"the rollout server is gone: {error} (tried for {self.spec.patience:g} s)") from error

    def _find_processed(self, params: Decoder, probe: list[int]) -> None:
        """Whether log-probabilities are of the distribution sampled: seen on a few tokens at another temperature."""
        if self._found_out:
            return
        asked = Asked(0, 0, probe, TOLD_BY, 1)
        body = question(self.spec.model, asked, Temperature(value=TOLD_APART), ())
        sample = self._insist(lambda: self.ask(self._control, asked, body, ()))
        row, count = probe + sample.tokens.tolist(), len(sample.tokens)
        raw, tempered = (
            float(np.median(np.abs(sample.logps - probe_logps(params, row, self.spec.dtype, temperature=t)[-count:])))
            for t in (1.0, TOLD_APART)
        )
        found = tempered < raw
        if max(raw, tempered) <= self.spec.tolerance:
            return  # nearly the same at both temperatures: nothing can be said yet
        if self.spec.processed not in (None, found):
            raise JaxrlError(
                f"rollout.engine.processed: {self.spec.processed} was declared, but at temperature {TOLD_APART:g} the "
                f"server's log-probabilities are {raw:.3f} nats a token from those of the policy itself and "
                f"{tempered:.3f} from those of the distribution sampled (vLLM: --logprobs-mode)"
            )
        self._processed, self._found_out = found, True


class Gate:
    """Many may be inside at once, or one alone."""

    def __init__(self) -> None:
        self._changed, self._inside, self._taken = threading.Condition(), 0, False

    @contextmanager
    def among(self) -> Iterator[None]:
        """Inside with others, once nobody is there alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside alone, once all others have left; nobody enters meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken)
            self._taken = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
