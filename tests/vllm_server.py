"""A real vLLM on loopback, in the environment whose python ``JAXRL_VLLM`` names."""

import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

PATIENCE = 300  # seconds until it must listen
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_SERVER_DEV_MODE": "1",
}
OPTIONS = ("--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager")


class VllmServer:
    """Serves ``model`` under the name ``policy``; ``start`` and ``stop`` keep the port."""

    def __init__(self, python: str, model: pathlib.Path, log: pathlib.Path, *options: str) -> None:
        self.python, self.model, self.log, self.options = python, model, log, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, and do not wait for it."""
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--model", str(self.model), "--served-model-name", "policy"]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *OPTIONS, *self.options],
                stdout=log, stderr=log, env=env | QUIET, cwd=self.log.parent, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> float:
        """Seconds until it listens."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            assert self._process is not None
            assert self._process.poll() is None, f"vLLM ended: {self.log.read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return time.monotonic() - began
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"vLLM does not listen after {PATIENCE} s: {self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Kill it with the processes it started."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process = None
