"""Printed numbers of SCIENCE.md that no other file checks, and its identities on sampled and trained models.

Half a unit of the last printed digit is the tolerance, at tightest 1e-6; numbers of ``golden.json`` hold to 1e-8.
"""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from influence_world import jitted_logps, small_model, some_rows
from model_cases import table_model, token_kl
from rl_cases import b8, graded_of, prefiltered, quick_jit

from jaxrl import keys
from jaxrl.data.synthetic import EOS, Msa0
from jaxrl.evaluation.sequence_kl import sequence_kl
from jaxrl.influence.audit import advantage_bound
from jaxrl.influence.changes import change_metrics, telescoping_error
from jaxrl.influence.distribution import perplexity
from jaxrl.influence.lines import probe_line
from jaxrl.influence.probe import build_probe
from jaxrl.influence.structure import structure
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init_model
from jaxrl.models.logps import token_logps
from jaxrl.rl.advantages import Centre, GroupZScore
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.filters import SampleGreedyFails
from jaxrl.rl.losses import Nll
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.weights import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from jaxrl.sampling.generate import generate
from jaxrl.sampling.strategies import Temperature
from jaxrl.types import Batch, Rows

PRINTED = 1e-6
SHAPED = [1, -0.5, -1, -1, -0.5, -1, -1, -0.5]  # B.1: one right, three wrong with a box, four without


def advantage(reward, piece):
    return np.asarray(piece(graded_of([reward], [[1] * len(reward)]))[0, :, 0])


# --- B.0, B.1, C.0: advantages ----------------------------------------------------------------


@pytest.mark.x64
def test_centred_advantages_of_one_correct_response_in_eight(x64):
    """B.1, Dr. GRPO."""
    np.testing.assert_allclose(advantage([1] + [0] * 7, Centre()), [0.875] + [-0.125] * 7, rtol=0, atol=1e-12)


@pytest.mark.x64
def test_mean_and_deviation_behind_the_shaped_group(x64):
    """B.1: mean -.5625, sd .678101, so that three wrong answers get a positive advantage."""
    centred, scored = advantage(SHAPED, Centre()), advantage(SHAPED, GroupZScore(eps=0.0))
    np.testing.assert_allclose(np.asarray(SHAPED) - centred, -0.5625, rtol=0, atol=1e-12)
    np.testing.assert_allclose(centred / scored, 0.678101, rtol=0, atol=PRINTED)
    assert [i for i, a in enumerate(scored) if a > 0 and SHAPED[i] < 0] == [1, 4, 7]


@pytest.mark.x64
def test_every_two_valued_reward_has_the_z_scores_of_the_binary_one(x64):
    """B.0: 1/0, 1/-1 and 1/-.5 are one reward to GRPO, up to eps; the shaped one is another."""
    right = np.asarray(SHAPED) == 1
    binary, signed, boxed = (
        advantage(np.where(right, 1.0, low).tolist(), GroupZScore(eps=0.0)) for low in (0.0, -1.0, -0.5)
    )
    np.testing.assert_allclose(signed, binary, rtol=0, atol=1e-12)
    np.testing.assert_allclose(boxed, binary, rtol=0, atol=1e-12)
    assert np.abs(advantage(SHAPED, GroupZScore(eps=0.0)) - binary).max() > 0.1


@pytest.mark.parametrize(("group", "bound"), [(2, 0.707107), (4, 1.5), (8, 2.474874), (16, 3.75), (32, 5.480078)])
def test_the_bounds_constant_is_the_largest_advantage_of_a_group(group, bound):
    """B.1 and C.0."""
    assert advantage_bound(group) == pytest.approx(bound, abs=PRINTED)


# --- B.8: SELF as it is composed --------------------------------------------------------------


