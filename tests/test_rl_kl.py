"""Which KL each estimator descends: expected gradients, exactly, on an enumerated policy of one or two tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_cases import SCORE, graded_of, quick_jit, tiny_model

from jaxrl.models.decoder import hidden, logits
from jaxrl.models.logps import token_logps
from jaxrl.rl.losses import FullKl, Nll, k1, k2, k3
from jaxrl.rl.regularisers import KL_LOSSES, KL_REFUSED, Kl
from jaxrl.rl.update import loss_and_grad
from jaxrl.types import Rollouts, Rows

EOS, START = 2, 3  # tokens 0 and 1 continue, 2 ends, 3 only opens the prompt (above the vocabulary limit)
RESPONSES = [(EOS,)] + [(a, b) for a in (0, 1) for b in (0, 1, EOS)]
COMBINATIONS = list(itertools.product(("forward", "reverse"), ("token", "sequence"), ("nll", "full", "k1", "k2", "k3")))

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
    )


def expected_gradient(piece, policy, base):
    """The piece's gradient averaged over its sampling distribution; token scope as a sum over tokens."""
    graded = as_graded(policy, base)
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
@pytest.mark.parametrize("estimator", ["nll", "full"])
def test_base_sample_estimators_descend_the_forward_kl(pair, scope, estimator):
    policy, base = pair
    got = expected_gradient(Kl(scope=scope, estimator=estimator, samples=1), policy, base)
    assert close(got, sequence_kl("forward")(policy, base))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("direction", "estimator", "other"), [("reverse", "k2", "forward"), ("forward", "k3", "reverse")]
)
def test_on_policy_estimators_descend_conditional_kls_only(pair, direction, estimator, other):
    policy, base = pair
    got = expected_gradient(Kl(direction=direction, estimator=estimator), policy, base)
    assert close(got, token_kl_at_policy_prefixes(direction)(policy, base))
    assert not close(got, token_kl_at_policy_prefixes(other)(policy, base), 0.05)
    assert not close(got, sequence_kl(direction)(policy, base), 0.01)


@pytest.mark.x64
def test_k1_as_a_loss_has_zero_expected_gradient(pair):
    policy, base = pair
    probability = jnp.exp(sequence_logp(policy))
    grad = quick_jit(jax.grad(lambda m, b: jnp.sum(probability * (sequence_logp(m) - sequence_logp(b)))))(policy, base)
    assert np.max(np.abs(flat(grad))) < 1e-13


def test_every_combination_is_admitted_or_refused_with_its_reason():
    assert set(KL_LOSSES) | set(KL_REFUSED) == set(COMBINATIONS)
    assert not set(KL_LOSSES) & set(KL_REFUSED)
    for direction, scope, estimator in COMBINATIONS:
        fields = {"direction": direction, "scope": scope, "estimator": estimator}
        if (direction, scope, estimator) in KL_LOSSES:
            assert Kl(**fields).loss.tag == estimator
        else:
            with pytest.raises(ValueError, match=f"{direction} {scope} {estimator} is refused: .+"):
                Kl(**fields)


def test_unusable_kl_settings_are_refused():
    with pytest.raises(ValueError, match="did you mean 'forward'"):
        Kl(direction="forwards")
    with pytest.raises(ValueError, match="selects base samples"):
        Kl(direction="reverse", estimator="k2", source="correct")
    with pytest.raises(ValueError, match="samples"):
        Kl(samples=0)


def test_full_kl_without_a_reference_says_so():
    with pytest.raises(ValueError, match="needs the reference model"):
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
