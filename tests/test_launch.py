"""The launch scripts hand their arguments on whole, to the interpreter of the checkout. No cluster is needed."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = ["configs/a.yaml", "--set", "task.eval=[a.jsonl, 'b c.jsonl']", "--out", "runs/a b"]

# Prints what follows the program, one argument a line, after checking that the program is Python.
INTERPRETER = """#!/usr/bin/env bash
[ "$1" = -c ] || exit 9
"$REAL_PYTHON" -c 'import ast, sys; ast.parse(sys.argv[1]); assert "distributed.initialize()" in sys.argv[1]' "$2"
printf '%s\\n' "${@:3}"
"""
SRUN = """#!/usr/bin/env bash
"$@"
"""
# `gcloud compute tpus tpu-vm ssh NAME ... --command TEXT`: the remote shell gets TEXT in the home folder.
GCLOUD = """#!/usr/bin/env bash
cd "$HOME" && exec bash -c "${@: -1}"
"""


@pytest.fixture
def home(tmp_path) -> pathlib.Path:
    """A home folder with a checkout ``jaxrl`` in it, and stand-ins for the cluster's commands."""
    files = {"jaxrl/.venv/bin/python": INTERPRETER, "bin/srun": SRUN, "bin/gcloud": GCLOUD}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def launch(home: pathlib.Path, script: str, words: list[str], **more: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **more, "HOME": str(home), "REAL_PYTHON": sys.executable}
    env["PATH"] = f"{home / 'bin'}{os.pathsep}{env['PATH']}"
    command = [ROOT / "launch" / script, *words]
    return subprocess.run(command, cwd=home / "jaxrl", env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("script", "more"), [("slurm.sh", {}), ("tpu_pod.sh", {"TPU": "slice", "ZONE": "zone"})], ids=["slurm", "tpu_pod"]
)
def test_arguments_arrive_as_they_were_given(home, script, more):
    done = launch(home, script, WORDS, **more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == WORDS


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_pod.sh"])
def test_without_a_config_it_says_how_it_is_used(home, script):
    done = launch(home, script, [], TPU="slice", ZONE="zone")
    assert done.returncode != 0
    assert "usage:" in done.stderr
    assert "CONFIG" in done.stderr


def test_without_a_slice_it_says_what_is_missing(home):
    done = launch(home, "tpu_pod.sh", WORDS, TPU="", ZONE="zone")
    assert done.returncode != 0
    assert "name of the TPU slice" in done.stderr
