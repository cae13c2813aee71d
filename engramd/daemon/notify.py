"""Tells systemd about the daemon's state: one datagram to the socket in NOTIFY_SOCKET, where there is one."""

from __future__ import annotations

import logging
import os
import socket
import time

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


def extend_timeout(longest_s: float) -> None:
    """Asks for this much more time for the start or the stop that is under way."""
    notify(f"EXTEND_TIMEOUT_USEC={int(longest_s * 1e6)}")


def reloading() -> None:
    """Says that the configuration is being read again; `READY=1` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


class Watchdog:
    """Signs of life where the service manager wants them (WATCHDOG_USEC), given by the event loop itself: a loop that
    is stuck gives none. Event loop's thread only."""

    def __init__(self) -> None:
        self.period_s: float | None = None  # half of what the manager allows
        self._next = 0.0
        interval, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        if interval.isascii() and interval.isdigit() and int(interval) > 0 and pid in ("", str(os.getpid())):
            self.period_s = int(interval) / 2e6

    def feed(self, now: float) -> float | None:
        """Gives a sign of life where one is due. Returns the seconds until the next one; None: none is wanted."""
        if self.period_s is None:
            return None
        if now >= self._next:
            notify("WATCHDOG=1")
            self._next = now + self.period_s
        return self._next - now
