"""The report: read back from run folders whatever is there, and drawn."""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl.errors import JaxrlError
from jaxrl.report import figures, prompts, read_run, render, style, tables
from jaxrl.report.curves import moving_mean, passk_rows
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
    (path / "config.json").write_text(json.dumps({"config": config, **environment}))
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
    levels = np.array([0, 0.354, -0.354, 0.54, -0.54, 1.5, 2.475])
    advantage = levels[np.arange(n) % len(levels)]
    kernel = rng.standard_t(3, (n, m)) * np.exp(rng.normal(size=m))[None] * 30
    second, third = rng.normal(size=(n, m)) * 400, rng.normal(size=(n, m)) * 900
    grow = eta[:, None, None]
    first = grow * advantage[:, None] * kernel
    curved = grow**2 * advantage[:, None] ** 2 * second
    delta = first + curved + grow**3 * advantage[:, None] ** 3 * third + rng.normal(size=first.shape) * 1e-15
    np.savez(path / "pairs.npz", eta=eta, delta=delta, kernel=kernel, advantage=advantage, bound_c=7 / np.sqrt(8),
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
             "entropy/token": 0.5 - 0.4 * rise + noise / 4, "kl/base_k3": 0.3 * rise, "rollout/length": 4 + noise,
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
                 "kernel/mean_cos": 0.02, "kernel/mean_abs_cos": 0.1 + 0.01 * rise,
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


if __name__ == "__main__":  # draw the made-up report into a folder, to look at it
    out = Path(sys.argv[1])
    made = [make_run(out / name, seed=i, gain=gain) for i, (name, gain) in enumerate((("grpo", 1.0), ("self", 0.5)))]
    make_check(made[0] / "check")
    print(render(made, out / "report"))
