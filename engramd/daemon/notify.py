"""Tells systemd about the daemon's state, and leaves descriptors to it: datagrams to the socket in NOTIFY_SOCKET, where
there is one."""

from __future__ import annotations

import logging
import os
import select
import socket
import time

_LOG = logging.getLogger("engramd")


BARRIER_TIMEOUT_S = 5.0


def is_managed() -> bool:
    """Whether there is a service manager to talk to."""
    return os.environ.get("NOTIFY_SOCKET", "")[:1] in ("/", "@")


def notify(*lines: str, descriptor: int | None = None) -> bool:
    """Sends lines such as `READY=1`, with a descriptor where there is one. Without a service manager, does nothing.
    Returns whether they were sent."""
    if not is_managed():
        return False
    address = os.environ["NOTIFY_SOCKET"]
    if address[0] == "@":  # an abstract name
        address = "\0" + address[1:]
    descriptors = [] if descriptor is None else [descriptor]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(address)
            socket.send_fds(sender, ["\n".join(lines).encode()], descriptors)
    except OSError as error:
        _LOG.warning("the service manager cannot be told %s: %s", lines[0], error)
        return False
    return True


def store_descriptor(descriptor: int, name: str) -> bool:
    """Leaves a descriptor to the service manager, which passes it to the next process of the service under this name
    (FileDescriptorStoreMax= in the unit). Returns whether it was sent."""
    return notify("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}", descriptor=descriptor)


def wait_until_taken() -> None:
    """Waits until the manager has handled all that was sent before, a few seconds at most: it does not look at messages
    of a process that is gone."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        sent = notify("BARRIER=1", descriptor=writer)
    finally:
        os.close(writer)
    if sent:
        poll = select.poll()
        poll.register(reader, 0)  # the manager closes its end when it comes to the message
        if not poll.poll(BARRIER_TIMEOUT_S * 1000):
            _LOG.warning("the service manager has not taken what was left to it within %g s", BARRIER_TIMEOUT_S)
    os.close(reader)


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
