"""The ring socket: handshakes, the lifetime of sessions, and catalogue requests.

One connection is one session. Everything a client sends here is hostile: one message of at most 4,096 bytes is read at
a time without ever waiting, no descriptor is accepted, and a connection that says neither a valid hello nor, after its
welcome, `mapped` within five seconds is closed. What clients can make the daemon hold (connections, sessions, memory)
is limited in all and for each uid. Event loop's thread only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engramd._engine import ffi, lib
from engramd.daemon import ring_messages
from engramd.daemon.acceptor import Acceptor
from engramd.daemon.catalogue import Catalogue
from engramd.daemon.engine import Engine, SessionRefused
from engramd.daemon.layer_maps import LayerMaps
from engramd.daemon.process import reopen
from engramd.daemon.ring_messages import Violation
from engramd.daemon.session_quota import SessionQuota
from engramd.daemon.worker_pool import WorkerPool

HANDSHAKE_DEADLINE_S = 5.0
MAX_PENDING = 128  # connections that have not said hello
MAX_OPENING = 64  # connections whose session's memory is being made
_LOG = logging.getLogger("engramd")


@dataclass(eq=False)
class Connection:
    """One client's connection. After its hello it waits for its memory (`is_opening`), then has a `session` (0 before),
    and `is_open` once it has mapped the ring."""

    socket: socket.socket
    pid: int
    uid: int
    deadline: float
    session: int = 0
    is_opening: bool = False
    is_open: bool = False
    memory_bytes: int = 0
    name: str = ""

    @property
    def context(self) -> dict[str, int]:
        """What log lines in JSON carry."""
        return {"session": self.session, "uid": self.uid}

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"client{name} (pid {self.pid}, uid {self.uid})"


class RingListener:
    """Accepts connections from `listener` and turns them into sessions of `engine`."""

    def __init__(
        self,
        listener: socket.socket,
        engine: Engine,
        catalogue: Catalogue,
        quota: SessionQuota,
        selector: selectors.BaseSelector,
    ) -> None:
        self._engine = engine
        self._catalogue = catalogue  # owned by the service, as are its successors
        self._quota = quota
        self._maps = LayerMaps(engine)
        self._selector = selector
        self._pending: dict[Connection, None] = {}  # no hello yet; oldest first
        self._mapping: dict[Connection, None] = {}  # welcomed, not yet mapped; oldest first
        self._sessions: dict[int, Connection] = {}
        self._opening: set[Connection] = set()
        self._opener = WorkerPool("opener", 1, MAX_OPENING)  # making an arena takes tens of milliseconds
        selector.register(self._opener.descriptor, selectors.EVENT_READ, self._opener.collect)
        self._acceptor = Acceptor(listener, selector, self._admit)

    # The loop calls these.

    def next_deadline(self) -> float | None:
        """When `expire` has something to do (time.monotonic), or None."""
        oldest = [next(iter(waiting)).deadline for waiting in (self._pending, self._mapping) if waiting]
        if self._acceptor.resumes_at is not None:
            oldest.append(self._acceptor.resumes_at)
        return min(oldest, default=None)

    def expire(self, now: float) -> None:
        """Closes connections whose next handshake message is overdue; resumes accepting after a pause."""
        overdue = [one for waiting in (self._pending, self._mapping) for one in waiting if one.deadline <= now]
        for connection in overdue:
            # What has arrived counts, however late this loop comes to look at it.
            self._receive(connection)
            if connection in self._pending or connection in self._mapping:
                missing = "mapped its ring" if connection.session else "said hello"
                self._drop(connection, f"has not {missing} within {HANDSHAKE_DEADLINE_S:g} s")
        self._acceptor.resume(now)

    def name_of(self, session: int) -> str:
        """What a session's client calls itself, or "". Any thread."""
        connection = self._sessions.get(session)
        return connection.name if connection is not None else ""

    def close_session(self, session: int, why: str) -> None:
        """Ends a session of which the engine says that it broke the protocol. The client sees the socket's end."""
        connection = self._sessions.get(session)
        if connection is not None:
            self._drop(connection, why)

    def set_catalogue(self, catalogue: Catalogue) -> None:
        """What clients get from now on; the old one's descriptor is not used any more."""
        self._catalogue = catalogue

    def stop_accepting(self) -> None:
        """Closes the listener; open sessions stay."""
        self._acceptor.close()
        for connection in [*self._pending, *self._opening, *self._mapping]:
            self._drop(connection, "the daemon is stopping", lib.ENGRAM_STATUS_STOPPING)

    def close(self) -> None:
        """Ends everything."""
        self.stop_accepting()
        if self._opener.descriptor >= 0:
            self._selector.unregister(self._opener.descriptor)
            self._opener.close()
        for connection in list(self._sessions.values()):
            self._drop(connection, None)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        pid, uid, _ = struct.unpack("iII", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        connection = Connection(accepted, pid, uid, time.monotonic() + HANDSHAKE_DEADLINE_S)
        if len(self._pending) >= MAX_PENDING:
            self._make_room()
        self._pending[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._receive(connection))
        self._receive(connection)  # a client's hello is usually there already

    def _make_room(self) -> None:
        """Ends the oldest silent connection of the uid that has most of them: silence cannot keep others out."""
        uid, _ = Counter(connection.uid for connection in self._pending).most_common(1)[0]
        oldest = next(connection for connection in self._pending if connection.uid == uid)
        self._receive(oldest)
        if oldest in self._pending:
            text = f"{MAX_PENDING} connections have not said hello, the limit"
            self._drop(oldest, text, lib.ENGRAM_STATUS_BUSY)

    # Messages.

    def _receive(self, connection: Connection) -> None:
        """Reads one message where one is there. Without room for control data the kernel installs no descriptor that
        came along: it drops them and sets MSG_CTRUNC."""
        try:
            data, _, flags, _ = connection.socket.recvmsg(ring_messages.MAX_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(connection, None if isinstance(error, ConnectionError) else error.strerror)
            return
        if not data and not flags & socket.MSG_CTRUNC:
            self._drop(connection, None)
            return
        try:
            if flags & socket.MSG_CTRUNC:
                raise Violation("sent file descriptors")
            if flags & socket.MSG_TRUNC:
                raise Violation(f"sent a message of more than {ring_messages.MAX_BYTES} bytes")
            self._message(connection, ring_messages.kind_of(data), data)
        except Violation as violation:
            self._drop(connection, str(violation))
        except SessionRefused as refusal:
            self._drop(connection, str(refusal), refusal.status)
        except Exception:  # noqa: BLE001 - a mistake in here must not end the other clients' sessions
            _LOG.exception("%s: a message cannot be handled", connection)
            self._drop(connection, "internal error of the daemon (see its log)")

    def _message(self, connection: Connection, kind: int, data: bytes) -> None:
        if not connection.session:
            if kind != lib.ENGRAM_KIND_HELLO:
                raise Violation(f"began with a message of kind {kind} instead of hello")
            self._hello(connection, data)
        elif kind == lib.ENGRAM_KIND_MAPPED and not connection.is_open:
            ring_messages.check_length(data, ring_messages.HEADER_BYTES)
            self._engine.start_session(connection.session)
            del self._mapping[connection]
            connection.is_open = True
            _LOG.info("%s: session %d", connection, connection.session, extra=connection.context)
        elif kind == lib.ENGRAM_KIND_CATALOGUE_REQUEST and connection.is_open:
            ring_messages.check_length(data, ring_messages.HEADER_BYTES)
            self._send_catalogue(connection)
        elif kind == lib.ENGRAM_KIND_MAP_REQUEST and connection.is_open:
            self._send_map(connection, ring_messages.handle_of(data))
        elif kind == lib.ENGRAM_KIND_UNMAP and connection.is_open:
            handle = ring_messages.handle_of(data)
            if not self._maps.unmap(connection.session, handle):
                raise Violation(f"unmaps handle {handle}, which it has not mapped")
        else:
            names = {lib.ENGRAM_KIND_HELLO: "hello", lib.ENGRAM_KIND_MAPPED: "mapped"}
            raise Violation(f"sent {names.get(kind, f'a message of kind {kind}')} where it has no place")

    def _hello(self, connection: Connection, data: bytes) -> None:
        hello = ring_messages.hello_of(data)
        connection.name = hello.name
        ring_messages.check_version(hello)
        self._quota.check(connection.uid)
        if not self._opener.submit(lambda: self._open(connection, hello.arena_bytes, hello.flags)):
            raise SessionRefused(lib.ENGRAM_STATUS_BUSY, f"{MAX_OPENING} sessions are being opened, the limit")
        # It has nothing more to say before its welcome; whether it left is seen then.
        del self._pending[connection]
        self._selector.unregister(connection.socket)
        self._opening.add(connection)
        connection.is_opening = True
        connection.memory_bytes = self._quota.session_bytes
        self._quota.add(connection.uid, connection.memory_bytes)

    def _open(self, connection: Connection, arena_bytes: int, flags: int) -> Callable[[], None]:
        """Runs on the opener's thread: makes the session's memory. Returns what the loop's thread does with it."""
        try:
            welcome, descriptors = self._engine.open_session(connection.pid, connection.uid, arena_bytes, flags)
        except SessionRefused as refusal:
            text, status = str(refusal), refusal.status
            return lambda: self._drop(connection, text, status)
        return lambda: self._welcome(connection, welcome, descriptors)

    def _welcome(self, connection: Connection, welcome: Any, descriptors: tuple[int, int, int]) -> None:
        session = int(welcome.session)
        try:
            if connection.socket.fileno() < 0:
                self._engine.close_session(session)
                return
            self._opening.remove(connection)
            connection.is_opening = False
            self._quota.remove(connection.uid, connection.memory_bytes)
            connection.session = session
            connection.memory_bytes = int(welcome.geometry.arena_bytes + welcome.geometry.ring_bytes)
            self._quota.add(connection.uid, connection.memory_bytes)
            self._sessions[session] = connection
            connection.deadline = time.monotonic() + HANDSHAKE_DEADLINE_S
            self._mapping[connection] = None
            self._selector.register(connection.socket, selectors.EVENT_READ, lambda: self._receive(connection))
            self._send_welcome(connection, welcome, descriptors)
        except SessionRefused as refusal:
            self._drop(connection, str(refusal), refusal.status)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _send_welcome(self, connection: Connection, welcome: Any, descriptors: tuple[int, int, int]) -> None:
        ring_messages.fill_header(welcome, lib.ENGRAM_KIND_WELCOME)
        welcome.version = lib.ENGRAM_PROTOCOL_VERSION
        welcome.daemon_pid = os.getpid()
        welcome.catalogue_bytes = self._catalogue.bytes
        places = [-1] * lib.ENGRAM_FD_COUNT
        places[lib.ENGRAM_FD_RING], places[lib.ENGRAM_FD_ARENA], places[lib.ENGRAM_FD_DOORBELL] = descriptors
        opened: list[int] = []
        try:
            for place, shared in (
                (lib.ENGRAM_FD_STATE, self._engine.state_descriptor),
                (lib.ENGRAM_FD_CATALOGUE, self._catalogue.descriptor),
            ):
                places[place] = reopen(shared)
                opened.append(places[place])
            socket.send_fds(connection.socket, [bytes(ffi.buffer(welcome))], places)
        except OSError as error:
            text = f"cannot be given the session's memory: {error.strerror}"
            raise SessionRefused(lib.ENGRAM_STATUS_BUSY, text) from None
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _send_catalogue(self, connection: Connection) -> None:
        _check_last_was_read(connection, "the catalogue")
        message = ffi.new("engram_catalogue_message *")
        ring_messages.fill_header(message, lib.ENGRAM_KIND_CATALOGUE)
        message.catalogue_bytes = self._catalogue.bytes
        try:
            catalogue = reopen(self._catalogue.descriptor)
            try:
                socket.send_fds(connection.socket, [bytes(ffi.buffer(message))], [catalogue])
            finally:
                os.close(catalogue)
        except OSError as error:
            # The daemon is out of descriptors or memory: a new session is the client's way out.
            raise SessionRefused(lib.ENGRAM_STATUS_BUSY, f"cannot be sent the catalogue: {error.strerror}") from None

    def _send_map(self, connection: Connection, handle: int) -> None:
        _check_last_was_read(connection, "a layer's memory")
        message, descriptor = self._maps.answer(connection.session, handle)
        try:
            socket.send_fds(connection.socket, [message], [] if descriptor is None else [descriptor])
        except OSError as error:
            raise SessionRefused(lib.ENGRAM_STATUS_BUSY, f"cannot be sent a layer: {error.strerror}") from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    # Ends.

    def _drop(self, connection: Connection, why: str | None, status: int = lib.ENGRAM_STATUS_BAD_REQUEST) -> None:
        """Ends a connection, and its session at once. `why` None: the client left, nothing to report."""
        if connection.socket.fileno() < 0:
            return
        if why is not None:
            _LOG.warning("%s: %s; connection closed", connection, why, extra=connection.context)
            ring_messages.send_refused(connection.socket, status, why)
        elif connection.session:
            _LOG.info("%s: session %d ended", connection, connection.session, extra=connection.context)
        self._pending.pop(connection, None)
        self._mapping.pop(connection, None)
        if connection.is_opening:
            self._opening.remove(connection)
        else:
            self._selector.unregister(connection.socket)
        if connection.is_opening or connection.session:
            self._quota.remove(connection.uid, connection.memory_bytes)
        if connection.session:
            del self._sessions[connection.session]
            self._engine.close_session(connection.session)
            self._maps.forget(connection.session)
        connection.socket.close()


def _check_last_was_read(connection: Connection, what: str) -> None:
    """Raises Violation where an answer is unread: descriptors in flight count against us."""
    if struct.unpack("i", fcntl.ioctl(connection.socket, termios.TIOCOUTQ, bytes(4)))[0]:
        raise Violation(f"asks for {what} without having read the last answer")
