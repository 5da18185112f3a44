"""Training. The package itself is callable: ``jaxrl.train(experiment)`` trains and returns the run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl.train.experiment import Experiment


class _CallablePackage(ModuleType):
    """``jaxrl.train`` is a package, so importing any part of it would hide a function of that name."""

    def __call__(self, experiment: Experiment, *args, **kwargs) -> Path:
        from jaxrl.train.loop import train

        return train(experiment, *args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
