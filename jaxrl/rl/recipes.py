"""Named recipes, each a composition of pieces, with where it comes from.

A name is only a way to write a composition down: nothing asks for it afterwards. Where the paper
(arXiv 2510.02230) and its released code differ, the plain name is the paper and ``_released_code`` the
code: token mean instead of Eq. 11's token sum, a dual clip at 3, two mini-batches a rollout batch, no
forward KL; filtered prompts leave the batch, survivors fill the mini-batches in order and their step
keeps the full mini-batch's denominator, and a mini-batch without survivors is skipped. Not reproduced:
survivors repeated to fill the GPUs, and a token mean that depends on the micro-batches. The paper
states neither the normalisation nor the estimator of its forward KL: ``token`` and ``full`` are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl.rl.advantages import (
    BatchWhiten,
    Centre,
    Gae,
    GreedyBaseline,
    LeaveOneOut,
    PassK,
    PassKTraining,
    Plain,
    Signed,
)
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.critic import Critic
from jaxrl.rl.filters import Mixed, SampleGreedyFails
from jaxrl.rl.losses import Clip, NoPolicy, PolicyGradient, SequenceClip
from jaxrl.rl.pair_losses import Dpo, Importance, Ipo, Slic
from jaxrl.rl.preferences import Preference
from jaxrl.rl.refill import Refill
from jaxrl.rl.regularisers import Imitation, Kl, Regulariser
from jaxrl.rl.shaping import Overlong
from jaxrl.rl.weights import SequenceMeanTokenMean, SequenceMeanTokenSum, SequenceMeanTokenSumNorm, TokenMean


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``what`` it does in a line, its ``source``, and the composition."""

    what: str
    source: str
    algorithm: Algorithm


SELF, YUE, IS_DAA = "arXiv 2510.02230", "arXiv 2504.13837", "arXiv 2506.08681"
_SUM = SequenceMeanTokenSum()
_FORWARD_KL = (1e-4, Kl(direction="forward", scope="token", estimator="full", prompts="all"))
_KL_IN_REWARD = (0.01, Kl(direction="reverse", scope="sequence", estimator="k1", where="reward"))


def _only(piece: Regulariser) -> Algorithm:
    """A recipe of one term and no policy term."""
    return Algorithm(loss=NoPolicy(), regularisers=((1.0, piece),))


_GROUP = {
    "grpo": Recipe(
        what="group z-scores, clipped ratio, token sum (Eq. 10, 11)", source=SELF, algorithm=Algorithm(weights=_SUM)
    ),
    "grpo_released_code": Recipe(
        what="GRPO as the SELF paper's code runs it: token mean, dual clip, two mini-batches",
        source=f"code of {SELF}",
        algorithm=Algorithm(weights=TokenMean(over="kept"), loss=Clip(dual=3.0), minibatches=2),
    ),
    "dr_grpo": Recipe(
        what="centred rewards without a deviation, token sum over a constant length",
        source="arXiv 2503.20783",
        algorithm=Algorithm(advantage=Centre(), weights=SequenceMeanTokenSumNorm(length=3072)),
    ),
    "reinforce": Recipe(
        what="the reward itself times the score, no baseline",
        source="Williams 1992",
        algorithm=Algorithm(advantage=Plain(), weights=_SUM, loss=PolicyGradient()),
    ),
    "rloo": Recipe(
        what="the mean of the other responses as baseline",
        source="arXiv 2402.14740",
        algorithm=Algorithm(advantage=LeaveOneOut(), weights=_SUM, loss=PolicyGradient()),
    ),
    "remax": Recipe(
        what="the greedy response's reward as baseline",
        source="arXiv 2310.10505",
        algorithm=Algorithm(advantage=GreedyBaseline(), weights=_SUM, loss=PolicyGradient()),
    ),
    "reinforce_pp": Recipe(
        what="rewards to go with a KL in the reward, whitened over the batch, clipped ratio",
        source="arXiv 2501.03262",
        algorithm=Algorithm(advantage=BatchWhiten(), regularisers=(_KL_IN_REWARD,)),
    ),
    "reinforce_pp_baseline": Recipe(
        what="group-centred rewards, whitened over the batch, clipped ratio",
        source="arXiv 2501.03262",
        algorithm=Algorithm(advantage=BatchWhiten(baseline="group_mean")),
    ),
    "dapo": Recipe(
        what="GRPO with a higher upper clip, token mean, groups of mixed correctness refilled, overlong penalty",
        source="arXiv 2503.14476",
        algorithm=Algorithm(
            keep=Mixed(),
            refill=Refill(rounds=10),
            shaping=((1.0, Overlong(limit=20480, cache=4096)),),
            loss=Clip(low=0.2, high=0.28),
        ),
    ),
    "gspo": Recipe(
        what="group z-scores, one clipped ratio a response",
        source="arXiv 2507.18071",
        algorithm=Algorithm(weights=SequenceMeanTokenMean(), loss=SequenceClip()),
    ),
    "psr": Recipe(
        what="correct responses only, advantage 1",
        source="arXiv 2506.01347",
        algorithm=Algorithm(advantage=Signed(positive=1.0, negative=0.0)),
    ),
    "nsr": Recipe(
        what="wrong responses only, advantage -1",
        source="arXiv 2506.01347",
        algorithm=Algorithm(advantage=Signed(positive=0.0, negative=-1.0)),
    ),
    "w_reinforce": Recipe(
        what="advantage 0.1 for correct, -1 for wrong responses",
        source="arXiv 2506.01347",
        algorithm=Algorithm(advantage=Signed(positive=0.1, negative=-1.0)),
    ),
    "pkpo": Recipe(
        what="rewards transformed so that their gradient is that of pass@k, leave-one-out baseline",
        source="arXiv 2505.15201",
        algorithm=Algorithm(advantage=PassK(k=4, baseline="leave_one_out"), weights=_SUM, loss=PolicyGradient()),
    ),
    "pass_at_k_training": Recipe(
        what="analytic advantages of groups drawn for pass@k, clipped ratio",
        source="arXiv 2508.10751",
        algorithm=Algorithm(advantage=PassKTraining(k=4)),
    ),
    "ppo": Recipe(
        what="generalised advantages of a learned critic on its own trunk, clipped ratio",
        source="arXiv 1707.06347, 1506.02438",
        algorithm=Algorithm(advantage=Gae(), critic=Critic()),
    ),
    "ppo_shared": Recipe(
        what="PPO whose critic is a value head on the policy's trunk",
        source="arXiv 1707.06347, 1506.02438",
        algorithm=Algorithm(advantage=Gae(), critic=Critic(trunk="shared", coef=0.5)),
    ),
}

