"""Progress of long work: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LINE_EVERY = 10.0  # seconds between plain lines


class Progress:
    """``with Progress(3000, "base") as bar: bar.advance(100, loss="1.2")``.

    On a terminal this is a tqdm bar. Under nohup, in a pipe or in CI it prints a whole line at most every
    ``LINE_EVERY`` seconds and one at the end, so that a log shows both that work goes on and how fast.
    ``done`` of the ``total`` were done before.
    """

    def __init__(
        self,
        total: int,
        desc: str,
        *,
        unit: str = "step",
        stream: TextIO | None = None,
        quiet: bool = False,
        done: int = 0,
    ) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.stream = sys.stderr if stream is None else stream
        self.done = done
        self._started = self._last = time.monotonic()
        self._note = ""
        self._bar = None
        self.quiet = quiet
        if self.stream.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=desc, unit=unit, file=self.stream, leave=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def advance(self, n: int = 1, **shown: object) -> None:
        """Count ``n`` units as done; ``shown`` appears behind the counter."""
        self.done += n
        self._note = " ".join(f"{k}={v}" for k, v in shown.items())
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last >= LINE_EVERY:
            self._line()

    def close(self) -> None:
        """End the bar, or print the last line."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        if self.quiet:
            return
        seconds = self._last - self._started
        line = f"{self.desc}: {self.done}/{self.total} {self.unit}s in {seconds:.0f} s {self._note}"
        print(line.rstrip(), file=self.stream, flush=True)
