"""What a training run is made of, as plain frozen objects.

``train`` consumes these and never sees YAML. ``jaxrl.config`` builds them from a file and checks
every value; built by hand they are taken at their word. Units: tokens, prompts, optimiser steps;
log-probabilities in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxrl.data.templates import Example
from jaxrl.models.config import ModelConfig
from jaxrl.rewards.shaping import Binary, Reward
from jaxrl.rewards.verdict import MathRule
from jaxrl.rl.algorithms import Algorithm
from jaxrl.rl.optimiser import Optimiser
from jaxrl.sampling.engines import EngineSpec, SlotSpec
from jaxrl.sampling.strategies import Strategy, Temperature


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where the policy comes from: exactly one of ``path``, ``init`` and ``base``.

    ``path`` is a folder or hub id of a Hugging Face model, ``init`` a decoder with fresh weights,
    ``base`` the name of a model that the task itself trains (``msa0``). ``dtype`` is what is
    computed in; master weights and optimiser moments are float32 at least.
    """

    path: str | None = None
    init: ModelConfig | None = None
    base: Literal["msa0"] | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: Literal["none", "names", "dots", "full"] = "none"
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Msa0Spec:
    """The enumerable multi-strategy arithmetic task (SCIENCE.md D.1)."""


@dataclass(frozen=True, kw_only=True)
class ProblemsSpec:
    """Problems with gold answers: a JSONL or parquet file, a hub id, or the name of a built-in set.

    ``template`` names a prompt template; ``instruction`` and ``system`` replace its own. ``limit``
    keeps the first problems of the training set. ``solution`` names the field of the training set that holds worked
    solutions, for recipes that imitate them; ``preferences`` a file of pairs (prompt, chosen, rejected) whose
    responses have at most ``max_preferred`` tokens. ``max_prompt`` is in tokens. ``on_bad_gold`` says
    what an answer does that cannot be parsed, ``too_long`` what a longer prompt does: stop at
    loading, or drop and count. ``rule`` is how answers are compared. ``tokenizer`` is a folder, file
    or hub id; the model's own by default.
    """

    train: str
    eval: tuple[str, ...] = ()
    template: str = "paper"
    examples: tuple[Example, ...] = ()
    instruction: str | None = None
    system: str | None = None
    max_prompt: int = 1024
    on_bad_gold: Literal["abort", "drop"] = "abort"
    too_long: Literal["error", "drop"] = "error"
    rule: MathRule = field(default_factory=MathRule)
    limit: int | None = None
    tokenizer: str | None = None
    solution: str | None = None
    preferences: str | None = None
    max_preferred: int = 1024


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """Sampling of a step: ``prompts`` x ``n`` responses of at most ``max_new_tokens``.

    ``engine`` is what samples. ``log_every`` is the number of steps between readable rollout logs. ``log_greedy`` decodes every prompt once more,
    greedily, so that runs compare by greedy accuracy; a piece that needs it does so anyway.
    """

    prompts: int = 16
    n: int = 8
    max_new_tokens: int = 5
    strategy: Strategy = field(default_factory=Temperature)
    engine: EngineSpec = field(default_factory=SlotSpec)
    log_every: int = 10
    log_greedy: bool = True


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Devices along each axis; one axis may be -1, which takes what the others leave."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """The fixed solutions that are followed: ``n`` base samples a prompt, scored every ``every`` steps."""

    prompts: int = 64
    n: int = 4
    temperature: float = 1.0
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class InfluenceSpec:
    """The exact gradient kernel beside training, of batch and probe: ``rows`` rows of each every ``every`` steps (0: never).

    ``layers`` also stores the part of every layer, which costs next to nothing except under ``columns``. ``sketch``
    numbers a row are kept of the rows' gradients (0: none), from which kernels across steps can be estimated later.
    """

    every: int = 20
    rows: int = 32
    method: Literal["auto", "reference", "columns", "chunked", "streamed", "ghost"] = "auto"
    layers: bool = True
    sketch: int = 0


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """Held-out pass@k from ``n`` samples a problem, every ``every`` steps (0: only at the end)."""

    every: int = 50
    n: int = 256
    k: tuple[int, ...] = (1, 16, 64, 256)
    presets: tuple[Literal["full", "yue"], ...] = ("full",)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Checkpoints every ``every`` steps: the last ``keep_last``, and all multiples of ``keep_every``."""

    every: int = 50
    keep_last: int = 2
    keep_every: int | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """Where the model comes from that recipes distil from: ``path`` (a folder or hub id) or ``base``, one that the task
    itself trains (``oracle``: MSA-0's, always right by both strategies). It has the policy's vocabulary.
    """

    path: str | None = None
    base: Literal["oracle"] | None = None


@dataclass(frozen=True, kw_only=True)
class StopSpec:
    """End the run before its last step, once the logged ``metric`` is at least a number (controls at equal drift or cost).

    The number is ``value``, or the last that the run in folder ``of`` logged. ``optim/updates`` matches optimiser
    steps, ``kl/forward_base`` the KL of the base to the policy (nats a response, by the probe), ``cost/total_tokens``
    generated tokens. The metric is looked at after every step that logs it.
    """

    metric: str
    value: float | None = None
    of: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.of is None):
            raise ValueError("stop: give the number itself (value) or a run to match (of), one of them")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole run. ``seed`` is the root of all randomness; ``base_seed`` overrides the base model's."""

    seed: int = 0
    base_seed: int | None = None
    model: ModelSpec
    task: Msa0Spec | ProblemsSpec
    reward: Reward = field(default_factory=Binary)
    algorithm: Algorithm
    teacher: TeacherSpec | None = None
    rollout: RolloutSpec = RolloutSpec()
    optimiser: Optimiser
    steps: int
    mesh: MeshSpec = MeshSpec()
    probe: ProbeSpec = ProbeSpec()
    influence: InfluenceSpec = InfluenceSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    stop: tuple[StopSpec, ...] = ()
