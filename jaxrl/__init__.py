"""Train language-model policies with verifiable rewards, and measure what each update does to the rest.

The public names below are loaded on first use, so that ``import jaxrl.report`` or a reward worker
never pays for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.config import load_config
    from jaxrl.evaluation.passk import pass_at_k
    from jaxrl.influence.gradients import predicted_change
    from jaxrl.influence.kernels import gradient_kernel
    from jaxrl.models.config import ModelConfig
    from jaxrl.models.decoder import init_model
    from jaxrl.models.hf import load_model, save_model
    from jaxrl.models.logps import token_logps
    from jaxrl.rewards.math import MathRule, Verdict, verify_math
    from jaxrl.rl.recipes import ALGORITHMS
    from jaxrl.sampling.engine import SlotEngine, SlotSpec
    from jaxrl.sampling.generate import generate
    from jaxrl.sampling.requests import Request, Sampling
    from jaxrl.sampling.strategies import Greedy, Temperature, TopK, TopKTopP, TopP
    from jaxrl.train.entry import train
    from jaxrl.types import Kernel, Prompts, Rollouts, Rows

_MODULES = {
    "ALGORITHMS": "jaxrl.rl.recipes",
    "Greedy": "jaxrl.sampling.strategies",
    "Kernel": "jaxrl.types",
    "MathRule": "jaxrl.rewards.math",
    "ModelConfig": "jaxrl.models.config",
    "Prompts": "jaxrl.types",
    "Request": "jaxrl.sampling.requests",
    "Rollouts": "jaxrl.types",
    "Rows": "jaxrl.types",
    "Sampling": "jaxrl.sampling.requests",
    "SlotEngine": "jaxrl.sampling.engine",
    "SlotSpec": "jaxrl.sampling.engine",
    "Temperature": "jaxrl.sampling.strategies",
    "TopK": "jaxrl.sampling.strategies",
    "TopKTopP": "jaxrl.sampling.strategies",
    "TopP": "jaxrl.sampling.strategies",
    "Verdict": "jaxrl.rewards.math",
    "generate": "jaxrl.sampling.generate",
    "gradient_kernel": "jaxrl.influence.kernels",
    "init_model": "jaxrl.models.decoder",
    "load_config": "jaxrl.config",
    "load_model": "jaxrl.models.hf",
    "pass_at_k": "jaxrl.evaluation.passk",
    "predicted_change": "jaxrl.influence.gradients",
    "save_model": "jaxrl.models.hf",
    "token_logps": "jaxrl.models.logps",
    "train": "jaxrl.train",
    "verify_math": "jaxrl.rewards.math",
}

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Greedy",
    "Kernel",
    "MathRule",
    "ModelConfig",
    "Prompts",
    "Request",
    "Rollouts",
    "Rows",
    "Sampling",
    "SlotEngine",
    "SlotSpec",
    "Temperature",
    "TopK",
    "TopKTopP",
    "TopP",
    "Verdict",
    "generate",
    "gradient_kernel",
    "init_model",
    "load_config",
    "load_model",
    "pass_at_k",
    "predicted_change",
    "save_model",
    "token_logps",
    "train",
    "verify_math",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    if module.__name__ == f"jaxrl.{name}":  # a package that is callable under its own name
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
