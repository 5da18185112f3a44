"""The arguments of ``jaxrl bench``. Nothing heavy is imported here: the command line reads it to print its help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from jaxrl.bench import SUBJECTS
from jaxrl.errors import nearest

SIZES = ("XS", "S", "M")
PEERS: dict[str, tuple[str, ...]] = {
    "kernel": ("torch", "nt"),
    "head": (),
    "rollout": ("hf", "tunix"),
    "step": ("trl", "tunix"),
}
CASES = {"rollout": ("plain", "shared", "refill"), "step": ("full", "ragged")}
LINE = "what the kernel, the head, sampling and a training step cost on this machine, in CPU-seconds against other libraries"
EXAMPLE = "jaxrl bench rollout --peer hf,tunix"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    subjects = (*SUBJECTS, "all")
    p.add_argument(
        "subject",
        nargs="?",
        default="all",
        choices=subjects,
        metavar="SUBJECT",
        help=f"{', '.join(subjects)} (default); all is quick and without peers, each alone takes up to half an hour",
    )
    p.add_argument("--repeats", type=_count, default=3, metavar="N", help="rounds of timings (default 3)")
    p.add_argument(
        "--peer",
        type=_peers,
        metavar="A,B",
        help=f"{_by_subject(PEERS)}; or none; each in its own environment, made when missing "
        "(default: all of the subject; none under all)",
    )
    shared = p.add_argument_group("rollout, step")
    shared.add_argument(
        "--cases",
        type=_names([name for names in CASES.values() for name in names]),
        metavar="A,B",
        help=f"{_by_subject(CASES)} (default all)",
    )
    shared.add_argument("--quick", action="store_true", default=None, help="a tiny model: shows that it runs, no more")
    shared.add_argument(
        "--accelerator",
        action="store_true",
        default=None,
        help="our own cases alone, on what jax finds: a model of 1.5 billion parameters in bfloat16, seconds by the "
        "wall, and the share of them that the device's peak bandwidth or speed explains",
    )
    kernel = p.add_argument_group("kernel")
    kernel.add_argument(
        "--sizes", type=_names(SIZES), metavar="S,M", help=f"of {', '.join(SIZES)} (default S,M; XS under all)"
    )
    kernel.add_argument("--rows", type=_counts, metavar="N,N", help="rows on each side (default: by size)")
    kernel.add_argument("--methods", type=_list, metavar="A,B", help="of our own (default reference,streamed)")
    kernel.add_argument(
        "--response", choices=("all", "half"), help="response tokens of a row (default all but the first)"
    )


def _by_subject(names: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{subject}: {', '.join(of)}" for subject, of in names.items() if of)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _names(known: Sequence[str]):
    def parse(text: str) -> tuple[str, ...]:
        for name in _list(text):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{nearest(name, known)}, got {name!r}")
        return tuple(dict.fromkeys(_list(text)))

    return parse


def _peers(text: str) -> tuple[str, ...]:
    known = list(dict.fromkeys(name for names in PEERS.values() for name in names))
    return () if text == "none" else _names(known)(text)
