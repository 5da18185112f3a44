"""Training. The package itself is callable: ``jaxrl.train(experiment)`` trains and returns the run folder."""

import pathlib
import sys
from types import ModuleType
from typing import Any

from jaxrl.train.entry import train


class _CallablePackage(ModuleType):
    """``jaxrl.train`` is a package, so importing any part of it would hide a function of that name."""

    def __call__(self, experiment: Any, **options: Any) -> pathlib.Path:
        return train(experiment, **options)


sys.modules[__name__].__class__ = _CallablePackage
