"""TensorBoard and Weights & Biases read the metric lines; neither is needed."""

import json
import sys
import types

import pytest

from jaxrl.errors import JaxrlError
from jaxrl.report import mirror


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"experiment": {"seed": 3}}))
    lines = [
        {"step": 1, "time": 0.0, "kind": "train", "reward/mean": 0.5, "reward/mean/n": 8},
        {"step": 0, "time": 0.0, "kind": "train", "reward/mean": 0.25, "reward/mean/n": 8},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Recorder:
    """Stands in for both libraries' writers."""

    def __init__(self, *args, **kwargs):
        self.made, self.points = kwargs, []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def add_scalar(self, name, value, step):
        self.points.append((name, step, value))

    def log(self, line, step):
        self.points += [(name, step, value) for name, value in line.items()]


def test_every_metric_goes_to_tensorboard_in_step_order_without_counts(run, tmp_path, monkeypatch):
    made = []
    monkeypatch.setitem(
        sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=lambda *a: made.append(Recorder()) or made[-1])
    )
    assert mirror.to_tensorboard(run, tmp_path / "events") == 2
    assert made[0].points == [("reward/mean", 0, 0.25), ("reward/mean", 1, 0.5)]


def test_weights_and_biases_gets_the_config_and_one_line_a_step(run, monkeypatch):
    made = []
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **k: made.append(Recorder(**k)) or made[-1])
    )
    assert mirror.to_wandb(run, "paper") == 2
    assert made[0].made["project"] == "paper"
    assert made[0].made["config"] == {"seed": 3}
    assert made[0].points == [("reward/mean", 0, 0.25), ("reward/mean", 1, 0.5)]


@pytest.mark.parametrize(("call", "module"), [("to_tensorboard", "tensorboardX"), ("to_wandb", "wandb")])
def test_without_the_extra_the_message_names_it(run, call, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(JaxrlError, match=r"pip install 'jaxrl\[(tensorboard|wandb)\]'"):
        getattr(mirror, call)(run, "there")