def test_the_worked_self_loss_of_a_prefilter_that_never_sampled_the_solved_prompt():
    """B.8 prints -.045455 for kept tokens; dropping before or after sampling must give the same loss."""
    algorithm = Algorithm(prefilter=SampleGreedyFails(), weights=TokenMean(over="kept"))
    graded = prefiltered(algorithm, b8())
    assert not np.asarray(graded.rollouts.rows.mask())[0].any()
    ((term,),) = quick_jit(prepare, static_argnums=0)(algorithm, graded)
    assert float(jnp.sum(term.batch.weight * -term.batch.advantage)) == pytest.approx(-0.045455, abs=PRINTED)


def test_the_named_recipes_hold_the_papers_coefficient_and_samples():
    """B.8: beta 1e-4, four base samples a prompt; the released code has no forward KL at all."""
    ((coef, kl),) = ALGORITHMS["self"].regularisers
    assert (coef, kl.samples, kl.direction, kl.prompts) == (1e-4, 4, "forward", "all")
    assert ALGORITHMS["self_released_code"].regularisers == ()
    assert (ALGORITHMS["grpo_released_code"].loss.dual, ALGORITHMS["grpo"].loss.dual) == (3.0, None)
    for name in ("grpo", "self"):
        piece = ALGORITHMS[name].advantage
        assert (piece, piece.ddof, piece.eps) == (GroupZScore(), 1, 1e-6)


# --- B.9, A21: likelihood of worked responses -------------------------------------------------

WORKED_LOGPS = [[-0.5, -1.0, -0.25], [-2.0, -0.1, 0.0]]
WORKED_MASK = np.asarray([[1, 1, 1], [1, 1, 0]], bool)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("weights", "want"), [(TokenMean(), 0.77), (SequenceMeanTokenMean(), 0.816667), (SequenceMeanTokenSum(), 1.925)]
)
def test_nll_of_the_worked_responses_under_each_aggregation(x64, weights, want):
    """B.9."""
    mask = jnp.asarray(WORKED_MASK)
    rows = Rows(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), jnp.asarray([3, 2]))
    weight = weights(mask[:, None], jnp.ones(2, bool))[:, 0]
    zero = jnp.zeros((2, 3))
    batch = Batch(rows=rows, advantage=zero, old_logps=zero, weight=weight)
    loss = jax.vmap(Nll())(jnp.asarray(WORKED_LOGPS), batch)
    assert float(jnp.sum(weight * loss)) == pytest.approx(want, abs=PRINTED)


def test_perplexities_of_the_worked_responses():
    """B.9: 1.792002 and 2.857651, mean 2.324826, geometric 2.262944."""
    scores, length = np.sum(WORKED_LOGPS, axis=1), WORKED_MASK.sum(axis=1)
    for i, want in enumerate((1.792002, 2.857651)):
        assert perplexity(scores[i : i + 1], length[i : i + 1], [0])["ppl"].value == pytest.approx(want, abs=PRINTED)
    found = perplexity(scores, length, [0, 1])
    assert found["ppl"].value == pytest.approx(2.324826, abs=PRINTED)
    assert found["ppl_geometric"].value == pytest.approx(2.262944, abs=PRINTED)


@pytest.mark.x64
def test_kl_of_the_worked_distributions_at_both_temperatures(x64):
    """B.9: KL(p, q), T^2 KL at T = 2, and KL(q, p) for p = .7/.2/.1 and q = .5/.3/.2."""
    p, q = (table_model(np.log(np.tile(x, (3, 1)))) for x in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2]))
    rows = Rows(jnp.asarray([[0, 1]], jnp.int32), jnp.asarray([1], jnp.int32), jnp.asarray([2], jnp.int32))
    got = [token_kl(p, q, rows), 4 * token_kl(p, q, rows, temperature=2.0), token_kl(q, p, rows)]
    np.testing.assert_allclose([float(x[0, 1]) for x in got], [0.085123, 0.098297, 0.092033], rtol=0, atol=PRINTED)


# --- A.4: the spectrum of the worked kernel ---------------------------------------------------


