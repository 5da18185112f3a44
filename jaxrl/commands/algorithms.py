"""``algorithms``: which recipes there are, and one of them as a config."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import yaml

from jaxrl import config
from jaxrl.errors import UsageError, nearest
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.optimiser import Optimiser
from jaxrl.rl.recipes import RECIPES
from jaxrl.schema import dump
from jaxrl.train.experiment import Experiment, ModelSpec, Msa0Spec, TeacherSpec
from jaxrl.train.setup import TEACHER_NEEDS

PARTS = ("prefilter", "keep", "advantage", "weights", "loss", "old_logps")
LEFT_OUT = frozenset({"rollouts", "trainer_logps"})  # what nearly every recipe asks for


def algorithms(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """All recipes as a table, or one as a whole config for the enumerable task, which ``train`` takes.

    Raises ``UsageError`` for an unknown name, with the nearest.
    """
    if arguments.name is None:
        return {"algorithms": {name: row(name) for name in RECIPES}}
    if arguments.name not in RECIPES:
        raise UsageError(f"unknown algorithm {arguments.name!r}; {nearest(arguments.name, RECIPES)}")
    tree = resolved(arguments.name)
    if arguments.json:
        return tree | row(arguments.name)
    return {"text": as_yaml(arguments.name, tree)}


def row(name: str) -> dict[str, Any]:
    """Pieces, what the collector must bring, and the source of a recipe."""
    recipe = RECIPES[name]
    return {
        "what": recipe.what,
        "pieces": ", ".join(pieces(recipe.algorithm)),
        "needs": ", ".join(sorted(recipe.algorithm.needs - LEFT_OUT)) or "-",
        "source": recipe.source,
    }


def pieces(algorithm: Algorithm) -> list[str]:
    """The pieces that differ from the defaults of their kind, by tag, those of terms with their coefficient."""
    plain = Algorithm()
    own = PARTS if algorithm.policy else ("loss",)
    found = [getattr(algorithm, part).tag for part in own if getattr(algorithm, part) != getattr(plain, part)]
    found += [f"{coef:g} {piece.tag}" for coef, piece in (*algorithm.shaping, *algorithm.regularisers)]
    if algorithm.critic is not None:
        found.append(f"critic ({algorithm.critic.trunk} trunk)")
    return found + [part for part in ("refill",) if getattr(algorithm, part) is not None] or ["defaults"]


def resolved(name: str) -> dict[str, Any]:
    """A whole config of the enumerable task with every value of the recipe written out."""
    algorithm = RECIPES[name].algorithm
    teacher = TeacherSpec(base="oracle") if algorithm.needs & TEACHER_NEEDS else None
    x = Experiment(
        model=ModelSpec(base="msa0"),
        task=Msa0Spec(),
        algorithm=algorithm,
        teacher=teacher,
        optimiser=Optimiser(lr=2e-3),
        steps=200,
    )
    tree = config.to_tree(x)
    kept = ("seed", "model", "task", "reward", "teacher", "rollout", "optimiser", "steps")
    small = {key: tree[key] for key in kept if tree[key] is not None}
    small["model"], small["optimiser"] = {"base": "msa0"}, {"lr": x.optimiser.lr}
    small["rollout"] = {key: tree["rollout"][key] for key in ("prompts", "n", "max_new_tokens")}
    return small | {"algorithm": dump(config.SCHEMA, algorithm)}


def as_yaml(name: str, tree: Mapping[str, Any]) -> str:
    """The config as text, under comments that say what it is."""
    about = row(name)
    head = f"# {name}: {about['what']} ({about['source']})\n# Needs: {about['needs']}.\n"
    head += f"#   jaxrl algorithms {name} > {name}.yaml && jaxrl train {name}.yaml\n"
    return head + yaml.safe_dump(dict(tree), sort_keys=False, width=110)
