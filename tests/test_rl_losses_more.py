"""Losses and regularisers beyond the clipped surrogate and the KL: worked numbers, rows, gradients, needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import quick_jit, tiny_model

from jaxrl.models.config import ModelConfig
from jaxrl.models.critic import with_value_head
from jaxrl.models.decoder import abstract_model, build, hidden, logits, param_shapes
from jaxrl.models.passes import plan_passes
from jaxrl.models.scoring import FORWARD, REVERSE, Reverse, StateValues
from jaxrl.rl.divergences import NegativeEntropy, ReverseKl, SquaredChange
from jaxrl.rl.losses import (
    K2,
    K3,
    LOSSES,
    Clip,
    FullKl,
    Nll,
    NoPolicy,
    PolicyGradient,
    SequenceClip,
    ValueLoss,
    weighted_sum,
)
from jaxrl.rl.pieces import NEEDS
from jaxrl.rl.regularisers import REGULARISERS, Entropy, Imitation, Kl, TrustRegion
from jaxrl.rl.update import loss_and_grad
from jaxrl.rl.weights import SequenceMeanTokenMean
from jaxrl.types import Batch, Graded, Rollouts, Rows, Samples

PRINTED = 5e-7  # half a unit of the sixth decimal
POLICY = (Clip(), Clip(dual=3.0), SequenceClip(low=0.2, high=0.2), PolicyGradient())
OTHERS = (Nll(), K2(), K3(), SquaredChange(), SquaredChange(whole=True), ValueLoss(), ValueLoss(clip=None))


@dataclasses.dataclass(frozen=True)
class Given:
    """A scorer whose log-probs, entropies and values are the 'model' itself."""

    at: float | None = None  # the temperature that it must be asked at

    def __call__(self, model, rows, *, temperature=1.0):
        assert self.at is None or temperature == self.at
        return model

    def scores(self, model, rows, *, temperature=1.0):
        return self(model, rows, temperature=temperature), model

    def values(self, model, rows):
        return model


def _value_and_grad(given, batch, *, loss, temperature, at):
    score = Given(at)
    return jax.value_and_grad(lambda x: weighted_sum(x, None, batch, loss, temperature=temperature, score=score))(given)


RUN = quick_jit(_value_and_grad, static_argnames=("loss", "temperature", "at"))


def value_and_grad(loss, given, batch, *, temperature=1.0, at=None):
    """Loss of one term and its gradient by the log-probs (or values) ``given`` float[N, L]."""
    return jax.device_get(RUN(given, batch, loss=loss, temperature=temperature, at=at))


def term_of(piece, graded, *, coef=1.0, mask=None, keep=None):
    term = quick_jit(lambda g, m, k: piece(coef, g, m, k))(graded, mask, keep)
    return dataclasses.replace(term, batch=jax.device_get(term.batch))


def numpy_rows(lengths, width=None):
    """Rows of random tokens, two of them the prompt's, and their mask; with any leading axes."""
    lengths = np.asarray(lengths, np.int32)
    width = 2 + lengths.max() if width is None else width
    tokens = np.random.default_rng(0).integers(0, 7, (*lengths.shape, width)).astype(np.int32)
    rows = Rows(tokens, np.full(lengths.shape, 2, np.int32), lengths + 2)
    t = np.arange(width)
    return rows, (t >= 2) & (t < rows.length[..., None])


def some_batch(seed=0):
    """Log-probs and a batch of three rows that hold a number in every field; the last row weighs nothing."""
    rng = np.random.default_rng(seed)
    rows, mask = numpy_rows([3, 2, 4])
    names = ("advantage", "old_logps", "ref_logps", "returns", "old_values")
    arrays = {name: rng.normal(size=mask.shape) * 0.3 for name in names}
    weight = np.where(mask & np.asarray([[True], [True], [False]]), 1 / 5, 0.0)
    return rng.normal(size=mask.shape) * 0.3, Batch(rows=rows, weight=weight, **arrays)


