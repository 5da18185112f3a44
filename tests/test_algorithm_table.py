"""One common table over all algorithms, recipes and combinations alike: the guarantees that every one of them gives."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from algorithm_cases import NO_RISE, ORDERED, TABLE, collected, permuted, poisoned, widen, world
from bigram import BIGRAM, VOCAB, policy
from rl_cases import graded_of, prefiltered, quick_jit

from jaxrl import keys
from jaxrl.config import SCHEMA, from_tree, to_tree
from jaxrl.mesh import make_mesh, replicated, to_mesh
from jaxrl.rl.algorithms import Algorithm, applied, kept, prepare, value_terms
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.pieces import NEEDS
from jaxrl.rl.update import loss_and_grad, refreshed, update
from jaxrl.schema import dump
from jaxrl.train.experiment import Experiment, ModelSpec, Msa0Spec, TeacherSpec
from jaxrl.types import Pairs, Rows, Samples, TrainState

# Each of a kind runs in the fast suite; the others where programs are compiled with care.
FAST = ("grpo", "dapo", "ppo", "rft", "is_dpo", "reverse k1 in the reward")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TABLE]


@partial(quick_jit, static_argnums=0)
def ready(algorithm, graded):
    return prepare(algorithm, graded), value_terms(algorithm, graded)


@partial(quick_jit, static_argnames="microbatch")
def gradient(model, terms, reference, microbatch=None):
    """Of one optimiser step, with what its losses fix beforehand."""
    terms, _ = refreshed(model, terms, reference, temperature=1.0, score=BIGRAM)
    return loss_and_grad(model, terms, reference, temperature=1.0, microbatch=microbatch, score=BIGRAM)


def steps(algorithm, graded, model, reference, **options):
    """Losses and gradients of all optimiser steps of one pass, a critic's among them."""
    batches, values = ready(algorithm, graded)
    return [gradient(model, terms, reference, **options) for terms in (*batches, *values)]


def same(found, wanted, **tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 0, "atol": 1e-10} | tolerance))


@pytest.mark.x64
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_and_depend_on_nothing_they_should_not(x64, name):
    algorithm, (model, reference) = TABLE[name], world()
    graded = collected(algorithm, model, reference)
    found = steps(algorithm, graded, model, reference)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert max(np.abs(x).max() for _, g in found for x in jax.tree.leaves(g)) > 1e-6
    for bad in (np.nan, 1e30):
        same(steps(algorithm, poisoned(graded, bad), model, reference), found, atol=0)
    if name not in ORDERED:
        same(steps(algorithm, permuted(graded, [2, 0, 3, 1]), model, reference), found)
    same(steps(algorithm, widen(graded), model, reference), found)
    for size in (1, 3):
        same(steps(algorithm, graded, model, reference, microbatch=size), found)


@pytest.mark.x64
@pytest.mark.parametrize("name", [n for n in NAMES if TABLE[getattr(n, "values", (n,))[0]].policy])
def test_without_advantages_the_policy_term_has_no_gradient(x64, name):
    algorithm, (model, reference) = TABLE[name], world()
    batches, _ = ready(algorithm, collected(algorithm, model, reference))
    for terms in batches:
        batch = dataclasses.replace(terms[0].batch, advantage=jnp.zeros_like(terms[0].batch.advantage))
        _, found = gradient(model, (dataclasses.replace(terms[0], batch=batch),), reference)
        assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(found))


@pytest.mark.x64
@pytest.mark.parametrize("name", NAMES)
def test_a_step_split_over_four_devices_is_that_of_one(x64, name):
    algorithm, (model, reference) = TABLE[name], world()
    graded = collected(algorithm, model, reference)
    mesh = make_mesh(2, 2, 1, devices=jax.devices()[:4])
    found = steps(algorithm, graded, model, reference)
    everywhere = jax.tree.map(lambda x: jax.device_put(x, replicated(mesh)), (model, reference))
    spread = dataclasses.replace(to_mesh(mesh, dataclasses.replace(graded, matched=None)), matched=graded.matched)
    assert len(spread.reward.sharding.device_set) == 4
    same(steps(algorithm, spread, *everywhere), found, atol=1e-12)


@pytest.mark.parametrize("name", TABLE)
def test_shapes_do_not_follow_what_filters_decide(name):
    algorithm, (model, reference) = TABLE[name], world()
    shapes = set()
    for greedy in ([True, False, False, True], [True] * 4, [False] * 4):
        graded = collected(algorithm, model, reference, greedy=greedy)
        batches, values = jax.eval_shape(lambda g: (prepare(algorithm, g), value_terms(algorithm, g)), graded)
        assert len(batches) == algorithm.minibatches == len(applied(algorithm, kept(algorithm, graded)))
        own = algorithm.critic is not None and not algorithm.critic.shared
        assert len(values) == (algorithm.minibatches if own else 0)
        shapes.add(str(jax.tree.map(jnp.shape, (batches, values))))
    assert len(shapes) == 1


@pytest.mark.parametrize("name", TABLE)
def test_compositions_hash_print_and_survive_yaml_and_json(name):
    algorithm = TABLE[name]
    again = dataclasses.replace(algorithm)
    assert (algorithm, hash(algorithm)) == (again, hash(again))
    assert type(algorithm.loss).__name__ in repr(algorithm)
    assert algorithm.needs <= NEEDS
    taught = algorithm.needs & {"teacher_samples", "teacher_model"}
    tree = dump(SCHEMA, algorithm)
    for read in (json.loads(json.dumps(tree)), yaml.safe_load(yaml.safe_dump(tree))):
        whole = to_tree(
            Experiment(
                model=ModelSpec(base="msa0"),
                task=Msa0Spec(),
                algorithm=Algorithm(),
                teacher=TeacherSpec(base="oracle") if taught else None,
                optimiser=Optimiser(lr=1e-3),
                steps=1,
            )
        )
        if "pairs" in algorithm.needs:  # the enumerable task has no preference file
            continue
        assert from_tree(whole | {"algorithm": read}).algorithm == algorithm


