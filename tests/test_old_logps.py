"""Old log-probs by the trainer, by the sampler, and with truncated importance weights; mismatch metrics."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import PROMPT, graded_of

from jaxrl.config import from_tree, to_tree
from jaxrl.errors import UsageError
from jaxrl.rl.algorithms import Algorithm, prepare
from jaxrl.rl.metrics import sampler_mismatch
from jaxrl.rl.old_logps import OLD_LOGPS, Sampler, Tis, Trainer
from jaxrl.rl.weights import SequenceMeanTokenSum
from jaxrl.types import STOP_LENGTH

# Two responses of three and two tokens to one prompt; advantages of the z-score are +-1/sqrt(2).
TRAINED = [[-1.0, -2.0, -0.5], [-1.5, -1.0, 0.0]]
DIFFERENCE = [[0.0, math.log(1.5), math.log(4.0)], [math.log(0.5), -50.0, 0.0]]  # trainer minus sampler
FACTOR = [[1.0, 1.5, 2.0], [0.5, math.exp(-20), 0.0]]  # at cap 2; the last is off its row
ADVANTAGE = 1 / math.sqrt(2)


def padded(values):
    """Response columns behind those of the prompt."""
    return jnp.pad(jnp.asarray(values, float), [(0, 0), (PROMPT, 0)])[None]


def worked(difference=DIFFERENCE):
    """The graded batch above, with the log-probs of both programs."""
    graded = graded_of([[1.0, 0.0]], [[3, 2]])
    rollouts = dataclasses.replace(graded.rollouts, logps=padded(TRAINED) - padded(difference))
    return dataclasses.replace(graded, rollouts=rollouts, old_logps=padded(TRAINED))


def policy(piece, graded, **changes):
    """The policy term's batch and loss."""
    ((term,),) = prepare(Algorithm(old_logps=piece, **changes), graded)
    return term.batch, term.loss


def gradient(batch, loss, logps):
    """Of the step's loss by each log-prob."""
    return jax.grad(lambda x: jnp.sum(batch.weight * jax.vmap(loss)(x, batch)))(logps)


@pytest.mark.x64
@pytest.mark.parametrize(("weights", "unit"), [({}, 1 / 5), ({"weights": SequenceMeanTokenSum()}, 1 / 2)])
def test_token_tis_weighs_the_worked_tokens_and_leaves_the_normaliser(x64, weights, unit):
    batch, _ = policy(Tis(cap=2.0), worked(), **weights)
    np.testing.assert_allclose(batch.weight[:, PROMPT:], np.multiply(FACTOR, unit), rtol=1e-12, atol=0)
    np.testing.assert_array_equal(batch.old_logps, padded(TRAINED)[0])
    assert (np.asarray(batch.weight) >= 0).all()
    assert batch.weight.max() <= 2 * unit


