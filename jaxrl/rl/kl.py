"""Which estimator has the gradient of which KL: the admissible combinations, and why the others are refused.

``direction`` ``forward`` is KL(base || policy), ``reverse`` KL(policy || base). ``scope`` ``token`` is the sum of
conditional KLs at prefixes that are taken as they are, ``sequence`` the KL of whole responses. ``where``: a loss of
its own, or the reward of the rollouts' tokens.
"""

from __future__ import annotations

from jaxrl.rl.divergences import ReverseKl
from jaxrl.rl.losses import K2, K3, FullKl, Nll, TokenLoss

DIRECTIONS = ("forward", "reverse")
SCOPES = ("token", "sequence")
ESTIMATORS = ("nll", "full", "k1", "k2", "k3")
WHERE = ("loss", "reward")
Combination = tuple[str, str, str, str]  # direction, scope, estimator, where

# The loss whose expected gradient is that of the KL named.
KL_LOSSES: dict[Combination, TokenLoss] = {
    ("forward", "token", "full", "loss"): FullKl(),
    ("forward", "token", "nll", "loss"): Nll(),
    ("forward", "token", "k3", "loss"): K3(),
    ("forward", "sequence", "full", "loss"): FullKl(),
    ("forward", "sequence", "nll", "loss"): Nll(),
    ("reverse", "token", "k2", "loss"): K2(),
    ("reverse", "token", "full", "loss"): ReverseKl(),
}
# The one whose policy gradient is: k1's own gradient averages to zero, so that the score's part is the whole.
KL_REWARD: Combination = ("reverse", "sequence", "k1", "reward")

_K1 = (
    "k1 used as a loss on on-policy samples has zero expected gradient (the score averages to zero); "
    "use k2 or full for the reverse KL (or k1 in the reward), and full for the forward KL"
)
_K2 = "k2 on on-policy samples gives the gradient of the reverse KL"
_SEQUENCE = (
    "at prefixes that are taken as they are an on-policy estimator misses how theta moves the prefixes themselves; "
    "it gives the sum of conditional KLs, scope token"
)
_AS_LOSS = {
    ("forward", "token", "k1"): _K1,
    ("forward", "sequence", "k1"): _K1,
    ("reverse", "token", "k1"): _K1,
    ("reverse", "sequence", "k1"): _K1,
    ("forward", "token", "k2"): f"{_K2}; use k3, nll or full",
    ("forward", "sequence", "k2"): f"{_K2}; use nll or full",
    ("forward", "sequence", "k3"): f"{_SEQUENCE}; use nll or full on base samples",
    ("reverse", "token", "k3"): "k3 on on-policy samples gives the gradient of the forward KL; use k2 or full",
    ("reverse", "sequence", "k2"): f"{_SEQUENCE}; for whole responses use k1 in the reward",
    ("reverse", "sequence", "k3"): f"{_SEQUENCE}, and for k3 that of the forward KL",
    ("reverse", "sequence", "full"): f"{_SEQUENCE}; for whole responses use k1 in the reward",
    ("reverse", "token", "nll"): "the NLL of base samples is a forward KL; use k2 or full",
    ("reverse", "sequence", "nll"): "the NLL of base samples is a forward KL; use k1 in the reward",
}

_FORWARD = "a reward is of the policy's own samples, over which only a reverse KL is a mean; use where: loss"
_NLL = "nll is of base samples and a reward of the rollouts; use where: loss"
_MOVES = (
    "a reward moves the prefixes too, whether as rewards to go or as one of the whole response; it gives the KL of "
    "whole responses, scope sequence"
)
_PART = "its mean depends on theta directly too, and a reward has no gradient: that part would be missing; use k1"
_IN_REWARD = {
    **{("forward", scope, estimator): _FORWARD for scope in SCOPES for estimator in ("full", "k1", "k2", "k3")},
    **{(direction, scope, "nll"): _NLL for direction in DIRECTIONS for scope in SCOPES},
    **{("reverse", "sequence", estimator): _PART for estimator in ("full", "k2", "k3")},
    **{("reverse", "token", estimator): f"{_PART} with scope sequence" for estimator in ("full", "k2", "k3")},
    ("reverse", "token", "k1"): _MOVES,
}

# Why the others are refused.
KL_REFUSED: dict[Combination, str] = {(*key, "loss"): reason for key, reason in _AS_LOSS.items()} | {
    (*key, "reward"): reason for key, reason in _IN_REWARD.items()
}


def check_kl(field: str, chosen: Combination) -> None:
    """Raises ``ValueError`` naming ``field`` and the reason, for a combination that is not what it says."""
    if chosen in KL_REFUSED:
        *what, where = chosen
        name = " ".join(what) + (" in the reward" if where == "reward" else "")
        raise ValueError(f"{field}: {name} is refused: {KL_REFUSED[chosen]}")
