"""`engramd reload TABLE`: switches a served table to the generation that its directory holds now. `engramd reload
--config`: has the daemon read its configuration file again."""

from __future__ import annotations

import argparse
import os
import sys

from engramd.cli.arguments import WHO_ADMINISTERS, add_socket_option

TIMEOUT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "reload",
        help="take a table's newest generation, or the configuration file, into use",
        description="With TABLE, switches a served table to its newest generation: requests go on meanwhile, each "
        "batch is answered from one generation. With --config, the daemon reads its configuration file again, applies "
        "what can change while it runs and says what takes a restart (status 1). " + WHO_ADMINISTERS,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("table", metavar="TABLE", nargs="?", help="the table's name in the daemon, or its directory")
    what.add_argument("--config", action="store_true", help="read the configuration file of the daemon again")
    add_socket_option(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once the new generation serves (or the newest one did already). Raises EngramdError."""
    from engramd.cli.control_client import ControlClient

    if args.config:
        return reload_config(args.socket)
    is_path = os.sep in args.table or args.table in (os.curdir, os.pardir)
    table = os.path.abspath(args.table) if is_path else args.table
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


def reload_config(socket: str | None) -> int:
    """Returns 0 where all of the file is in force now, 1 where something takes a restart. Raises EngramdError."""
    from engramd.cli.control_client import ControlClient

    with ControlClient(socket, TIMEOUT_S) as client:
        reply = client.ask("reload_config")
    print("\n".join(reply["applied"]) or "nothing has changed that can change while the daemon runs")
    for sentence in reply["not_applied"]:
        print(f"engramd: {sentence}", file=sys.stderr)
    return 1 if reply["not_applied"] else 0
