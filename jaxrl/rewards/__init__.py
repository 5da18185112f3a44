"""Verdicts on responses, and the rewards made of them. Imports no jax: a verifier process never loads it."""

from jaxrl.rewards.math import check_golds, verify_math
from jaxrl.rewards.pool import Verifier
from jaxrl.rewards.shaping import REWARDS, Binary, Custom, Paper, PlusMinus, ReleasedCode, Reward
from jaxrl.rewards.verdict import MATH_RULES, MINERVA, MathRule, Verdict

__all__ = [
    "MATH_RULES",
    "MINERVA",
    "REWARDS",
    "Binary",
    "Custom",
    "MathRule",
    "Paper",
    "PlusMinus",
    "ReleasedCode",
    "Reward",
    "Verdict",
    "Verifier",
    "check_golds",
    "verify_math",
]