def poisoned(batch, with_what):
    """Every number of the batch but its weights is another where nothing weighs."""
    numbers = {name: getattr(batch, name) for name in ("advantage", "old_logps", "ref_logps", "returns", "old_values")}
    return dataclasses.replace(batch, **{k: np.where(batch.weight != 0, x, with_what) for k, x in numbers.items()})


def fixed_logits(p):
    """A model of one hidden unit whose next-token distribution is ``p`` after any prefix."""
    config = ModelConfig(
        vocab_size=len(p),
        hidden_size=1,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        tied=False,
        dtype="float64",
    )
    leaves = {name: np.zeros(shape) for name, shape in param_shapes(config).items()}
    leaves |= {"embed": np.full((len(p), 1), 1e4), "norm": np.ones(1), "head": np.log(np.asarray(p))[None]}
    return build(config, jax.tree.map(jnp.asarray, leaves))


def same(got, expected, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


# --- what lies where nothing weighs ------------------------------------------------------------


@pytest.mark.x64
@pytest.mark.parametrize("loss", POLICY + OTHERS, ids=repr)
def test_what_lies_at_weightless_tokens_reaches_no_value_and_no_gradient(x64, loss):
    logps, batch = some_batch()
    expected = value_and_grad(loss, logps, batch)
    assert np.any(expected[1] != 0)
    assert not np.any(np.where(batch.weight != 0, 0, expected[1]))
    for with_what in (np.nan, 1e30, -1e30, np.inf):
        for given in (logps, np.where(batch.weight != 0, logps, with_what)):
            for got, want in zip(value_and_grad(loss, given, poisoned(batch, with_what)), expected, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.x64
@pytest.mark.parametrize("loss", POLICY, ids=repr)
def test_no_advantage_no_gradient(x64, loss):
    logps, batch = some_batch()
    value, grad = value_and_grad(loss, logps, dataclasses.replace(batch, advantage=np.zeros(logps.shape)))
    assert value == 0
    assert not np.any(grad)


@pytest.mark.x64
@pytest.mark.parametrize("loss", POLICY + OTHERS, ids=repr)
def test_a_row_does_not_see_another(x64, loss):
    """With other numbers in all other rows, the first row's gradient is the same."""
    one, other = some_batch(), some_batch(seed=1)
    mixed = jax.tree.map(lambda a, b: np.concatenate([a[:1], b[1:]]), one, other)
    got, expected, others = (value_and_grad(loss, *case)[1] for case in (mixed, one, other))
    assert np.any(expected[0] != 0)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], others[1])


# --- policy losses -----------------------------------------------------------------------------


@pytest.mark.x64
def test_at_ratio_one_all_policy_losses_have_one_gradient(x64):
    """With advantages of whole responses; it is minus the advantage times the weight."""
    logps, batch = some_batch()
    advantage = np.broadcast_to(batch.advantage[:, :1], logps.shape)
    batch = dataclasses.replace(batch, advantage=advantage, old_logps=logps)
    assert np.any(advantage * batch.weight != 0)
    for loss in POLICY:
        grad = value_and_grad(loss, logps, batch)[1]
        np.testing.assert_allclose(grad, -advantage * batch.weight, rtol=0, atol=1e-15)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("loss", "first", "second"),
    [(SequenceClip(low=0.2, high=0.2), 1.1237448, 0.9277435), (SequenceClip(), 1.0004, 0.9997)],
)
def test_one_ratio_a_response_is_the_geometric_mean_of_its_tokens(x64, loss, first, second):
    """Mean log-ratios (.1 + .3 - .05) / 3 and (.25 - .4) / 2 against advantages 2 and -1."""
    logps, batch = some_batch()
    mask = batch.weight != 0
    log_ratio = np.zeros(mask.shape)
    log_ratio[0, 2:5], log_ratio[1, 2:4] = [0.1, 0.3, -0.05], [0.25, -0.4]
    advantage = np.broadcast_to([[2.0], [-1.0], [5.0]], mask.shape)
    batch = dataclasses.replace(batch, advantage=advantage, old_logps=np.where(mask, logps - log_ratio, 7.0))
    each = SequenceMeanTokenMean()(jnp.asarray(mask)[:, None], np.ones(3, bool))[:, 0]
    value, grad = value_and_grad(loss, logps, dataclasses.replace(batch, weight=np.asarray(each)))
    assert float(value) == pytest.approx((-2 * first + second) / 2, abs=1e-7)
    clipped = loss == SequenceClip()  # upwards with a good response, downwards with a bad one: both clips act
    slope = [[0.0], [0.0], [0.0]] if clipped else [[-2 * first / 3], [second / 2], [0.0]]
    np.testing.assert_allclose(grad, np.where(mask, slope, 0) / 2, atol=1e-7)
    assert loss.clip_range == (loss.low, loss.high)


