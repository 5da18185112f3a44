"""One table between our parameters and the tensors of Hugging Face checkpoints, both ways.

Our layer parameters are stacked over layers and keep heads apart; theirs are one tensor a layer,
matrices stored as (out, in). Letters name axes: d hidden, v vocabulary, h heads, k key-value heads,
e head size, f MLP. Their side gives the axes in storage order, joined by a space where they are
separate: ``"he d"`` is a matrix of shape (h*e, d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import param_shapes


@dataclass(frozen=True)
class Layout:
    """One parameter: the tensor's name (``{i}`` is the layer), its axes, and ours."""

    tensor: str
    theirs: str
    ours: str

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that holds a parameter of shape ``ours`` (without the layer axis)."""
        size = dict(zip(self.ours, ours, strict=True))
        return tuple(math.prod(size[letter] for letter in group) for group in self.theirs.split())

    def imported(self, tensor: np.ndarray, ours: tuple[int, ...]) -> np.ndarray:
        """A view of the tensor in our layout; nothing is copied."""
        size = dict(zip(self.ours, ours, strict=True))
        letters = self.theirs.replace(" ", "")
        apart = tensor.reshape([size[letter] for letter in letters])
        return apart.transpose([letters.index(letter) for letter in self.ours])

    def exported(self, param: np.ndarray) -> np.ndarray:
        """The parameter in the tensor's layout."""
        letters = self.theirs.replace(" ", "")
        return param.transpose([self.ours.index(letter) for letter in letters]).reshape(self.shape(param.shape))


def _layer(tensor: str, theirs: str, ours: str) -> Layout:
    return Layout("model.layers.{i}." + tensor, theirs, ours)


TABLE: dict[str, Layout] = {
    "embed": Layout("model.embed_tokens.weight", "v d", "vd"),
    "layers.attn_norm": _layer("input_layernorm.weight", "d", "d"),
    "layers.q": _layer("self_attn.q_proj.weight", "he d", "dhe"),
    "layers.k": _layer("self_attn.k_proj.weight", "ke d", "dke"),
    "layers.v": _layer("self_attn.v_proj.weight", "ke d", "dke"),
    "layers.o": _layer("self_attn.o_proj.weight", "d he", "hed"),
    "layers.q_bias": _layer("self_attn.q_proj.bias", "he", "he"),
    "layers.k_bias": _layer("self_attn.k_proj.bias", "ke", "ke"),
    "layers.v_bias": _layer("self_attn.v_proj.bias", "ke", "ke"),
    "layers.o_bias": _layer("self_attn.o_proj.bias", "d", "d"),
    "layers.q_norm": _layer("self_attn.q_norm.weight", "e", "e"),
    "layers.k_norm": _layer("self_attn.k_norm.weight", "e", "e"),
    "layers.mlp_norm": _layer("post_attention_layernorm.weight", "d", "d"),
    "layers.gate": _layer("mlp.gate_proj.weight", "f d", "df"),
    "layers.up": _layer("mlp.up_proj.weight", "f d", "df"),
    "layers.down": _layer("mlp.down_proj.weight", "d f", "fd"),
    "layers.gate_bias": _layer("mlp.gate_proj.bias", "f", "f"),
    "layers.up_bias": _layer("mlp.up_proj.bias", "f", "f"),
    "layers.down_bias": _layer("mlp.down_proj.bias", "d", "d"),
    "norm": Layout("model.norm.weight", "d", "d"),
    "head": Layout("lm_head.weight", "v d", "dv"),
}
HEAD = TABLE["head"].tensor
EMBED = TABLE["embed"].tensor


def stacked(name: str) -> bool:
    """Whether a parameter has a leading layer axis."""
    return name.startswith("layers.")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of ``config`` holds, embedding first, head last."""
    params = param_shapes(config)
    shapes = {EMBED: TABLE["embed"].shape(params["embed"])}
    for i in range(config.num_layers):
        for name, layout in TABLE.items():
            if stacked(name) and name in params:
                shapes[layout.tensor.format(i=i)] = layout.shape(params[name][1:])
    for name in ("norm", "head"):
        if name in params:
            shapes[TABLE[name].tensor] = TABLE[name].shape(params[name])
    return shapes
