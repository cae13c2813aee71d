"""Options and argument types that several verbs share. Imports nothing of the daemon, so that `--help` is quick."""

from __future__ import annotations

import argparse

WHO_ADMINISTERS = "Only root, the daemon's own user and the group that its option admin_group names may."


def add_socket_option(parser: argparse.ArgumentParser, when: str = "") -> None:
    """--socket of the verbs that ask a running daemon. when: under which circumstances they do."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"{when}the daemon's control socket (default: $ENGRAMD_SOCKET, else the first that exists of "
        "/run/engramd/engramd.sock and $XDG_RUNTIME_DIR/engramd.sock)",
    )


def count_argument(text: str) -> int:
    """A number of lines or screens."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= 10**9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000000000")
    return int(text)


def interval_argument(text: str) -> float:
    """A time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.01 to 86400")
    return value
