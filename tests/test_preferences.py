"""Direct alignment: printed numbers, importance weights without gradient, pairs of samples and of files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import BASE, RIGHT, collected, only, world
from bigram import BIGRAM, policy
from rl_cases import quick_jit
from tiny_tokenizer import EOS, save_tiny

from jaxrl.data.datasets import DataError
from jaxrl.data.preferences import load_preferences, tokenise_preferences
from jaxrl.data.prompts import load_tokenizer
from jaxrl.data.templates import make_template
from jaxrl.errors import UsageError
from jaxrl.keys import root
from jaxrl.rl.pair_losses import Dpo, Importance, Ipo, Slic, SlicHf, margin
from jaxrl.rl.preferences import PairLoss, Preference
from jaxrl.rl.update import loss_and_grad, refreshed
from jaxrl.types import Batch, Rows, Term

# SCIENCE B.10, beta .1, epsilon 1: (log pi_w, log pi_l, log ref_w, log ref_l), h, w, losses, losses times w.
ROWS = [
    ((-4, -6, -4.5, -5), 1.5, 0.606531, (0.620957, 12.25, 0.85), (0.376629, 7.430001, 0.515551)),
    ((-8, -7, -7, -7.5), -1.5, 0.606531, (0.770957, 42.25, 1.15), (0.467609, 25.625920, 0.697510)),
    ((-3, -9, -5, -6), 5.0, 0.367879, (0.474077, 0.0, 0.5), (0.174403, 0.0, 0.183940)),
    ((-2, -3, -4, -4.5), 0.5, 7.389056, (0.668460, 20.25, 0.95), (4.939286, 149.628386, 7.019603)),
]
OBJECTIVES = (Dpo(beta=0.1), Ipo(beta=0.1), Slic(beta=0.1))


@dataclasses.dataclass(frozen=True)
class Told(type(BIGRAM)):
    """A scorer of one-token responses whose log-prob is the model's entry for the row."""

    def __call__(self, model, rows, *, temperature=1.0):
        return jnp.where(rows.mask(), model[:, None], 0)


def told(rows, objective, importance=None):
    """Printed pairs as a batch, and the policy's log-probs as a model."""
    numbers = jnp.asarray([row[0] for row in rows], float)
    m = len(rows)
    shape = (m, 2)
    tokens = Rows(jnp.zeros((m, 2, 2), jnp.int32), jnp.ones(shape, jnp.int32), jnp.full(shape, 2, jnp.int32))
    ref = jnp.zeros((m, 2, 2)).at[:, :, 1].set(numbers[:, 2:])
    weight = jnp.zeros((m, 2, 2)).at[:, 0, 1].set(1 / m)
    batch = Batch(tokens, jnp.zeros_like(weight), ref, weight, ref)
    return numbers[:, :2].reshape(-1), Term(batch, PairLoss(objective=objective, importance=importance))


def loss_of(model, term):
    (term,), metrics = refreshed(model, (term,), None, temperature=1.0, score=Told())
    losses, gradient = loss_and_grad(model, (term,), None, temperature=1.0, score=Told())
    return float(losses[0]), np.asarray(gradient).reshape(-1, 2), {name: m.value for name, m in metrics.items()}


@pytest.mark.x64
@pytest.mark.parametrize("row", ROWS, ids=range(4))
def test_the_worked_pairs(x64, row):
    numbers, h, w, plain, weighted = row
    assert float(margin(*numbers)) == pytest.approx(h)
    for objective, a, b in zip(OBJECTIVES, plain, weighted, strict=True):
        model, term = told([row], objective)
        assert loss_of(model, term)[0] == pytest.approx(a, abs=1e-6)
        model, term = told([row], objective, Importance(clip=1.0))
        found, _, metrics = loss_of(model, term)
        assert found == pytest.approx(b, abs=1e-6)
        assert metrics["pair/weight"] == pytest.approx(w, abs=1e-6)
        assert metrics["pair/margin"] == pytest.approx(h)
        assert metrics["pair/clipped"] == float(w > 7)


@pytest.mark.x64
def test_means_of_the_worked_pairs_effective_sample_size_and_self_normalisation(x64):
    for objective, plain, weighted in zip(
        OBJECTIVES, (0.621997, 18.166667, 0.833333), (0.339547, 11.018640, 0.465667), strict=True
    ):
        assert loss_of(*told(ROWS[:3], objective))[0] == pytest.approx(plain, abs=1e-6)
        assert loss_of(*told(ROWS[:3], objective, Importance(clip=1.0)))[0] == pytest.approx(weighted, abs=1e-6)
    found, _, metrics = loss_of(*told(ROWS[:3], Dpo(beta=0.1), Importance(clip=1.0, self_normalise=True)))
    assert found == pytest.approx(0.644326, abs=1e-6)
    assert metrics["pair/ess"] * 3 == pytest.approx(2.869235, abs=1e-6)


