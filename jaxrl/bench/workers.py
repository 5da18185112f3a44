"""Worker processes that time one case each, driven turn by turn (see ``peers/protocol.py``)."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxrl.errors import JaxrlError

PATIENCE = 3600.0  # seconds for one answer
LEEWAY = 0.1  # CPU-seconds that clocks of different grain may disagree by


class WorkerFailed(JaxrlError):
    """A worker that died, fell silent, or answered what cannot be."""


class Worker:
    """One case in its own process. ``first`` answers what it computed, ``seconds`` times more calls of it.

    A context: the process is ended on the way out. What it says beside its answers is kept in
    ``messages``, a file, whose end is quoted when it fails.
    """

    def __init__(
        self, name: str, command: Sequence[str], job: Mapping[str, Any], env: Mapping[str, str], messages: Path
    ) -> None:
        self.name, self.messages, self.patience = name, messages, PATIENCE
        self.peak_rss_bytes: int | None = None
        self.made: int | None = None  # by the last call
        self._rest = b""
        with messages.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=dict(env)
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def first(self, shape: tuple[int, int]) -> dict[str, Any]:
        """The answer after the first call; ``values`` as an array of ``shape``, or None. Raises ``WorkerFailed``."""
        answer = self._checked(self._answer(), ("values", "temp_bytes", "versions", "made"), 1, math.inf)
        self.made = answer["made"]
        if answer["values"] is not None:
            values = np.asarray(answer["values"], np.float64)
            if values.shape != shape or not np.isfinite(values).all():
                raise self._failure(f"expected finite numbers, {shape}, got shape {values.shape}: {values}")
            answer["values"] = values
        return answer

    def seconds(self, calls: int) -> float:
        """CPU-seconds of one call, over ``calls`` of them. Raises ``WorkerFailed``."""
        began = time.monotonic()
        try:
            os.write(self._asks.fileno(), f"{calls}\n".encode())  # past the buffer, which would fail again on closing
        except BrokenPipeError:
            raise self._failure("died between two timings") from None
        answer = self._answer()
        self._checked(answer, ("peak_rss_bytes", "made"), calls, time.monotonic() - began)
        self.peak_rss_bytes, self.made = int(answer["peak_rss_bytes"]), answer["made"]
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process; it has nothing to tidy up."""
        self._process.kill()
        self._process.wait()
        self._asks.close()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        """The next line, as JSON."""
        until = time.monotonic() + self.patience
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._failure(f"gave no answer in {self.patience:g} s")
            more = os.read(self._answers.fileno(), 1 << 16)
            if not more:
                raise self._failure(self._end())
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failure(f"expected a JSON object in one line, got {line[:80]!r}")
        return answer

    def _end(self) -> str:
        """How a worker ended that has closed its output."""
        try:
            return f"died with exit code {self._process.wait(timeout=10)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def _checked(self, answer: dict[str, Any], keys: Sequence[str], calls: int, wall: float) -> dict[str, Any]:
        missing = [key for key in ("seconds", *keys) if key not in answer]
        if missing:
            raise self._failure(f"its answer lacks {', '.join(missing)}")
        took, most = answer["seconds"], (wall * (os.cpu_count() or 1) + LEEWAY) / calls
        if not isinstance(took, float) or not 0 < took <= most:
            raise self._failure(f"says that a call took {took!r} seconds; more than 0 and at most {most:.4g} can be")
        return answer

    def _failure(self, what: str) -> WorkerFailed:
        said = self.messages.read_text(errors="replace").strip().splitlines()[-3:]
        return WorkerFailed("\n".join([f"{self.name}: {what}", *said]))
