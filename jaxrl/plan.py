"""What a program will need on a machine that is not there: compiled ahead of time, nothing allocated or run.

The streamed kernel so far: memory a device, operations, and bytes between devices. As a command:

    python -m jaxrl.plan kernel --config MODEL --topology v5p:2x2x4 --mesh data=1,fsdp=16 -n 64 -m 64 --width 2048

with a folder of a model (its ``config.json`` is enough) or a name of ``PRESETS``. A TPU topology needs libtpu (the
``tpu`` extra) but no TPU; without ``--topology`` the devices are those of this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxrl.errors import DoesNotHold, JaxrlError, OutOfMemory, UsageError, nearest
from jaxrl.hlo import collective_bytes
from jaxrl.influence.abstract import abstract_arguments, abstract_job
from jaxrl.influence.blocks import ROWS
from jaxrl.influence.cost import BLOCK, CHUNK, exchange_bytes, human, matrix_shapes, row_bytes
from jaxrl.influence.stream import stream
from jaxrl.mesh import AXES, make_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import param_shapes
from jaxrl.models.hf_config import read_config
from jaxrl.models.hf_folder import find_folder

PRESETS = {
    "qwen2.5-math-1.5b": ModelConfig(
        family="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12,
        num_kv_heads=2, head_dim=128, qkv_bias=True, tied=True, norm_eps=1e-6, max_positions=4096,
    ),
}  # fmt: skip
# Bytes of a device of each kind, as their makers state them.
DEVICE_BYTES = {"TPU v4": 32e9, "TPU v5": 95e9, "TPU v5 lite": 16e9, "TPU v6 lite": 32e9}


@dataclass(frozen=True)
class KernelPlan:
    """The compiled program of one kernel. Bytes are those of one device, operations those of all together.

    ``total`` is what the program has reserved while it runs (arguments, output, temporary, code), ``peak`` the most
    that is in use at once where the compiler says so, 0 where not. ``estimate`` is what
    ``cost.row_bytes`` expects beside the parameters, by which row tiles are chosen. ``once`` is XLA's
    count of one device's operations, in which the body of a loop counts once however often it runs;
    ``flops`` counts the matrix products of all devices, every time they run. ``exchange`` is the formula
    for the all-to-all of per-row gradients, ``exchanged`` what the program does of it.
    """

    device: str
    mesh: dict[str, int]
    n: int
    m: int
    width: int
    scored: int
    listed: int
    parameters: int
    arguments: int
    output: int
    temp: int
    code: int
    total: int
    peak: int
    estimate: int
    once: float
    flops: float
    collectives: dict[str, int]
    exchanged: int
    exchange: int
    seconds: float

    @property
    def room(self) -> float | None:
        """Bytes that such a device has, where that is known."""
        return DEVICE_BYTES.get(self.device)

    def lines(self) -> list[str]:
        """The plan in words."""
        size = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        room = f" of {self.room / 1e9:.0f} GB" if self.room else ""
        moved = ", ".join(f"{kind} {human(size)}" for kind, size in self.collectives.items() if size)
        return [
            f"{self.n} x {self.m} rows of {self.width} tokens ({self.scored} scored, {self.listed or 'all'} entries of "
            f"the vocabulary listed) on {math.prod(self.mesh.values())} {self.device} ({size})",
            f"{human(self.total)}{room} a device (peak use {human(self.peak)}): arguments {human(self.arguments)} (parameters "
            f"{human(self.parameters)}), temporary {human(self.temp)}, output {human(self.output)}, code {human(self.code)}",
            f"expected of rows and blocks, by which row tiles are chosen: {human(self.estimate)}",
            f"{self.flops:.3e} operations in matrix products, {self.flops / math.prod(self.mesh.values()):.3e} a device",
            f"between devices, bytes a device: {moved or 'nothing'}",
            f"exchange of gradients: {human(self.exchanged)}, by the formula {human(self.exchange)}",
        ]


def plan_kernel(
    config: ModelConfig,
    mesh: Mesh,
    *,
    n: int,
    m: int,
    width: int,
    scored: int | None = None,
    listed: int | None = None,
    param_dtype: str = "float32",
    block: int = BLOCK,
    chunk: int = CHUNK,
) -> KernelPlan:
    """Compile the streamed kernel of ``n`` rows with ``m`` others for the devices of ``mesh``, without arrays.

    ``width``: tokens of a row. ``scored``: how many of them the longest response has, ``listed``: how many
    different tokens occur, both by default as many as there can be. Rows are in one tile. Raises
    ``OutOfMemory`` when the compiler finds no room.
    """
    job = abstract_job(
        config, mesh, n=n, m=m, width=width, scored=scored, param_dtype=param_dtype, block=block, chunk=chunk
    )
    given = abstract_arguments(job, listed)
    model, sides, _, ids, _, how = given
    start = time.perf_counter()
    compiled = _compiled(given, f"{n} x {m} rows of {width} tokens", math.prod(mesh.shape[name] for name in ROWS))
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    rows, at = sum(side.count for side in sides), 0 if ids is None else ids.shape[0]
    apart = how.consumer.row_devices
    return KernelPlan(
        device=mesh.devices.flat[0].device_kind,
        mesh=dict(mesh.shape),
        n=n,
        m=m,
        width=width,
        scored=sides[0].target.shape[1],
        listed=at,
        parameters=held_bytes(model),
        arguments=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        total=_reserved(memory),
        peak=getattr(memory, "peak_memory_in_bytes", 0),
        estimate=rows // apart * row_bytes(config, width) + 2 * how.consumer.block,
        once=float((compiled.cost_analysis() or {}).get("flops", math.nan)),
        flops=kernel_flops(config, n, m, width, sides[0].target.shape[1], at, how.consumer.ghost),
        collectives=collective_bytes(text),
        exchanged=collective_bytes(text, "shard_map")["all-to-all"],
        exchange=0 if how.consumer.mesh is None else exchange_bytes(model, mesh, rows, at),
        seconds=seconds,
    )


def _compiled(given: tuple[Any, ...], what: str, devices: int) -> Any:
    try:
        return stream.lower(*given).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{what} do not fit {devices} devices that share rows: {str(error).splitlines()[0][:300]}; "
            "plan fewer rows or tokens (a kernel takes row tiles by itself), or more devices"
        ) from error


def _reserved(memory: Any) -> int:
    parts = ("argument", "output", "temp", "generated_code")
    return sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) - memory.alias_size_in_bytes


def held_bytes(tree: Any) -> int:
    """Bytes of arrays, or shapes with shardings, that one device holds."""
    shards = ((x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x.dtype) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def kernel_flops(
    config: ModelConfig, n: int, m: int, width: int, scored: int, listed: int, ghost: frozenset[str] = frozenset()
) -> int:
    """Operations of the streamed kernel's matrix products, all devices together (KERNEL.md 1).

    A rematerialised gradient pass over n + m rows, ``2 n m P`` for the products, and once more the head on the
    ``listed`` entries of a tied matrix (0: on all). Attention counts all pairs of tokens, since all are
    computed. Padding of rows, blocks and the vocabulary's last chunk is left out, as is what is no matrix product.
    """
    c, rows, pairs = config, n + m, n * m
    attention = 4 * rows * c.num_heads * width**2 * c.head_dim  # scores and mixture, or one of their pullbacks
    layer = 4 * attention  # forward, recomputed, and two products for each of the two in reverse
    for name, (i, o) in matrix_shapes(c).items():
        passes = (
            2 if name == "down" else 3
        )  # forward, recomputed (of the last matrix nothing is needed), inputs' cotangent
        layer += 2 * passes * rows * width * i * o
        both = 2 * (pairs + rows) * width**2 * (i + o)  # products token by token, and norms
        layer += both if name in ghost else 2 * (rows * width + pairs) * i * o
    logits, entry = 2 * rows * scored * c.hidden_size, 2 * pairs * c.hidden_size
    head = 3 * logits * c.vocab_size  # two passes and the states' cotangent
    if not c.tied:
        head += (logits + entry) * c.vocab_size + entry * listed
    elif listed:
        head += (logits + entry) * c.vocab_size + 2 * (logits + entry) * listed
    else:
        head += (2 * logits + entry) * c.vocab_size
    vectors = sum(math.prod(s) for name, s in param_shapes(c).items() if name.endswith(("norm", "_bias")))
    return c.num_layers * layer + head + 2 * pairs * vectors


# ---------------------------------------------------------------- the command


def topology_mesh(name: str, data: int = 1, fsdp: int = -1, tensor: int = 1) -> Mesh:
    """A mesh of the devices of a TPU topology such as ``v5p:2x2x4``, none of which need exist.

    Raises ``UsageError`` without libtpu or for a name it does not know.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no metadata server what this machine is
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # libtpu raises whatever kept it from loading
        raise UsageError(
            f"--topology {name}: {str(error).splitlines()[0][:300]}; expected a generation and its shape, such as "
            "v5p:2x2x4, and libtpu (pip install 'jaxrl[tpu]')"
        ) from error
    return make_mesh(data, fsdp, tensor, devices=devices)