# ---------------------------------------------------------------- a world that can be learnt


PROMPTS, GROUP, RIGHT = 4, 8, {0: 3, 1: 4, 2: 5, 3: 3}  # the right answer to prompt p is one token


def bandit_rows(answers, prompts=None):
    """``[P B]`` rows: the prompt token, then one answer token."""
    answers = np.asarray(answers)
    first = np.broadcast_to(np.arange(PROMPTS)[:, None], answers.shape) if prompts is None else prompts
    tokens = np.stack([np.zeros_like(answers), first, answers], axis=-1)
    return Rows(
        jnp.asarray(tokens, jnp.int32), jnp.full(answers.shape, 2, jnp.int32), jnp.full(answers.shape, 3, jnp.int32)
    )


def drawn(rng, model, count):
    p = np.asarray(jax.nn.softmax(model["table"][:PROMPTS], axis=-1), float)
    return np.stack([rng.choice(VOCAB, count, p=row / row.sum()) for row in p])


def is_right(answers):
    return np.asarray(answers) == np.array([RIGHT[p] for p in range(PROMPTS)])[:, None]


def expected_reward(model):
    p = jax.nn.softmax(model["table"][:PROMPTS], axis=-1)
    return float(np.mean([p[x, RIGHT[x]] for x in range(PROMPTS)]))


def bandit_step(algorithm, rng, model, reference, step):
    """What a collector would bring: fresh rollouts of the policy, samples of the others."""
    answers = drawn(rng, model, GROUP)
    p = np.asarray(model["table"])[:PROMPTS]
    greedy = is_right(p.argmax(1)[:, None])[:, 0]
    graded = graded_of(is_right(answers).astype(float), np.ones((PROMPTS, GROUP), int), greedy=greedy)
    rows = bandit_rows(answers)
    graded = dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(graded.rollouts, rows=rows),
        chance=jnp.asarray(rng.random(PROMPTS)),
        matched=jnp.int32(3),
    )
    graded = prefiltered(algorithm, graded)
    rows = graded.rollouts.rows

    def score(m, rows):
        return BIGRAM(m, rows.flat()).reshape(rows.tokens.shape)

    base = drawn(rng, reference["base"], 8)
    taught = np.repeat(np.array([RIGHT[p] for p in range(PROMPTS)])[:, None], 8, axis=1)
    pairs = bandit_rows(np.stack([taught[:, 0], (taught[:, 0] + 1) % VOCAB], axis=1))
    probe = bandit_rows(base).flat()
    old = score(model, rows)
    return dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(graded.rollouts, logps=old),
        old_logps=old,
        ref_logps=score(reference["base"], rows),
        values=jnp.where(rows.mask(), BIGRAM.values(model, rows.flat()).reshape(old.shape), 0),
        end_values=jnp.zeros(graded.reward.shape),
        greedy_reward=jnp.asarray(greedy).astype(float),
        base=dataclasses.replace(graded.rollouts, rows=bandit_rows(base)),
        base_correct=jnp.asarray(is_right(base)),
        base_logps=score(reference["base"], bandit_rows(base)),
        stream=Samples(bandit_rows(base), jnp.asarray(is_right(base))),
        teacher=Samples(bandit_rows(taught), jnp.ones((PROMPTS, 8), bool)),
        demonstrations=Samples(bandit_rows(taught[:, :1]), jnp.ones((PROMPTS, 1), bool)),
        pairs=Pairs(pairs, score(reference["base"], pairs), jnp.ones(PROMPTS, bool)),
        probe=probe,
        probe_logps=BIGRAM(reference["base"], probe),
    )


SGD = make_optimiser(Optimiser(type="adamw", lr=3e-2), total=1)
STEP = quick_jit(update, static_argnames=("tx", "temperature", "microbatch", "score"))


@pytest.mark.x64
@pytest.mark.parametrize("name", [n for n in NAMES if getattr(n, "values", (n,))[0] not in NO_RISE])
def test_expected_reward_rises_on_the_bandit(x64, name):
    algorithm, rng = TABLE[name], np.random.default_rng(0)
    model = policy(0, 0.3)
    reference = {"base": model, "teacher": policy(5)}
    reference["teacher"] = {
        "table": jnp.zeros((VOCAB, VOCAB)).at[jnp.arange(PROMPTS), jnp.array(list(RIGHT.values()))].set(4.0),
        "value": jnp.zeros(VOCAB),
    }
    state = TrainState(jnp.zeros((), jnp.int32), model, SGD.init(model), keys.root(0))
    before = expected_reward(model)
    for step in range(25):
        batches, values = ready(algorithm, bandit_step(algorithm, rng, state.model, reference, step))
        for terms in batches * algorithm.epochs + values:
            state, metrics = STEP(state, terms, reference, tx=SGD, temperature=1.0, score=BIGRAM)
            assert all(np.isfinite(m.value) or float(m.count) == 0 for m in metrics.values())
    assert expected_reward(state.model) > before + 0.02, (before, expected_reward(state.model))
