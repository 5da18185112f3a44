"""A model with tied embeddings as one with a head of its own."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

from jaxrl.models.decoder import Decoder, build, param_shapes


def untied(model: Decoder) -> Decoder:
    """The same function, its head a copy of the embedding, transposed; a model that is not tied is returned itself."""
    if not model.config.tied:
        return model
    config = dataclasses.replace(model.config, tied=False)
    leaves = {name: attrgetter(name)(model).get_value() for name in param_shapes(config) if name != "head"}
    return build(config, leaves | {"head": leaves["embed"].T})
