"""`engramd top`: the sessions of a running daemon, those that ask for most first."""

from __future__ import annotations

import argparse

from engramd.cli.arguments import add_socket_option, count_argument, interval_argument
from engramd.cli.stats import sampler
from engramd.views.top import SORT_KEYS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "top",
        help="show who asks a running daemon for what",
        description="Shows a running daemon's rows and requests a second, DRAM hits, reads and memory, and below them "
        "its sessions: process, user, what the client calls itself, rows and requests a second, requests waiting, rows "
        "in all, seconds since it connected. Redraws until interrupted (Ctrl-C); piped, one block after the other.",
    )
    add_socket_option(parser)
    parser.add_argument(
        "--interval", metavar="S", type=interval_argument, default=1.0, help="seconds between screens (default: 1)"
    )
    parser.add_argument("--count", metavar="N", type=count_argument, help="end after N screens")
    parser.add_argument("--sort", choices=SORT_KEYS, default="rows", help="order of the sessions (default: rows)")


def run(args: argparse.Namespace) -> int:
    """Shows until interrupted. Raises EngramdError where nobody answers."""
    from engramd.views import top

    with sampler(args.socket, 5.0) as sample:
        top.run(sample, args.interval, args.count, args.sort)
    return 0