def test_the_absent_policy_term_is_known_by_its_mark_and_has_no_values():
    logps, batch = some_batch()
    assert {tag for tag, cls in LOSSES.items() if not cls.on_rollouts} == {"none"}
    with pytest.raises(TypeError, match="no policy term"):
        NoPolicy().tokens(None, None, batch, temperature=1.0)
    with pytest.raises(TypeError, match="no policy term"):
        NoPolicy()(logps[0], None)


@pytest.mark.parametrize(
    ("cls", "fields"), [(SequenceClip, {"low": 1.1}), (SequenceClip, {"high": -0.1}), (ValueLoss, {"clip": -1})]
)
def test_clips_out_of_range_are_refused(cls, fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))}: expected a number"):
        cls(**fields)


# --- values ------------------------------------------------------------------------------------


def value_case():
    """The worked values, returns and old values of SCIENCE.md B.5, as the first response of three tokens."""
    values, batch = some_batch()
    weight = np.where(np.arange(3)[:, None] == 0, batch.weight, 0) * 5 / 3
    batch.returns[0, 2:5], batch.old_values[0, 2:5], values[0, 2:5] = (
        [0.9705, 0.99, 1.0],
        [0.5, 0.6, 0.8],
        [0.7, 0.6, 0.5],
    )
    return values, dataclasses.replace(batch, weight=weight)


def with_first(values, value):
    values = values.copy()
    values[0, 2] = value
    return values


@pytest.mark.x64
def test_value_loss_is_the_worked_number(x64):
    values, batch = value_case()
    loss, grad = value_and_grad(ValueLoss(), values, batch)
    assert float(loss) == pytest.approx(0.079212, abs=PRINTED)
    np.testing.assert_allclose(grad[0, 3:5], [-0.39 / 3, -0.5 / 3], atol=1e-12)
    plain, _ = value_and_grad(ValueLoss(clip=None), values, batch)
    assert float(plain) == pytest.approx((0.2705**2 + 0.39**2 + 0.5**2) / 6, abs=1e-12)


@pytest.mark.x64
def test_a_value_that_went_its_way_towards_the_return_moves_no_further(x64):
    values, batch = value_case()
    far = with_first(values, 0.75)  # the old one is .5, the return .9705
    assert value_and_grad(ValueLoss(), far, batch)[1][0, 2] == 0
    assert value_and_grad(ValueLoss(clip=None), far, batch)[1][0, 2] < 0
    away = with_first(values, 0.2)
    assert value_and_grad(ValueLoss(), away, batch)[1][0, 2] < 0


def critic():
    model = with_value_head(tiny_model(num_layers=1, vocab_limit=7))
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 0.1), model)


def value_rows():
    tokens = np.random.default_rng(0).integers(0, 7, (4, 8))
    return Rows(*(jnp.asarray(x, jnp.int32) for x in (tokens, [1, 3, 2, 4], [6, 8, 2, 8])))


def by_both(model, rows):
    return [StateValues(score)(model, rows, temperature=0.3) for score in (FORWARD, Reverse(responses=5))]


