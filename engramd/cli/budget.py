"""`engramd budget SIZE`: changes a running daemon's DRAM budget."""

from __future__ import annotations

import argparse

from engramd.cli.arguments import WHO_ADMINISTERS, add_socket_option
from engramd.sizes import format_size, parse_size

TIMEOUT_S = 120.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "budget",
        help="change a running daemon's DRAM budget",
        description="Places all rows anew under another budget while requests go on; memory above it returns to the "
        "system before the answer. Lasts until the daemon stops. " + WHO_ADMINISTERS,
    )
    parser.add_argument("size", metavar="SIZE", help="for example 32GiB; 0 = no row cache")
    add_socket_option(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once the budget is in force. Raises EngramdError."""
    from engramd.cli.control_client import ControlClient

    size = parse_size(args.size)
    with ControlClient(args.socket, TIMEOUT_S) as client:
        reply = client.ask("budget", dram_bytes=size)
    print(f"the DRAM budget is {format_size(reply['budget_bytes'])}, {format_size(reply['used_bytes'])} of it in use")
    return 0
