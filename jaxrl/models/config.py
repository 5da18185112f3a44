"""The architecture of one decoder family, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
REMAT = ("none", "names", "dots", "full")
ATTENTION = ("auto", "xla", "cudnn", "splash")


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1+: long wavelengths are stretched by ``factor``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a Llama / Qwen2 / Qwen3 / Mistral decoder.

    ``windows`` holds one sliding window a layer (tokens that a query sees, itself included; None
    for all); the empty tuple means none anywhere. Ids at or above ``vocab_limit`` (the tokenizer's
    size) exist in the matrices but are never sampled nor scored. ``dtype`` is the compute dtype:
    parameters are kept in float32 whatever it says. ``remat`` chooses what the backward pass keeps
    of a layer: everything (``none``), named activations (``names``), matmul outputs (``dots``) or
    only layer inputs (``full``). ``attention`` chooses the kernel of whole rows: ``auto`` what suits the
    platform, ``xla`` everywhere, ``cudnn`` on NVIDIA GPUs, ``splash`` on TPUs. Only ``xla`` has forward
    mode and second derivatives: kernels and predictions of changes use it whatever is said here.

    ``source`` is the folder that a loaded model came from and ``checkpoint_dtype`` the dtype its
    tensors had there: one name, or (tensor, dtype) pairs where they differ. ``save_model`` goes by
    them. They say nothing of what the model computes and take no part in comparisons, so models
    from different folders fit into one tree; the price is that a jitted function which *returns* a
    model may give it the record of an equal one that it was compiled for. Name ``source`` and
    ``dtype`` when you save a model after training.

    Raises ``ValueError`` when sizes do not divide or a name is unknown.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    family: str = "llama"
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    tied: bool = True
    max_positions: int = 2048
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    vocab_limit: int | None = None
    init_std: float = 0.02
    value_head: bool = False
    source: str | None = field(default=None, compare=False)
    checkpoint_dtype: str | tuple[tuple[str, str], ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model.family: expected one of {', '.join(FAMILIES)}, got {self.family!r}")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat: expected one of {', '.join(REMAT)}, got {self.remat!r}")
        if self.attention not in ATTENTION:
            raise ValueError(f"model.attention: expected one of {', '.join(ATTENTION)}, got {self.attention!r}")
        if self.dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"model.dtype: expected float32, bfloat16, float16 or float64, got {self.dtype!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads: {self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim: rotary embeddings need an even number, got {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"model.windows: expected {self.num_layers} entries, got {len(self.windows)}")
        if self.vocab_limit is not None and not 0 < self.vocab_limit <= self.vocab_size:
            raise ValueError(f"model.vocab_limit: {self.vocab_limit} is not within 1..{self.vocab_size}")
