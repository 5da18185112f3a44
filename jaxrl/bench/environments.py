"""The peers' own environments: a virtual environment each, made when first asked for, versions pinned.

They live in ``$JAXRL_BENCH_CACHE``, or ``.cache/bench`` below the current folder. Packages come from
wherever this machine's pip gets its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxrl.errors import JaxrlError

STAMP = "complete"  # holds the pins; written last, so an environment without it is half-made
# Not given to a peer: paths that would mix environments, flags that another XLA may refuse to start with.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True)
class Work:
    """What a peer does for one subject: its script below ``peers/``, and the ways it can be called."""

    script: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A library that does the same as we do, by subject, and its pinned packages.

    ``dependencies``: whether pip may add what the pins need; False where the pins are all there is.
    """

    name: str
    work: Mapping[str, Work]
    pins: tuple[str, ...]
    dependencies: bool = True


TRANSFORMERS = ("torch==2.13.0", "transformers==5.24.0", "safetensors==0.8.0", "numpy==2.4.6")

PEERS = {
    "torch": Peer(
        name="torch",
        work={"kernel": Work("torch_func.py", ("torch.func whole", "torch.func chunks of 4"))},
        pins=("torch==2.13.0", "numpy==2.4.6"),
    ),
    "nt": Peer(  # its declared dependencies include TensorFlow, which the empirical kernel does not use
        name="nt",
        work={
            "kernel": Work(
                "tangents.py", ("neural-tangents JACOBIAN_CONTRACTION", "neural-tangents NTK_VECTOR_PRODUCTS")
            )
        },
        pins=(
            "neural-tangents==0.6.5",
            "jax==0.4.23",
            "jaxlib==0.4.23",
            "ml-dtypes==0.5.3",
            "numpy==1.26.4",
            "opt-einsum==3.4.0",
            "scipy==1.12.0",
        ),
        dependencies=False,
    ),
    "hf": Peer(
        name="hf",
        work={"rollout": Work("hf_generate.py", ("transformers generate",))},
        pins=TRANSFORMERS,
    ),
    "trl": Peer(
        name="trl",
        work={"step": Work("trl_step.py", ("TRL GRPOTrainer", "TRL GRPOTrainer, micro-batches"))},
        pins=(*TRANSFORMERS, "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"),
    ),
    "tunix": Peer(
        name="tunix",
        work={
            "rollout": Work("tunix_sampler.py", ("Tunix Sampler",)),
            "step": Work("tunix_learner.py", ("Tunix GRPOLearner", "Tunix GRPOLearner, micro-batches")),
        },
        pins=(
            "google-tunix==0.1.7",
            "qwix==0.1.8",
            "jax==0.10.2",
            "jaxlib==0.10.2",
            "flax==0.12.8",
            "optax==0.2.8",
            "orbax-checkpoint==0.12.8",
            "transformers==5.12.1",
            "safetensors==0.7.0",
            "numpy==2.4.6",
        ),
    ),
}


def peers_of(subject: str) -> tuple[str, ...]:
    """Names of the peers that can do ``subject``."""
    return tuple(name for name, peer in PEERS.items() if subject in peer.work)


# What pays for every pair of rows, and the work (pairs x parameters) beyond which it is left out: 16 x 16 rows at S.
# It was 4.6 times the gradient pass there, and grows with the number of pairs.
PAIRWISE = frozenset({"neural-tangents NTK_VECTOR_PRODUCTS"})
PAIRWISE_WORK = 256 * 4_100_000


def cache_folder() -> Path:
    """``$JAXRL_BENCH_CACHE``, else ``.cache/bench`` below the current folder."""
    return Path(os.environ.get("JAXRL_BENCH_CACHE") or Path(".cache") / "bench").absolute()


def environment() -> dict[str, str]:
    """This process's environment variables, without those that would change another Python or another jax."""
    return {k: v for k, v in os.environ.items() if k not in FOREIGN and not k.startswith("JAX_")}


def peer_python(peer: Peer, root: Path | None = None) -> Path:
    """The Python of ``peer``'s environment below ``root``; made, or made anew where it was left half-made.

    Takes minutes and needs a package index the first time. Raises ``JaxrlError`` with the end of
    pip's own words when an environment cannot be made.
    """
    folder = (root or cache_folder()) / peer.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = "".join(f"{pin}\n" for pin in peer.pins)
    stamp = folder / STAMP
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of peer {peer.name} in {folder} ...", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _command([sys.executable, "-m", "venv", str(folder)], peer)
    alone = [] if peer.dependencies else ["--no-deps"]
    _command([str(python), "-m", "pip", "install", "--quiet", *alone, *peer.pins], peer)
    stamp.write_text(wanted)
    return python


def _command(words: list[str], peer: Peer) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise JaxrlError(
            f"the environment of peer {peer.name} cannot be made ({' '.join(peer.pins)}):\n{said}\n--peer none runs without peers"
        )
