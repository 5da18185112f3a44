"""Which KL each estimator descends: expected gradients, exactly, on an enumerated policy of one or two tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import SCORE, graded_of, quick_jit, tiny_model

from jaxrl.mesh import make_mesh, shard_tree, to_mesh
from jaxrl.models.decoder import abstract_model, hidden, logits, param_axes
from jaxrl.models.logps import token_logps
from jaxrl.models.scoring import FORWARD, REVERSE, Reverse
from jaxrl.rl.advantages import total_reward
from jaxrl.rl.kl import DIRECTIONS, ESTIMATORS, KL_LOSSES, KL_REFUSED, KL_REWARD, SCOPES, WHERE
from jaxrl.rl.losses import FullKl, Nll, PolicyGradient, k1, k2, k3
from jaxrl.rl.regularisers import Kl
from jaxrl.rl.update import loss_and_grad
from jaxrl.types import Batch, Rollouts, Rows, Samples, Term

EOS, START = 2, 3  # tokens 0 and 1 continue, 2 ends, 3 only opens the prompt (above the vocabulary limit)
RESPONSES = [(EOS,)] + [(a, b) for a in (0, 1) for b in (0, 1, EOS)]
COMBINATIONS = list(itertools.product(DIRECTIONS, SCOPES, ESTIMATORS, WHERE))
IN_REWARD = Kl(direction="reverse", scope="sequence", estimator="k1", where="reward")

GRADIENT = quick_jit(loss_and_grad)


def small(seed):
    return tiny_model(seed, vocab_size=4, vocab_limit=3, num_layers=1, init_std=0.7)


def all_responses():
    tokens = np.full((len(RESPONSES), 4), START)
    for i, response in enumerate(RESPONSES):
        tokens[i, 2 : 2 + len(response)] = response
    length = jnp.asarray([2 + len(r) for r in RESPONSES], jnp.int32)
    return Rows(jnp.asarray(tokens, jnp.int32), jnp.full(len(RESPONSES), 2, jnp.int32), length)


@jax.jit
def sequence_logp(model):
    return token_logps(model, all_responses()).sum(-1)


def next_token(model):
    """Log-probs of the next token after the empty response, ``0`` and ``1``: [3 prefixes, 3 tokens]."""
    tokens = jnp.asarray([[START, START, 0], [START, START, 1]], jnp.int32)
    lp = jax.nn.log_softmax(logits(model, hidden(model, tokens)), axis=-1)[..., :3]
    return jnp.stack([lp[0, 1], lp[0, 2], lp[1, 2]])


def as_graded(policy, base):
    """Every response once, as the rollout of one prompt each and as its base sample."""
    rows = jax.tree.map(lambda x: x[:, None], all_responses())
    old, ref = (SCORE(m, all_responses())[:, None] for m in (policy, base))
    rollouts = Rollouts(rows, old, jnp.zeros((len(RESPONSES), 1), jnp.int32))
    graded = graded_of(np.zeros((len(RESPONSES), 1)), np.ones((len(RESPONSES), 1), int))
    return dataclasses.replace(
        graded,
        rollouts=rollouts,
        old_logps=old,
        ref_logps=ref,
        base=rollouts,
        base_correct=jnp.ones((len(RESPONSES), 1), bool),
        stream=Samples(rows, jnp.ones((len(RESPONSES), 1), bool)),
    )


def expected_gradient(piece, policy, base):
    """The piece's gradient averaged over its sampling distribution; token scope as a sum over tokens."""
    graded = as_graded(policy, base)
    graded = dataclasses.replace(graded, **{"base" if piece.prompts == "stream" else "stream": None})
    mask = graded.rollouts.rows.mask()
    term = piece(1.0, graded, mask, jnp.ones(len(RESPONSES), bool))
    probability = jnp.exp(sequence_logp(base if piece.on_base else policy))
    normaliser = mask.sum() if piece.scope == "token" else len(RESPONSES)
    weight = term.batch.weight * int(normaliser) * probability[:, None]
    term = dataclasses.replace(term, batch=dataclasses.replace(term.batch, weight=weight))
    return GRADIENT(policy, (term,), base, temperature=1.0)[1]


