"""The command line: arguments, printing, exit codes and messages. The commands themselves are stubbed."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import types

import pytest

from jaxrl import cli
from jaxrl.errors import DoesNotHold, GateFailed, JaxrlError, UsageError, nearest
from jaxrl.tables import plain


@pytest.fixture
def commands(monkeypatch):
    """A stand-in for ``jaxrl.commands``; set its functions, then call ``cli.main``."""
    module = types.ModuleType("jaxrl.commands")
    monkeypatch.setitem(sys.modules, "jaxrl.commands", module)
    return module


def doing(result=None, error=None):
    def command(arguments):
        if error is not None:
            raise error
        return result

    return command


# ---------------------------------------------------------------- arguments


def test_every_command_of_the_interface_is_there():
    others = {"kernel", "bench", "algorithms"}
    assert set(cli.COMMANDS) == {"demo", "train", "sample", "eval", "probe", "check", "report", "export"} | others


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_in_each_help_parses(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    example = cli.COMMANDS[name][2]
    assert f"example:\n  {example}" in text
    assert "--json" in text
    assert "exit codes: 0 done" in text
    assert cli.parse(shlex.split(example)[1:]).command == name


def test_arguments_reach_the_command():
    a = cli.parse(
        ["train", "c.yaml", "--set", "a.b=1", "--set", "c=2", "--out", "o", "--resume", "--dry-run", "--json"]
    )
    assert (a.config, a.set, a.out) == (pathlib.Path("c.yaml"), ["a.b=1", "c=2"], pathlib.Path("o"))
    assert a.resume
    assert a.dry_run
    assert a.json
    a = cli.parse(
        shlex.split("sample M --prompt hi -n 3 --temperature 0.7 --top-p 0.9 --max-new-tokens 5 --seed 4 --out f")
    )
    assert (a.model, a.prompt, a.data, a.n, a.temperature, a.top_p) == ("M", "hi", None, 3, 0.7, 0.9)
    assert (a.max_new_tokens, a.seed, a.out) == (5, 4, pathlib.Path("f"))
    a = cli.parse(shlex.split("check RUN --probe p.npz --pairs 8 --step 3 --out d"))
    assert (a.model, a.probe, a.pairs, a.step) == ("RUN", pathlib.Path("p.npz"), 8, 3)
    a = cli.parse(shlex.split("report a b --names x,y"))
    assert (a.runs, a.names) == ([pathlib.Path("a"), pathlib.Path("b")], ("x", "y"))
    a = cli.parse(shlex.split("export r --step 0 --out d"))
    assert (a.run, a.step, a.out) == (pathlib.Path("r"), 0, pathlib.Path("d"))
    a = cli.parse(shlex.split("probe M --data f"))
    assert (a.prompts, a.n, a.temperature, a.out) == (64, 4, 1.0, pathlib.Path("probe.npz"))
    a = cli.parse(["demo"])
    assert (a.out, a.seed) == (pathlib.Path("runs/demo"), 0)


def test_ks_default_to_those_that_the_samples_allow():
    assert cli.parse(shlex.split("eval M --data f --out o -n 64")).k == (1, 16, 64)
    assert cli.parse(shlex.split("eval M --data f --out o -n 8 --k 8,1,4")).k == (1, 4, 8)


WRONG = [
    ([], "the following arguments are required: COMMAND"),
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["train"], "the following arguments are required: CONFIG"),
    (["train", "c", "--rezume"], "unrecognized arguments: --rezume"),
    (["train", "c", "--res"], "unrecognized arguments: --res"),
    (["demo", "--seed", "x"], "argument --seed: expected an integer from 0 to 2**32 - 1, got 'x'"),
    (["demo", "--seed", "4294967296"], "argument --seed: expected an integer from 0 to 2**32 - 1, got '4294967296'"),
    (["export", "r", "--out", "o", "--step", "-1"], "argument --step: expected an integer of at least 0, got '-1'"),
    (["sample", "M", "--out", "f"], "one of the arguments --data --prompt is required"),
    (["sample", "M", "--prompt", "a", "--data", "b", "--out", "f"], "not allowed with argument"),
    (
        ["sample", "M", "--prompt", "a", "--out", "f", "-n", "0"],
        "argument -n: expected an integer of at least 1, got '0'",
    ),
    (
        ["sample", "M", "--prompt", "a", "--out", "f", "--top-p", "1.5"],
        "argument --top-p: expected a number above 0 and at most 1, got '1.5'",
    ),
    (
        ["sample", "M", "--prompt", "a", "--out", "f", "--temperature", "nan"],
        "argument --temperature: expected a number from 0 (greedy) to 100, got 'nan'",
    ),
    (["eval", "M", "--data", "f", "--out", "o", "-n", "4", "--k", "1,8"], "--k 8 needs as many samples"),
    (
        ["eval", "M", "--data", "f", "--out", "o", "--k", "1,,8"],
        "argument --k: expected an integer of at least 1, got ''",
    ),
    (["eval", "M", "--data", "f", "--out", "o", "--preset", "x"], "argument --preset: invalid choice: 'x'"),
    (["report", "a", "b", "--names", "x"], "--names: expected one for each of 2 runs, got 1"),
    (["report", "a", "--names", "x,"], "argument --names: expected names between commas, got 'x,'"),
    (["export", "r"], "the following arguments are required: --out"),
]


@pytest.mark.parametrize(
    ("argv", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_usage_exits_2_with_one_message(argv, message, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "Traceback" not in err


# ---------------------------------------------------------------- results


RESULT = {
    "run": pathlib.Path("runs/x"),
    "seconds": 12.34567,
    "pass": {
        "base": {"train": {"pass@1": {"value": 0.5, "low": 0.4, "high": 0.6}, "mode_share": 0.25}},
        "self": {"train": {"pass@1": {"value": 0.75, "low": 0.7, "high": 0.8}, "mode_share": None}},
    },
    "kernel_check": {"slope_single": 2.0, "tightness_quantiles": [0.1, 0.5]},
    "files": [{"file": "report.html", "bytes": 10}],
}


def test_json_is_one_object_with_every_value(commands, capsys):
    commands.demo = doing(RESULT)
    assert cli.main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {**RESULT, "run": "runs/x"}
    assert err == ""


def test_tables_show_every_value_without_folding_off_a_terminal(commands, capsys):
    long = "x" * 300
    commands.demo = doing({**RESULT, "path": long})
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    for text in ("12.35", "0.5 [0.4, 0.6]", "0.75 [0.7, 0.8]", "kernel_check", "0.1, 0.5", "report.html", long):
        assert text in out
    row = next(line for line in out.split("\n") if "0.75" in line)
    assert row.split()[:2] == ["self", "train"]


def test_a_table_of_many_measures_has_one_a_row(commands, capsys):
    measures = {f"pass@{2**i}": {"value": i / 8, "low": 0.0, "high": 1.0} for i in range(8)}
    commands.train = doing({"evaluation": {f"{split}/exact": measures for split in ("train", "heldout", "ood")}})
    assert cli.main(["train", "c.yaml"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert max(map(len, text)) < 100
    assert any(line.split()[:3] == ["train/exact", "heldout/exact", "ood/exact"] for line in text)
    assert any(line.split()[:2] == ["pass@4", "0.25"] for line in text)


def test_brackets_in_a_value_are_printed_as_they_are(commands, capsys):
    commands.demo = doing({"text": "[bold]x[/bold]"})
    cli.main(["demo"])
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_values_that_json_lacks_become_null_or_text():
    import numpy as np

    tree = {"a": float("nan"), "b": np.float32(0.5), "c": np.arange(2), 3: pathlib.Path("x"), "d": (True, None)}
    assert plain(tree) == {"a": None, "b": 0.5, "c": [0, 1], "3": "x", "d": [True, None]}


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong config"), 2),
        (JaxrlError("no such shard"), 1),
        (DoesNotHold("slope is 1.7"), 3),
        (GateFailed("hard p1 is 0.2"), 3),
        (FileNotFoundError(2, "No such file or directory", "x.jsonl"), 1),
        (OSError(28, "No space left on device"), 1),
        (ValueError("row 3 has start 0"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_say_one_message_and_exit_with_their_code(commands, capsys, error, code):
    commands.train = doing(error=error)
    assert cli.main(["train", "c.yaml"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxrl: ")
    assert "Traceback" not in err
    assert (str(error) or "interrupted") in err


def test_an_interrupted_training_run_says_how_to_go_on(commands, capsys):
    commands.train = doing(error=KeyboardInterrupt())
    cli.main(["train", "c.yaml"])
    assert "--resume continues" in capsys.readouterr().err
    commands.demo = doing(error=KeyboardInterrupt())
    cli.main(["demo"])
    assert "--resume" not in capsys.readouterr().err


def test_a_failure_under_json_is_an_object_too(commands, capsys):
    commands.check = doing(error=DoesNotHold("slope is 1.7", {"slope": 1.7}))
    assert cli.main(["check", "RUN", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"slope": 1.7, "error": "slope is 1.7", "exit_code": 3}
    assert err == "jaxrl: slope is 1.7\n"


def test_what_a_failed_check_found_is_printed_all_the_same(commands, capsys):
    commands.check = doing(error=DoesNotHold("slope is 1.7", {"slope": 1.7}))
    assert cli.main(["check", "RUN"]) == 3
    assert "1.7" in capsys.readouterr().out


def test_a_bug_is_said_to_be_one_in_one_message(commands, capsys):
    commands.demo = doing(error=ZeroDivisionError("bug"))
    assert cli.main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "jaxrl: internal error: ZeroDivisionError: bug; set JAXRL_DEBUG=1 for the traceback\n"
    assert cli.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"].startswith("internal error: ZeroDivisionError: bug")


def test_the_traceback_of_a_bug_is_shown_when_asked_for(commands, capsys, monkeypatch):
    monkeypatch.setenv("JAXRL_DEBUG", "1")
    commands.demo = doing(error=ZeroDivisionError("bug"))
    assert cli.main(["demo"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debugging_shows_the_traceback(commands, capsys, monkeypatch):
    monkeypatch.setenv("JAXRL_DEBUG", "1")
    commands.demo = doing(error=JaxrlError("no such shard"))
    assert cli.main(["demo"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_output_that_nobody_reads_any_more_is_no_error_message():
    code = (
        "import sys, types\n"
        "m = types.ModuleType('jaxrl.commands'); m.demo = lambda a: {'x': 'y' * 10**6}\n"
        "sys.modules['jaxrl.commands'] = m\n"
        "from jaxrl.cli import main; sys.exit(main(['demo']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_installed_command_runs():
    command = pathlib.Path(sys.executable).with_name("jaxrl")
    if not command.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "jaxrl")


def test_nearest_match_or_all_names():
    assert nearest("grop", ["grpo", "self"]) == "did you mean 'grpo'? (one of: grpo, self)"
    assert nearest("zzz", ["grpo", "self"]) == "expected one of: grpo, self"
    assert nearest("zzz", []) == "no name is known here"