@pytest.mark.x64
def test_both_scorers_say_the_value_of_the_state_before_a_token(x64):
    """The state before token t has read the tokens before it and not t itself."""
    model, rows = critic(), value_rows()
    both, states = quick_jit(lambda m, r: (by_both(m, r), hidden(m, r.tokens)))(model, rows)
    direct = np.asarray(states) @ np.asarray(model.value[...])
    t = np.arange(8)
    mask = (t >= np.asarray(rows.start)[:, None]) & (t < np.asarray(rows.length)[:, None])
    want = np.where(mask, np.pad(direct[:, :-1], [(0, 0), (1, 0)]), 0)
    for found in both:
        np.testing.assert_allclose(found, want, atol=1e-12)


@pytest.mark.slow
@pytest.mark.x64
def test_gradients_of_values_are_the_same_by_both_scorers(x64):
    weight = np.random.default_rng(1).normal(size=(4, 8))

    def value(model, rows):
        return jnp.stack([jnp.sum(weight * x) for x in by_both(model, rows)])

    jacobian = quick_jit(jax.jacrev(value))(critic(), value_rows())
    assert np.all(np.asarray(jacobian.value[...]) != 0)
    for by in jax.tree.leaves(jacobian):
        np.testing.assert_allclose(by[1], by[0], atol=1e-12 * max(1.0, float(jnp.abs(by).max())))


@pytest.mark.slow
@pytest.mark.x64
def test_values_of_packed_rows_are_those_of_padded_ones(x64):
    model, rows = critic(), value_rows()
    passes = plan_passes(rows, np.arange(4) != 2, width=16)
    part = passes[0]
    got = quick_jit(lambda m, part: part.values(m, part.select(rows)))(model, part)
    live = np.asarray(part.live)
    want = np.asarray(quick_jit(REVERSE.values)(model, rows))[np.asarray(part.index).reshape(-1)[live]]
    assert live.sum() == 3
    np.testing.assert_allclose(np.asarray(got)[live], want, atol=1e-12)


@pytest.mark.x64
@pytest.mark.parametrize("score", [FORWARD, REVERSE])
def test_a_model_without_a_value_head_has_no_values(x64, score):
    with pytest.raises(ValueError, match="expected a model with a value head"):
        jax.eval_shape(score.values, abstract_model(fixed_logits([0.5, 0.5]).config), value_rows())


# --- imitation ---------------------------------------------------------------------------------


ALL_KEPT = np.ones(2, bool)


def some_graded(lengths, **fields):
    """Two prompts' rollouts, and their mask."""
    rows, mask = numpy_rows(lengths)
    n, zeros = mask.shape[:2], np.zeros(mask.shape)
    rollouts = Rollouts(rows, zeros, np.zeros(n, np.int32))
    prompts, right = np.arange(n[0]), np.zeros(n, bool)
    return Graded(rollouts, prompts, np.zeros(n), right, right[:, 0], old_logps=zeros, **fields), mask


def imitated(source="demonstrations"):
    """Two prompts with two samples: those of SCIENCE.md B.9 first, and an empty and a wrong one."""
    samples = Samples(numpy_rows([[3, 2], [0, 1]])[0], np.asarray([[True, True], [True, False]]))
    return some_graded([[1], [1]], **{source: samples})[0]


@pytest.mark.x64
@pytest.mark.parametrize(
    ("source", "scope", "want"),
    [
        ("demonstrations", "token", 0.77),
        ("teacher", "sequence_mean_token_mean", 0.816667),
        ("stream", "sequence", 1.925),
    ],
)
def test_imitation_means_as_worked(x64, source, scope, want):
    """The second prompt's samples count nowhere. At temperature 1, whatever the rollouts'."""
    logps = np.full((4, 5), -9.0)
    logps[0, 2:5], logps[1, 2:4] = [-0.5, -1.0, -0.25], [-2.0, -0.1]
    piece = Imitation(source=source, scope=scope, select="correct", samples=2)
    term = term_of(piece, imitated(source), coef=0.5, keep=ALL_KEPT)
    value, _ = value_and_grad(term.loss, logps, term.batch, temperature=0.5, at=1.0)
    assert float(value) == pytest.approx(want / 2, abs=PRINTED / 2)


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"samples": 2}, [3, 2, 0, 1]),
        ({"samples": 1}, [3, 0]),
        ({"samples": 2, "prompts": "kept"}, [0, 0, 0, 1]),
        ({"samples": 2, "select": "correct"}, [3, 2, 0, 0]),
    ],
)
def test_imitation_takes_the_prompts_and_samples_it_was_told(fields, counted):
    term = term_of(Imitation(**fields), imitated(), keep=np.asarray([False, True]))
    assert (term.batch.weight != 0).sum(-1).tolist() == counted