def sequence_kl(direction):
    """Gradient of the KL between whole responses, through the sampling distribution."""

    def value(policy, base):
        p, q = sequence_logp(base), sequence_logp(policy)
        return jnp.sum(jnp.exp(p) * (p - q)) if direction == "forward" else jnp.sum(jnp.exp(q) * (q - p))

    return quick_jit(jax.grad(value))


def token_kl_at_policy_prefixes(direction):
    """Gradient of the sum of conditional KLs, prefixes drawn from the policy and detached."""

    def value(policy, base):
        p, q = next_token(base), next_token(policy)
        first = jax.lax.stop_gradient(jnp.exp(q[0]))
        reach = jnp.stack([jnp.ones_like(first[0]), first[0], first[1]])
        kl = jnp.exp(p) * (p - q) if direction == "forward" else jnp.exp(q) * (q - p)
        return jnp.sum(reach * kl.sum(-1))

    return quick_jit(jax.grad(value))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def close(a, b, tolerance=1e-10):
    return np.max(np.abs(flat(a) - flat(b))) <= tolerance * np.max(np.abs(flat(b)))


@pytest.fixture
def pair(x64):
    return small(1), small(2)


@pytest.mark.x64
def test_enumeration_is_complete(pair):
    for model in pair:
        assert float(jnp.exp(sequence_logp(model)).sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.x64
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize(("estimator", "prompts"), [("nll", "all"), ("full", "all"), ("full", "stream")])
def test_base_sample_estimators_descend_the_forward_kl(pair, scope, estimator, prompts):
    policy, base = pair
    got = expected_gradient(Kl(scope=scope, estimator=estimator, samples=1, prompts=prompts), policy, base)
    assert close(got, sequence_kl("forward")(policy, base))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("direction", "estimator", "other"),
    [("reverse", "k2", "forward"), ("reverse", "full", "forward"), ("forward", "k3", "reverse")],
)
def test_on_policy_estimators_descend_conditional_kls_only(pair, direction, estimator, other):
    policy, base = pair
    got = expected_gradient(Kl(direction=direction, estimator=estimator), policy, base)
    assert close(got, token_kl_at_policy_prefixes(direction)(policy, base))
    assert not close(got, token_kl_at_policy_prefixes(other)(policy, base), 0.05)
    assert not close(got, sequence_kl(direction)(policy, base), 0.01)


@pytest.mark.x64
@pytest.mark.parametrize("to_go", [True, False])
def test_k1_in_the_reward_descends_the_reverse_kl_of_whole_responses(pair, to_go):
    """Exactly, as rewards to go and as one reward a response; per-token rewards alone would not."""
    policy, base = pair
    graded = as_graded(policy, base)
    mask = graded.rollouts.rows.mask()
    graded = dataclasses.replace(graded, token_reward=IN_REWARD.token_reward(1.0, graded, mask))
    each = graded.token_reward[:, 0]
    if to_go:
        advantage = jnp.flip(jnp.cumsum(jnp.flip(each, -1), -1), -1)
    else:
        advantage = jnp.broadcast_to(total_reward(graded), each.shape)

    def gradient(advantage):
        weight = jnp.where(mask[:, 0], jnp.exp(sequence_logp(policy))[:, None], 0)
        batch = Batch(all_responses(), advantage, graded.old_logps[:, 0], weight)
        return GRADIENT(policy, (Term(batch, PolicyGradient()),), base, temperature=1.0)[1]

    expected = sequence_kl("reverse")(policy, base)
    assert close(gradient(advantage), expected)
    assert not close(gradient(each), expected, 0.01)


