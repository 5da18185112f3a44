"""Our own rollout engine: fixed slots, refilled as rows end, over prompts that are stored once.

Three compiled programs do the work (``jaxrl.sampling.programs``); the loop on the host only says which row takes
which sample. While samples wait for a row it reads a chunk before it dispatches the next, because a row that stays free
for a chunk costs more than the device's wait; then chunks run ahead of what is read. Nothing that the host decides
changes what a row draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl import keys
from jaxrl.errors import JaxrlError
from jaxrl.mesh import to_host
from jaxrl.models.decoder import Decoder
from jaxrl.sampling import programs
from jaxrl.sampling.requests import Request, Sample, Sampling, check_requests
from jaxrl.sampling.schedule import Opened, Pool, Prompts, Reserve, Shapes, by_prompt, shapes
from jaxrl.sampling.slots import Weights, empty_slots, empty_store, logits_dtype
from jaxrl.types import STOP_EOS, STOP_LENGTH

NEVER = 2**30  # rows: no chunk ends early for as many


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """How the engine is laid out. Only speed and memory depend on it.

    - ``slots``: rows that decode at once; ``chunk``: steps between two looks at the host; ``admit``: rows whose end cuts
      a chunk short while samples wait; ``ahead``: chunks in flight before one is read, once no sample waits for a row.
    - ``share``: attend to a prompt's stored keys from all its samples (None: where a prompt has several).
    - ``pools``: capacities by halving, so that short rows do not pay for the longest (attention reads a row's whole
      capacity); a row that outgrows one is copied to the next. ``compact``: halve the number of rows when half of
      them is free and nothing waits.
    - ``fixed``: one width, one capacity, no compaction: streams of as many prompts, as many samples and as long a
      longest prompt and response run the same programs, so that a row's numbers are bitwise the same whatever its
      neighbours. Otherwise they agree to rounding.
    """

    slots: int = 128
    chunk: int = 8
    admit: int = 8
    ahead: int = 1
    share: bool | None = None
    pools: int = 1
    compact: bool = True
    fixed: bool = False

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("chunk", 1), ("admit", 1), ("ahead", 0), ("pools", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"rollout.engine.{name}: expected at least {least}, got {getattr(self, name)}")

        if self.fixed and self.pools > 1:
            raise ValueError("rollout.engine.fixed: a fixed layout has one pool; leave out pools, or fixed")

    def build(self, mesh: Mesh | None = None) -> SlotEngine:
        """The engine."""
        return SlotEngine(self, mesh)


class SlotEngine:
    """``jaxrl.sampling.requests.Engine`` in this process."""

    caps = frozenset({"logprobs", "processed_logprobs", "per_request_seed", "shared_prefix", "in_process", "sleep"})

    def __init__(self, spec: SlotSpec | None = None, mesh: Mesh | None = None) -> None:
        self.spec, self.mesh = spec or SlotSpec(), mesh
        self._model: Decoder | None = None
        self._weights: Weights | None = None
        self.reserved = Reserve()
        self.version = -1

    def load(self, params: Decoder, version: int) -> None:
        """Take a policy over. Layers are copied in the compute dtype; embedding and head stay the caller's arrays."""
        self._model, self.version = params, version
        self._weights = programs.weights_of(params, self.mesh)

    def reserve(self, *, prompts: int = 0, width: int = 0, max_new: int = 0) -> None:
        """Lay every stream out for this many prompts and tokens, so that one with less compiles nothing new."""
        self.reserved = Reserve(prompts, width, max_new)

    def sleep(self) -> None:
        """Drop the copy of the layers; caches live no longer than a stream."""
        self._weights = None

    def wake(self) -> None:
        """Copy the layers again, from the arrays last loaded (unless an update has consumed them)."""
        if self._model is not None and not any(x.is_deleted() for x in jax.tree.leaves(self._model)):
            self._weights = programs.weights_of(self._model, self.mesh)

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples as they finish. Parameters must not be donated to an update before the stream has ended.

        Raises ``ValueError`` for requests that cannot be sampled and ``RuntimeError`` without parameters.
        """
        if self._weights is None:
            raise RuntimeError(
                "the engine holds no parameters (none were loaded, it sleeps, or an update consumed them): call load"
            )
        requests, config = list(requests), self._weights.model.config
        check_requests(requests, sampling.stop_ids, vocab_size=config.vocab_size, room=config.max_positions)
        if "fry" not in str(sampling.key.dtype):
            raise ValueError(f"key: expected a threefry key, as keys.root(seed) makes it, got {sampling.key.dtype}")
        return _Stream(self, self._weights, requests, sampling).run() if requests else iter(())


@dataclass
class _Record:
    """A dispatched program whose draws were not read yet: who sat in each row when it was dispatched."""

    drawn: programs.Drawn
    who: list[Opened | None]


class _Stream:
    """One call of ``stream``: the arrays on the device and who sits where."""

    def __init__(self, engine: SlotEngine, weights: Weights, requests: list[Request], sampling: Sampling) -> None:
        self.spec, self.mesh = engine.spec, engine.mesh
        self.weights, self.version = weights, engine.version
        self.config, self.strategy = weights.model.config, sampling.strategy
        asked = by_prompt(requests)
        self.shapes: Shapes = shapes(asked, self.spec, engine.reserved)
        self.key = keys.at(sampling.key, "rollout", np.int32(sampling.step))
        self.stop_set = frozenset(sampling.stop_ids)
        self.stops = np.asarray(sorted(self.stop_set), np.int32)
        dtype = logits_dtype(weights.model)
        self.store = empty_store(self.config, self.shapes.prompts, self.shapes.width, dtype, self.mesh)
        self.prompts = Prompts(asked, self.shapes)
        self.pools = [Pool(capacity) for capacity in self.shapes.capacities]
        self.pending: deque[list[_Record]] = deque()

    def run(self) -> Iterator[Sample]:
        """Dispatch a chunk, then read the one before."""
        while self.prompts.waiting or any(pool.busy for pool in self.pools):
            records = self.admit() + self.decode()
            for record in records:
                jax.tree.map(_start_copy, record.drawn)
            self.pending.append(records)
            # a row that stays free for a chunk costs more than the device's wait for the host
            ahead = self.spec.ahead if records and not self.prompts.waiting else 0
            while len(self.pending) > ahead:
                yield from self.read(self.pending.popleft())
        while self.pending:
            yield from self.read(self.pending.popleft())

    # ---- starting rows

    def admit(self) -> list[_Record]:
        """Fill free rows of the first pool; prompts are prefilled as rows become free for them."""
        room = self.shapes.slots - sum(pool.busy for pool in self.pools)
        self.resize(0, min(room, self.prompts.samples_left))
        pool, records = self.pools[0], []
        free = deque(pool.free()[:room])
        while free:
            chosen = self.prompts.take(len(free))
            if not chosen:
                if not self.prefill(len(free)):
                    break
                continue
            records.append(self._admit(pool, chosen, [free.popleft() for _ in chosen]))
        return records

    def _admit(self, pool: Pool, chosen: list[Opened], rows: list[int]) -> _Record:
        m, idle = self.shapes.admit_rows(len(chosen)), pool.size
        who: list[Opened | None] = [*chosen, *[None] * (m - len(chosen))]
        columns = [
            [row for row, _ in zip(rows, chosen, strict=True)],
            [o.place for o in chosen],
            [o.uid for o in chosen],
            [o.index for o in chosen],
            [o.limit for o in chosen],
        ]
        fill = (idle, 0, 0, 0, 1)
        new = programs.Admission(*(_column(c, m, f) for c, f in zip(columns, fill, strict=True)))
        pool.state, drawn = programs.admit(
            pool.state,
            self.store,
            new,
            self.strategy,
            self.key,
            self.stops,
            np.bool_(not self.shapes.share),
            mesh=self.mesh,
        )
        for opened, row in zip(chosen, rows, strict=True):
            pool.seat(opened, row)
        if not self.shapes.share:
            self.prompts.release(chosen)
        return _Record(drawn, who)

    def prefill(self, wanted: int) -> bool:
        """Store the next prompts, enough for ``wanted`` samples if they fit; False when none can be stored now."""
        batch = self.prompts.store(wanted)
        if not batch:
            return False
        size = self.shapes.prefill_rows(len(batch))
        tokens = np.zeros((size, self.shapes.prompt_width(batch)), np.int32)
        length, place = np.ones(size, np.int32), np.full(size, self.shapes.prompts, np.int32)
        for i, prompt in enumerate(batch):
            ids = prompt.asked.prompt
            tokens[i, : len(ids)], length[i], place[i] = ids, len(ids), prompt.place
        self.store = programs.prefill(self.weights, self.store, tokens, length, place, mesh=self.mesh)
        return True

    # ---- decoding

    def decode(self) -> list[_Record]:
        """One chunk of every pool that holds rows."""
        self.promote()
        records = []
        waiting = self.prompts.waiting
        for i in range(len(self.pools)):
            if waiting == 0 or i > 0:
                self.resize(i, 0)
            pool = self.pools[i]
            if not pool.busy:
                continue
            store, sharing = None, None
            if self.shapes.share:
                store, sharing = self.store, programs.Sharing(*pool.sharing(self.shapes))
            wanted = np.int32(self.spec.admit if waiting else NEVER)
            given = (store, sharing, self.strategy, self.stops, wanted)
            pool.state, drawn = programs.decode(
                self.weights, pool.state, *given, steps=self.shapes.chunk, mesh=self.mesh
            )
            records.append(_Record(drawn, list(pool.who)))
        return records

    def promote(self) -> None:
        """Copy rows that may run out of room before the next look to the next pool, as far as it has rows."""
        margin = (1 + (0 if self.prompts.waiting else self.spec.ahead)) * self.shapes.chunk
        for i in range(len(self.pools) - 1):
            pool = self.pools[i]
            outgrown = [o for o in pool.who if o is not None and o.outgrows(pool.capacity, margin)]
            if outgrown:
                self.resize(i + 1, len(outgrown))
                above = self.pools[i + 1]
                self.move(pool, above, list(zip(outgrown, above.free(), strict=False)))

    def resize(self, index: int, more: int) -> None:
        """Give a pool as many rows as it needs for ``more`` rows beside its own: a halving of all slots."""
        pool = self.pools[index]
        size = self.shapes.rows_for(pool.busy, more, pool.size, bool(self.prompts.waiting))
        if size == pool.size:
            return
        larger = Pool(pool.capacity)
        larger.open(size, empty_slots(self.config, size, pool.capacity, self.mesh))
        if pool.busy:
            self.move(pool, larger, list(zip([o for o in pool.who if o is not None], range(size), strict=False)))
        self.pools[index] = larger

    def move(self, source: Pool, to: Pool, pairs: list[tuple[Opened, int]]) -> None:
        """Copy rows, and who sits there, as many a call as the smaller side has."""
        at_once = min(source.size, to.size)
        for i in range(0, len(pairs), at_once):
            part = pairs[i : i + at_once]
            row = _column([o.row for o, _ in part], at_once, 0)
            into = _column([r for _, r in part], at_once, to.size)
            to.state, source.state = programs.move(to.state, source.state, into, row, mesh=self.mesh)
            for opened, r in part:
                source.leave(opened)
                to.seat(opened, r)

    # ---- reading

    def read(self, records: list[_Record]) -> Iterator[Sample]:
        """Take in what was drawn; rows that ended are free again."""
        for record in records:
            token, logp, count, live = to_host(record.drawn)
            for i, opened in enumerate(record.who):
                if opened is None or opened.ended:
                    continue
                self.check(opened, logp[i, : count[i]])
                opened.add(token[i, : count[i]], logp[i, : count[i]])
                if live[i]:
                    continue
                opened.ended = True
                opened.pool.leave(opened)
                self.prompts.finish(opened, self.shapes.share)
                yield self.sample(opened)

    def check(self, o: Opened, logps: np.ndarray) -> None:
        """A token that was drawn has a finite log-probability, unless the parameters are not finite themselves."""
        if not np.isfinite(logps).all():
            at = o.count + int(np.flatnonzero(~np.isfinite(logps))[0])
            raise JaxrlError(
                f"sample {o.index} of prompt {o.uid}: the log-probability of response token {at} is not finite: the "
                f"parameters (version {self.version}) hold NaN or infinite values, or the temperature is too close to 0"
            )

    def sample(self, o: Opened) -> Sample:
        """A finished row as the caller gets it."""
        tokens, logps = np.concatenate(o.tokens), np.concatenate(o.logps)
        stop = STOP_EOS if int(tokens[-1]) in self.stop_set else STOP_LENGTH
        return Sample(o.uid, o.index, tokens, logps, stop, self.version)


def _column(values: list[int], size: int, fill: int) -> np.ndarray:
    """``values`` as i32[size], filled up."""
    return np.asarray([*values, *[fill] * (size - len(values))], np.int32)


def _start_copy(x: Any) -> None:
    if x.is_fully_addressable:
        x.copy_to_host_async()
