"""What this library's workers time for ``rollout``: our engine, and the same engine without what it is for.

python -m jaxrl.bench.own_rollout '{"world": FILE, "case": NAME, "memory": BYTES or null}'
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.bench.peers.batches import static_batches
from jaxrl.bench.peers.protocol import read_job, serve
from jaxrl.bench.workloads import root
from jaxrl.models.decoder import Decoder, hidden, logits, with_config
from jaxrl.models.hf import load_model
from jaxrl.sampling.engine import SlotSpec
from jaxrl.sampling.requests import Request, Sampling
from jaxrl.sampling.strategies import Temperature

OURS = "jaxrl"
COPIED = "jaxrl, prompt cache copied to each sample"
PREFILLS = "jaxrl, a prefill for each sample"
STATIC = "jaxrl, static batches"
World = Mapping[str, Any]


def spec(name: str, world: World) -> SlotSpec:
    """How the engine is laid out in a case."""
    slots = world["config"]["slots"]
    if name == COPIED:
        return SlotSpec(slots=slots, share=False)
    return SlotSpec(slots=slots, compact=name != STATIC)


def streams(name: str, world: World) -> list[list[Request]]:
    """The requests of a case, by the streams that run one after the other."""
    if name == STATIC:
        starts = itertools.accumulate((len(tokens) for tokens, _, _ in static_batches(world)), initial=0)
        batches = zip(starts, static_batches(world), strict=False)
        return [list(_requests(tokens, wanted, first)) for first, (tokens, _, wanted) in batches]
    return [list(_requests(world["tokens"], world["lengths"], 0, apart=name == PREFILLS))]


def _requests(tokens: np.ndarray, wanted: np.ndarray, first: int, apart: bool = False) -> Iterator[Request]:
    """One request a prompt, or one a sample where their lengths differ; ``apart``, samples are prompts of their own."""
    for i, (prompt, lengths) in enumerate(zip(tokens, wanted, strict=True), first):
        if not apart and len(set(lengths.tolist())) == 1:
            yield Request(i, prompt, len(lengths), int(lengths[0]))
            continue
        for g, length in enumerate(lengths.tolist()):
            yield Request(i * len(lengths) + g, prompt, 1, length) if apart else Request(i, prompt, 1, length, first=g)


def case(name: str, world: World, model: Decoder) -> Callable[[], int]:
    """A call that samples all requests once and returns the number of tokens. The last id stops, and is never drawn."""
    stop = model.config.vocab_size - 1
    engine = spec(name, world).build()
    engine.load(with_config(model, vocab_limit=stop), 0)
    rounds, requests = itertools.count(), streams(name, world)

    def call() -> int:
        sampling = Sampling(Temperature(), (stop,), root(), step=next(rounds))
        return sum(len(s.tokens) for stream in requests for s in engine.stream(stream, sampling))

    return call


def last_logits(model: Decoder, prompts: np.ndarray) -> np.ndarray:
    """Logits after each prompt, without the last id."""
    return np.asarray(jax.jit(lambda m, t: logits(m, hidden(m, t)[:, -1])[:, :-1])(model, prompts))


def versions() -> dict[str, str]:
    """The version of jax, and what it computes on."""
    return {"jax": importlib.metadata.version("jax"), "device": jax.devices()[0].device_kind}


def main() -> None:
    """Serve the case that the command line names."""
    world, name = read_job()
    if not world["config"]["accelerator"]:
        jax.config.update("jax_platforms", "cpu")  # CPU-seconds say nothing about an accelerator
    model = load_model(world["config"]["model"], dtype=world["config"]["dtype"])
    serve(case(name, world, model), versions(), check=lambda: last_logits(model, world["checked"]))


if __name__ == "__main__":
    main()
