"""The ``jaxrl`` command: parsing and printing only. The work is in ``jaxrl.commands``."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.bench.arguments import EXAMPLE, LINE, add_arguments
from jaxrl.errors import JaxrlError, UsageError, nearest
from jaxrl.tables import write_json, write_tables

FAILED, INTERRUPTED = 1, 130
EXIT_CODES = """exit codes: 0 done; 1 a failure, said in one message; 2 wrong usage or config;
3 does not hold or does not fit (a gate, a plan, a check); 130 interrupted, resumable
JAXRL_DEBUG=1 shows the traceback of a failure"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every failure is printed in one place."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nusage: see {self.prog} --help")


# ---------------------------------------------------------------- values of arguments


def count(text: str) -> int:
    """An integer of at least 1."""
    return _number(int, text, lambda x: x >= 1, "an integer of at least 1")


def index(text: str) -> int:
    """An integer of at least 0: a step."""
    return _number(int, text, lambda x: x >= 0, "an integer of at least 0")


def seed(text: str) -> int:
    """An integer that roots the random keys, which have 32 bits: what a config's ``seed`` takes."""
    return _number(int, text, lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")


def temperature(text: str) -> float:
    """0 (greedy) or more."""
    return _number(float, text, lambda x: 0 <= x <= 100, "a number from 0 (greedy) to 100")


def rate(text: str) -> float:
    """A learning rate: above 0."""
    return _number(float, text, lambda x: 0 < x < float("inf"), "a number above 0")


def decay(text: str) -> float:
    """0 or more."""
    return _number(float, text, lambda x: 0 <= x < float("inf"), "a number of at least 0")


def probability(text: str) -> float:
    """Above 0, at most 1."""
    return _number(float, text, lambda x: 0 < x <= 1, "a number above 0 and at most 1")


def counts(text: str) -> tuple[int, ...]:
    """``1,16,64`` as a tuple in rising order."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def size(text: str) -> int:
    """``512M`` or ``2G`` as bytes; K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    value = int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text!r}")
    return value


