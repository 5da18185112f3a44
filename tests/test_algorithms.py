"""One common table over all algorithms: every recipe and combination of pieces must pass every row."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import graded_of, prefiltered, quick_jit, scored, tiny_model

from jaxrl import keys
from jaxrl.rl.advantages import ADVANTAGES, Centre, Gae, PassKTraining
from jaxrl.rl.algorithms import Algorithm, applied, kept, prepare
from jaxrl.rl.critic import Critic
from jaxrl.rl.filters import (
    FILTERS,
    PREFILTERS,
    KeepGreedyFails,
    KeepMatched,
    Mixed,
    SampleGreedyFails,
    SampleMatched,
    SolveRate,
)
from jaxrl.rl.losses import LOSSES, Nll, NoPolicy
from jaxrl.rl.old_logps import OLD_LOGPS, Sampler, Tis
from jaxrl.rl.optimiser import Optimiser, make_optimiser
from jaxrl.rl.pieces import NEEDS
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.refill import Refill
from jaxrl.rl.regularisers import REGULARISERS, Imitation, Kl
from jaxrl.rl.shaping import Overlong
from jaxrl.rl.update import update
from jaxrl.rl.weights import WEIGHTS, SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean
from jaxrl.types import TrainState

# What a decoder trains on here; the table over every algorithm is in test_algorithm_table.
HELD = {"rollouts", "trainer_logps", "sampler_logps", "ref_logps", "greedy_correct", "base_samples", "reference_model"}
TABLE = {name: x for name, x in ALGORITHMS.items() if x.needs <= HELD and x.policy} | {
    "pass_at_k_training": Algorithm(advantage=PassKTraining(k=2)),  # at k = n, as the recipe has it here, all is 0
    "dr_grpo": Algorithm(advantage=Centre(), weights=SequenceMeanTokenSumNorm(length=5)),
    "mixed_groups_only": Algorithm(keep=Mixed(), truncated="mask"),
    "hard_prompts": Algorithm(keep=SolveRate(max=0.5), weights=SequenceMeanTokenMean(over="prompts"), no_kept="skip"),
    "filter_after_sampling": Algorithm(keep=KeepGreedyFails(), weights=TokenMean(over="all"), epochs=2),
    "forward_nll_sequence": Algorithm(
        prefilter=SampleGreedyFails(),
        regularisers=((0.1, Kl(scope="sequence", estimator="nll", prompts="kept", source="correct")),),
        minibatches=2,
    ),
    "reverse_kl": Algorithm(regularisers=((0.1, Kl(direction="reverse", estimator="k2")),)),
    "sampler_logps": Algorithm(
        old_logps=Sampler(), minibatches=2, regularisers=((0.1, Kl(direction="reverse", estimator="k2")),)
    ),
    "token_tis": Algorithm(
        old_logps=Tis(cap=1.5), prefilter=SampleGreedyFails(), kept_first=True, minibatches=2, truncated="mask"
    ),
    "both_kls": Algorithm(regularisers=((0.1, Kl(samples=2)), (0.1, Kl(estimator="k3")), (0.0, Kl(samples=9)))),
}
READY = quick_jit(prepare, static_argnums=0)
UPDATE = quick_jit(update, static_argnames=("tx", "temperature", "microbatch"))
TX = make_optimiser(Optimiser(type="sgd", lr=1e-2), total=100)
GREEDY = [True, False, False, True]


def collected(algorithm, model, reference, greedy=GREEDY):
    """Four prompts, two samples solved at different rates, as the collector would grade them."""
    reward = [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    lengths = [[3, 2, 4, 3], [2, 3, 4, 1], [4, 4, 2, 2], [1, 2, 3, 4]]
    base = [[3, 2, 1, 4], [4, 5, 2, 2], [2, 3, 3, 3], [1, 1, 2, 5]]
    graded = prefiltered(algorithm, graded_of(reward, lengths, greedy=greedy, base_lengths=base))
    graded = scored(model, graded, reference if "ref_logps" in algorithm.needs else None)
    if "base_samples" not in algorithm.needs:
        graded = dataclasses.replace(graded, base=None, base_correct=None)
    if "sampler_logps" in algorithm.needs:
        off = np.random.default_rng(3).normal(size=graded.old_logps.shape) * 0.3  # the sampler is another program
        sampled = jnp.where(graded.rollouts.rows.mask(), graded.old_logps + jnp.asarray(off, float), 0)
        graded = dataclasses.replace(graded, rollouts=dataclasses.replace(graded.rollouts, logps=sampled))
    if "trainer_logps" not in algorithm.needs:
        graded = dataclasses.replace(graded, old_logps=None)
    return graded


@pytest.fixture(scope="module")
def models():
    return tiny_model(0), tiny_model(1)


# programs of their own, for what other files work by hand
SLOW = (
    "reinforce",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "dapo",
    "gspo",
    "psr",
    "nsr",
    "w_reinforce",
    "pkpo",
    "pass_at_k_training",
    "sampler_logps",
    "token_tis",
    "both_kls",
    "forward_nll_sequence",
    "reverse_kl",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TABLE])
def test_recipe_trains_with_finite_numbers_and_fixed_shapes(name, models):
    algorithm, (model, reference) = TABLE[name], models
    reference_or_none = reference if "reference_model" in algorithm.needs else None
    state = TrainState(jnp.zeros((), jnp.int32), model, TX.init(model), keys.root(0))
    shapes = set()
    for greedy in (GREEDY, [True] * 4, [False] * 4):
        graded = collected(algorithm, state.model, reference, greedy)
        batches = READY(algorithm, graded)
        assert len(batches) == algorithm.minibatches == len(applied(algorithm, kept(algorithm, graded)))
        shapes |= {str(jax.tree.map(jnp.shape, terms)) for terms in batches}
        for terms in batches * algorithm.epochs:
            state, metrics = UPDATE(state, terms, reference_or_none, tx=TX, temperature=1.0, microbatch=3)
            numbers = [metrics[k].value for k in metrics] + list(jax.tree.leaves(state.model))
            assert all(np.isfinite(x).all() for x in numbers)
    assert len(shapes) == 1
    assert np.abs(np.asarray(state.model.embed[...]) - np.asarray(model.embed[...])).max() > 0


@pytest.mark.parametrize("name", TABLE)
def test_filtered_prompts_have_no_policy_gradient_and_weights_are_a_mean(name, models):
    algorithm = TABLE[name]
    graded = collected(algorithm, *models)
    keep = np.asarray(kept(algorithm, graded))
    parts = READY(algorithm, graded)
    weight = np.concatenate([np.asarray(t[0].batch.weight).sum(1) for t in parts])
    order = np.argsort(~keep, stable=True) if algorithm.kept_first else np.arange(4)
    dropped = ~keep[order]
    advantage = np.concatenate([np.abs(t[0].batch.advantage).sum(1) for t in parts])
    assert (advantage.reshape(4, 4)[dropped] == 0).all()
    assert (weight.reshape(4, 4)[dropped] == 0).all()
    assert (weight.reshape(4, 4)[~dropped] > 0).any() == keep.any()


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_hashable_comparable_and_printable(name):
    algorithm = TABLE[name]
    again = dataclasses.replace(algorithm)
    assert (algorithm, hash(algorithm)) == (again, hash(again))
    assert type(algorithm.loss).__name__ in repr(algorithm)
    json.dumps(dataclasses.asdict(algorithm))
    assert algorithm.needs <= NEEDS


def test_recipes_need_what_they_use_and_no_more():
    scored = {"rollouts", "trainer_logps"}
    assert ALGORITHMS["grpo"].needs == scored
    assert ALGORITHMS["filter_only"].needs == scored | {"greedy_correct"}
    assert ALGORITHMS["fkl_only"].needs == scored | {"base_samples", "reference_model"}
    assert ALGORITHMS["self"].needs == scored | {"greedy_correct", "base_samples", "reference_model"}
    assert ALGORITHMS["self"].base_samples == 4
    assert ALGORITHMS["self_released_code"].needs == scored | {"greedy_correct"}
    assert Algorithm(regularisers=((0.1, Kl(direction="reverse", estimator="k2")),)).needs == scored | {"ref_logps"}
    assert Algorithm(regularisers=((0.1, Kl(estimator="nll")),)).needs == scored | {"base_samples"}
    assert Algorithm(old_logps=Sampler()).needs == {"rollouts", "sampler_logps"}
    assert Algorithm(old_logps=Tis()).needs == scored | {"sampler_logps"}


def test_regulariser_at_coefficient_zero_is_not_built(models):
    algorithm = dataclasses.replace(ALGORITHMS["fkl_only"], regularisers=((0.0, Kl()),))
    assert algorithm.needs == {"rollouts", "trainer_logps"}
    assert algorithm.base_samples == 0
    (terms,) = prepare(algorithm, collected(algorithm, *models))
    assert len(terms) == 1


def test_missing_inputs_are_named(models):
    graded = collected(ALGORITHMS["grpo"], *models)
    with pytest.raises(ValueError, match="needs base_samples, which"):
        prepare(ALGORITHMS["self"], graded)
    with pytest.raises(ValueError, match="needs ref_logps, which"):
        prepare(TABLE["reverse_kl"], graded)
    with pytest.raises(ValueError, match="needs trainer_logps, which"):
        prepare(TABLE["token_tis"], dataclasses.replace(graded, old_logps=None))
    short = collected(ALGORITHMS["fkl_only"], *models)
    with pytest.raises(ValueError, match="needs base_samples"):
        prepare(Algorithm(regularisers=((0.1, Kl(samples=5)),)), short)


def test_released_code_fills_minibatches_with_survivors_and_keeps_the_full_denominator(models):
    """Two mini-batches of two prompts: K survivors scale a step by K/2, and none skips it."""
    algorithm = ALGORITHMS["self_released_code"]
    for greedy, sums, steps in (
        ([True, False, False, True], [1, 0], [True, False]),
        ([False, True, False, False], [1, 0.5], [True, True]),
        ([True, True, True, False], [0.5, 0], [True, False]),
        ([True] * 4, [0, 0], [False, False]),
    ):
        graded = collected(algorithm, *models, greedy)
        parts = prepare(algorithm, graded)
        assert [float(t[0].batch.weight.sum()) for t in parts] == pytest.approx(sums)
        assert applied(algorithm, kept(algorithm, graded)).tolist() == steps


def test_without_survivors_the_paper_still_steps_on_its_forward_kl(models):
    graded = collected(ALGORITHMS["self"], *models, [True] * 4)
    assert applied(ALGORITHMS["self"], kept(ALGORITHMS["self"], graded)).tolist() == [True]
    ((policy, forward),) = prepare(ALGORITHMS["self"], graded)
    assert float(policy.batch.weight.sum()) == 0
    assert float(forward.batch.weight.sum()) == pytest.approx(1e-4)


def test_registries_hold_each_piece_under_its_tag():
    for pieces in (PREFILTERS, FILTERS, ADVANTAGES, WEIGHTS, LOSSES, OLD_LOGPS, REGULARISERS):
        assert all(cls.tag == tag and dataclasses.is_dataclass(cls) for tag, cls in pieces.items())
    assert {"all", "greedy_fails", "greedy_succeeds", "random", "matched"} == set(PREFILTERS)
    assert {"trainer", "sampler", "tis"} == set(OLD_LOGPS)
    assert isinstance(LOSSES["nll"](), Nll)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "algorithm.epochs"),
        ({"minibatches": 0}, "algorithm.minibatches"),
        ({"truncated": "drop"}, "expected one of keep, mask"),
        ({"advantage": Gae()}, "algorithm.critic: gae needs the values of a critic, and none is configured"),
        ({"critic": Critic()}, "asks no critic for values"),
        ({"loss": NoPolicy()}, "leaves nothing to train on"),
        ({"loss": NoPolicy(), "regularisers": ((1.0, Imitation()),), "keep": Mixed()}, "loss: none has none"),
        ({"loss": NoPolicy(), "regularisers": ((1.0, Imitation()),), "no_kept": "skip"}, "would never take a step"),
        ({"refill": Refill()}, "nothing to refill"),
        ({"refill": Refill(), "keep": KeepMatched(run="runs/other")}, "cannot be refilled"),
        ({"prefilter": SampleMatched(run="a"), "keep": KeepMatched(run="b")}, "both match a run"),
        ({"shaping": ((-1.0, Overlong(limit=4, cache=1)),)}, "algorithm.shaping.coef"),
        ({"no_kept": "skipp"}, "did you mean 'skip'"),
        ({"regularisers": ((-0.1, Kl()),)}, "coef"),
        ({"prefilter": SampleGreedyFails(), "weights": TokenMean(over="all")}, "before they are sampled"),
    ],
)
def test_unusable_recipes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Algorithm(**fields)
