"""Dynamic sampling: prompts that the filters drop are replaced by others, within bounds."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl.rl.pieces import one_of, within

SHORT = ("continue", "stop")


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Sample further prompts until every place of the step holds one that the filters keep (DAPO; arXiv 2503.14476).

    ``rounds``: generation batches a step at most, the first included. ``short``: what a step does that is not full
    after them: train on the prompts it has (``continue``), the empty places masked, or end the run with its last
    checkpoint (``stop``). Prompts of later rounds are a function of seed, step and round, none of them twice in a step.
    """

    rounds: int = 10
    short: str = "continue"

    def __post_init__(self) -> None:
        within("algorithm.refill.rounds", self.rounds, 2)
        one_of("algorithm.refill.short", self.short, SHORT)