@pytest.mark.x64
def test_json_numbers_of_the_worked_pairs(x64, golden):
    names = ("dpo", "ipo", "slic")
    for case in golden["daa_beta0.1_eps1"]:
        if "logpi_w" not in case:
            continue
        row = (tuple(case[k] for k in ("logpi_w", "logpi_l", "logref_w", "logref_l")),)
        for name, objective in zip(names, OBJECTIVES, strict=True):
            assert loss_of(*told([row], objective))[0] == pytest.approx(case[name], abs=1e-8, rel=1e-8)
            found, _, metrics = loss_of(*told([row], objective, Importance(clip=1.0)))
            assert found == pytest.approx(case[f"is_{name}"], abs=1e-8, rel=1e-8)
        assert metrics["pair/weight"] == pytest.approx(case["w"], abs=1e-8, rel=1e-8)


@pytest.mark.x64
def test_the_gradient_on_the_chosen_response_is_negative_and_leaves_the_ratio_alone(x64):
    """Through the ratio it would be +.348573, and push the chosen response down."""
    for objective, plain, weighted in zip(
        OBJECTIVES, (-0.046257, -7, -0.1), (-0.028056, -4.245715, -0.060653), strict=True
    ):
        assert loss_of(*told(ROWS[:1], objective))[1][0, 0] == pytest.approx(plain, abs=1e-6)
        chosen = loss_of(*told(ROWS[:1], objective, Importance(clip=1.0)))[1][0, 0]
        assert chosen < 0
        assert chosen == pytest.approx(weighted, abs=1e-6)
    (w, l, rw, rl) = ROWS[0][0]
    through = jax.grad(lambda x: jnp.exp(x - rw + l - rl) * Dpo(beta=0.1)(x, float(l), rw, rl))(float(w))
    assert float(through) == pytest.approx(0.348573, abs=1e-6)


@pytest.mark.x64
def test_each_response_may_be_clipped_on_its_own(x64):
    _, _, metrics = loss_of(*told(ROWS[2:3], Dpo(), Importance(clip=1.0, per="response")))
    assert metrics["pair/weight"] == pytest.approx(0.135335, abs=1e-6)
    assert metrics["pair/clipped"] == 1


@pytest.mark.x64
def test_supplied_log_probs_of_the_data_policy_take_the_reference_s_place_in_the_ratio_alone(x64):
    model, term = told(ROWS[:1], Dpo(beta=0.1), Importance(clip=1.0))
    plain = loss_of(model, told(ROWS[:1], Dpo(beta=0.1))[1])[0]
    moved = dataclasses.replace(term, batch=dataclasses.replace(term.batch, old_logps=term.batch.old_logps - 0.25))
    found, _, metrics = loss_of(model, moved)
    assert metrics["pair/weight"] == pytest.approx(np.exp(0.0), abs=1e-9)  # -.5 + 2 * .25
    assert found == pytest.approx(plain)


def test_the_first_slic_regularises_by_the_chosen_response():
    objective = SlicHf(delta=1.0, weight=0.5)
    assert float(objective(-2.0, -3.0, 0.0, 0.0)) == pytest.approx(0.0 + 1.0)
    assert float(objective(-3.0, -2.5, 0.0, 0.0)) == pytest.approx(1.5 + 1.5)


def test_pairs_are_the_first_correct_against_the_first_wrong_samples():
    model, reference = world()
    piece = Preference(pairs=3, samples=8)
    graded = collected(only(piece), model, reference)
    right = np.stack([np.arange(8) % 5 == 2, RIGHT[1], RIGHT[2], np.ones(8, bool)])
    graded = dataclasses.replace(graded, base_correct=jnp.asarray(right))
    found = piece.of(graded)
    assert np.asarray(found.valid).reshape(4, 3).tolist()[0] == [True, True, False]  # two correct ones
    assert not np.asarray(found.valid).reshape(4, 3)[3].any()  # none is wrong
    tokens, base = np.asarray(found.rows.tokens).reshape(4, 3, 2, -1), np.asarray(graded.base.rows.tokens)
    np.testing.assert_array_equal(tokens[0, 0], base[0, [2, 0]])
    np.testing.assert_array_equal(tokens[0, 1], base[0, [7, 1]])
    lengths = np.asarray(found.rows.length).reshape(4, 3, 2)
    assert lengths[0, 0].tolist() == [BASE[0, 2] + 2, BASE[0, 0] + 2]
    assert piece.metrics(graded)["pair/filled"].value == pytest.approx(np.asarray(found.valid).mean())


def test_an_empty_response_is_in_no_pair():
    model, reference = world()
    piece = Preference(pairs=8, samples=8)
    graded = collected(only(piece), model, reference)
    before = int(piece.of(graded).valid[:8].sum())
    rows = graded.base.rows
    empty = dataclasses.replace(rows, length=rows.length.at[0].set(rows.start[0]).at[0, 0].set(rows.start[0, 0] + 1))
    found = piece.of(dataclasses.replace(graded, base=dataclasses.replace(graded.base, rows=empty)))
    assert before > 0
    assert int(np.asarray(found.valid)[:8].sum()) == 0  # one response is left, which cannot be both


