"""The memory of control requests in flight, and what happens to a client that does not take its replies.

Ids and replies are counted from the request to the moment when libzmq has handed the reply to the kernel. A client that
stops reading would keep its replies in the daemon for ever, and a few such clients all of the budget: so a connection
that has taken none of its replies for STALL_S is shut down, and libzmq drops what it queued for it. Event loop's thread
only.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engramd.daemon.messages import RequestError

PEER_BYTES_LIMIT = 64 << 20  # ids and replies of one client that are queued, running or unsent
ALL_BYTES_LIMIT = 192 << 20
STALL_S = 10.0
SO_PEERGROUPS = 59  # asm-generic/socket.h; Python does not name it
MAX_GROUPS = 256  # as many as Python's getsockopt has room for
_LOG = logging.getLogger("engramd")
Key = tuple[int, bytes]


@dataclass(frozen=True)
class Connection:
    """A client's connection inside libzmq: its descriptor, which may be another's by the time it is used, and what it
    is recognised by. uid, pid: as libzmq gave them; None for TCP."""

    descriptor: int
    inode: int
    uid: int | None
    pid: int | None

    @classmethod
    def of(cls, descriptor: int, uid: int | None, pid: int | None) -> Connection | None:
        """None where the descriptor is no socket any more."""
        try:
            found = os.fstat(descriptor)
        except OSError:
            return None
        return cls(descriptor, found.st_ino, uid, pid) if stat.S_ISSOCK(found.st_mode) else None

    def shut_down(self) -> bool:
        """Ends the connection where the descriptor still is this one; libzmq sees that and frees what it holds."""
        copy = self._copy()
        if copy is None:
            return False
        with copy:
            try:
                copy.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
            return True

    def groups(self) -> set[int]:
        """All groups that a local client's process had when it connected; empty where that is not known any more."""
        copy = self._copy() if self.pid is not None else None
        if copy is None:
            return set()
        with copy:
            try:
                *_, primary = struct.unpack("iII", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                others = copy.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * MAX_GROUPS)
            except OSError:
                return set()
            return {primary, *struct.unpack(f"{len(others) // 4}I", others)}

    def _copy(self) -> socket.socket | None:
        """The connection's socket once more, where the descriptor still is this connection. A copy, so that nothing
        changes between the look and what follows."""
        try:
            copy = socket.socket(fileno=os.dup(self.descriptor))
        except OSError:
            return None  # closed meanwhile
        is_same = os.fstat(copy.fileno()).st_ino == self.inode and (copy.family == socket.AF_UNIX) == (
            self.pid is not None
        )
        if is_same and self.pid is not None:
            pid, uid, _ = struct.unpack("iII", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            is_same = (uid, pid) == (self.uid, self.pid)
        if is_same:
            return copy
        copy.close()
        return None


@dataclass
class _Client:
    """What one client holds. unsent: (MessageTracker, bytes) of replies that wait inside libzmq."""

    held_bytes: int = 0
    requests: int = 0
    connection: Connection | None = None
    unsent: list[tuple[Any, int]] = field(default_factory=list)
    moved_at: float = 0.0  # when a reply was queued on an empty queue, or last left it


class ByteBudget:
    """Bounds the memory of requests in flight. A reply counts until libzmq has sent it or its client is gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, never going back. `reserved_bytes`: what all clients hold together."""
        self._clock = clock
        self._clients: dict[Key, _Client] = {}
        self.reserved_bytes = 0

    def take(self, peer: Key, connection: Connection | None, count: int) -> None:
        """Reserves bytes for a request that came over this connection. Raises RequestError Busy naming the limit."""
        self._sweep()
        client = self._clients.get(peer) or _Client()
        if client.held_bytes + count > PEER_BYTES_LIMIT:
            raise RequestError("Busy", f"this client's requests in flight reach {PEER_BYTES_LIMIT} bytes, the limit")
        if self.reserved_bytes + count > ALL_BYTES_LIMIT:
            raise RequestError("Busy", f"all clients' control requests reach {ALL_BYTES_LIMIT} bytes, the limit")
        client.connection = connection
        client.held_bytes += count
        client.requests += 1
        self._clients[peer] = client
        self.reserved_bytes += count

    def give_back(self, peer: Key, count: int) -> None:
        """Ends a reservation."""
        client = self._clients[peer]
        client.held_bytes -= count
        client.requests -= 1
        self.reserved_bytes -= count
        if client.requests == 0:
            del self._clients[peer]

    def give_back_when_sent(self, tracker: Any, peer: Key, count: int) -> None:
        """Keeps the reservation until a zmq.MessageTracker says that the memory is free; None: it is free already."""
        if tracker is None or tracker.done:
            self.give_back(peer, count)
            return
        client = self._clients[peer]
        if not client.unsent:
            client.moved_at = self._clock()
        client.unsent.append((tracker, count))

    def next_deadline(self) -> float | None:
        """When `expire` has something to look at (the clock's time), or None."""
        return min((client.moved_at + STALL_S for client in self._clients.values() if client.unsent), default=None)

    def expire(self) -> None:
        """Shuts down the connections whose clients have taken nothing for STALL_S."""
        now = self._clock()
        if (deadline := self.next_deadline()) is None or deadline > now:
            return
        self._sweep()
        for client in self._clients.values():
            if not client.unsent or client.moved_at + STALL_S > now:
                continue
            client.moved_at = now  # once more as long, should it not help
            connection = client.connection
            done = connection is not None and connection.shut_down()
            _LOG.warning(
                "a control client%s has taken none of its replies for %g s: %s",
                f" (pid {connection.pid}, uid {connection.uid})" if connection and connection.pid is not None else "",
                STALL_S,
                "its connection is shut down" if done else f"{client.held_bytes} bytes wait for it",
            )

    def _sweep(self) -> None:
        """Gives back what has been sent."""
        for peer, client in list(self._clients.items()):
            waiting, sent = [], []
            for tracker, count in client.unsent:
                if tracker.done:
                    sent.append(count)
                else:
                    waiting.append((tracker, count))
            if sent:
                client.moved_at = self._clock()
                client.unsent = waiting
            for count in sent:
                self.give_back(peer, count)
