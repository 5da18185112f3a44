"""``python -m jaxrl.bench``: what ``jaxrl bench`` does, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxrl.bench.arguments import LINE, add_arguments
from jaxrl.bench.run import run
from jaxrl.errors import DoesNotHold, JaxrlError
from jaxrl.tables import write_json, write_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench", description=f"Prints {LINE}.")
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    error, result = None, None
    try:
        result = run(arguments)
    except JaxrlError as raised:
        error, result = raised, raised.result if isinstance(raised, DoesNotHold) else None
    if result:
        (write_json if arguments.json else write_tables)(result, sys.stdout)
    if error is not None:
        print(f"jaxrl.bench: {error}", file=sys.stderr)
    return 0 if error is None else error.exit_code


if __name__ == "__main__":
    sys.exit(main())