_SELF = {
    "self": Recipe(
        what="GRPO on prompts whose greedy response fails, and a forward KL to the base",
        source=SELF,
        algorithm=Algorithm(prefilter=SampleGreedyFails(), weights=_SUM, regularisers=(_FORWARD_KL,)),
    ),
    "filter_only": Recipe(
        what="SELF without its forward KL",
        source=SELF,
        algorithm=Algorithm(prefilter=SampleGreedyFails(), weights=_SUM),
    ),
    "fkl_only": Recipe(
        what="SELF without its filter", source=SELF, algorithm=Algorithm(weights=_SUM, regularisers=(_FORWARD_KL,))
    ),
    "self_released_code": Recipe(
        what="SELF as its code runs it: filter only, full denominator, skipped mini-batches",
        source=f"code of {SELF}",
        algorithm=Algorithm(
            prefilter=SampleGreedyFails(),
            weights=TokenMean(over="prompts"),
            loss=Clip(dual=3.0),
            minibatches=2,
            kept_first=True,
            no_kept="skip",
        ),
    ),
}

_SUPERVISED = {
    "sft": Recipe(
        what="likelihood of the task's demonstrations", source="maximum likelihood", algorithm=_only(Imitation())
    ),
    "rft": Recipe(
        what="likelihood of the base model's own correct samples (rejection sampling)",
        source="arXiv 2308.01825",
        algorithm=_only(Imitation(source="base", select="correct", samples=8)),
    ),
    "distill_hard": Recipe(
        what="likelihood of a teacher's samples",
        source="arXiv 1606.07947",
        algorithm=_only(Imitation(source="teacher", samples=8)),
    ),
    "distill_soft": Recipe(
        what="KL from a teacher's tempered next-token distributions, on its samples",
        source="arXiv 1503.02531",
        algorithm=_only(Imitation(source="teacher", estimator="full", temperature=2.0, samples=8)),
    ),
}

_PREFERENCES = {
    "dpo": Recipe(
        what="logistic loss of the implicit reward margin", source="arXiv 2305.18290", algorithm=_only(Preference())
    ),
    "ipo": Recipe(
        what="squared distance of the margin to 1/(2 beta)",
        source="arXiv 2310.12036",
        algorithm=_only(Preference(objective=Ipo(beta=0.1))),
    ),
    "slic": Recipe(
        what="hinge loss of the margin",
        source="arXiv 2305.10425",
        algorithm=_only(Preference(objective=Slic(beta=0.1))),
    ),
    "is_dpo": Recipe(
        what="DPO times a clipped importance ratio of the pair",
        source=IS_DAA,
        algorithm=_only(Preference(objective=Dpo(beta=0.05), importance=Importance())),
    ),
    "is_ipo": Recipe(
        what="IPO times a clipped importance ratio of the pair",
        source=IS_DAA,
        algorithm=_only(Preference(objective=Ipo(beta=0.05), importance=Importance())),
    ),
    "is_slic": Recipe(
        what="SLiC times a clipped importance ratio of the pair",
        source=IS_DAA,
        algorithm=_only(Preference(objective=Slic(beta=0.05), importance=Importance())),
    ),
}

RECIPES: dict[str, Recipe] = _GROUP | _SELF | _SUPERVISED | _PREFERENCES
ALGORITHMS: dict[str, Algorithm] = {name: recipe.algorithm for name, recipe in RECIPES.items()}
