"""``kernel --time``: CPU-seconds of the kernel over those of a gradient pass over the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl.bench.own import PASS, case
from jaxrl.bench.peers.protocol import peak_rss_bytes
from jaxrl.bench.timing import against
from jaxrl.commands.compared import Compared
from jaxrl.influence.kernels import gradient_kernel

ROUNDS = 3


def timed(compared: Compared, options: Mapping[str, Any]) -> dict[str, Any]:
    """Each once to compile, then turn by turn; the medians of ``ROUNDS`` rounds, and peak memory (resident, GiB).

    The pass is the gradient of the summed scores of the N + M rows with rematerialised layers. The kernel is
    the whole call without its noise floor. Peaks are of this process so far: before the first pass, and after all.
    """
    model, (a, b) = compared.model, compared.sides
    wide = max(side.rows.tokens.shape[1] for side in (a, b))
    padded = tuple(replace(x.rows, tokens=_wider(x.rows.tokens, wide)) for x in (a, b))
    before = peak_rss_bytes()
    cases: dict[str, Callable[[], Any]] = {
        PASS: case(PASS, model, (padded[0], padded[1]))[0],
        "kernel": lambda: np.asarray(gradient_kernel(model, a.rows, b.rows, noise=0, **options).values),
    }
    for call in cases.values():
        call()
    rounds = [{name: _seconds(call) for name, call in cases.items()} for _ in range(ROUNDS)]
    taken = {name: np.array([one[name] for one in rounds]) for name in cases}
    return {
        "CPU-seconds": {
            row["case"]: {name: value for name, value in row.items() if name != "case"}
            for row in against(taken, PASS, "times the gradient pass")
        },
        "peak memory, GiB": {"without the pass": before / 2**30, "with it": peak_rss_bytes() / 2**30},
    }


def _wider(tokens: Int[Array, "N L"], width: int) -> Int[Array, "N W"]:
    return jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return max(time.process_time() - began, 1e-9)