def names(text: str) -> tuple[str, ...]:
    """``a,b`` as a tuple of texts."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected names between commas, got {text!r}")
    return found


def _number(kind: type, text: str, holds: Callable[[Any], bool], expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


# ---------------------------------------------------------------- the commands' arguments


def _demo(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs and the report"
    )
    p.add_argument("--seed", type=seed, default=0, help="root of all randomness (default 0)")


def _train(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file; see configs/")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one value; may be given several times"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/ and the config's name)")
    p.add_argument("--resume", action="store_true", help="continue the run in DIR from its last checkpoint")
    p.add_argument("--dry-run", action="store_true", help="compile, print memory and shapes, and take no step")


def _sample(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL|RUN", help="a model folder or hub id; with --data also a run folder")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="FILE", help="problems: JSONL, parquet, a hub id or a built-in set")
    source.add_argument("--prompt", metavar="TEXT", help="one problem")
    p.add_argument("-n", type=count, default=1, help="responses a problem (default 1)")
    p.add_argument("--temperature", type=temperature, default=1.0, help="0 is greedy (default 1)")
    p.add_argument("--top-p", type=probability, default=1.0, help="mass of the nucleus (default 1: everything)")
    _sampling(p)
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL of the samples")
    p.add_argument("--overwrite", action="store_true", help="replace FILE")


def _eval(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL|RUN", help="a model folder, a hub id or a run folder")
    p.add_argument("--data", required=True, metavar="FILE|NAME", help="problems, or a split of the run's own task")
    p.add_argument("-n", type=count, default=256, help="samples a problem (default 256)")
    p.add_argument(
        "--k", type=counts, metavar="K,K,...", help="the k of pass@k (default: those of 1,16,64,256 up to n)"
    )
    p.add_argument(
        "--preset", choices=("full", "yue"), default="full", help="full: T=1, top-p 1; yue: T=0.6, top-p 0.95"
    )
    p.add_argument("--step", type=index, metavar="S", help="checkpoint of a run (default: the last)")
    _sampling(p)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="samples and summary")


def _probe(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL|RUN", help="a model folder, a hub id or a run folder")
    p.add_argument("--data", required=True, metavar="FILE", help="problems: JSONL, parquet, a hub id or a built-in set")
    p.add_argument("--prompts", type=count, default=64, help="how many problems (default 64)")
    p.add_argument("-n", type=count, default=4, help="solutions a problem (default 4)")
    p.add_argument("--temperature", type=temperature, default=1.0, help="of the sampling (default 1)")
    _sampling(p)
    p.add_argument("--out", type=Path, default=Path("probe.npz"), metavar="FILE", help="(default probe.npz)")
    p.add_argument("--overwrite", action="store_true", help="replace FILE")


def _sampling(p: argparse.ArgumentParser) -> None:
    p.add_argument("--template", help="prompt template (default: the run's own, else paper)")
    p.add_argument("--max-new-tokens", type=count, help="tokens of a response (default: the run's own, else 256)")
    p.add_argument("--limit", type=count, help="only the first problems")
    p.add_argument("--seed", type=seed, default=0, help="root of all randomness (default 0)")


def _kernel(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL|RUN", help="a model folder or hub id with --a; or a run folder")
    p.add_argument("--a", type=Path, metavar="FILE", help="rows: JSONL of prompt, response and labels")
    p.add_argument("--b", type=Path, metavar="FILE", help="rows of the other side (default: those of --a again)")
    p.add_argument(
        "--step", type=index, metavar="S", help="checkpoint of a run: its batch and probe (default: the last)"
    )
    p.add_argument("--method", default="auto", help="auto (default), streamed, ghost, chunked, reference or columns")
    p.add_argument("--layers", action="store_true", help="also the part of every layer")
    p.add_argument("--normalise", choices=("sum", "tok"), default="sum", help="sum over response tokens, or their mean")
    p.add_argument("--limit", type=count, metavar="N", help="rows of each side (default: all; of a run influence.rows)")
    p.add_argument("--max-tokens", type=count, metavar="L", help="cut longer rows at the end of the response")
    p.add_argument("--memory", type=size, metavar="BYTES", help="limit of what is held beside the model, as 2G")
    p.add_argument(
        "--verify", action="store_true", help="take an SGD and an AdamW step on A; predicted against measured on B"
    )
    scaled = "so that scores change by 0.3 %%"
    p.add_argument("--lr", type=rate, metavar="X", help=f"of the SGD step of --verify (default: {scaled})")
    p.add_argument("--adam-lr", type=rate, metavar="X", help=f"of its AdamW step (default: {scaled})")
    p.add_argument("--weight-decay", type=decay, metavar="X", help="of its AdamW step (default 0)")
    p.add_argument(
        "--time", action="store_true", help="CPU time against a gradient pass over the same rows, peak memory"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="(default: kernel.zarr, or kernel-STEP.zarr in the run)")
    p.add_argument("--overwrite", action="store_true", help="replace the kernel in DIR")


def _check(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="RUN|MODEL", help="a run folder, or a model folder with --probe")
    p.add_argument("--probe", type=Path, metavar="FILE", help="solutions to check on (default: the run's own)")
    p.add_argument("--pairs", type=count, default=64, help="pairs of single rows (default 64)")
    p.add_argument("--step", type=index, metavar="S", help="checkpoint of the run (default: the last)")
    p.add_argument("--out", type=Path, metavar="DIR", help="tables and figures (default: RUN/check)")


def _report(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders; several are compared")
    p.add_argument("--names", type=names, metavar="A,B", help="what to call them, in order")
    p.add_argument("--out", type=Path, metavar="FILE", help="(default: RUN/report.html of the first run)")
    p.add_argument("--tensorboard", type=Path, metavar="DIR", help="also write the metrics as TensorBoard events")
    p.add_argument("--wandb", metavar="PROJECT", help="also log the metrics to Weights & Biases")


def _export(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    p.add_argument("--step", type=index, metavar="S", help="checkpoint (default: the last)")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default float32)")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="a Hugging Face model folder")
    p.add_argument("--overwrite", action="store_true", help="replace what DIR holds")


def _algorithms(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME", help="one recipe, as a config that `jaxrl train` takes")


# name -> (arguments, one line, example)
COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "demo": (
        _demo,
        "train GRPO and SELF on a tiny enumerable task, check the kernel, write a report",
        "jaxrl demo --out runs/demo",
    ),
    "train": (
        _train,
        "train a policy as a config says",
        "jaxrl train configs/msa0/self.yaml --set seed=1 --set optimiser.lr=1e-3 --out runs/self-1",
    ),
    "algorithms": (
        _algorithms,
        "the recipes, their pieces and sources; or one of them as a config",
        "jaxrl algorithms dapo",
    ),
    "sample": (
        _sample,
        "sample responses to problems",
        "jaxrl sample MODEL --prompt 'What is three plus four?' -n 4 --out samples.jsonl",
    ),
    "eval": (
        _eval,
        "pass@k with intervals",
        "jaxrl eval runs/self-1 --data math500.jsonl -n 64 --k 1,8,64 --out eval",
    ),
    "probe": (
        _probe,
        "sample the solutions whose probability is to be followed",
        "jaxrl probe MODEL --data problems.jsonl --prompts 64 -n 4 --out probe.npz",
    ),
    "kernel": (
        _kernel,
        "the exact gradient kernel between rows, stored and drawn",
        "jaxrl kernel MODEL --a train.jsonl --b probe.jsonl --layers --out kernel.zarr",
    ),
    "check": (
        _check,
        "compare the gradient kernel with measured changes, in double precision",
        "jaxrl check runs/self-1 --pairs 64 --out runs/self-1/check",
    ),
    "report": (
        _report,
        "one self-contained HTML page about a run, or comparing several",
        "jaxrl report runs/grpo runs/self --names GRPO,SELF --out report.html",
    ),
    "export": (
        _export,
        "a trained checkpoint as a Hugging Face folder",
        "jaxrl export runs/self-1 --step 200 --out self-hf",
    ),
    "bench": (add_arguments, LINE, EXAMPLE),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser(
        prog="jaxrl",
        description="Reinforcement learning with verifiable rewards, and what each update does to the rest.",
        epilog=f"jaxrl COMMAND --help shows a command's arguments and an example\n{EXIT_CODES}",
        formatter_class=raw,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"jaxrl {importlib.import_module('jaxrl').__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (arguments, line, example) in COMMANDS.items():
        p = commands.add_parser(
            name,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.",
            epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
            formatter_class=raw,
            allow_abbrev=False,
        )
        arguments(p)
        p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of one command. Raises ``UsageError``."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UsageError(f"unknown command {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    arguments = parser().parse_args(argv)
    if arguments.command == "eval":
        if arguments.k is None:
            arguments.k = tuple(k for k in (1, 16, 64, 256) if k <= arguments.n)
        if max(arguments.k) > arguments.n:
            raise UsageError(
                f"--k {max(arguments.k)} needs as many samples: pass@k is not defined for k > n = {arguments.n}"
            )
    if arguments.command == "report" and arguments.names and len(arguments.names) != len(arguments.runs):
        raise UsageError(f"--names: expected one for each of {len(arguments.runs)} runs, got {len(arguments.names)}")
    return arguments


# ---------------------------------------------------------------- running


def run(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The result of a command. Nothing heavy is imported before its arguments are known to be good."""
    return getattr(importlib.import_module("jaxrl.commands"), arguments.command)(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: runs one command, prints its result, returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in argv
    try:
        arguments = parse(argv)
        show(run(arguments), as_json)
    except KeyboardInterrupt:
        continues = " --resume continues a training run from its last checkpoint" if argv[:1] == ["train"] else ""
        return fail(f"interrupted.{continues}", INTERRUPTED, as_json)
    except BrokenPipeError:  # the reader of our output has gone; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except JaxrlError as error:
        return fail(str(error), error.exit_code, as_json, getattr(error, "result", None))
    except (OSError, ValueError) as error:
        return fail(str(error) or type(error).__name__, FAILED, as_json)
    except Exception as error:  # a bug: said to be one, and no less readable by a program than any other failure
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        return fail(f"internal error: {said}; set JAXRL_DEBUG=1 for the traceback", FAILED, as_json)
    return 0


def show(result: Mapping[str, Any] | None, as_json: bool) -> None:
    """Print a result on standard output. One that is ``text`` alone is printed as it is."""
    if result and not as_json and set(result) == {"text"}:
        sys.stdout.write(result["text"])
    elif result:
        (write_json if as_json else write_tables)(result, sys.stdout)
    sys.stdout.flush()


def fail(message: str, code: int, as_json: bool, result: Mapping[str, Any] | None = None) -> int:
    """Print what was found all the same, then the message; returns ``code``."""
    if os.environ.get("JAXRL_DEBUG") == "1":
        traceback.print_exc()
    show({**(result or {}), "error": message, "exit_code": code} if as_json else result, as_json)
    print(f"jaxrl: {message}", file=sys.stderr)
    return code
