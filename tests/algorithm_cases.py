"""Every algorithm with what its collector would bring, on a bigram policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from bigram import BIGRAM, VOCAB, policy
from rl_cases import graded_of, prefiltered, rows_of

from jaxrl.rl.advantages import BatchWhiten, Centre, Gae, PassK, PassKTraining, Signed
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.critic import Critic
from jaxrl.rl.filters import (
    KeepGreedyFails,
    KeepGreedySucceeds,
    KeepMatched,
    KeepRandom,
    Mixed,
    RewardSpread,
    SampleGreedyFails,
    SampleGreedySucceeds,
    SampleMatched,
    SampleRandom,
    SolveRate,
)
from jaxrl.rl.losses import Clip, NoPolicy, PolicyGradient, SequenceClip
from jaxrl.rl.old_logps import Sampler, Tis
from jaxrl.rl.pair_losses import Importance, Ipo, SlicHf
from jaxrl.rl.preferences import Preference
from jaxrl.rl.recipes import ALGORITHMS
from jaxrl.rl.regularisers import Entropy, Imitation, Kl, TrustRegion
from jaxrl.rl.shaping import Overlong
from jaxrl.rl.weights import SequenceMeanTokenMean, SequenceMeanTokenSum, SequenceMeanTokenSumNorm, TokenMean
from jaxrl.types import STOP_LENGTH, Pairs, Samples


def only(piece, coef=1.0):
    return Algorithm(loss=NoPolicy(), regularisers=((coef, piece),))


def with_kl(coef=0.1, **fields):
    return Algorithm(regularisers=((coef, Kl(**fields)),))


# Named recipes, and combinations of pieces that no recipe holds.
TABLE = ALGORITHMS | {
    "pass_at_k_training": Algorithm(advantage=PassKTraining(k=2)),  # at k = n, as the recipe has it here, all is 0
    "centred, constant length": Algorithm(advantage=Centre(), weights=SequenceMeanTokenSumNorm(length=5)),
    "mixed groups, truncated masked": Algorithm(keep=Mixed(), truncated="mask"),
    "hard prompts": Algorithm(keep=SolveRate(max=0.5), weights=SequenceMeanTokenMean(over="prompts"), no_kept="skip"),
    "filter after sampling": Algorithm(keep=KeepGreedyFails(), weights=TokenMean(over="all"), epochs=2),
    "inverse filter": Algorithm(prefilter=SampleGreedySucceeds()),
    "inverse filter after sampling": Algorithm(keep=KeepGreedySucceeds()),
    "random filter": Algorithm(prefilter=SampleRandom(rate=0.6)),
    "random filter after sampling": Algorithm(keep=KeepRandom(rate=0.6)),
    "matched filter": Algorithm(prefilter=SampleMatched(run="other")),
    "matched filter after sampling": Algorithm(keep=KeepMatched(run="other")),
    "groups that differ": Algorithm(keep=RewardSpread()),
    "forward nll": Algorithm(
        prefilter=SampleGreedyFails(),
        regularisers=((0.1, Kl(scope="sequence", estimator="nll", prompts="kept", source="correct")),),
        minibatches=2,
    ),
    "forward kl of a stream": with_kl(prompts="stream", samples=2),
    "forward k3": with_kl(estimator="k3"),
    "reverse k2": with_kl(direction="reverse", estimator="k2"),
    "reverse full": with_kl(direction="reverse", estimator="full"),
    "reverse k1 in the reward": dataclasses.replace(
        with_kl(direction="reverse", scope="sequence", estimator="k1", where="reward"), advantage=BatchWhiten()
    ),
    "sampler's log-probs": Algorithm(
        old_logps=Sampler(), minibatches=2, regularisers=((0.1, Kl(direction="reverse", estimator="k2")),)
    ),
    "token importance": Algorithm(
        old_logps=Tis(cap=1.5), prefilter=SampleGreedyFails(), kept_first=True, minibatches=2, truncated="mask"
    ),
    "dual clip": Algorithm(loss=Clip(dual=3.0), weights=SequenceMeanTokenSum()),
    "sequence ratio, overlong": Algorithm(
        loss=SequenceClip(), weights=SequenceMeanTokenMean(), shaping=((0.5, Overlong(limit=4, cache=2)),)
    ),
    "whitened by sequence": Algorithm(advantage=BatchWhiten(baseline="group_mean", per="sequence")),
    "pass@2 without baseline": Algorithm(advantage=PassK(k=2), loss=PolicyGradient()),
    "negative only, masked": Algorithm(advantage=Signed(positive=0.0), truncated="mask"),
    "gae, bootstrapped": Algorithm(advantage=Gae(gamma=0.99, lam=0.95, bootstrap=True), critic=Critic(clip=None)),
    "entropy bonus": Algorithm(regularisers=((0.01, Entropy()),)),
    "trust region": Algorithm(regularisers=((0.1, TrustRegion()), (0.1, TrustRegion(scope="sequence")))),
    "policy and demonstrations": Algorithm(regularisers=((0.1, Imitation(scope="sequence")),)),
    "teacher, correct samples, whole distributions": only(
        Imitation(source="teacher", select="correct", estimator="full", scope="sequence_mean_token_mean", samples=2)
    ),
    "preferences of a file": only(Preference(source="file", objective=Ipo(beta=0.2), average=True)),
    "several pairs, self-normalised": only(
        Preference(pairs=2, importance=Importance(self_normalise=True, per="response"), samples=4)
    ),
    "slic-hf": only(Preference(objective=SlicHf(), samples=4)),
}
# No step of these raises the reward by itself: they hold on, or choose what cannot.
NO_RISE = frozenset(
    {
        "inverse filter",  # greedy-correct prompts alone
        "inverse filter after sampling",
        "gae, bootstrapped",  # bootstraps on random values
    }
)
# What the order of a prompt's rollouts, or of the prompts, enters: the pairs of base samples do not move with them.
ORDERED = frozenset(name for name, x in TABLE.items() if x.minibatches > 1)
GREEDY = [True, False, False, True]
REWARD = [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
LENGTHS = [[3, 2, 4, 3], [2, 3, 4, 1], [4, 4, 2, 2], [1, 2, 3, 4]]
BASE = np.resize([3, 2, 1, 4, 4, 5, 2, 2, 2, 3, 3, 3, 1, 1, 2, 5], (4, 8))
RIGHT = np.resize([True, False, False, True, True, False, False, True], (4, 8))


def tokens_in(rows, seed):
    """``rows`` with tokens of the bigram's vocabulary."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, rows.tokens.shape)
    return dataclasses.replace(rows, tokens=jnp.asarray(tokens, jnp.int32))