@pytest.mark.x64
def test_the_first_gradient_is_the_one_worked_by_hand(x64):
    """At the trainer's own log-probs: -weight A under the trainer, times the capped or the clipped ratio otherwise."""
    graded = worked()
    at = padded(TRAINED)[0]
    mask = np.asarray([[1, 1, 1], [1, 1, 0]])
    base = -ADVANTAGE / 5 * np.asarray([[1.0], [-1.0]]) * mask
    # A > 0: the clip at 1.2 stops ratios 1.5 and 4. A < 0: it stops 0.5 and exp(-50), below 0.8
    clipped = np.asarray([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    for piece, factor in ((Trainer(), mask), (Tis(cap=2.0), np.asarray(FACTOR)), (Sampler(), clipped)):
        got = gradient(*policy(piece, graded), at)
        np.testing.assert_allclose(got[:, PROMPT:], base * factor, rtol=1e-5, atol=1e-15)  # the z-score's eps is 1e-6
        np.testing.assert_array_equal(got[:, :PROMPT], 0)


@pytest.mark.x64
def test_where_both_programs_agree_all_pieces_are_one(x64):
    graded = worked(np.zeros((2, 3)))
    want = policy(Trainer(), graded)
    for piece in (Tis(), Sampler()):
        got = policy(piece, graded)
        for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.x64
def test_the_sampler_s_log_probs_need_none_of_the_trainer(x64):
    graded = dataclasses.replace(worked(), old_logps=None)
    batch, _ = policy(Sampler(), graded)
    np.testing.assert_array_equal(batch.old_logps, graded.rollouts.logps[0])
    for piece in (Trainer(), Tis()):
        with pytest.raises(ValueError, match="needs trainer_logps, which the graded rollouts do not hold"):
            prepare(Algorithm(old_logps=piece), graded)


@pytest.mark.x64
def test_tokens_that_do_not_count_keep_no_weight_and_no_overflow(x64):
    """A masked response may hold any difference; one that counts and is no number shows in the loss."""
    graded = worked([[0.0, 0.0, 0.0], [-1e4, np.inf, 0.0]])
    stop = jnp.asarray([[0, STOP_LENGTH]], jnp.int32)
    graded = dataclasses.replace(graded, rollouts=dataclasses.replace(graded.rollouts, stop=stop))
    batch, loss = policy(Tis(), graded, truncated="mask")
    assert np.asarray(batch.weight[1] == 0).all()
    assert np.isfinite(gradient(batch, loss, graded.old_logps[0])).all()
    batch, _ = policy(Tis(), worked([[0.0, np.nan, 0.0], [0.0, 0.0, 0.0]]))
    assert np.isnan(batch.weight[0, PROMPT + 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tis(cap=0.0), r"algorithm\.old_logps\.cap: expected a number above 0, got 0"),
        (lambda: Tis(cap=math.inf), r"algorithm\.old_logps\.cap: expected a number above 0, got inf"),
        (lambda: Tis(cap=math.nan), r"algorithm\.old_logps\.cap"),
        (lambda: Sampler(max_gap=-1.0), r"algorithm\.old_logps\.max_gap: expected a number at least 0"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


CONFIG = {"model": {"base": "msa0"}, "task": {"type": "msa0"}, "optimiser": {"lr": 1e-3}, "steps": 1}


def test_a_config_declares_whose_log_probs_are_old():
    for tag, kind in OLD_LOGPS.items():
        x = from_tree(CONFIG | {"algorithm": {"name": "grpo", "old_logps": {"type": tag}}})
        assert x.algorithm.old_logps == kind()
        assert from_tree(to_tree(x)) == x
    assert from_tree(CONFIG | {"algorithm": "grpo"}).algorithm.old_logps == Trainer()
    for piece, message in (
        ({"type": "tis", "cap": 0}, r"algorithm\.old_logps\.cap: expected a number above 0"),
        ({"type": "sampler", "cap": 2.0}, "unknown key"),
        ({"type": "traner"}, "did you mean 'trainer'"),
    ):
        with pytest.raises(UsageError, match=message):
            from_tree(CONFIG | {"algorithm": {"name": "grpo", "old_logps": piece}})


# ---- how far apart the two are


@pytest.mark.x64
def test_mismatch_is_measured_before_any_cap(x64):
    graded = worked([[0.0, math.log(1.5), math.log(4.0)], [math.log(0.5), 0.25, 9.0]])
    mask = graded.rollouts.rows.mask()
    got = sampler_mismatch(graded.rollouts.logps, graded.old_logps, mask, cap=2.0)
    d = np.asarray([0.0, math.log(1.5), math.log(4.0), math.log(0.5), 0.25])
    p = np.exp(np.asarray([-1.0, -2.0, -0.5, -1.5, -1.0]))
    w = np.minimum(np.exp(d), 2)
    assert got["mean"].value == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert float(got["max"]) == pytest.approx(math.log(4.0), rel=1e-12)
    assert got["ratio"].value == pytest.approx(np.exp(d).mean(), rel=1e-12)
    assert got["capped"].value == pytest.approx(1 / 5)
    assert float(got["ess"]) == pytest.approx(w.sum() ** 2 / (w**2).sum() / 5, rel=1e-12)
    assert float(got["correlation"]) == pytest.approx(np.corrcoef(p * np.exp(-d), p)[0, 1], rel=1e-12)


@pytest.mark.x64
def test_two_programs_that_agree_show_no_mismatch_and_nothing_sampled_shows_no_nan(x64):
    graded = worked(np.zeros((2, 3)))
    mask = graded.rollouts.rows.mask()
    got = sampler_mismatch(graded.rollouts.logps, graded.old_logps, mask)
    assert (got["mean"].value, float(got["max"]), got["ratio"].value) == (0, 0, 1)
    assert [float(got[name]) for name in ("ess", "correlation")] == pytest.approx([1, 1], rel=1e-6)
    assert "capped" not in got
    none = sampler_mismatch(graded.rollouts.logps, graded.old_logps, mask & False)
    assert [float(none[name]) for name in ("max", "ess", "correlation")] == [0, 0, 0]
    one = sampler_mismatch(padded([[-1.0] * 3] * 2), padded(TRAINED), mask)
    assert float(one["correlation"]) == pytest.approx(0, abs=1e-3)
