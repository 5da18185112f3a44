"""The log-prob head by blocks of the vocabulary against whole logits and chunks of tokens: CPU-seconds and memory."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxrl.bench.cases import one_thread, own_cases
from jaxrl.bench.compare import Agreement, compare
from jaxrl.bench.own_head import CASES, WHOLE
from jaxrl.bench.report import Report
from jaxrl.bench.table import table

SAME = Agreement("another loss or gradient", "of the norm", 1e-4)
TARGET = 1.0


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """``tokens`` states of width ``hidden`` against a tied matrix of ``vocab`` entries, in float32."""

    tokens: int
    hidden: int
    vocab: int


HEAD_SIZES = {
    "full": HeadSize(tokens=1024, hidden=256, vocab=151936),
    "quick": HeadSize(tokens=128, hidden=16, vocab=4099),
}


def head(*, repeats: int, size: HeadSize) -> Report:
    """CPU-seconds and temporary memory of a clipped loss and its gradients by states and matrix, one thread each.

    Raises ``JaxrlError`` when whole logits cannot be timed; another case that fails, or that finds another loss or
    gradient, is left out and reported.
    """
    report = Report(sizes=[{"size": "head", "N": size.tokens, "d": size.hidden, "V": size.vocab}])
    title = f"head {size.tokens}x{size.hidden}x{size.vocab}"
    print(f"{title} ...", file=sys.stderr, flush=True)
    cases = one_thread(own_cases("jaxrl.bench.own_head", CASES))
    with tempfile.TemporaryDirectory(prefix="jaxrl-bench-") as folder:
        file = Path(folder) / "world.npz"
        np.savez(file, config=np.array(json.dumps(asdict(size))))
        found = compare(cases, file, (1, 3), repeats=repeats, agreement=SAME, target=TARGET)
    report.add(title, table(found, WHOLE, ""), found)
    return report