@pytest.mark.x64
def test_a_kl_in_the_reward_is_minus_the_coefficient_times_k1_on_counted_tokens(pair):
    policy, base = pair
    graded = as_graded(policy, base)
    mask = graded.rollouts.rows.mask() & (jnp.arange(len(RESPONSES)) > 0)[:, None, None]
    wild = dataclasses.replace(graded, ref_logps=jnp.where(mask, graded.ref_logps, jnp.nan))
    got = IN_REWARD.token_reward(0.3, wild, mask)
    np.testing.assert_allclose(got, np.where(mask, -0.3 * (graded.old_logps - graded.ref_logps), 0), atol=1e-15)
    assert np.any(got != 0)
    assert IN_REWARD.in_reward
    assert IN_REWARD.needs == {"rollouts", "ref_logps"}


def test_what_is_in_the_reward_is_no_term_and_a_term_is_not_in_the_reward():
    with pytest.raises(TypeError, match="is no term"):
        IN_REWARD(1.0, None, None, None)
    assert not Kl().in_reward
    with pytest.raises(TypeError, match="adds nothing to the reward"):
        Kl().token_reward(1.0, None, None)


@pytest.mark.x64
def test_k1_as_a_loss_has_zero_expected_gradient(pair):
    policy, base = pair
    probability = jnp.exp(sequence_logp(policy))
    grad = quick_jit(jax.grad(lambda m, b: jnp.sum(probability * (sequence_logp(m) - sequence_logp(b)))))(policy, base)
    assert np.max(np.abs(flat(grad))) < 1e-13


def test_every_combination_is_admitted_or_refused_with_its_reason():
    admitted = {*KL_LOSSES, KL_REWARD}
    assert admitted | set(KL_REFUSED) == set(COMBINATIONS)
    assert not admitted & set(KL_REFUSED)
    assert len(admitted) == 8
    for chosen in COMBINATIONS:
        direction, scope, estimator, where = chosen
        fields = {"direction": direction, "scope": scope, "estimator": estimator, "where": where}
        if chosen in admitted:
            piece = Kl(**fields)
            assert piece.in_reward or piece.loss == KL_LOSSES[chosen]
        else:
            place = " in the reward" if where == "reward" else ""
            with pytest.raises(ValueError, match=f"{direction} {scope} {estimator}{place} is refused: .+"):
                Kl(**fields)


def test_each_kl_asks_for_what_it_reads():
    assert Kl(estimator="nll").needs == {"base_samples"}
    assert Kl().needs == {"base_samples", "reference_model"}
    assert Kl(prompts="stream").needs == {"stream_samples", "reference_model"}
    assert Kl(estimator="k3").needs == {"rollouts", "ref_logps"}
    assert Kl(direction="reverse", estimator="full").needs == {"rollouts", "reference_model"}


def test_unusable_kl_settings_are_refused():
    with pytest.raises(ValueError, match="did you mean 'forward'"):
        Kl(direction="forwards")
    with pytest.raises(ValueError, match="did you mean 'reward'"):
        Kl(where="rewards")
    with pytest.raises(ValueError, match="selects base samples"):
        Kl(direction="reverse", estimator="full", source="correct")
    with pytest.raises(ValueError, match="'stream' holds base samples"):
        Kl(estimator="k3", prompts="stream")
    with pytest.raises(ValueError, match="samples"):
        Kl(samples=0)


def scored_rows():
    tokens = np.random.default_rng(0).integers(0, 7, (4, 8))
    start, length = (jnp.asarray(x, jnp.int32) for x in ([1, 3, 2, 4], [6, 8, 2, 8]))
    return Rows(jnp.asarray(tokens, jnp.int32), start, length)


def kl_run(score, rows, pair):
    """The reverse KL of the first model from the second, and the gradient by both of a random weighting of it."""
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)))

    def value(pair):
        each = score.reverse_kl(*pair, rows, temperature=0.7)
        return jnp.sum(weight * each), each

    return quick_jit(jax.value_and_grad(value, has_aux=True))(pair)


