"""A completions server on loopback, of a policy whose next token depends on the last alone.

It serves the head of the folder that it was last told to load, samples as asked, and misbehaves as told:
``faults`` holds one function for each of the next questions, ``lie`` one for all.
"""

import contextlib
import itertools
import json
import pathlib
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from safetensors.numpy import load_file

NEVER_LOADED = "default"
Fault = Callable[[dict[str, Any]], Any]  # answer -> another answer, a status, or None: no answer at all


class StubServer:
    """``with StubServer() as server: server.url``. ``port`` 0 takes a free one; ``stop`` and ``start`` keep it."""

    def __init__(self, vocab: int, *, processed: bool = True) -> None:
        self.vocab, self.processed = vocab, processed
        self.port, self.room, self.obeys, self.labels = 0, 512, True, True
        self.questions: list[dict[str, Any]] = []  # that asked for samples
        self.calls: list[str] = []  # other paths
        self.authorised: set[str | None] = set()
        self.faults: deque[Fault] = deque()
        self.lie: Fault | None = None
        self._http: ThreadingHTTPServer | None = None

    def __enter__(self) -> "StubServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, folder: str | None = None) -> None:
        """Listen, with the weights of nobody or of a folder: as a server that was restarted."""
        self.scores, self.label = np.zeros((self.vocab, self.vocab)), NEVER_LOADED
        if folder is not None:
            self.load(folder)
        self.dead = threading.Event()
        handler = type("Handler", (_Handler,), {"stub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.005,), daemon=True).start()

    def stop(self) -> None:
        """Die: what is being answered is not."""
        self.dead.set()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def load(self, folder: str) -> None:
        head = load_file(pathlib.Path(folder) / "model.safetensors")["lm_head.weight"]
        self.scores = head[:, : self.vocab].T.astype(np.float64)

    def logps(self, temperature: float = 1.0) -> np.ndarray:
        scores = self.scores / temperature
        return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)

    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer, as vLLM 0.32 gives it."""
        rng, t = np.random.default_rng(body["seed"]), body["temperature"]
        drawn = self.logps(t or 1.0)
        told = drawn if self.processed else self.logps()
        prompt, ids, given, stop = body["prompt"], [], [], None
        if body.get("echo"):
            ids, given = list(prompt), [None, *(told[a, b] for a, b in itertools.pairwise(prompt))]
        for _ in range(body["max_tokens"]):
            last = (prompt + ids)[-1]
            p = np.exp(drawn[last])
            ids.append(int(np.argmax(p)) if t == 0 else int(rng.choice(self.vocab, p=p / p.sum())))
            given.append(float(told[last, ids[-1]]))
            if ids[-1] in body["stop_token_ids"]:
                stop = ids[-1]
                break
        return choice(ids, given, prompt=prompt, stop=stop)


def choice(ids, given, *, prompt, stop=None) -> dict[str, Any]:
    words = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": given}
    one = {
        "index": 0, "text": "?" * len(ids), "token_ids": ids, "prompt_token_ids": prompt, "logprobs": words,
        "finish_reason": "length" if stop is None else "stop", "stop_reason": stop,
    }  # fmt: skip
    return {"object": "text_completion", "choices": [one]}


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        stub, answer = self.stub, {}
        if self.path == "/v1/models":
            answer = {"data": [{"id": "policy", "max_model_len": stub.room}]}
        elif self.path == "/weight_info" and stub.labels:
            answer = {"weight_version": stub.label}
        else:
            return self._send(404, {})
        return self._send(200, answer)

    def do_POST(self) -> None:
        stub = self.stub
        stub.authorised.add(self.headers.get("Authorization"))
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else {}
        if self.path == "/v1/completions":
            return self._complete(body)
        stub.calls.append(self.path)
        if self.path == "/collective_rpc" and stub.obeys:
            stub.load(body["kwargs"]["weights_path"])
        elif self.path == "/update_weight_version" and stub.labels:
            stub.label = body["new_version"]
        elif self.path.startswith(("/sleep", "/wake_up", "/update_weight_version")):
            return self._send(404, {})
        return self._send(200, {})

    def _complete(self, body: dict[str, Any]) -> None:
        stub, answer = self.stub, self.stub.sample(body)
        if not body.get("echo"):
            stub.questions.append(body)
            fault = stub.faults.popleft() if stub.faults else stub.lie
            answer = answer if fault is None else fault(answer)
        if stub.dead.is_set() or answer is None:
            self.close_connection = True
        elif isinstance(answer, int):
            self._send(answer, {"error": "as told"})
        else:
            self._send(200, answer)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        with contextlib.suppress(OSError):  # nobody listens any more
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
