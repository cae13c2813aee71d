"""`engramd reload TABLE`: switches a served table to the generation that its directory holds now."""

from __future__ import annotations

import argparse
import os

TIMEOUT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "reload",
        help="switch a served table to its newest generation",
        description="Requests go on meanwhile; each batch is answered from one generation. Only root and the daemon's "
        "own user may.",
    )
    parser.add_argument("table", metavar="TABLE", help="the table's name in the daemon, or its directory")
    parser.add_argument("--socket", metavar="PATH", help="the daemon's control socket (default: the usual places)")


def run(args: argparse.Namespace) -> int:
    """Returns 0 once the new generation serves (or the newest one did already). Raises EngramdError."""
    from engramd.cli.control_client import ControlClient

    table = os.path.abspath(args.table) if os.sep in args.table else args.table
    with ControlClient(args.socket, TIMEOUT_S) as client:
        reply = client.ask("reload", table=table)
    if reply["generation"] == reply["previous_generation"]:
        print(f"table {reply['name']}: generation {reply['generation']} is the newest and serves already")
    else:
        print(
            f"table {reply['name']}: generation {reply['generation']} serves, "
            f"generation {reply['previous_generation']} is gone; identity {reply['identity']}"
        )
    return 0
