"""The README holds: its Python runs, its commands parse, and what it names is there."""

import json
import os
import pathlib
import re
import shlex

import pytest

import jaxrl
from jaxrl import cli
from jaxrl.config import load_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


PYTHON = blocks("python")
TRAINING = [block for block in PYTHON if re.search(r"\btrain\(", block)]
QUICK = [block for block in PYTHON if block not in TRAINING]


def commands() -> list[list[str]]:
    """Arguments of every ``jaxrl`` command line, in shell blocks and in tables."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"^\|.*`(jaxrl \w+ [^`]+)` \|$", README, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return [w[1:] for w in words if w and w[0].endswith("jaxrl") and w[1] in cli.COMMANDS]


def run(code: list[str], names: dict) -> dict:
    """Run blocks in one namespace; a failure is shown at its line of the README."""
    for block in code:
        above = README[: README.index(block)].count("\n")
        exec(compile("\n" * above + block, str(ROOT / "README.md"), "exec"), names)
    return names


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty folder with the repository's configs in it, as the current one."""
    os.symlink(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_examples_run_in_order(workplace, capsys):
    names = run(QUICK, {})
    assert names["kernel"].values.shape == (2, 8)
    assert "grpo" in capsys.readouterr().out
    assert sorted(p.name for p in workplace.iterdir()) == ["configs", "tiny-model"]


@pytest.mark.slow
def test_the_training_example_runs_and_records_what_the_readme_names(workplace):
    names = run([*(b for b in QUICK if "load_config" in b), *TRAINING], {})
    recorded = {}
    for line in names["lines"]:
        recorded.setdefault(line["kind"], set()).update(line)
    for kind, named in table_of_names().items():
        assert named, kind
        assert named <= recorded[kind], (kind, named - recorded[kind])
    folder = names["run"]
    for name in ("config.json", "summary.json", "probe.npz", "rollouts", "arrays.zarr", "eval", "checkpoints"):
        assert (folder / name).exists()
        assert f"`{name}" in README


def table_of_names() -> dict[str, set[str]]:
    """The metric names that the README's table lists by kind; patterns such as ``probe/train/...`` aside."""
    found = {}
    for kind in ("train", "probe", "influence", "eval"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{kind}` | every"))
        names = set(re.findall(r"`(\w+/[\w@]+)`", row))
        found[kind] = names or {"eval/heldout/exact/pass@1", "eval/heldout/exact/mode_share"}
    return found


@pytest.mark.parametrize("name", jaxrl.__all__)
def test_every_public_name_is_used_in_an_example(name):
    assert any(re.search(rf"\b{name}\b", block) for block in PYTHON)
    assert re.search(rf"^### .*`{name}`", README, re.MULTILINE)


def test_every_command_has_an_example():
    shown = {words[0] for words in commands()}
    assert shown == set(cli.COMMANDS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_line_is_accepted(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = cli.parse(words)
    assert arguments.command == words[0]
    if arguments.command == "train":
        assert load_config(arguments.config, arguments.set).steps > 0


def test_the_problem_line_is_read(tmp_path):
    from jaxrl.data.datasets import load_problems

    (line,) = blocks("json")
    (tmp_path / "problems.jsonl").write_text(line)
    (problem,) = load_problems(tmp_path / "problems.jsonl")
    assert problem.answer == json.loads(line)["answer"]


def test_links_and_named_files_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"`((?:jaxrl|configs|launch)/[\w./-]*)`", README)
    assert targets
    missing = [t for t in (*targets, *named) if not t.startswith("http") and not (ROOT / t).exists()]
    assert missing == []


def test_the_picture_is_small():
    (picture,) = re.findall(r"!\[.+\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size < 150_000


def test_named_algorithms_and_rewards_exist():
    from jaxrl.rewards.shaping import REWARDS

    section = README.split("## The paper, and its released code")[1].split("\n## ")[0]
    named = {"grpo", "self", "grpo_released_code", "self_released_code", "filter_only", "fkl_only"}
    assert named == {name for name in jaxrl.ALGORITHMS if f"`{name}`" in section or f"`{name} " in section}
    assert {"paper", "released_code"} <= set(REWARDS)
