"""Tells systemd about the daemon's state: one datagram to the socket in NOTIFY_SOCKET, where there is one."""

from __future__ import annotations

import logging
import os
import socket

_LOG = logging.getLogger("engramd")


def notify(*lines: str) -> None:
    """Sends lines such as `READY=1`. Without a service manager, does nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    if address[0] == "@":  # an abstract name
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        _LOG.warning("the service manager cannot be told %s: %s", lines[0], error)