def whole_kl(pair, rows, limit):
    log = [jax.nn.log_softmax(logits(m, hidden(m, rows.tokens), 0.7)[..., :limit]) for m in pair]
    each = jnp.sum(jnp.exp(log[0]) * (log[0] - log[1]), -1)
    return jnp.where(rows.mask(), jnp.pad(each[:, :-1], [(0, 0), (1, 0)]), 0)


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize(
    ("score", "model", "reference", "limit"),
    [
        (Reverse(responses=5), {"vocab_limit": 7}, {"vocab_limit": 7}, 7),
        (REVERSE, {"tied": False}, {"tied": False}, 8),
        (REVERSE, {"tied": False}, {"hidden_size": 6, "num_layers": 1}, 8),
        (REVERSE, {}, {"tied": False}, 8),
    ],
)
def test_the_reverse_kl_by_blocks_is_that_of_whole_distributions(x64, score, model, reference, limit):
    """Values and gradients, against one way in primitives; a reference of another shape and head too."""
    pair, rows = (tiny_model(0, **model), tiny_model(1, **reference)), scored_rows()
    expected = kl_run(FORWARD, rows, pair)
    (_, each), (by_model, by_reference) = expected
    np.testing.assert_allclose(each, quick_jit(whole_kl, static_argnums=2)(pair, rows, limit), atol=1e-12)
    assert not np.any(flat(by_reference))
    assert np.all(np.isfinite(flat(by_model)))
    for a, b in zip(jax.tree.leaves(kl_run(score, rows, pair)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("kind", [{}, {"tied": False, "vocab_limit": 5}])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)])
def test_the_reverse_kl_of_a_head_split_over_a_mesh_is_the_same(x64, kind, shape):
    pair, mesh, rows = (tiny_model(0, **kind), tiny_model(1, **kind)), make_mesh(*shape), scored_rows()
    rows = Rows(rows.tokens % 5, rows.start, rows.length)
    expected = kl_run(Reverse(responses=5), rows, pair)
    there = tuple(shard_tree(mesh, param_axes(m.config), m) for m in pair)
    got = kl_run(Reverse(responses=5, mesh=mesh), to_mesh(mesh, rows), there)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.parametrize("score", [FORWARD, REVERSE])
@pytest.mark.parametrize("other", [{"vocab_size": 9}, {"vocab_limit": 7}])
def test_models_of_two_vocabularies_have_no_divergence(score, other):
    config = dataclasses.replace(small(0).config, vocab_size=8, vocab_limit=None)
    models = [abstract_model(dataclasses.replace(config, **changes)) for changes in (other, {})]
    with pytest.raises(ValueError, match="vocabulary of 8 entries, 8 of them known"):
        score.kl(*models, scored_rows())


def test_full_kl_without_a_reference_says_so():
    with pytest.raises(ValueError, match="needs the base model"):
        FullKl().tokens(None, None, None, temperature=1.0)


@pytest.mark.x64
def test_forward_kl_scores_the_model_itself_whatever_the_rollout_temperature(pair):
    policy, base = pair
    batch = Kl(samples=1)(1.0, as_graded(policy, base), None, jnp.ones(len(RESPONSES), bool)).batch
    for loss in (Nll(), FullKl()):
        one, other = (loss.tokens(policy, base, batch, temperature=t) for t in (1.0, 0.3))
        np.testing.assert_array_equal(one, other)


@pytest.mark.x64
def test_kl_estimators_match_the_worked_numbers(x64):
    lp, ref = jnp.asarray([-1.0, -2.0, -0.5]), jnp.asarray([-1.2, -1.5, -0.5])  # SCIENCE.md A20
    np.testing.assert_allclose(k1(lp, ref), [0.2, -0.5, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(k2(lp, ref), [0.02, 0.125, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(k3(lp, ref), [0.018731, 0.148721, 0], rtol=0, atol=1e-6)
