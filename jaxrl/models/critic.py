"""Critics: decoders with a value head, made of a policy's parameters and taken apart again."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import jax.numpy as jnp

from jaxrl.models.decoder import Decoder, build, param_shapes


def critic_of(model: Decoder) -> Decoder:
    """A critic that starts from ``model``: its trunk, no head for tokens, and a value of 0 everywhere.

    Parameters are shared with ``model``, the value vector excepted; copy before donating.
    """
    return _changed(model, tied=True, value_head=True)


def with_value_head(model: Decoder) -> Decoder:
    """``model`` with a value head that says 0 everywhere: policy and critic on one trunk."""
    return _changed(model, value_head=True)


def without_value_head(model: Decoder) -> Decoder:
    """The policy alone: what samples, is exported and has a kernel. ``model`` itself where it has no value head."""
    return _changed(model, value_head=False) if model.config.value_head else model


def _changed(model: Decoder, **changes: Any) -> Decoder:
    config = dataclasses.replace(model.config, **changes)
    leaves = {}
    for name, shape in param_shapes(config).items():
        held = attrgetter(name)(model)
        leaves[name] = jnp.zeros(shape, model.norm[...].dtype) if held is None else held.get_value()
    return build(config, leaves)
