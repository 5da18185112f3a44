"""Who sits where: the engine's book-keeping, on the host and without jax.

``Shapes`` are the sizes that programs are compiled for, ``Prompts`` the queue of requests and the stored prompts,
``Pool`` the rows of one capacity, ``Opened`` one sample on its way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from jaxrl.sampling.requests import Request

PREFILL_TOKENS = 4096  # tokens of one prefill call, padding included
SMALLEST = 16  # least width of a prompt bucket and least capacity of a pool, tokens
LEAST_ROWS = 8  # rows below which fewer save nothing
STORED = 4  # times as many samples' prompts are stored as there are rows: a prompt stays while one of its rows does
GROUP = 16  # rows of one prompt that decode at once, where there are prompts enough to fill the others


class Layout(Protocol):
    """What of an engine's settings the shapes depend on; see ``SlotSpec``."""

    slots: int
    chunk: int
    share: bool | None
    pools: int
    compact: bool
    fixed: bool


@dataclass(frozen=True)
class Shapes:
    """Sizes of one stream. ``prompts`` are stored at once, of ``width`` tokens, at most ``group`` rows of each decode
    at once; ``prefill`` prompts run in one call; ``capacities`` are tokens a row's own cache holds, by pool."""

    slots: int
    chunk: int
    share: bool
    prompts: int
    group: int
    width: int
    prefill: int
    capacities: tuple[int, ...]
    compact: bool
    fixed: bool

    def prompt_width(self, batch: Sequence[Stored]) -> int:
        """The bucket of the longest of some prompts."""
        return self.width if self.fixed else min(self.width, bucket(max(len(p.asked.prompt) for p in batch)))

    def prefill_rows(self, count: int) -> int:
        """Rows of a prefill call for ``count`` prompts."""
        return self.prefill if self.fixed else max(least_part(self.prefill, count, 4), min(self.prefill, LEAST_ROWS))

    def admit_rows(self, count: int) -> int:
        """Rows of an admission of ``count`` samples."""
        return self.slots if self.fixed else max(least_part(self.slots, count, 4), min(self.slots, LEAST_ROWS))

    def rows_for(self, busy: int, more: int, size: int, waiting: bool) -> int:
        """Rows that a pool should have: halvings of all slots; shrinks at a half, or while samples wait at a quarter."""
        if self.fixed:
            return self.slots
        need = busy + more
        if not need:
            return size
        least = max(least_part(self.slots, min(need, self.slots), 2), min(self.slots, LEAST_ROWS))
        shrinks = self.compact and least * (4 if waiting else 2) <= size
        return least if least > size or shrinks else size


