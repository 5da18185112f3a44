"""What must hold of the tree as a whole: sizes, layers, lazy imports, public names, portability."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jaxrl

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "jaxrl").rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".ini", ".sh", ".j2", ".html", ".css"}


def tracked() -> list[pathlib.Path]:
    """Text files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\n") if name]
    return [f for f in files if f.is_file() and (f.suffix in TEXT or f.name in ("Makefile", "run", "LICENSE"))]


def test_no_module_is_longer_than_400_lines():
    assert {str(f): n for f in SOURCES if (n := f.read_text().count("\n")) > 400} == {}


def test_no_function_is_longer_than_60_lines():
    long = {
        f"{f.name}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for f in SOURCES
        for node in ast.walk(ast.parse(f.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60
    }
    assert long == {}


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    homes = "|".join(("work", "farm", "home", "root", "Users", "tmp"))
    pattern = re.compile(rf"(?<![\w./])/({homes})/")
    hits = [
        f"{f.relative_to(ROOT)}:{i}: {line.strip()}"
        for f in tracked()
        for i, line in enumerate(f.read_text(errors="replace").split("\n"), 1)
        if pattern.search(line)
    ]
    assert hits == []


def test_pinned_versions_name_no_host_and_no_build():
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert {"jax", "flax", "transformers", "torch"} <= {pin.split("==")[0] for pin in pins}


def test_every_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in wanted}
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert {name for name in names if f"\n{name}==" not in pins} == set()


def test_process_index_is_read_in_mesh_alone():
    users = {f.relative_to(ROOT).as_posix() for f in SOURCES if "process_index" in f.read_text()}
    assert users <= {"jaxrl/mesh.py"}


def test_layers_hold():
    command = pathlib.Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["jaxrl", "jaxrl.report", "jaxrl.rewards", "jaxrl.cli"])
def test_importing_it_loads_no_jax(module):
    assert not {"jax", "jaxlib", "flax", "torch"} & loaded_by(f"import {module}")


def test_verifying_an_answer_loads_no_jax():
    assert "jax" not in loaded_by("from jaxrl import verify_math, MathRule, Verdict")


@pytest.mark.parametrize("name", jaxrl.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(jaxrl, name)
    if name != "ALGORITHMS":  # a plain dict of recipes
        assert (inspect.getdoc(value) or "").strip()
    assert name in dir(jaxrl)


def test_train_is_callable_whatever_was_imported_before():
    code = (
        "import jaxrl.train.experiment, jaxrl; from jaxrl import train; assert callable(train) and train is jaxrl.train"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lode_model'"):
        _ = jaxrl.lode_model


def test_public_names_are_listed_once_and_all_have_a_module():
    assert sorted(set(jaxrl.__all__)) == jaxrl.__all__
    assert set(jaxrl._MODULES) == set(jaxrl.__all__)


def test_version_is_the_projects():
    import tomllib

    assert jaxrl.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
