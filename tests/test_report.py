"""The report: read back from run folders whatever is there, and drawn."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl.errors import JaxrlError
from jaxrl.report import figures, prompts, read_run, render, style, tables
from jaxrl.report.curves import FURTHER, moving_mean, over_steps, passk_rows, recorded
from jaxrl.report.drift import drift_curve, drift_points
from jaxrl.report.sections import check_pictures

STEPS, PROBES, PROMPTS = 90, 24, 40
KS = (1, 4, 16, 64, 256)
SPLITS = ("train", "heldout", "ood")


def make_run(path: Path, *, seed: int = 0, lr: float = 2e-3, gain: float = 1.0, arrays: bool = True) -> Path:
    """A run folder as ``train`` leaves it, with made-up numbers of a plausible shape."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    config = {"seed": seed, "model": {"base": "msa0", "dtype": "float32"}, "algorithm": {"name": path.name, "epochs": 1},
              "rollout": {"prompts": 16, "n": 8}, "optimiser": {"type": "adamw", "lr": lr}, "steps": STEPS}  # fmt: skip
    environment = {"versions": {"jax": "0.10.2", "flax": "0.12.8"}, "git": "0123abc", "devices": ["cpu:0"],
                   "command": ["jaxrl", "train", "configs/msa0.yaml"]}  # fmt: skip
    (path / "config.json").write_text(json.dumps({"experiment": config, **environment}))
    logps = _logps(rng, gain)
    lines = [line for t in range(STEPS) for line in _step_lines(t, rng, logps, gain)]
    lines += [_eval_line(t, gain) for t in (0, STEPS // 2, STEPS - 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    uid = np.repeat(np.arange(PROBES // 4), 4)
    tokens = np.zeros((PROBES, 10), np.int32)
    np.savez(path / "probe.npz", tokens=tokens, start=np.full(PROBES, 5), length=np.full(PROBES, 9), uid=uid,
             correct=np.arange(PROBES) % 3 > 0)  # fmt: skip
    (path / "eval").mkdir()
    (path / "eval" / "exact.json").write_text(json.dumps(_exact(rng, gain)))
    if arrays:
        write_zarr(path, "probe_logp_sum", logps)
        for step in (0, 40, 80):
            delta = logps[step + 1] - logps[step]
            write_zarr(path, f"predicted/{step}", delta * (1 + 0.1 * rng.normal(size=PROBES)))
            write_zarr(path, f"kernel/{step}", rng.normal(size=(PROBES, PROBES)))
    return path


def make_check(path: Path, *, n: int = 16, m: int = 12) -> Path:
    """A folder as ``jaxrl check`` leaves it: a quadratic and cubic world with heavy-tailed kernels."""
    rng = np.random.default_rng(3)
    path.mkdir(parents=True)
    eta = np.logspace(-7, -2, 6)
    bound_c = 7 / np.sqrt(8)
    levels = np.array([0, 0.354, -0.354, 0.54, -0.54, 1.5, bound_c])
    advantage = levels[np.arange(n) % len(levels)]
    kernel = rng.standard_t(3, (n, m)) * np.exp(rng.normal(size=m))[None] * 30
    second, third = rng.normal(size=(n, m)) * 400, rng.normal(size=(n, m)) * 900
    grow = eta[:, None, None]
    first = grow * advantage[:, None] * kernel
    curved = grow**2 * advantage[:, None] ** 2 * second
    delta = first + curved + grow**3 * advantage[:, None] ** 3 * third + rng.normal(size=first.shape) * 1e-15
    np.savez(path / "pairs.npz", eta=eta, delta=delta, kernel=kernel, advantage=advantage, bound_c=bound_c,
             second_order=curved)  # fmt: skip
    predicted = (first / n).sum(1)
    predicted_second = predicted + (curved / n).sum(1)
    np.savez(path / "batch.npz", eta=eta, measured=(delta / n).sum(1), predicted=predicted, advantage=advantage,
             predicted_second=predicted_second, kernel=kernel, weight_advantage=advantage / n,
             probe_norm=np.abs(kernel).mean(0) ** 0.5)  # fmt: skip
    check = {"slope_single": 2.001, "slope_batch": 1.998, "slope_second_order": 3.01, "sign_agreement": 1.0,
             "violations_single": 0.035, "violations_batch": 0.0, "adam_residual": 3e-13,
             "tightness_quantiles": [0.143, 0.143, 0.218, 0.293, 0.999],
             "tables": {"T-C1": [{"quantity": "vmap(grad) against jvp", "value": 3.1e-14, "limit": 1e-8}],
                        "T-C2": [{"case": "single", "n": 4096, "violations": 0.035, "tightness 50": 0.218},
                                 {"case": "batch", "n": 64, "violations": 0.0, "tightness 50": 0.11}]}}  # fmt: skip
    (path / "check.json").write_text(json.dumps(check))
    (path / "T-C3.csv").write_text("part,share\ncurrent,0.31\nmomentum,0.68\n")
    return path


def write_zarr(path: Path, name: str, values: np.ndarray) -> None:
    import tensorstore

    store = {"driver": "file", "path": str(path / "arrays.zarr" / name)}
    array = tensorstore.open({"driver": "zarr", "kvstore": store}, create=True, dtype=values.dtype,
                             shape=values.shape).result()  # fmt: skip
    array.write(values).result()


def _logps(rng: np.random.Generator, gain: float) -> np.ndarray:
    start = -2 - rng.gamma(2.0, 1.0, PROBES)
    moves = rng.normal(-0.004 * gain, 0.05, (STEPS, PROBES))
    return np.concatenate([start[None], start + np.cumsum(moves, 0)])


def _step_lines(t: int, rng: np.random.Generator, logps: np.ndarray, gain: float) -> list[dict]:
    rise = 1 - np.exp(-t / 25 * gain)
    delta, total = logps[t + 1] - logps[t], logps[t + 1] - logps[0]
    correct = np.arange(PROBES) % 3 > 0
    noise = rng.normal() * 0.03
    train = {"step": t, "time": 1.0 * t, "kind": "train", "reward/mean": 0.4 + 0.5 * rise + noise,
             "reward/correct": min(0.4 + 0.5 * rise + noise, 1), "rollout/kept": 0.6 * (1 - rise) + 0.08,
             "entropy/token": 0.5 - 0.4 * rise + noise / 4, "kl/base_k3_tok": 0.3 * rise, "rollout/length": 4 + noise,
             "rollout/truncated": 0.0, "optim/grad_norm": 0.6 + abs(noise), "rollout/greedy_accuracy": 0.5 + 0.4 * rise,
             "clip/before_token": 0.0, "clip/after_token": 0.1 + noise, "clip/after_active": 0.03 + noise / 3,
             "clip/after_sequence": 0.14 + noise}  # fmt: skip
    probe = {"step": t, "time": 1.0 * t, "kind": "probe", "kl/forward_base": -total.mean(), "probe/ppl": None}
    kinds = {"all": correct | True, "interference": correct, "interference_macro": correct, "incorrect": ~correct}
    for suffix, scale in (("sum", 1.0), ("tok", 0.25)):
        for name, chosen in kinds.items():
            for stem, values in ((name, delta), (f"cumulative_{name}", total)):
                probe[f"probe/{stem}_{suffix}"] = scale * values[chosen].mean()
                probe[f"probe/{stem}_{suffix}/se"] = scale * values[chosen].std() / chosen.sum() ** 0.5
        probe[f"probe/cumulative_selectivity_{suffix}"] = scale * (total[correct].mean() - total[~correct].mean())
        probe[f"probe/strength_{suffix}"] = scale**2 * (delta**2).mean()
    for scope in ("in_batch", "train", "heldout", "ood"):
        probe[f"probe/{scope}/interference_sum"] = delta[correct].mean() + rng.normal() * 0.01
    probe |= {"probe/strength_per_update_sum": 40 + 10 * rise + noise, "clip/probe_token": 0.1 + noise,
              "clip/probe_sequence": 0.2 + noise, "clip/probe_cumulative_token": 0.7 * rise,
              "clip/probe_cumulative_sequence": 0.9 * rise}  # fmt: skip
    if t % 10:
        return [train, probe]
    influence = {"step": t, "time": 1.0 * t, "kind": "influence", "influence/median_ratio": 1 + noise,
                 "influence/correlation": 0.98 + 0.01 * rise, "influence/sign_agreement": 0.95,
                 "influence/relative_error": 0.1 * (1 - 0.8 * rise), "influence/noise_floor": 2e-4,
                 "kernel/trace": 250 * np.exp(2 * rise), "kernel/offdiag_mass": 0.9 - 0.05 * rise,
                 "kernel/mean_cos": 0.02, "kernel/cross/mean_cos": 0.04, "kernel/same/mean_cos": -0.1, "kernel/mean_abs_cos": 0.1 + 0.01 * rise,
                 "kernel/participation": 20 - 2 * rise, "kernel/erank": 33 - rise}  # fmt: skip
    return [train, probe, influence]


def _eval_line(t: int, gain: float) -> dict:
    """Exact pass@k of prompts that grow easier, but some of them unsolvable outside the training families."""
    line = {"step": t, "time": 1.0 * t, "kind": "eval"}
    rise = min(t / STEPS * gain, 1)
    quantiles = (np.arange(60) + 0.5) / 60
    for i, split in enumerate(SPLITS):
        base = 0.95 * quantiles ** (1.5 + 0.5 * i) + 0.004
        p = np.where(quantiles < 0.15 * i * rise, base * (1 - rise) ** 4, base + (0.97 - base) * rise * (0.9 - 0.3 * i))
        for k in KS:
            solved = 1 - (1 - p) ** k
            value, reach = float(solved.mean()), 1.96 * float(solved.std()) / len(p) ** 0.5
            name = f"eval/{split}/exact/pass@{k}"
            line |= {name: value, f"{name}/low": max(value - reach, 0), f"{name}/high": min(value + reach, 1)}
        line[f"eval/{split}/exact/mode_share"] = 0.25 - 0.1 * rise
    return line


def _exact(rng: np.random.Generator, gain: float) -> dict:
    base = rng.beta(1.2, 2.0, PROMPTS)
    now = np.clip(base * np.exp(rng.normal(0.5 * gain, 0.6, PROMPTS)), 1e-4, 0.999)
    delta = np.log(now / base) - rng.gamma(1.5, 0.6 * gain, PROMPTS)
    split = [SPLITS[i % 3] for i in range(PROMPTS)]
    delta_plus = [None, *delta.tolist()[1:]]
    return {"step": STEPS - 1, "uid": list(range(PROMPTS)), "split": split, "p_base": base.tolist(), "p_now": now.tolist(),
            "delta_plus": delta_plus}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_runs(folder) -> list[Path]:
    runs = [make_run(folder / "grpo", seed=0), make_run(folder / "self", seed=1, lr=1e-3, gain=0.5)]
    make_check(runs[0] / "check")
    return runs


@pytest.fixture(scope="module")
def page(two_runs, folder) -> Path:
    return render(two_runs, folder / "out" / "report.html", names=["GRPO", "SELF"])


def only_metrics(path: Path, *lines: str, end: str = "\n") -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("\n".join(lines) + end)
    return path


# Reading


def test_a_report_loads_no_jax():
    code = "import sys, jaxrl.report; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_series_is_ascending_and_a_step_written_twice_counts_once_with_its_later_value(tmp_path):
    run = read_run(
        only_metrics(tmp_path / "r", '{"step": 1, "a/b": 1}', '{"step": 0, "a/b": 2}', '{"step": 1, "a/b": 3}')
    )
    steps, values = run.series("a/b")
    assert steps.tolist() == [0, 1]
    assert values.tolist() == [2, 3]


def test_null_reads_as_nan_and_text_is_no_metric(tmp_path):
    run = read_run(only_metrics(tmp_path / "r", '{"step": 0, "kind": "probe", "x": null, "y": 1}'))
    assert np.isnan(run.series("x")[1]).all()
    assert not run.has("x")
    assert "kind" not in run.metrics


def test_a_run_that_stopped_at_a_non_finite_metric_says_so(tmp_path):
    run = read_run(only_metrics(tmp_path / "r", '{"step": 7, "kind": "train", "not_finite": ["policy/loss"]}'))
    assert "The run stopped at step 7: policy/loss was not finite." in run.notes


def test_an_unknown_metric_is_answered_with_the_nearest_name(tmp_path):
    run = read_run(only_metrics(tmp_path / "r", '{"step": 0, "reward/mean": 1}'))
    with pytest.raises(KeyError, match=r"no metric 'reward/meen'; did you mean 'reward/mean'"):
        run.series("reward/meen")


def test_the_unfinished_last_line_of_a_killed_run_is_left_out_and_noted(tmp_path):
    run = read_run(only_metrics(tmp_path / "r", '{"step": 0, "x": 1}', '{"step": 1, "x', end=""))
    assert run.series("x")[0].tolist() == [0]
    assert any("line 2" in note and "cut off" in note for note in run.notes)


@pytest.mark.parametrize("line", ['{"step": 1, "x', "[1]", "5", '{"x": 1}', '{"step": "one"}', '{"step": 1e400}'])
def test_a_malformed_line_elsewhere_is_an_error_with_its_number(tmp_path, line):
    folder = only_metrics(tmp_path / "r", '{"step": 0, "x": 1}', line, '{"step": 2, "x": 1}')
    with pytest.raises(JaxrlError, match=r"metrics\.jsonl:2: expected one JSON object"):
        read_run(folder)


def test_a_finished_but_malformed_last_line_is_an_error(tmp_path):
    with pytest.raises(JaxrlError, match=r"metrics\.jsonl:2"):
        read_run(only_metrics(tmp_path / "r", '{"step": 0}', '{"step": 1, "x'))


def test_a_folder_that_is_no_run_is_named(tmp_path):
    make_run(tmp_path / "grpo", arrays=False)
    with pytest.raises(JaxrlError, match=r"gropo does not exist; did you mean 'grpo'"):
        read_run(tmp_path / "gropo")
    with pytest.raises(JaxrlError, match=r"neither config\.json nor metrics\.jsonl"):
        read_run(tmp_path)


def test_malformed_json_and_npz_are_named(tmp_path):
    run = make_run(tmp_path / "r", arrays=False)
    (run / "config.json").write_text('{"a": 1,\n')
    with pytest.raises(JaxrlError, match=r"config\.json:2: malformed JSON"):
        read_run(run)
    (run / "config.json").write_text("{}")
    (run / "probe.npz").write_bytes(b"no archive")
    with pytest.raises(JaxrlError, match=r"probe\.npz: expected an \.npz file"):
        read_run(run)


@pytest.mark.parametrize("text", ["[]", "5", '{"experiment": null}'])
def test_a_config_that_is_no_runs_is_named(text, tmp_path):
    run = only_metrics(tmp_path / "r", '{"step": 0, "x": 1}')
    (run / "config.json").write_text(text)
    with pytest.raises(JaxrlError, match=r"config\.json: expected"):
        read_run(run)


def test_an_exact_evaluation_that_lacks_a_part_is_left_out_and_noted(tmp_path):
    run = make_run(tmp_path / "r", arrays=False)
    exact = json.loads((run / "eval" / "exact.json").read_text())
    del exact["delta_plus"]
    (run / "eval" / "exact.json").write_text(json.dumps(exact))
    found = read_run(run)
    assert found.exact == {}
    assert "eval/exact.json was left out: it has no delta_plus." in found.notes


def test_a_run_folder_reads_back(two_runs):
    run = read_run(two_runs[1])
    assert run.name == "self"
    assert run.config["optimiser"]["lr"] == 1e-3
    assert run.environment["versions"]["jax"] == "0.10.2"
    assert run.array("probe_logp_sum").shape == (STEPS + 1, PROBES)
    assert run.array("absent") is None
    assert run.array_steps("kernel") == [0, 40, 80]
    assert run.probe["uid"].shape == (PROBES,)
    assert run.eval_sets() == [(split, "exact") for split in SPLITS]
    assert run.eval_ks("ood", "exact") == list(KS)
    assert run.eval_steps("ood", "exact") == [0, STEPS // 2, STEPS - 1]


def test_a_band_prefers_the_recorded_interval_and_falls_back_to_the_standard_error(tmp_path):
    run = read_run(
        only_metrics(
            tmp_path / "r", '{"step": 0, "a": 1, "a/low": 0.5, "a/high": 2, "a/se": 9, "b": 1, "b/se": 0.5, "c": 1}'
        )
    )
    assert [float(part[0]) for part in run.band("a")] == [0, 0.5, 2]
    assert [float(part[0]) for part in run.band("b")] == pytest.approx([0, 0.02, 1.98])
    assert run.band("c") is None
    assert run.interval("b", 0) == pytest.approx((1, 0.02, 1.98))


# Numbers behind the pictures


def test_the_decomposition_is_the_identity_and_leaves_out_what_has_none():
    exact = {"p_base": [0.7, 0.5, 0.0, 0.5], "p_now": [0.93, 0.25, 0.5, 0.5], "delta_plus": [-0.122187, -0.7, -1.0, None],
             "split": ["train", "ood", "ood", "ood"], "uid": [3, 4, 5, 6]}  # fmt: skip
    part = prompts.decomposition(exact)
    assert part["uid"].tolist() == [3, 4]
    assert part["left_out"] == 2
    assert part["log_ratio"][0] == pytest.approx(0.284104, abs=1e-6)  # SCIENCE.md R2
    assert part["narrowing"][0] == pytest.approx(0.406291, abs=1e-6)
    np.testing.assert_allclose(part["log_ratio"] - part["narrowing"], part["delta_plus"])


def test_pair_bounds_are_the_advantage_share_of_the_kernel_to_first_order(two_runs):
    pairs = dict(np.load(two_runs[0] / "check" / "pairs.npz"))
    bound, kernel, share, eta = figures.pair_bounds(pairs)
    assert eta < 1e-5
    assert len(bound) == np.sum(pairs["advantage"] != 0) * pairs["kernel"].shape[1]
    np.testing.assert_allclose(bound, share * kernel, rtol=1e-2, atol=1e-6)


def test_batch_bounds_never_exceed_mean_or_largest_kernel_at_a_small_step(two_runs):
    pairs, batch = (dict(np.load(two_runs[0] / "check" / f"{name}.npz")) for name in ("pairs", "batch"))
    bound, mean, largest, _ = figures.batch_bounds(batch, float(pairs["bound_c"]))
    assert np.all(bound <= mean * (1 + 1e-3))
    assert np.all(mean <= largest)
    active = batch["advantage"] != 0
    np.testing.assert_allclose(mean, np.abs(batch["kernel"][active]).mean(0))  # equal weights


def test_the_most_linear_step_size_avoids_curvature_and_rounding():
    eta = np.logspace(-8, 0, 9)
    predicted = eta[:, None] * np.ones(3)
    measured = predicted + eta[:, None] ** 2 + 1e-12
    assert 1e-7 < eta[figures.most_linear(eta, measured, predicted)] < 1e-5


def test_a_moving_mean_keeps_constants_to_the_ends_and_skips_gaps():
    values = np.array([2.0, 2.0, np.nan, 2.0, 2.0])
    np.testing.assert_allclose(moving_mean(values, 3), 2.0)
    assert moving_mean(np.array([0.0, 3.0, 6.0]), 3).tolist() == [1.5, 3.0, 4.5]


def test_labels_are_spread_by_the_gap_and_moved_as_little_as_possible():
    np.testing.assert_allclose(style.spread(np.array([0.0, 0.5, 0.5, 1.0]), 0.1), [0, 0.45, 0.55, 1.0])
    assert np.all(np.diff(style.spread(np.zeros(5), 0.2)) == pytest.approx(0.2))


def test_the_base_is_one_curve_when_the_runs_share_it_and_one_each_otherwise(two_runs, tmp_path):
    runs = [read_run(path) for path in two_runs]
    assert [row[0] for row in passk_rows(runs, "ood", "exact")] == ["base", "grpo", "self"]
    other = read_run(only_metrics(tmp_path / "r", '{"step": 0, "eval/ood/exact/pass@1": 0.9}'))
    assert [row[0] for row in passk_rows([*runs, other], "ood", "exact")] == [
        "base of grpo",
        "base of r",
        "grpo",
        "self",
    ]


# The page


def test_the_page_holds_every_picture_and_reads_no_other_file(page):
    html = page.read_text()
    pictures = sorted((page.parent / "figures").glob("*.png"))
    assert len(pictures) == 17
    for picture in pictures:
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert base64.b64encode(picture.read_bytes()).decode() in html
    assert not re.search(r"<(?:img|link|script)[^>]+(?:src|href)=\"(?!data:)", html)
    assert len(re.findall("<figcaption>", html)) == 17 + len(list((page.parent / "tables").glob("*.csv")))
    targets = re.findall(r'<a href="#([^"]+)"', html)
    assert len(targets) == 11
    assert all(f'<section id="{target}">' in html for target in targets)


def test_nothing_is_reported_missing_of_a_whole_run(page):
    notes = re.findall(r'<p class="note">([^<]*)</p>', page.read_text())
    assert all("left out 1 of 40 prompts" in note for note in notes), notes


def test_files_appear_only_under_their_final_names(page):
    assert not list(page.parent.rglob("*.part"))


def test_the_headline_table_has_base_and_runs_for_every_split_with_intervals(page, two_runs):
    rows = [line.split(",") for line in (page.parent / "tables" / "headline.csv").read_text().splitlines()]
    assert rows[0][:7] == ["split", "sampler", "model", "step", "pass@1", "pass@1 low", "pass@1 high"]
    assert [row[2] for row in rows[1:]] == ["base", "GRPO", "SELF"] * 3
    run = read_run(two_runs[0])
    assert float(rows[2][4]) == run.at("eval/train/exact/pass@1", STEPS - 1)


def test_settings_that_differ_are_separated_from_those_in_common(page):
    folder = page.parent / "tables"
    differ = (folder / "settings-that-differ.csv").read_text()
    assert "optimiser.lr,0.002,0.001" in differ
    assert "rollout.n" not in differ
    assert "rollout.n,8" in (folder / "settings-in-common.csv").read_text()


def test_check_tables_come_from_json_or_csv(page):
    folder = page.parent / "tables"
    assert "vmap(grad) against jvp,3.1e-14,1e-08" in (folder / "T-C1.csv").read_text()
    assert "momentum,0.68" in (folder / "T-C3.csv").read_text()


def test_a_check_that_does_not_hold_says_no():
    table = tables.kernel_check({"slope_single": 1.8, "adam_residual": 1e-12, "violations_single": 0.03})
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("slope_single", "NO"),
        ("violations_single", "—"),
        ("adam_residual", "yes"),
    ]


def test_one_run_alone_makes_a_report(two_runs, tmp_path):
    html = render(two_runs[1:], tmp_path).read_text()
    assert "<title>Training report: self</title>" in html
    assert "No check/check.json was found" in html


def test_a_run_that_recorded_almost_nothing_still_makes_a_report_that_says_so(tmp_path):
    run = only_metrics(
        tmp_path / "bare", '{"step": 0, "kind": "train", "reward/mean": 0.5}', '{"step": 1, "rew', end=""
    )
    html = render([run], tmp_path / "report.html").read_text()
    for said in ("config.json is missing", "cut off", "No evaluation was recorded", "Not recorded: correct rollouts",
                 "no eval/exact*.json", "no scatter", "clip/before_token", "kernel/trace"):  # fmt: skip
        assert said in html


def test_a_missing_part_of_the_check_is_named_and_the_rest_drawn(two_runs, tmp_path):
    make_check(tmp_path / "check")
    (tmp_path / "check" / "batch.npz").unlink()
    pictures, notes = check_pictures(tmp_path / "check")
    assert [picture.name for picture in pictures] == ["check-remainders", "check-pair-bound"]
    assert notes == ["batch.npz is missing: no whole-batch figures (F-C1 right, F-C3)."]


def test_text_from_a_run_cannot_become_markup(tmp_path):
    run = only_metrics(tmp_path / "bare", '{"step": 0, "reward/mean": 0.5}')
    html = render([run], tmp_path, names=["<b>x</b>"]).read_text()
    assert "<b>x</b>" not in html
    assert "&lt;b&gt;x&lt;/b&gt;" in html


@pytest.mark.slow
def test_the_same_numbers_draw_the_same_bytes(two_runs):
    first, second = (check_pictures(two_runs[0] / "check")[0] for _ in range(2))
    assert [picture.png for picture in first] == [picture.png for picture in second]


def test_wrong_names_no_runs_and_an_unwritable_place_are_refused(two_runs, tmp_path):
    with pytest.raises(JaxrlError, match="1 names for 2 runs"):
        render(two_runs, tmp_path, names=["a"])
    with pytest.raises(JaxrlError, match="at least one run"):
        render([], tmp_path)
    (tmp_path / "file").write_text("")
    run = only_metrics(tmp_path / "bare", '{"step": 0, "reward/mean": 0.5}')
    with pytest.raises(JaxrlError, match=r"cannot write .*figures"):
        render([run], tmp_path / "file" / "report.html")


if __name__ == "__main__":  # draw the made-up report into a folder, to look at it
    out = Path(sys.argv[1])
    made = [make_run(out / name, seed=i, gain=gain) for i, (name, gain) in enumerate((("grpo", 1.0), ("self", 0.5)))]
    make_check(made[0] / "check")
    print(render(made, out / "report"))


# ---------------------------------------------------------------- accuracy against drift, and what few runs record


def test_accuracy_is_drawn_against_drift_from_the_base_on(two_runs):
    run = read_run(two_runs[0])
    drift, value = drift_points(run, "ood", "exact")
    steps = run.eval_steps("ood", "exact")
    assert len(drift) == len(steps) == len(value) > 2
    assert (drift[0], value[0]) == (0, run.at("eval/ood/exact/pass@1", 0))
    assert drift[1] == run.at("kl/forward_base", steps[1] - 1)
    assert drift_curve([run], [("ood", "exact")]).name == "drift"
    assert drift_curve([run], [("nowhere", "exact")]) is None


def test_what_few_runs_record_is_drawn_only_where_one_does(two_runs, tmp_path):
    assert recorded(FURTHER, [read_run(two_runs[0])]) == ()
    other = tmp_path / "pairs"
    shutil.copytree(two_runs[0], other)
    file = other / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    more = [line | ({"pair/chosen": -0.1, "pair/rejected": -0.4} if line["kind"] == "train" else {}) for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in more))
    (panel,) = recorded(FURTHER, [read_run(other)])
    assert [label for _, label in panel.metrics] == ["chosen", "rejected"]
    assert over_steps([read_run(other)], [panel], name="further", caption="pairs").name == "further"