def test_spectrum_of_the_worked_kernel():
    """A.4 prints the eigenvalues .764910, 2.185682 and 4.049408; trace, ranks and largest share fix all three."""
    eigenvalues = np.array([0.764910, 2.185682, 4.049408])
    found = structure(np.array([[2, -0.5, 0.3], [-0.5, 1, 0.2], [0.3, 0.2, 4]]))
    assert 3 * found["trace"] == pytest.approx(eigenvalues.sum(), abs=PRINTED)
    assert 3 * found["trace"] * found["top_share"] == pytest.approx(eigenvalues.max(), abs=PRINTED)
    assert found["stable"] == pytest.approx(eigenvalues.sum() / eigenvalues.max(), abs=PRINTED)
    assert 9 * found["trace"] ** 2 / found["participation"] == pytest.approx((eigenvalues**2).sum(), abs=1e-5)
    assert found["median_norm"] == pytest.approx(np.sqrt(2))


# --- R1, A2, A3: identities -------------------------------------------------------------------

SMALL = ModelConfig(
    vocab_size=24, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    max_positions=16, init_std=0.6,
)  # fmt: skip
SCORE = jax.jit(token_logps)


def small(seed):
    """A random model, far from uniform; double precision where that is on."""
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"
    return init_model(dataclasses.replace(SMALL, dtype=dtype), keys.root(seed))


@pytest.mark.slow
@pytest.mark.x64
def test_mean_influence_plus_the_enumerated_kl_is_zero_within_three_standard_errors(x64):
    """A3: with the KL of another source, and truncated responses included; without them it must break."""
    base, now, uid = small(6), small(7), np.arange(0, 320, 8)
    drawn = generate(
        base, Msa0().prompts(uid), Temperature(), n=25, key=keys.root(5), max_new_tokens=3, stop_ids=[EOS]
    )  # fmt: skip
    probe = build_probe([(uid, drawn, Msa0().grade(uid, jax.device_get(drawn.rows)))])
    rows = jax.tree.map(jnp.asarray, probe.rows)
    before, after = (np.asarray(SCORE(m, rows)) for m in (base, now))
    exact = sequence_kl(base, now, uid, max_new_tokens=3).value.mean()
    line = probe_line(probe, before, before, after, include_truncated=True)
    se = line["probe/all_sum/se"]
    assert line["probe/all_sum/n"] == 25 * len(uid)
    assert abs(line["probe/all_sum"] + exact) < 3 * se
    assert abs(line["kl/forward_base"] - exact) < 3 * se
    assert 3 * se < 0.2 * exact  # the check has power
    without = probe_line(probe, before, before, after)
    assert without["kl/forward_base"] == line["kl/forward_base"]  # the KL always counts every sample
    assert abs(without["probe/all_sum"] + exact) > 3 * se


def test_measured_changes_telescope_and_their_means_add_up():
    """A2 in float32, on a model that moves step by step; means over one fixed probe add up as its rows do."""
    rows, uid = some_rows(24, prompts=6), np.arange(24) % 6
    correct, length = np.arange(24) % 5 < 2, np.asarray(rows.response_length())
    models = [small_model(dtype="float32")]
    for seed in range(1, 6):
        models.append(jax.tree.map(lambda x, d: x + 0.05 * d, models[-1], small_model(seed, dtype="float32")))
    scores = np.stack([np.asarray(jitted_logps(m, rows)).sum(-1) for m in models])
    steps = scores[1:] - scores[:-1]
    assert telescoping_error(steps, scores[0], scores[-1]) < 1e-4
    assert telescoping_error(np.delete(steps, 2, 0), scores[0], scores[-1]) > 1e-2
    parts = [change_metrics(a, b, length, correct, uid) for a, b in pairwise(scores)]
    whole = change_metrics(scores[0], scores[-1], length, correct, uid)
    for name in ("all_sum", "all_tok", "interference_sum", "interference_tok", "interference_macro_sum"):
        assert sum(p[name].value for p in parts) == pytest.approx(whole[name].value, abs=1e-5)
    squares = sum(p["strength_sum"].value for p in parts)
    assert squares != pytest.approx(whole["strength_sum"].value, rel=0.05)  # a mean square does not telescope