def least_part(whole: int, count: int, by: int) -> int:
    """The least of ``whole``, ``whole / by``, ``whole / by^2`` ... (rounded up) that holds ``count``."""
    size = whole
    while size > 1 and -(-size // by) >= count:
        size = -(-size // by)
    return size


def bucket(length: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that holds ``length``: at most a third of it is padding."""
    size = SMALLEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


@dataclass(frozen=True, eq=False)
class Asked:
    """One prompt and all samples that were asked of it, as (index, most tokens)."""

    uid: int
    prompt: Int[np.ndarray, " S"]
    samples: list[tuple[int, int]]


def by_prompt(requests: Sequence[Request]) -> list[Asked]:
    """Requests for samples of one prompt joined, in the order in which prompts first come."""
    found: dict[tuple[int, bytes], Asked] = {}
    for r in requests:
        prompt = np.asarray(r.prompt, np.int32)
        asked = found.setdefault((r.uid, prompt.tobytes()), Asked(r.uid, prompt, []))
        asked.samples.extend((index, r.max_new) for index in range(r.first, r.first + r.n))
    return list(found.values())


@dataclass(frozen=True)
class Reserve:
    """Sizes that every stream of an engine is laid out for, so that one with fewer prompts compiles nothing new."""

    prompts: int = 0
    width: int = 0
    max_new: int = 0


def shapes(asked: Sequence[Asked], layout: Layout, reserve: Reserve) -> Shapes:
    """Sizes for what is asked, and for what is reserved: a function of the two alone."""
    most = max(len(a.samples) for a in asked)
    prompts = max(len(asked), reserve.prompts)
    total = max(sum(len(a.samples) for a in asked), most * reserve.prompts)
    slots = layout.slots if layout.fixed else min(layout.slots, 1 << (total - 1).bit_length())
    mean = sum(len(a.samples) for a in asked) / len(asked)
    share = mean >= 2 if layout.share is None else layout.share
    width = bucket(max(reserve.width, *(len(a.prompt) for a in asked)))
    # many prompts with few rows each rather than few with many: a prompt keeps its place until its last sample ends
    group = min(most, max(min(math.ceil(mean), GROUP), -(-slots // prompts))) if share else 1
    at_once = max(1, PREFILL_TOKENS // width)
    stored = min(1 << (prompts - 1).bit_length(), max(2, -(-STORED * slots // group)) if share else slots)
    prefill = min(stored, at_once)
    longest = max(reserve.max_new, *(limit for a in asked for _, limit in a.samples)) - 1 + (0 if share else width)
    capacities = [bucket(longest)]
    least = (0 if share else width) + SMALLEST + 4 * layout.chunk
    while not layout.fixed and len(capacities) < layout.pools and capacities[0] >= 2 * least:
        capacities.insert(0, -(-capacities[0] // 2))
    chunk = min(layout.chunk, max(longest, 1))
    return Shapes(
        slots, chunk, share, stored if share else prefill, group, width, prefill, tuple(capacities), layout.compact, layout.fixed
    )  # fmt: skip


@dataclass(eq=False)
class Stored:
    """A prompt in the store at ``place``; samples up to ``taken`` were started, ``live`` of them go on."""

    asked: Asked
    place: int
    taken: int = 0
    live: int = 0


@dataclass(eq=False)
class Opened:
    """A sample that has a row."""

    prompt: Stored
    index: int
    limit: int
    held: int
    count: int = 0
    ended: bool = False
    pool: Any = None
    row: int = -1
    tokens: list[np.ndarray] = field(default_factory=list)
    logps: list[np.ndarray] = field(default_factory=list)

    @property
    def uid(self) -> int:
        return self.prompt.asked.uid

    @property
    def place(self) -> int:
        return self.prompt.place

    def add(self, tokens: np.ndarray, logps: np.ndarray) -> None:
        """Take in what a chunk drew."""
        self.tokens.append(tokens)
        self.logps.append(logps)
        self.count += len(tokens)

    def outgrows(self, capacity: int, margin: int) -> bool:
        """Whether ``margin`` more tokens may not fit, and more than fit are wanted."""
        return self.held + self.limit - 1 > capacity and self.held + self.count + margin > capacity


class Prompts:
    """Prompts in their order, and those that have begun."""

    def __init__(self, asked: Sequence[Asked], shapes: Shapes) -> None:
        self.shapes = shapes
        self.queue = deque(asked)
        self.places = deque(range(shapes.prompts))
        self.open: list[Stored] = []  # stored prompts with samples left
        self.samples_left = sum(len(a.samples) for a in asked)

    @property
    def waiting(self) -> int:
        """Samples without a row."""
        return self.samples_left

    def store(self, wanted: int) -> list[Stored]:
        """The next prompts to be prefilled in one call, places taken: enough for ``wanted`` samples, if they fit.

        Rows that the call has anyway are filled with the prompts after those.
        """
        batch: list[Stored] = []
        most = self.shapes.prefill
        while self.queue and self.places and len(batch) < most:
            batch.append(Stored(self.queue.popleft(), self.places.popleft()))
            wanted -= min(len(batch[-1].asked.samples), self.shapes.group)
            if wanted <= 0:
                most = self.shapes.prefill_rows(len(batch))
        self.open += batch
        return batch

    def take(self, most: int) -> list[Opened]:
        """Samples that can start now, in the order of requests."""
        chosen: list[Opened] = []
        for prompt in self.open:
            asked = prompt.asked
            room = self.shapes.group - prompt.live if self.shapes.share else most
            for _ in range(max(0, min(room, most - len(chosen), len(asked.samples) - prompt.taken))):
                held = 0 if self.shapes.share else len(asked.prompt)
                chosen.append(Opened(prompt, *asked.samples[prompt.taken], held))
                prompt.taken += 1
                prompt.live += 1
        self.open = [p for p in self.open if p.taken < len(p.asked.samples)]
        self.samples_left -= len(chosen)
        return chosen

    def release(self, started: Sequence[Opened]) -> None:
        """Places of prompts that were copied to rows and have no sample left."""
        for prompt in dict.fromkeys(o.prompt for o in started):
            if prompt.taken == len(prompt.asked.samples):
                self.places.append(prompt.place)

    def finish(self, opened: Opened, share: bool) -> None:
        """A sample ended; where prompts are shared, the last one frees its prompt's place."""
        prompt = opened.prompt
        prompt.live -= 1
        if share and not prompt.live and prompt.taken == len(prompt.asked.samples):
            self.places.append(prompt.place)


class Pool:
    """Rows of one capacity. ``state`` are their ``Slots``, ``who`` sits in each (None: free)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state: Any = None
        self.who: list[Opened | None] = []
        self.busy = 0

    @property
    def size(self) -> int:
        return len(self.who)

    def open(self, size: int, state: Any) -> None:
        """Become ``size`` free rows."""
        self.who, self.state, self.busy = [None] * size, state, 0

    def free(self) -> list[int]:
        """Rows without a sample."""
        return [i for i, o in enumerate(self.who) if o is None]

    def seat(self, opened: Opened, row: int) -> None:
        """Give a row to a sample."""
        self.who[row], opened.pool, opened.row = opened, self, row
        self.busy += 1

    def leave(self, opened: Opened) -> None:
        """Free a sample's row."""
        self.who[opened.row] = None
        self.busy -= 1

    def sharing(self, shapes: Shapes) -> tuple[Int[np.ndarray, "P m"], Int[np.ndarray, " B"]]:
        """Rows by stored prompt (``size`` where there is none), and each row's place in that table."""
        member = np.full((shapes.prompts, shapes.group), self.size, np.int32)
        place = np.zeros(self.size, np.int32)
        used = np.zeros(shapes.prompts, np.int32)
        for row, opened in enumerate(self.who):
            if opened is not None:
                p = opened.place
                member[p, used[p]] = row
                place[row] = p * shapes.group + used[p]
                used[p] += 1
        return member, place
