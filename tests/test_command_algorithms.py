"""``jaxrl algorithms``: the list, and every recipe as a config that training takes."""

import json

import pytest
import yaml

from jaxrl import cli
from jaxrl.config import load_config
from jaxrl.rl.recipes import ALGORITHMS, RECIPES


def out(capsys, *argv):
    assert cli.main(["algorithms", *argv]) == 0
    return capsys.readouterr().out


def test_the_list_names_every_recipe_with_pieces_needs_and_source(capsys):
    text = out(capsys)
    for name, recipe in RECIPES.items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert recipe.source in line
        assert recipe.what in line
    table = json.loads(out(capsys, "--json"))["algorithms"]
    assert "leave_one_out" in table["rloo"]["pieces"]
    assert table["remax"]["needs"] == "greedy_reward"
    assert "teacher_model" in table["distill_soft"]["needs"]
    assert "1 preference" in table["is_dpo"]["pieces"]
    assert "critic (own trunk)" in table["ppo"]["pieces"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_printed_as_a_config_that_gives_it_back(name, capsys, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(out(capsys, name))
    assert load_config(file).algorithm == ALGORITHMS[name]
    assert "name" not in yaml.safe_load(file.read_text())["algorithm"]  # every value written out
    assert json.loads(out(capsys, name, "--json"))["algorithm"] == yaml.safe_load(file.read_text())["algorithm"]


def test_an_unknown_recipe_is_met_with_the_nearest(capsys):
    assert cli.main(["algorithms", "daop"]) == 2
    assert "did you mean 'dapo'?" in capsys.readouterr().err
