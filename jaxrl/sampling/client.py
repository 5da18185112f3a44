"""JSON over HTTP with the standard library, and when to ask again."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxrl.errors import JaxrlError

T = TypeVar("T")

# A server or a proxy before it that cannot answer just now; another answer may come later.
BUSY = frozenset({408, 425, 429, 502, 503, 504})
EXCERPT = 300  # characters of an answer that go into a message


class Lost(Exception):
    """No answer came, and one may come later.

    ``broken``: the connection could not be made or broke, so that what answers next may be another server.
    ``status`` is that of an answer which said so, else 0.
    """

    def __init__(self, message: str, *, broken: bool = False, status: int = 0) -> None:
        super().__init__(message)
        self.broken, self.status = broken, status


class Refused(JaxrlError):
    """The server understood and said no; asking again would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long to wait between attempts: exponential, with jitter so that many waiting do not return at once.

    Attempt k (from 0) is followed by ``base * 2^k`` seconds, at most ``ceiling``, times a random number from 0.5 to
    1. After ``patience`` seconds since the first failure nothing is asked again.
    """

    base: float = 0.5
    ceiling: float = 30.0
    patience: float = 600.0

    def delay(self, attempt: int) -> float:
        """Seconds to wait after failed attempt ``attempt``."""
        return min(self.ceiling, self.base * 2.0 ** min(attempt, 60)) * random.uniform(0.5, 1)


def insist(ask: Callable[[], T], backoff: Backoff, pause: Callable[[float], Any] = time.sleep) -> T:
    """``ask()``, again while it raises ``Lost`` and patience lasts; then the last ``Lost`` is raised.

    ``pause(seconds)`` waits; where it returns true, nobody waits for the answer any more and ``Lost`` is raised.
    """
    began = None
    for attempt in itertools.count():
        try:
            return ask()
        except Lost:
            now, delay = time.monotonic(), backoff.delay(attempt)
            began = now if began is None else began
            if now + delay - began > backoff.patience or pause(delay):
                raise
    raise AssertionError  # the loop has no end


class Client:
    """Asks one server. Each question has its own connection; ``close`` breaks those that are open."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://host:port or https://host, got {url!r}")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._host, self._port, self._secure = parts.hostname, parts.port, parts.scheme == "https"
        self._root = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        self._lock, self._open, self._closed = threading.Lock(), set[http.client.HTTPConnection](), False

    def get(self, path: str, *, timeout: float | None = None) -> Any:
        """The JSON answer to GET. Raises as ``post``."""
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """The JSON answer to POST of ``body`` (None where the answer is empty).

        Raises ``Lost`` when the connection cannot be made, breaks or is silent for ``timeout`` seconds (None: the
        client's), and for the statuses of ``BUSY`` and 500; ``Refused`` for other statuses and for an answer that
        is not JSON.
        """
        return self._ask("POST", path, None if body is None else json.dumps(body).encode(), timeout)

    def close(self) -> None:
        """Break all open connections, from any thread; what was asked is lost, and nothing is asked after it."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                if connection.sock is not None:
                    try:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # it ended by itself

    def _ask(self, method: str, path: str, body: bytes | None, timeout: float | None) -> Any:
        seconds = self.timeout if timeout is None else timeout
        connection = self._connection(seconds)
        name = f"{method} {self.url}{path}"
        try:
            connection.connect()
            with self._lock:  # from here on `close` breaks it
                if self._closed:
                    raise Lost(f"{name}: given up")
                self._open.add(connection)
            connection.request(method, self._root + path, body, self._headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except TimeoutError as error:
            raise Lost(f"{name}: no answer within {seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise Refused(f"{name}: {error.verify_message}; is the certificate the server's own?", 0) from error
        except (OSError, http.client.HTTPException) as error:
            raise Lost(f"{name}: {type(error).__name__}: {error}", broken=True) from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        return _content(name, status, text)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout)


def _content(name: str, status: int, text: bytes) -> Any:
    shown = " ".join(text.decode(errors="replace").split())[:EXCERPT]
    if status in BUSY or status == 500:
        raise Lost(f"{name}: status {status}: {shown}", status=status)
    if not 200 <= status < 300:
        raise Refused(f"{name}: status {status}: {shown}", status)
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refused(f"{name}: expected JSON, got {shown!r}", status) from error