@pytest.mark.x64
@pytest.mark.parametrize(("score", "temperature", "want"), [(FORWARD, 1.0, 0.085123), (REVERSE, 2.0, 0.098297)])
def test_distillation_and_the_reverse_kl_are_the_worked_numbers(x64, score, temperature, want):
    """p = (.7, .2, .1) of the teacher, q = (.5, .3, .2); distillation whatever the rollouts' temperature.

    The reverse KL is at the rollouts': at 1/2 that of the squares over their sums.
    """
    student, teacher = fixed_logits([0.5, 0.3, 0.2]), fixed_logits([0.7, 0.2, 0.1])
    graded = imitated("teacher")
    graded.teacher.rows.tokens[...] %= 3
    piece = Imitation(source="teacher", estimator="full", temperature=temperature, samples=2)
    soft = term_of(piece, graded, keep=ALL_KEPT)

    def both(student, models, batch):
        found = weighted_sum(student, models, batch, soft.loss, temperature=0.3, score=score)
        base = models["teacher"]
        return found, *(weighted_sum(student, base, batch, ReverseKl(), temperature=t, score=score) for t in (1.0, 0.5))

    p, q = np.asarray([0.49, 0.04, 0.01]) / 0.54, np.asarray([0.25, 0.09, 0.04]) / 0.38
    half = np.sum(q * np.log(q / p))
    got = quick_jit(both)(student, {"base": student, "teacher": teacher}, soft.batch)
    np.testing.assert_allclose(got, [want, 0.092033, half], rtol=0, atol=PRINTED)


def test_imitation_asks_for_its_samples_and_for_who_wrote_them():
    expected = {
        ("base", "nll"): {"base_samples"},
        ("base", "full"): {"base_samples", "reference_model"},
        ("stream", "full"): {"stream_samples", "reference_model"},
        ("teacher", "nll"): {"teacher_samples"},
        ("teacher", "full"): {"teacher_samples", "teacher_model"},
        ("demonstrations", "nll"): {"demonstrations"},
        ("demonstrations", "full"): {"demonstrations", "teacher_model"},
    }
    for (source, estimator), needs in expected.items():
        assert Imitation(source=source, estimator=estimator).needs == needs <= NEEDS


def test_the_full_kl_of_today_is_that_from_the_base_at_temperature_one():
    assert FullKl() == FullKl(who="base", temperature=1.0) == Kl().loss
    assert FullKl() != FullKl(who="teacher")
    assert FullKl().needs == {"reference_model"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "teachers"}, "did you mean 'teacher'"),
        ({"estimator": "full", "temperature": 0.0}, "temperature: expected a number above 0"),
        ({"temperature": 2.0}, "use estimator: full"),
        ({"source": "stream", "prompts": "kept"}, "a stream has its own"),
        ({"samples": 0}, "samples: expected a number at least 1"),
        ({"scope": "tokens"}, "did you mean 'token'"),
        ({"select": "right"}, "select: expected one of all, correct"),
    ],
)
def test_unusable_imitation_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Imitation(**fields)


# --- entropy and trust region ------------------------------------------------------------------


