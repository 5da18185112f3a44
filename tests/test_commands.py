"""The commands on a run and on a tiny model folder: what they write and what they return."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import yaml
from tiny_tokenizer import EOS, save_tiny
from train_world import GRPO, experiment, last_state, lines, use_devices

import jaxrl
from jaxrl import cli, keys
from jaxrl.commands import check_worker
from jaxrl.commands.runs import open_run
from jaxrl.config import to_tree
from jaxrl.errors import JaxrlError, UsageError
from jaxrl.influence.probe import load_probe
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.hf import load_model, save_model
from jaxrl.rewards.shaping import Paper
from jaxrl.train.experiment import EvalSpec, InfluenceSpec, ModelSpec, ProbeSpec, ProblemsSpec, RolloutSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUIET = {"influence": InfluenceSpec(every=0), "eval": EvalSpec(every=0, n=2, k=(1, 2))}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    use_devices(monkeypatch, 1)


def command(*words) -> dict:
    """What a command returns, from its words on the command line."""
    return cli.run(cli.parse([str(word) for word in words]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of GRPO on MSA-0."""
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        return jaxrl.train(experiment(GRPO, steps=2, **QUIET), out=tmp_path_factory.mktemp("run") / "run", quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """An untrained decoder with a tokenizer of one token a byte."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shape = ModelConfig(
        family="llama",
        vocab_size=263,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=512,
    )
    save_model(init_model(shape, keys.root(0)), folder)
    return save_tiny(folder, stop=EOS)


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> pathlib.Path:
    """Six sums, the last of them twice."""
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    records = [{"id": f"sum-{a}", "problem": f"What is {a} + {a}?", "answer": str(2 * a)} for a in range(6)]
    records.append(records[-1] | {"id": "again"})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_an_exported_checkpoint_is_bitwise_what_was_trained(run, tmp_path):
    said = command("export", run, "--out", tmp_path / "hf")
    assert said == {"model": str(tmp_path / "hf"), "step": 2, "dtype": "float32"}
    exported, trained = load_model(tmp_path / "hf"), last_state(run)
    leaves = {name: np.asarray(leaf) for name, leaf in named(exported).items()}
    assert leaves.keys() == {name for name in trained if name.startswith("model.")}
    assert [name for name in leaves if leaves[name].tobytes() != trained[name].tobytes()] == []
    first = named(load_model(experiment().model.path))
    assert any(not np.array_equal(leaves[name], first[name]) for name in leaves)


def named(model) -> dict:
    """Parameters by their names in a checkpoint."""
    paths = jax.tree_util.tree_flatten_with_path(model)[0]
    return {f"model{jax.tree_util.keystr(path)}".removesuffix(".value"): leaf for path, leaf in paths}


def test_a_run_is_opened_on_other_devices_than_it_was_trained_on(run, monkeypatch, tmp_path):
    tree = json.loads((run / "config.json").read_text())
    tree["experiment"]["mesh"] = {"data": 1, "fsdp": 1, "tensor": 1}
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(tree))
    use_devices(monkeypatch, 2)
    assert open_run(tmp_path / "run").setup.mesh.size == 2


@pytest.mark.slow
def test_a_run_is_evaluated_on_a_set_of_its_own_task(run, tmp_path):
    said = command("eval", run, "--data", "heldout", "-n", 8, "--k", "1,8", "--out", tmp_path)
    stored = json.loads((tmp_path / "heldout.json").read_text())
    assert said["metrics"].keys() == {"pass@1", "pass@8"}
    assert (
        stored["metrics"]["pass@8"]["low"] <= said["metrics"]["pass@8"]["value"] <= stored["metrics"]["pass@8"]["high"]
    )
    exact = {line["kind"]: line for line in lines(run)}["eval"]["eval/heldout/exact/pass@1"]
    assert said["metrics"]["pass@1"]["value"] == pytest.approx(exact, abs=0.1)
    records = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert len(records) == 8 * said["problems"]
    assert np.mean([r["correct"] for r in records]) == pytest.approx(said["metrics"]["pass@1"]["value"])


def test_a_set_that_the_runs_task_lacks_is_answered_with_the_nearest(run, tmp_path):
    with pytest.raises(UsageError, match="this run's task has no such set; did you mean 'heldout'"):
        command("eval", run, "--data", "held-out", "-n", 1, "--out", tmp_path)


@pytest.mark.slow
def test_only_the_first_problems_of_a_runs_own_set_are_taken(run, tmp_path):
    said = command("eval", run, "--data", "ood", "--limit", 2, "-n", 1, "--k", 1, "--out", tmp_path)
    assert said["problems"] == 2
    said = command("sample", run, "--data", "ood", "--limit", 3, "--out", tmp_path / "s.jsonl")
    assert said["samples"] == 3
    said = command("probe", run, "--data", "ood", "--limit", 2, "-n", 1, "--out", tmp_path / "probe.npz")
    assert said["prompts"] == 2


def test_one_prompt_cannot_be_put_to_a_run(run, tmp_path):
    with pytest.raises(UsageError, match="is a run folder; --prompt takes a model folder or hub id"):
        command("sample", run, "--prompt", "Hi", "--out", tmp_path / "s.jsonl")


@pytest.mark.parametrize("words", [("sample", "M", "--prompt", "Hi"), ("probe", "M", "--data", "d")])
def test_a_file_that_is_there_is_not_written_over(words, tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(UsageError, match="is there already; add --overwrite to replace it, or name another --out"):
        command(*words, "--out", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "old"


def test_a_folder_without_a_tokenizer_is_said_to_have_none(run, problems, tmp_path):
    command("export", run, "--out", tmp_path / "hf")
    for words in (("--data", problems), ("--prompt", "Hi")):
        with pytest.raises(JaxrlError, match=r"this folder has no tokenizer: expected tokenizer.json") as raised:
            command("sample", tmp_path / "hf", *words, "--out", tmp_path / "s.jsonl")
        assert "transformers" not in str(raised.value)


def test_problems_are_no_probe(problems):
    with pytest.raises(ValueError, match=r"expected a probe.npz made by `jaxrl probe`, and this is no .npz file"):
        load_probe(problems)


@pytest.mark.parametrize("text", ["[]", "5", '{"experiment": null}'])
@pytest.mark.parametrize("words", ["export R --out o", "eval R --data ood --out o", "check R", "report R"])
def test_a_config_that_is_no_runs_is_named_by_every_command(words, text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JaxrlError, match=r"config\.json: expected"):
        command(*(tmp_path if word == "R" else word for word in words.split()))


def test_a_folder_that_is_no_run_is_said_to_be_none(model, tmp_path):
    with pytest.raises(UsageError, match=r"not a run folder; expected the config.json that `jaxrl train` writes"):
        command("export", model, "--out", tmp_path / "hf")


def test_a_dry_run_tells_shapes_and_memory_and_takes_no_step(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = command("train", ROOT / "configs" / "msa0" / "grpo.yaml", "--dry-run")
    assert said["shapes"]["rows a mini-batch"] == 128
    assert said["shapes"]["row width"] == 10
    assert said["shapes"]["terms"] == ["clip"]
    assert said["model"]["parameters"] == 26_016
    parts = ("update", "sampling (prefill)", "sampling (decode)")
    assert all(said[f"{what} memory, MiB"]["arguments"] > 0 for what in parts)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- problems as text


def test_samples_are_written_with_text_and_score(model, problems, tmp_path):
    out = tmp_path / "samples.jsonl"
    said = command("sample", model, "--data", problems, "-n", 2, "--max-new-tokens", 4, "--limit", 3, "--out", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert said["samples"] == len(records) == 6
    assert all(r["logp"] < 0 and 1 <= len(r["tokens"]) <= 4 and r["verdict"] == "no_box" for r in records)


def test_one_prompt_is_sampled_without_data(model, tmp_path):
    out = tmp_path / "samples.jsonl"
    words = ("sample", model, "--prompt", "What is 1 + 1?", "-n", 3, "--max-new-tokens", 4, "--out", out)
    assert command(*words)["samples"] == 3
    first = out.read_text()
    command(*words, "--overwrite")
    assert out.read_text() == first
    command(*words, "--overwrite", "--seed", 1)
    assert out.read_text() != first


def test_a_probe_is_sampled_and_can_be_read_again(model, problems, tmp_path):
    out = tmp_path / "probe.npz"
    words = ("--prompts", 3, "-n", 2, "--max-new-tokens", 4, "--out", out)
    said = command("probe", model, "--data", problems, *words)
    found = load_probe(out)
    assert (said["prompts"], said["solutions"]) == (3, 6) == (len(np.unique(found.uid)), len(found.uid))
    assert not found.correct.any()


@pytest.fixture(scope="module")
def problem_run(model, problems, tmp_path_factory):
    """One step on problems, by the command, evaluated on the problems that it trained on."""
    folder = tmp_path_factory.mktemp("problems")
    x = experiment(
        GRPO,
        model=ModelSpec(path=str(model)),
        task=ProblemsSpec(train=str(problems), eval=(str(problems),)),
        reward=Paper(),
        rollout=RolloutSpec(prompts=4, n=2, max_new_tokens=6, log_every=1),
        probe=ProbeSpec(prompts=4, n=1),
        steps=1,
        **QUIET,
    )
    config = folder / "sums.yaml"
    config.write_text(yaml.safe_dump(to_tree(x)))
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        said = command("train", config, "--out", folder / "run")
    return folder / "run", said


def test_training_on_problems_writes_what_the_command_returns(problem_run):
    run, said = problem_run
    assert said == {"run": str(run)} | json.loads((run / "summary.json").read_text())
    (line,) = lines(run, "train")
    assert (line["reward/mean"], line["reward/no_box"], line["reward/no_box/n"]) == (-1, 1, 8)
    assert lines(run, "eval")[0]["eval/sums/full/pass@2/n"] == 2
    assert said["evaluation"]["sums/full"]["pass@1"]["value"] == 0


def test_prompts_and_responses_are_logged_as_text(problem_run):
    records = [json.loads(line) for line in (problem_run[0] / "rollouts" / "000000.jsonl").read_text().splitlines()]
    assert len(records) == 8
    assert all("What is " in r["prompt"] and r["prompt"].endswith("<|im_start|>assistant\n") for r in records)
    assert {(r["verdict"], r["reward"]) for r in records} == {("no_box", -1.0)}


def test_duplicates_and_shared_problems_are_reported_when_data_is_loaded(problem_run):
    said = " ".join(json.loads((problem_run[0] / "config.json").read_text())["data"]["data"])
    assert "sum-5" in said
    assert "again" in said


def test_a_run_on_problems_exports_with_its_tokenizer(problem_run, tmp_path):
    command("export", problem_run[0], "--out", tmp_path / "hf")
    said = command("sample", tmp_path / "hf", "--prompt", "Hi", "--max-new-tokens", 2, "--out", tmp_path / "s.jsonl")
    assert said["samples"] == 1


def test_a_bug_in_the_checks_process_is_its_last_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("jaxrl.commands.check_worker.is_run", lambda path: 1 / 0)
    assert check_worker.main([str(tmp_path), str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "internal error: ZeroDivisionError: division by zero"
    assert said[0].startswith("Traceback")
