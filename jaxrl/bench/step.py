"""One GRPO step by our update and by other libraries: the same weights, rows and old log-probabilities, one thread each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.bench.cases import one_thread, own_cases, peer_cases
from jaxrl.bench.compare import Agreement, compare
from jaxrl.bench.own_step import MICRO, OURS, WHOLE
from jaxrl.bench.report import Report, shape
from jaxrl.bench.roofline import step_seconds
from jaxrl.bench.table import speeds
from jaxrl.bench.workloads import Scale, write_given

STEPS = 3  # whose losses are compared; all but the first depend on the steps before
SETTINGS = {"lr": 1e-4, "clip": 1.0, "epsilon": 0.2}


def _relative(values: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(values / truth - 1).max())


LOSSES = Agreement("another loss", "of itself", 1e-3, _relative)


def step(
    names: Sequence[str], *, peers: Sequence[str], repeats: int, scale: Scale, accelerator: bool = False
) -> Report:
    """CPU-seconds of one optimiser step on the named batches. A peer's environment is made when it is missing.

    Everybody takes the same steps: forward and backward over all rows, at once or in micro-batches, the clipped loss averaged over
    the tokens of a response and then over responses, gradients clipped by their norm, AdamW. With ``accelerator``, seconds by the wall on
    what jax finds, and the least time that device could take over them (the MFU). Raises ``JaxrlError``
    when an environment cannot be made, or when our own step cannot be timed; any other case that fails, or whose
    losses of the first ``STEPS`` steps are others, is left out and reported.
    """
    model, report = scale.model.model(), Report()
    report.sizes.append(shape("Qwen2", model))
    others = peer_cases("step", peers)
    for name in names:
        given, title = scale.step[name], f"step {name}"
        arrays = given.arrays(model, exact=not accelerator)
        tokens = int((arrays["length"] - arrays["start"]).sum())
        print(f"{title} ...", file=sys.stderr, flush=True)
        cases = [*own_cases("jaxrl.bench.own_step", (OURS, MICRO, WHOLE)), *others]
        config: dict[str, Any] = {
            **SETTINGS,
            "n": given.n,
            "pad": scale.model.vocab - 1,
            "checked": STEPS,
            "accelerator": accelerator,
        }
        config |= {"dtype": scale.dtype, "remat": scale.remat, "microbatch": scale.microbatch}
        config["peer_microbatch"] = scale.peer_microbatch
        with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as folder:
            file = write_given(Path(folder), model, arrays, **config)
            found = compare(
                cases if accelerator else one_thread(cases),
                file,
                (1, STEPS),
                repeats=repeats,
                agreement=LOSSES,
                made=tokens,
                target=scale.target,
                clock="wall" if accelerator else "cpu",
            )
        least = partial(step_seconds, model.config, arrays["length"])
        report.add(title, speeds(found, tokens, OURS, least if accelerator else None), found)
    return report
