"""Sampling by our engine and by other libraries: the same weights, prompts and response lengths, one thread each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jaxrl.bench.cases import one_thread, own_cases, peer_cases
from jaxrl.bench.compare import Agreement, compare
from jaxrl.bench.own_rollout import COPIED, OURS, PREFILLS, STATIC
from jaxrl.bench.report import Report, shape
from jaxrl.bench.roofline import rollout_seconds
from jaxrl.bench.table import speeds
from jaxrl.bench.workloads import Scale, write_given

CHECKED = 8  # prompts whose next-token logits are compared
OWN = {"plain": (OURS,), "shared": (OURS, COPIED, PREFILLS), "refill": (OURS, STATIC)}


def _largest(values: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(values - truth).max())


LOGITS = Agreement("another model", "in a logit", 1e-4, _largest)


def rollout(
    names: Sequence[str], *, peers: Sequence[str], repeats: int, scale: Scale, accelerator: bool = False
) -> Report:
    """CPU-seconds of the named workloads. A peer's environment is made when it is missing.

    With ``accelerator``, seconds by the wall on what jax finds, and the least time that device could take over them.
    Raises ``JaxrlError`` when that fails, or when our own engine cannot be timed; any other case that
    fails, or whose logits are others, is left out and reported.
    """
    model, report = scale.model.model(), Report()
    report.sizes.append(shape("Qwen2", model))
    others = peer_cases("rollout", peers)
    for name in names:
        work, title = scale.rollout[name], f"rollout {name}"
        tokens, lengths = work.tokens(scale.model.vocab), work.lengths()
        print(f"{title} ...", file=sys.stderr, flush=True)
        cases = [*own_cases("jaxrl.bench.own_rollout", OWN[name]), *others]
        arrays = {"tokens": tokens, "lengths": lengths, "checked": tokens[:CHECKED]}
        with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as folder:
            config = {"slots": work.slots, "dtype": scale.dtype, "accelerator": accelerator}
            file = write_given(Path(folder), model, arrays, **config)
            found = compare(
                cases if accelerator else one_thread(cases),
                file,
                (len(arrays["checked"]), scale.model.vocab - 1),
                repeats=repeats,
                agreement=LOGITS,
                made=int(lengths.sum()),
                target=scale.target,
                clock="wall" if accelerator else "cpu",
            )
        least = partial(rollout_seconds, model.config, work)
        report.add(title, speeds(found, int(lengths.sum()), OURS, least if accelerator else None), found)
    return report
