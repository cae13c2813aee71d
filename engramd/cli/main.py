"""The `engramd` command: finds the verb, loads that verb's module alone, turns errors into one line and a status.

Exit status: 0 done, 1 failed, 2 wrong usage (argparse's own). A verb is a module `engramd.cli.NAME` with
`add_parser(subparsers)` and `run(args) -> int`; the others are not imported, so that `serve` and `stats` start fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from engramd import __version__
from engramd.errors import EngramdError, one_line

VERBS = {
    "synth": "write a synthetic checkpoint with the real tensor names and layout",
    "pack": "turn a checkpoint's tables into a packed table",
    "verify": "check every page of a packed table",
    "repair": "rewrite the bad pages of a packed table",
    "serve": "run the daemon",
    "top": "show who asks a running daemon for what",
    "stats": "show a running daemon's counters",
    "doctor": "check what of this machine stands in the way",
    "bench": "measure on this machine",
    "reload": "take a table's newest generation, or the configuration file, into use",
    "keygen": "make a key pair for the TCP endpoint",
    "budget": "change a running daemon's DRAM budget",
    "record": "sample a running daemon's row ids into a file",
    "plan": "how much DRAM a stream of look-ups needs",
    "heat": "which rows and n-grams are looked up most",
    "warm": "load the hottest rows into a running daemon's cache",
    "shutdown": "ask a running daemon to drain and stop",
}


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser with one verb's options filled in; the other verbs are only listed."""
    parser = argparse.ArgumentParser(
        prog="engramd",
        description="Serves read-only embedding tables from DRAM and NVMe to inference servers on the same machine.",
        epilog="`pack` a checkpoint into a table, `serve` it, `stats` and `top` to watch; `doctor` says what of the "
        "machine stands in the way. `engramd VERB --help` describes a verb. Exit status: 0 done, 1 failed, 2 wrong "
        "usage.",
    )
    parser.add_argument("--version", action="version", version=f"engramd {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, summary in VERBS.items():
        if name == verb:
            importlib.import_module(f"engramd.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. argv: the arguments without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        args = build_parser(verb).parse_args(arguments)
        return int(importlib.import_module(f"engramd.cli.{args.verb}").run(args))
    except EngramdError as error:
        print(f"engramd: {one_line(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != "engramd._engine":
            raise
        print("engramd: the native module is missing: run `make build` in the checkout", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