@pytest.mark.x64
@pytest.mark.parametrize("score", [FORWARD, pytest.param(Reverse(responses=5), marks=pytest.mark.slow)])
def test_an_entropy_bonus_climbs_the_mean_entropy_of_kept_tokens(x64, score):
    """At the rollouts' temperature, against whole distributions."""
    model = tiny_model(num_layers=1, vocab_limit=7)
    graded, mask = some_graded([[3, 2], [4, 1]])
    term = term_of(Entropy(), graded, coef=0.3, mask=mask, keep=np.asarray([True, False]))
    assert term.loss == NegativeEntropy()

    def direct(model, rows):
        lp = jax.nn.log_softmax(logits(model, hidden(model, rows.tokens[:2]), 0.7)[..., :7], axis=-1)
        each = -jnp.sum(jnp.exp(lp) * lp, axis=-1)[:, :-1]
        return -0.3 * jnp.sum(jnp.where(mask[0, :, 1:], each, 0)) / 5

    expected = quick_jit(jax.value_and_grad(direct))(model, term.batch.rows)
    (loss,), grad = quick_jit(lambda m, t: loss_and_grad(m, (t,), None, temperature=0.7, score=score))(model, term)
    same((loss, grad), expected)
    assert float(expected[0]) < -0.1


@pytest.mark.parametrize(("prompts", "counted"), [("kept", [3, 2, 0, 0]), ("all", [3, 2, 4, 1])])
def test_an_entropy_bonus_counts_all_or_kept_prompts(prompts, counted):
    graded, mask = some_graded([[3, 2], [4, 1]])
    weight = term_of(Entropy(prompts=prompts), graded, mask=mask, keep=np.asarray([True, False])).batch.weight
    assert (weight != 0).sum(-1).tolist() == counted
    assert weight.sum() == pytest.approx(1)
    assert Entropy().needs == {"rollouts"}


def test_unknown_prompts_and_scopes_are_refused():
    with pytest.raises(ValueError, match=r"entropy\.prompts: expected one of all, kept"):
        Entropy(prompts="keep")
    with pytest.raises(ValueError, match=r"trust_region\.scope: expected one of token, sequence"):
        TrustRegion(scope="tok")


@pytest.mark.x64
@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_the_trust_region_is_half_the_squared_change_of_the_probe(x64, scope):
    """Changes (.1, -.3, .4) and (-.2, .5): sums .2 and .3; at temperature 1, whatever the rollouts'."""
    probe, mask = numpy_rows([3, 2, 0])
    change = np.zeros(mask.shape)
    change[0, 2:5], change[1, 2:4], change[2] = [0.1, -0.3, 0.4], [-0.2, 0.5], 5.0
    base = np.random.default_rng(0).normal(size=mask.shape)
    piece = TrustRegion(scope=scope)
    term = term_of(piece, some_graded([[1]], probe=probe, probe_logps=base)[0], coef=2.0)
    assert piece.needs == {"probe"}
    token = (0.01 + 0.09 + 0.16 + 0.04 + 0.25) / 2 / 5
    want = {"token": token, "sequence": (0.04 + 0.09) / 2 / 2}[scope]
    value, grad = value_and_grad(term.loss, base + change, term.batch, temperature=0.5, at=1.0)
    assert float(value) == pytest.approx(2 * want, abs=1e-12)
    step = {"token": change / 5, "sequence": np.asarray([[0.2], [0.3], [0.0]]) / 2}[scope]
    np.testing.assert_allclose(grad, np.where(mask, 2 * step, 0), atol=1e-12)
    assert not np.any(value_and_grad(term.loss, base, term.batch)[1])


def test_every_regulariser_needs_only_what_a_collector_can_bring():
    for cls in REGULARISERS.values():
        assert cls().needs <= NEEDS


@pytest.mark.x64
def test_a_kl_in_the_reward_gives_the_worked_rewards_to_go(x64):
    """SCIENCE.md B.4: reward 1, coefficient .01, log-ratios .10, -.02, .05."""
    graded, mask = some_graded([[3]], ref_logps=np.full((1, 1, 5), -1.0))
    graded.old_logps[0, 0] = [7, 7, -0.9, -1.02, -0.95]
    piece = Kl(direction="reverse", scope="sequence", estimator="k1", where="reward")
    each = np.asarray(piece.token_reward(0.01, graded, mask))[0, 0]
    assert not each[:2].any()
    to_go = np.cumsum((each[2:] + np.asarray([0, 0, 1]))[::-1])[::-1]
    np.testing.assert_allclose(to_go, [0.9987, 0.9997, 0.9995], atol=PRINTED)
