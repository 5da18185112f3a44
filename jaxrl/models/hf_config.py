"""``config.json`` of a Hugging Face folder to and from ``ModelConfig``, by a whitelist.

Every attribute must be known: read, or harmless, or harmless at one value. Anything else might
change what the model computes, so it is an error that names it. Both spellings are read
(``rope_theta`` and ``rope_scaling`` or ``rope_parameters``, ``torch_dtype`` or ``dtype``); the
current one, of transformers 5, is written. Defaults are those of the transformers classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import JaxrlError, nearest
from jaxrl.models.config import Llama3Rope, ModelConfig
from jaxrl.models.hf_attributes import ARCHITECTURES, DEFAULTS, FIXED, HARMLESS, READ, ROPE, ROPE_KEYS

FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(file: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The config of a model folder and its JSON object as it is.

    Raises ``JaxrlError`` naming the file and the attribute: malformed, missing, unknown, of the wrong
    type, or with a value that this decoder does not compute.
    """
    if not file.exists():
        raise JaxrlError(f"{file.parent}: no {file.name}; a model folder holds config.json and model.safetensors")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise JaxrlError(f"{file}: malformed JSON ({error})") from None
    if not isinstance(raw, dict):
        raise JaxrlError(f"{file}: expected a JSON object, got {type(raw).__name__}")
    try:
        return from_hf(raw), raw
    except ValueError as error:
        raise JaxrlError(f"{file}: {error}") from None


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """``ModelConfig`` of a ``config.json`` object; raises ``ValueError`` naming the attribute."""
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(f"model_type: unknown architecture {family!r}; {nearest(family, ARCHITECTURES)}")
    named = raw.get("architectures") or [ARCHITECTURES[family]]
    if named != [ARCHITECTURES[family]]:
        raise ValueError(f"architectures: expected [{ARCHITECTURES[family]!r}] for model_type {family!r}, got {named}")
    _check_known(raw)
    get = _Reader({**DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None or k == "sliding_window"}})
    if get.raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: only silu is computed here, got {get.raw['hidden_act']!r}")
    hidden, heads, layers = (get.size(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    theta, scaling = _rope(raw, get.size("max_position_embeddings"))
    attention_bias, mlp_bias = _biases(get, family)
    return ModelConfig(
        family=family,
        vocab_size=get.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get.size("num_key_value_heads", heads),
        head_dim=get.size("head_dim", hidden // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=get.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        windows=_windows(get, family, layers),
        tied=get.flag("tie_word_embeddings", False),
        max_positions=get.size("max_position_embeddings"),
        init_std=get.number("initializer_range", 0.02),
    )


class _Reader:
    """Typed access to attributes; errors name the attribute, what was expected and what came."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw

    def size(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, "a positive integer", lambda v: isinstance(v, int) and v > 0))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, "a number", lambda v: isinstance(v, (int, float)) and v >= 0))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, "true or false", lambda v: isinstance(v, bool)))

    def _get(self, key: str, default: Any, expected: str, good: Callable[[Any], bool]) -> Any:
        value = self.raw.get(key, default)
        if value is None:
            raise ValueError(f"{key}: missing, expected {expected}")
        if not good(value) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise ValueError(f"{key}: expected {expected}, got {value!r}")
        return value


def _check_known(raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        if key in FIXED:
            if value not in FIXED[key]:
                raise ValueError(f"{key}: only {' or '.join(map(repr, FIXED[key]))} is computed here, got {value!r}")
        elif key not in READ and key not in HARMLESS:
            raise ValueError(
                f"{key}: unknown attribute (value {value!r}), which may change what the model computes; "
                f"{nearest(key, sorted(READ)).split(' (')[0]}"
            )


def _rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, Llama3Rope | None]:
    """Base and scaling of the rotary embedding, from either spelling; what stands inside wins."""
    given = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f"rope_scaling and rope_parameters disagree: {given[0]} and {given[1]}")
    rope = given[0] if given else {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: expected an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope_parameters.rope_type: {kind!r} is not computed here; {nearest(kind, ROPE_KEYS)}")
    for key in rope:
        if key not in ROPE_KEYS[kind]:
            raise ValueError(
                f"rope_parameters.{key}: unknown for rope_type {kind!r}; {nearest(key, sorted(ROPE_KEYS[kind]))}"
            )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters.partial_rotary_factor: only 1 is computed here, got {rope}")
    theta = _Reader({"rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}).number("rope_theta", 10000.0)
    if kind == "default":
        return theta, None
    get = _Reader(rope)
    return theta, Llama3Rope(
        factor=get.number("factor"),
        low_freq_factor=get.number("low_freq_factor"),
        high_freq_factor=get.number("high_freq_factor"),
        original_max_position=get.size("original_max_position_embeddings", max_positions),
    )


def _biases(get: _Reader, family: str) -> tuple[bool, bool]:
    """(attention, MLP) biases. Qwen2 always has them on q, k, v; its attribute, if any, must not deny it."""
    attention = get.flag("attention_bias", family == "qwen2")
    mlp = get.flag("mlp_bias", False)
    if family in ("qwen2", "mistral") and attention != (family == "qwen2"):
        raise ValueError(f"attention_bias: {family} has none to choose, got {attention}")
    if mlp and family != "llama":
        raise ValueError(f"mlp_bias: only llama has it, got it with model_type {family!r}")
    return attention, mlp


def _windows(get: _Reader, family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, by the rules of each transformers class."""
    types = get.raw.get("layer_types")
    if types is not None and (len(types) != layers or not set(types) <= {FULL, SLIDING}):
        raise ValueError(f"layer_types: expected {layers} of {FULL!r} or {SLIDING!r}, got {types!r}")
    window = get.raw.get("sliding_window")
    window = None if window is None else get.size("sliding_window")
    if family == "llama":
        sliding = [False] * layers
        if window is not None:
            raise ValueError(f"sliding_window: llama attends to everything, got {window}")
    elif family == "mistral":
        sliding = [window is not None] * layers
    else:
        window = window if get.flag("use_sliding_window", False) else None
        first = layers if window is None else int(get.number("max_window_layers"))
        sliding = [kind == SLIDING for kind in types] if types else [i >= first for i in range(layers)]
        if window is None and any(sliding):
            raise ValueError("layer_types: sliding layers need use_sliding_window and a sliding_window")
    if types is not None and [kind == SLIDING for kind in types] != sliding:
        raise ValueError(f"layer_types: {family} with sliding_window {window} does not follow them, got {types!r}")
    return tuple(window if s else None for s in sliding) if any(sliding) else ()


def to_hf(config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``config.json`` object of a model, in the current spelling.

    Attributes of ``source`` (the object that the model was loaded with) that say nothing about the
    computation are kept. Raises ``ValueError`` for a combination that the family cannot express.
    """
    family = config.family
    _check_expressible(config)
    replaced = {*ROPE, "torch_dtype", "layer_types", "sliding_window", "use_sliding_window"}
    kept = {key: value for key, value in (source or _FRESH).items() if key not in replaced}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (s := config.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
                 "high_freq_factor": s.high_freq_factor,
                 "original_max_position_embeddings": s.original_max_position}  # fmt: skip
    out = kept | {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.norm_eps, "rope_parameters": rope,
        "tie_word_embeddings": config.tied, "initializer_range": config.init_std, "dtype": dtype,
    }  # fmt: skip
    if family in ("llama", "qwen3"):
        out["attention_bias"] = config.o_bias
    if family == "llama":
        out["mlp_bias"] = config.mlp_bias
    return out | _write_windows(config)


# Without an original, the classes' default token ids would be claimed for a vocabulary that has none.
_FRESH = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    window = next((w for w in config.windows if w is not None), None)
    if config.family == "llama":
        return {}
    if config.family == "mistral":
        return {"sliding_window": window}
    windows = config.windows or (None,) * config.num_layers
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [FULL if w is None else SLIDING for w in windows],
    }


def _check_expressible(c: ModelConfig) -> None:
    """Raise where transformers' class of the family would compute something else."""
    wrong = {
        "qkv_bias": c.qkv_bias != {"qwen2": True, "mistral": False}.get(c.family, c.o_bias),
        "o_bias": c.o_bias and c.family in ("qwen2", "mistral"),
        "mlp_bias": c.mlp_bias and c.family != "llama",
        "qk_norm": c.qk_norm != (c.family == "qwen3"),
        "windows": len({w for w in c.windows if w is not None}) > 1
        or (c.family == "llama" and any(w is not None for w in c.windows))
        or (c.family == "mistral" and len(set(c.windows)) > 1),
    }
    for name, bad in wrong.items():
        if bad:
            raise ValueError(
                f"{name}={getattr(c, name)!r} cannot be written as a {c.family} model; choose another family"
            )
