"""Which weights a completions server serves: told to it, and found out from what it answers.

A server is given a folder and asked for the log-probabilities of a fixed probe, which must be ours within a tolerance,
in the median: single tokens of a bfloat16 model were seen 6 nats from float32, in vLLM and in transformers alike.
That tells one model from another, but not two steps of an optimiser whose difference is below the server's rounding;
therefore weights are labelled too where the server keeps a label (vLLM's ``/weight_info``, lost in a restart), and a
server whose answer did not move in a single bit although the weights did has not loaded them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl.errors import JaxrlError
from jaxrl.sampling.client import Client, Lost, Refused
from jaxrl.sampling.completions import PATH, probe_question, read_probe

Reload = Callable[[str, int], None]  # (folder as the server sees it, version)

ABSENT = frozenset({404, 405, 501})  # statuses of a server without such an endpoint
MOVED = 1e-3  # nats, mean change of the probe above which a server's rounding cannot hide it to the last bit
DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1, or set `reload_command` to a command that restarts the server"


class WrongVersion(JaxrlError):
    """The server does not serve the weights that it should."""


@dataclass(frozen=True, eq=False)
class Weights:
    """One exported version: ``folder`` as the server sees it, and our log-probabilities f64[n - 1] of the probe."""

    version: int
    folder: str
    label: str
    expected: Float[np.ndarray, " m"]


class Server:
    """The server's side of ``load``, ``sleep`` and ``wake``. ``tolerance`` is in nats a token, of a median."""

    def __init__(
        self,
        client: Client,
        model: str,
        probe: Sequence[int],
        tolerance: float,
        *,
        patience: float,
        reload: Reload | None = None,
    ) -> None:
        self.client, self.model, self.probe, self.tolerance = client, model, list(probe), tolerance
        self.patience = patience
        self.reload = reload or self._reload_rpc
        self._last: tuple[Weights, Float[np.ndarray, " m"]] | None = None  # what was verified, and the server's answer

    def room(self) -> int | None:
        """Tokens of context that the server has, where it says so. Raises ``Refused`` if it does not serve ``model``."""
        listed = self._optional(lambda: self.client.get("/v1/models")) or {}
        models = {entry.get("id"): entry for entry in listed.get("data", [])}
        if models and self.model not in models:
            raise Refused(f"{self.client.url} serves {', '.join(map(str, models))}, and no model {self.model!r}", 404)
        return models.get(self.model, {}).get("max_model_len")

    def tell(self, weights: Weights) -> None:
        """Have the server load ``weights``. Raises ``Refused`` where it will not, ``Lost`` where it does not answer."""
        self.reload(weights.folder, weights.version)

    def check(self, weights: Weights) -> None:
        """See that it loaded what it was told to, and label that. Raises ``WrongVersion`` with both numbers."""
        answer, before = self._probe(weights), self._last
        if before is not None and before[0].label != weights.label:
            moved = float(np.abs(weights.expected - before[0].expected).mean())
            if moved > MOVED and np.array_equal(answer, before[1]):
                raise WrongVersion(
                    f"{self.client.url}: version {weights.version} was loaded and our log-probabilities of the probe "
                    f"moved by {moved:.4f} nats a token, the server's by 0.0000: it still serves version "
                    f"{before[0].version}"
                )
        self._optional(lambda: self.client.post("/update_weight_version", {"new_version": weights.label}))
        self._last = (weights, answer)

    def verify(self, weights: Weights) -> None:
        """Raise ``WrongVersion`` unless the server still serves weights that were checked."""
        kept = self._optional(lambda: self.client.get("/weight_info"))
        if isinstance(kept, dict) and kept.get("weight_version") not in (None, weights.label):
            raise WrongVersion(
                f"{self.client.url}: serves weights {kept['weight_version']!r}, expected {weights.label!r}: it was "
                "restarted, or something else gives it weights"
            )
        self._probe(weights)

    def _probe(self, weights: Weights) -> Float[np.ndarray, " m"]:
        answer = read_probe(self.client.post(PATH, probe_question(self.model, self.probe)), self.probe)
        gap = float(np.median(np.abs(answer - weights.expected)))
        if not gap <= self.tolerance:
            raise WrongVersion(
                f"{self.client.url}: does not serve version {weights.version}: over the {len(answer)} tokens of the "
                f"probe its mean log-probability is {answer.mean():.4f} nats and ours {weights.expected.mean():.4f}; "
                f"single tokens are {gap:.4f} apart in the median (at most {self.tolerance:g}). Did it load "
                f"{weights.folder}, whole and in this precision?"
            )
        return answer

    def sleep(self) -> bool:
        """Have it give memory back; False where it has no such endpoint."""
        return self._optional(lambda: self.client.post("/sleep?level=1") or {}) is not None

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._optional(lambda: self.client.post("/wake_up"))

    def _reload_rpc(self, folder: str, version: int) -> None:
        """vLLM's way: no token is sampled meanwhile, and the prefixes cached under the older weights are dropped."""
        self._optional(lambda: self.client.post("/pause?mode=wait", timeout=self.patience))
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self.client.post("/collective_rpc", body, timeout=self.patience)
            self.client.post("/reset_prefix_cache")
        except Lost as error:
            if error.status != 500:
                raise
            raise Refused(
                f"version {version} was not loaded: {error}; does the server see the folder {folder} (`server_folder` "
                "says where)? vLLM stops where it cannot read one",
                500,
            ) from error
        except Refused as error:
            raise Refused(f"{error}; {DEV_MODE}", error.status) from error
        finally:
            self._resume()

    def _resume(self) -> None:
        try:
            self._optional(lambda: self.client.post("/resume"))
        except Lost:
            pass  # it is gone, and its pause with it; the question that follows will tell

    def _optional(self, ask: Callable[[], Any]) -> Any:
        """The answer, or None from a server without that endpoint."""
        try:
            return ask()
        except Refused as error:
            if error.status not in ABSENT:
                raise
            return None


def by_command(command: Sequence[str], timeout: float) -> Reload:
    """A ``Reload`` that runs a command, ``{folder}`` and ``{version}`` filled in.

    It must return once the old weights are no longer served, and may return before the new ones are.
    """

    def reload(folder: str, version: int) -> None:
        filled = [part.replace("{folder}", folder).replace("{version}", str(version)) for part in command]
        try:
            done = subprocess.run(filled, capture_output=True, text=True, timeout=timeout, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise JaxrlError(f"reload_command: {filled[0]}: {error}") from error
        if done.returncode:
            raise JaxrlError(f"reload_command: {filled[0]} failed with status {done.returncode}: {done.stderr[-300:]}")

    return reload
