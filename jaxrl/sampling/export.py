"""The policy as a folder that a server loads, and what such a server must say of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.mesh import is_main, to_host
from jaxrl.models.decoder import Decoder
from jaxrl.models.hf import save_model
from jaxrl.models.logps import token_logps
from jaxrl.models.tying import untied
from jaxrl.types import Rows

PRECISIONS = {"bfloat16": (8, 7), "float16": (5, 10)}  # bits of exponent and mantissa


def stored_dtype(model: Decoder, dtype: str | None) -> str:
    """What the weights are written in: ``dtype``, else what the checkpoint came in, else float32."""
    known = model.config.checkpoint_dtype
    return dtype or (known if isinstance(known, str) else "float32")


def export(model: Decoder, folder: Path, version: int, dtype: str | None = None) -> Path:
    """Write ``folder/<version>``, which appears whole or not at all; all processes call this, the first one writes.

    A tied model is written with a head of its own: on reload, vLLM 0.32 keeps the old head of a tied model on CPUs,
    where heads are packed when they are loaded.
    """
    return save_model(untied(model), folder / str(version), stored_dtype(model, dtype), overwrite=True)


def drop_exports(folder: Path, versions: Sequence[int]) -> None:
    """Remove ``folder/<version>`` of each."""
    if is_main():
        for version in versions:
            shutil.rmtree(folder / str(version), ignore_errors=True)


def some_probe(model: Decoder, length: int) -> list[int]:
    """Ids spread over the vocabulary. Improbable ones: there two models differ by more than rounding does."""
    limit = model.config.vocab_limit or model.config.vocab_size
    return [int(i) for i in np.random.default_rng(0).integers(0, limit, length)]


def probe_logps(
    model: Decoder, probe: Sequence[int], dtype: str | None = None, *, temperature: float = 1.0
) -> Float[np.ndarray, " m"]:
    """Log-probabilities f64[len(probe) - 1], in nats, of all tokens but the first, under the weights as written."""
    tokens, ends = jnp.asarray([probe], jnp.int32), jnp.asarray([[1], [len(probe)]], jnp.int32)
    rows = Rows(tokens, ends[0], ends[1])
    found = _probe_logps(model, rows, temperature, stored_dtype(model, dtype))
    return to_host(found)[0, 1:].astype(np.float64)


@partial(jax.jit, static_argnames=("temperature", "dtype"))
def _probe_logps(model: Decoder, rows: Rows, temperature: float, dtype: str) -> Float[Array, "1 L"]:
    # not a cast there and back, which XLA takes out
    bits = PRECISIONS.get(dtype)
    rounded = model if bits is None else jax.tree.map(lambda x: jax.lax.reduce_precision(x, *bits), model)
    return token_logps(rounded, rows, temperature=temperature)