def score(model, rows):
    return BIGRAM(model, rows.flat()).reshape(rows.tokens.shape)


def world():
    """The policy, and the frozen models by name."""
    return policy(0), {"base": policy(1), "teacher": policy(2)}


def collected(algorithm, model, reference, *, greedy=GREEDY, noise=0.1):
    """Four prompts, two of them solved at different rates, with everything that ``algorithm`` needs."""
    rng = np.random.default_rng(3)
    graded = graded_of(REWARD, LENGTHS, greedy=greedy, base_lengths=BASE)
    rollouts = dataclasses.replace(graded.rollouts, rows=tokens_in(graded.rollouts.rows, 4))
    stop = jnp.where(jnp.asarray(LENGTHS) == 4, STOP_LENGTH, 0).astype(jnp.int32)
    graded = dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(rollouts, stop=stop),
        chance=jnp.asarray(rng.random(4)),
        matched=jnp.int32(2),
    )
    graded = prefiltered(algorithm, graded)
    rows, mask = graded.rollouts.rows, graded.rollouts.rows.mask()
    base = dataclasses.replace(graded.base, rows=tokens_in(graded.base.rows, 5))
    off = jnp.where(mask, jnp.asarray(rng.normal(size=mask.shape)), 0)
    lengths = np.resize([2, 3, 4, 1, 2, 5], (4, 2))
    files, probe = tokens_in(rows_of(np.resize([2, 3, 4, 3], (4, 2)), 6), 7), tokens_in(rows_of([3, 2, 4], 8), 9)
    old = score(model, rows)
    return dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(graded.rollouts, logps=old + 3 * noise * off),
        old_logps=old + noise * off,
        ref_logps=score(reference["base"], rows),
        values=jnp.where(mask, jnp.asarray(rng.normal(size=mask.shape)), 0),
        end_values=jnp.asarray(rng.normal(size=mask.shape[:2])),
        greedy_reward=jnp.asarray(greedy).astype(float),
        base=base,
        base_correct=jnp.asarray(RIGHT),
        base_logps=score(reference["base"], base.rows),
        stream=Samples(tokens_in(rows_of(lengths, 1), 10), jnp.ones((4, 2), bool)),
        teacher=Samples(tokens_in(rows_of(BASE, 1), 11), jnp.asarray(RIGHT)),
        demonstrations=Samples(tokens_in(rows_of(lengths[:, :1], 2), 12), jnp.ones((4, 1), bool)),
        pairs=Pairs(files, score(reference["base"], files), jnp.asarray([True, True, False, True])),
        probe=probe,
        probe_logps=BIGRAM(reference["base"], probe),
    )


def widen(tree, by=3):
    """Rows and per-token numbers with ``by`` more columns of rubbish behind."""
    width = {6, 7}  # of rollouts and of base samples

    def one(x):
        if np.ndim(x) < 2 or x.shape[-1] not in width:
            return x
        fill = {"i": VOCAB - 1, "f": jnp.nan}[np.dtype(x.dtype).kind]
        return jnp.concatenate([x, jnp.full((*x.shape[:-1], by), fill, x.dtype)], axis=-1)

    return jax.tree.map(one, tree)


def poisoned(graded, bad):
    """``graded`` with ``bad`` in every number that is of no counted token."""

    def off(values, rows):
        return jnp.where(rows.mask(), values, bad)

    rows, base, pairs = graded.rollouts.rows, graded.base.rows, graded.pairs
    return dataclasses.replace(
        graded,
        rollouts=dataclasses.replace(graded.rollouts, logps=off(graded.rollouts.logps, rows)),
        old_logps=off(graded.old_logps, rows),
        ref_logps=off(graded.ref_logps, rows),
        values=off(graded.values, rows),
        base_logps=off(graded.base_logps, base),
        pairs=dataclasses.replace(pairs, ref_logps=off(pairs.ref_logps, pairs.rows)),
        probe_logps=off(graded.probe_logps, graded.probe),
    )


def permuted(graded, order):
    """The rollouts of every prompt in another order."""
    order = np.asarray(order)

    def turn(x):
        return jax.tree.map(lambda y: y[:, order], x)

    fields = ("rollouts", "reward", "correct", "old_logps", "ref_logps", "values", "end_values")
    return dataclasses.replace(graded, **{name: turn(getattr(graded, name)) for name in fields})