@pytest.mark.x64
def test_places_without_a_pair_change_nothing(x64):
    model, reference = world()
    piece = Preference(source="file", importance=Importance(self_normalise=True))
    graded = collected(only(piece), model, reference)

    def gradient(pairs):
        term = piece(1.0, dataclasses.replace(graded, pairs=pairs), None, None)
        (term,), _ = refreshed(model, (term,), reference, temperature=1.0, score=BIGRAM)
        return loss_and_grad(model, (term,), reference, temperature=1.0, score=BIGRAM)

    gradient = quick_jit(gradient)
    pairs = graded.pairs
    assert not np.asarray(pairs.valid).all()
    wild = dataclasses.replace(pairs, ref_logps=jnp.where(pairs.valid[:, None, None], pairs.ref_logps, 50.0))
    for a, b in zip(jax.tree.leaves(gradient(pairs)), jax.tree.leaves(gradient(wild)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.x64
@pytest.mark.parametrize("objective", [*OBJECTIVES, SlicHf()], ids=lambda o: o.tag)
def test_steps_raise_the_margin(x64, objective):
    model, reference = policy(0), {"base": policy(0)}
    piece = Preference(source="file", objective=objective)
    graded = collected(only(piece), model, reference)
    term = piece(1.0, graded, None, None)

    @quick_jit
    def step(model):
        _, metrics = refreshed(model, (term,), reference, temperature=1.0, score=BIGRAM)
        _, gradient = loss_and_grad(model, (term,), reference, temperature=1.0, score=BIGRAM)
        return jax.tree.map(lambda p, g: p - 0.02 * g, model, gradient), metrics["pair/margin"]

    margins = []
    for _ in range(10):
        model, found = step(model)
        margins.append(found.value)
    assert margins[0] == pytest.approx(0, abs=1e-12)
    assert margins[-1] > 0.01


# ---------------------------------------------------------------- files


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


def test_a_file_becomes_pairs_that_end_in_the_stop_id(tmp_path):
    tokenizer = load_tokenizer(save_tiny(tmp_path / "tokenizer"))
    file = written(tmp_path / "p.jsonl", GOOD, GOOD | {"chosen": "2 = 2", "chosen_logp": None})
    pool = tokenise_preferences(
        load_preferences(file), tokenizer, make_template("plain"), max_prompt=64, max_response=16, stop_id=EOS
    )
    assert pool.rows.tokens.shape[:2] == (2, 2)
    ends = np.take_along_axis(pool.rows.tokens, pool.rows.length[..., None] - 1, axis=-1)
    assert (ends == EOS).all()
    assert (pool.rows.start[:, 0] == pool.rows.start[:, 1]).all()
    rows, data = pool.take(root(0), 0, 2)
    assert data is None
    assert {len(rows.start), len(pool)} == {2}
    again, _ = pool.take(root(0), 0, 2)
    np.testing.assert_array_equal(rows.tokens, again.tokens)
    with pytest.raises(UsageError, match="cannot be taken from 2"):
        pool.take(root(0), 0, 3)
    with pytest.raises(DataError, match=r"line 2: field 'chosen' has .* task.max_preferred = 2"):
        tokenise_preferences(
            load_preferences(file), tokenizer, make_template("plain"), max_prompt=64, max_response=2, stop_id=EOS
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"rejected": "2"}, "line 2: chosen and rejected are the same text"),
        (GOOD | {"chosen": "  "}, "line 2: field 'chosen' is empty"),
        ({"prompt": "x", "chosen": "y"}, "line 2: field 'rejected' must be text, got None"),
        (GOOD | {"chosen_logp": -1.0, "rejected_logp": 0.5}, "line 1: field 'chosen_logp' must be a log-prob"),
        (GOOD | {"id": "a"}, "line 2: id 'a' occurs in"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    first = GOOD | ({"id": "a"} if "id" in row else {})
    with pytest.raises(DataError, match=message):
        load_preferences(written(tmp_path / "p.jsonl", first, row))


def test_log_probs_of_the_data_policy_are_needed_in_all_rows_or_none(tmp_path):
    scored = GOOD | {"chosen_logp": -1.0, "rejected_logp": -2.5}
    assert load_preferences(written(tmp_path / "p.jsonl", scored))[0].logps == (-1.0, -2.5)
    with pytest.raises(DataError, match="line 2: field 'chosen_logp'"):
        load_preferences(written(tmp_path / "q.jsonl", scored, GOOD))
    with pytest.raises(DataError, match="holds no preferences"):
        load_preferences(written(tmp_path / "r.jsonl"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dpo(beta=0.0), "objective.beta"),
        (lambda: Importance(clip=-1.0), "importance.clip"),
        (lambda: Importance(per="token"), "importance.per"),
        (lambda: Preference(source="bas"), "did you mean 'base'"),
        (lambda: Preference(samples=1), "preference.samples"),
    ],
)
def test_values_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