def sizes(text: str) -> dict[str, int]:
    """``data=1,fsdp=16`` as a dict."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise UsageError(f"--mesh: unknown axis {name!r}; {nearest(name, AXES)}")
        if not size.lstrip("-").isdigit():
            raise UsageError(f"--mesh: expected an integer for {name}, got {size!r}")
        found[name] = int(size)
    return found


def model_config(name: str, dtype: str) -> ModelConfig:
    """A preset, or the config of a model's folder, computing in ``dtype``."""
    config = PRESETS.get(name.lower())
    if config is None:
        if not Path(name).is_dir() and "/" not in name:
            raise UsageError(f"--config: {name!r} is no folder and no preset; {nearest(name, PRESETS)}")
        config = read_config(find_folder(name) / "config.json")[0]
    return dataclasses.replace(config, dtype=dtype)


def parser() -> argparse.ArgumentParser:
    """Arguments of ``python -m jaxrl.plan``."""
    root = argparse.ArgumentParser(prog="python -m jaxrl.plan", description=(__doc__ or "").splitlines()[0])
    add = root.add_subparsers(dest="phase", required=True).add_parser("kernel", help="the streamed gradient kernel")
    add.add_argument("--config", required=True, metavar="MODEL", help="a model's folder, or " + ", ".join(PRESETS))
    add.add_argument("--topology", metavar="NAME", help="a TPU topology: v5p:2x2x4 (default: this machine's devices)")
    add.add_argument("--mesh", default="fsdp=-1", metavar="SIZES", help="data=1,fsdp=16,tensor=1; -1 is what is left")
    add.add_argument("-n", type=int, default=64, help="rows on the left")
    add.add_argument("-m", type=int, default=64, help="rows on the right")
    add.add_argument("--width", type=int, default=2048, help="tokens a row")
    add.add_argument("--scored", type=int, help="tokens of the longest response (default: all but the first)")
    add.add_argument("--listed", type=_whole, help="different tokens that occur (default: as many as there can be)")
    add.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    add.add_argument(
        "--param-dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what parameters are kept in",
    )
    add.add_argument("--json", action="store_true", help="machine-readable")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 3 when the plan does not fit the device."""
    given = parser().parse_args(arguments)
    try:
        place = sizes(given.mesh)
        mesh = topology_mesh(given.topology, **place) if given.topology else make_mesh(**place)
        keys = ("n", "m", "width", "scored", "listed", "param_dtype")
        plan = plan_kernel(model_config(given.config, given.dtype), mesh, **{key: getattr(given, key) for key in keys})
        print(json.dumps(dataclasses.asdict(plan), indent=1) if given.json else "\n".join(plan.lines()))
        if plan.room and plan.total > plan.room:
            raise DoesNotHold(f"{human(plan.total)} do not fit a {plan.device} of {plan.room / 1e9:.0f} GB")
    except JaxrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return UsageError.exit_code
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0 (0: the whole vocabulary), got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
