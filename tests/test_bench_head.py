"""``jaxrl bench head`` computes one loss in several ways and measures each. No timing is asserted."""

import numpy as np
import pytest

from jaxrl.bench.head import HEAD_SIZES, HeadSize, head
from jaxrl.bench.own_head import CASES, WHOLE, arguments, case


def test_every_case_computes_the_same_loss_and_gradients():
    found = [case(name, arguments(128, 8, 1500))[0]()[0] for name in CASES]
    assert min(abs(x) for x in found[0]) > 1e-4
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5)


def test_old_log_probs_are_so_near_that_some_ratios_are_clipped_and_others_not():
    states, matrix, token, old, _ = (np.asarray(x, np.float64) for x in arguments(512, 64, 4000))
    logits = states @ matrix.T
    logps = logits[np.arange(512), token.astype(int)] - np.log(np.exp(logits).sum(axis=1))
    inside = np.abs(np.exp(logps - old) - 1) < 0.2
    assert 0.5 < inside.mean() < 0.99


def test_the_full_size_is_that_of_the_readme():
    assert HEAD_SIZES["full"] == HeadSize(tokens=1024, hidden=256, vocab=151936)


@pytest.mark.slow
def test_the_quick_size_runs_and_its_cases_agree():
    report = head(repeats=1, size=HEAD_SIZES["quick"])
    assert report.failed == []
    ((title, rows),) = report.tables.items()
    assert title == "head 128x16x4099"
    assert [row["case"] for row in rows] == list(CASES)
    assert rows[0]["case"] == WHOLE
    assert rows[2]["temp ratio"] < 1
    assert all(row["differs by"] < 1e-5 for row in rows[1:])
