"""connect(), and what every client can do whichever way it reaches its daemon."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import MAX_ARENA_BYTES, handshake_timeout, integer, text_or_none
from .context import Closeable
from .errors import DaemonLost

if TYPE_CHECKING:
    from .curve import CurveKeys
    from .table import Table

SYSTEM_SOCKET = "/run/engramd/engramd.sock"


class Client(Closeable, ABC):
    """A connection to one daemon. Made by connect(); may be used from any number of threads.

    A client survives its daemon: calls in flight raise DaemonLost, and the next call connects again. After a fork the
    child's client opens its own session at its first call; tickets and views of the parent are not usable there.
    """

    #: Most rows of one ticket (Table.submit). Table.fetch takes any number.
    max_ticket_rows: int

    @abstractmethod
    def table(self, name: str | None = None, layer: int | None = None, identity: str | None = None) -> Table:
        """A handle on one layer of one table.

        What is left out may be left out only where a single layer fits. identity (64 hexadecimal digits) pins the
        content; with None the handle follows a reload as long as the geometry stays equal.
        Raises UnknownTable, TableMismatch, DaemonLost; TypeError and ValueError where an argument is of a wrong kind.
        """

    @abstractmethod
    def stats(self, *, timeout: float | None = 5.0) -> dict[str, Any]:
        """The daemon's counters, as `engramd stats --json` prints them. Raises DaemonLost, RequestTimeout (seconds)."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """What this client has done so far, over all its sessions: `requests` answered with rows (a split one counts
        once), `failed_requests` answered with an error, `rows` and `reply_bytes` received, `wait_ns` spent waiting for
        replies and `copy_ns` copying them, both summed over threads. A request whose daemon was lost counts nowhere.
        """

    @abstractmethod
    def close(self) -> None:
        """Hangs up and waits for nothing. Closing twice is harmless.

        Calls in flight in other threads raise EngramError. Views of unreleased tickets stay readable.
        """


def find_target() -> str:
    """The daemon's address where none is given: ENGRAMD_SOCKET, else the first of the two usual sockets that exists."""
    named = os.environ.get("ENGRAMD_SOCKET")
    if named:
        return named
    candidates = [SYSTEM_SOCKET]
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_folder:
        candidates.append(os.path.join(runtime_folder, "engramd.sock"))
    for candidate in candidates:
        if Path(candidate).exists() or Path(candidate + ".ring").exists():
            return candidate
    raise DaemonLost(
        f"no daemon found: there is no socket at {' or '.join(candidates)}, and ENGRAMD_SOCKET is not set; start "
        "one with `engramd serve`, or name its socket"
    )


def connect(
    target: str | os.PathLike[str] | None = None,
    *,
    arena_bytes: int = 0,
    spin_us: int | None = None,
    timeout: float = 5.0,
    name: str | None = None,
    writable_arena: bool = False,
    curve: CurveKeys | None = None,
) -> Client:
    """Opens a session with a daemon.

    target: the daemon's socket path; "tcp://host:port" for the same API over ZeroMQ, with rows in private memory; or
    "ipc-control:PATH" for the same over the local control socket, where memory cannot be shared. None: ENGRAMD_SOCKET,
    then /run/engramd/engramd.sock, then $XDG_RUNTIME_DIR/engramd.sock.
    arena_bytes: size of the reply arena (0 = the daemon's choice, which is also the most).
    spin_us: how long a wait looks for its reply before it sleeps, in microseconds; None fits it to the batch
    (20 + 0.1 a row, at most 500), 0 sleeps at once. timeout: of the handshake, in seconds. name: for the daemon's log.
    writable_arena: map the arena for writing too, which devices need that register no read-only memory (a stray write
    of this process can then spoil its own replies).
    curve: keys of a tcp:// target; None takes the files that the variable ENGRAMD_CURVE names (see CurveKeys).
    Raises DaemonLost where nobody answers (it does not retry), Busy where the daemon takes no more sessions, and
    TypeError or ValueError for wrong arguments.
    """
    address = find_target() if target is None else os.fspath(target)
    arena_bytes = integer("arena_bytes", arena_bytes, 0, MAX_ARENA_BYTES)
    if spin_us is not None:
        spin_us = integer("spin_us", spin_us, 0, 1_000_000)
    timeout = handshake_timeout(timeout)
    name = text_or_none("name", name)
    if "://" in address or address.startswith("ipc-control:"):
        from .control_client import ControlClient
        from .curve import CurveKeys

        if address.startswith("tcp://") and curve is None:
            curve = CurveKeys.from_environment()
        return ControlClient(address, timeout, curve)
    if curve is not None:
        raise ValueError(f"curve is for tcp:// targets, not for the socket {address}")
    from .ring_client import RingClient

    return RingClient(
        address, arena_bytes=arena_bytes, spin_us=spin_us, timeout=timeout, name=name, writable_arena=writable_arena
    )
