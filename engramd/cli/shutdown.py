"""`engramd shutdown`: asks a running daemon to drain and stop, and waits until it has."""

from __future__ import annotations

import argparse
import os
import select

from engramd.cli.arguments import WHO_ADMINISTERS, add_socket_option
from engramd.errors import EngramdError

WAIT_S = 30.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "shutdown",
        help="ask a running daemon to drain and stop",
        description="Lets the daemon finish what it serves, then stops it. " + WHO_ADMINISTERS,
    )
    add_socket_option(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 once the daemon is gone. Raises EngramdError."""
    from engramd.cli.control_client import ControlClient

    with ControlClient(args.socket) as client:
        pid = client.ask("ping")["pid"]
        try:
            process = os.pidfd_open(pid)
        except OSError:
            process = -1  # in another pid namespace: it stops, but cannot be watched from here
        client.ask("shutdown")
        if process >= 0:
            try:
                if not select.select([process], [], [], WAIT_S)[0]:
                    raise EngramdError(f"the daemon at {client.path} (pid {pid}) is still draining after {WAIT_S:g} s")
            finally:
                os.close(process)
        print(f"the daemon at {client.path} (pid {pid}) has stopped")
    return 0
