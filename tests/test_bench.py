"""The benchmarks run, compare what they say they compare, and print numbers. No timing is asserted."""

import json
import math

import numpy as np
import pytest

from jaxrl.bench import SUBJECTS, Sizes
from jaxrl.bench.__main__ import main
from jaxrl.bench.timing import against, interleaved

TINY = Sizes(
    hidden=16,
    layers=1,
    heads=2,
    vocab=16,
    width=6,
    kernel_rows=2,
    prompts=2,
    prompt_tokens=4,
    new_tokens=3,
    samples=2,
    step_rows=4,
    microbatch=2,
    target=0.0,
)
BASELINES = {"kernel": "gradient pass", "sampling": "n prefills, one sample each", "step": "whole batch"}


@pytest.fixture(scope="module")
def printed():
    """Output of one run, as JSON and as a table."""
    import contextlib
    import io

    outputs = []
    for flags in (["--json"], []):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["--repeats", "1", *flags], TINY) == 0
        outputs.append(out.getvalue())
    return outputs


def test_every_subject_gives_finite_positive_ratios(printed):
    result = json.loads(printed[0])
    assert set(SUBJECTS) == set(BASELINES) <= set(result)
    for name in SUBJECTS:
        assert len(result[name]) >= 2
        for row in result[name]:
            numbers = [v for k, v in row.items() if k not in ("case", "ratio")] + list(row["ratio"].values())
            assert all(math.isfinite(x) and x > 0 for x in numbers), row


def test_each_ratio_is_against_a_baseline_of_the_same_run(printed):
    result = json.loads(printed[0])
    for name, baseline in BASELINES.items():
        ratios = {row["case"]: row["ratio"]["value"] for row in result[name]}
        assert ratios.pop(baseline) == 1
        assert ratios


def test_the_kernel_is_timed_by_both_methods(printed):
    assert {row["case"] for row in json.loads(printed[0])["kernel"]} == {"gradient pass", "reference", "columns"}


def test_tables_name_every_case(printed):
    for row in (row for name in SUBJECTS for row in json.loads(printed[0])[name]):
        assert row["case"] in printed[1]


def test_cases_are_timed_turn_by_turn():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = interleaved(cases, repeats=3, target=0.0)
    assert order == list("aabb" + "ab" * 3)  # warm-up and calibration first
    assert all(taken.shape == (3,) and (taken > 0).all() for taken in seconds.values())


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    seconds = {"base": np.array([1.0, 10.0, 2.0]), "other": np.array([3.0, 20.0, 8.0])}
    base, other = against(seconds, "base", "ratio")
    assert base["ratio"] == {"value": 1, "low": 1, "high": 1}
    assert other["ratio"] == {"value": 3, "low": 2, "high": 4}
    assert (base["CPU-seconds"], other["CPU-seconds"]) == (2, 8)


@pytest.mark.parametrize("repeats", ["0", "-1", "x"])
def test_a_wrong_number_of_rounds_is_a_usage_error(repeats, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([f"--repeats={repeats}"], TINY)
    assert stopped.value.code == 2
    assert "at least 1" in capsys.readouterr().err
