"""Requests over the control socket (ZeroMQ): statistics, and rows where memory cannot be shared.

Each request in flight has a socket of its own from a small pool, so that threads do not wait for each other, a ticket
may be awaited by another thread than the one that sent it, and a reply that nobody wants any more goes down with its
socket. The loss of the daemon shows in the socket's monitor.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from typing import Any

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from . import errors
from .arguments import deadline_of
from .curve import CurveKeys
from .errors import Busy, DaemonLost, EngramError, RequestTimeout, RowIdError

PROTOCOL_VERSION = 1
MAX_IDLE_LINKS = 8
MAX_REPLY_HEADER_BYTES = 16 << 20  # statistics of many tables and sessions
SLICE_MS = 100
# Finds a peer that is gone without a word (a cut cable); a closed connection is seen at once.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000

_ERRORS: dict[str, type[EngramError]] = {
    kind.__name__: kind
    for kind in (
        errors.UnknownTable,
        errors.RowIdError,
        errors.TableMismatch,
        errors.Busy,
        errors.RequestTimeout,
        errors.DaemonLost,
        errors.PageCorrupt,
        errors.ReadFailed,
    )
}
_REFUSAL_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_LOSS_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | _REFUSAL_EVENTS

# As plain integers: the operators of zmq's flags are Python functions, called several times a request.
_POLLIN, _NOBLOCK, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_context: zmq.Context[Any] | None = None
_context_lock = threading.Lock()


def _shared_context() -> zmq.Context[Any]:
    """One context a process, made at first use: each has threads of its own."""
    global _context
    with _context_lock:
        if _context is None or _context.closed:
            _context = zmq.Context()
        return _context


def _start_over_in_child() -> None:
    global _context, _context_lock
    _context = None
    _context_lock = threading.Lock()


os.register_at_fork(after_in_child=_start_over_in_child)


class _Link:
    """One socket and its monitor. Used by one request at a time."""

    def __init__(self, endpoint: str, keys: CurveKeys | None) -> None:
        self.socket = _shared_context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if keys is not None:
            keys.apply(self.socket)
        self.monitor = self.socket.get_monitor_socket(_LOSS_EVENTS)
        self.socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)

    def is_lost(self) -> bool:
        return bool(self.monitor.getsockopt(zmq.EVENTS) & _POLLIN)

    def loss(self, target: str) -> str:
        """In words, once is_lost()."""
        if recv_monitor_message(self.monitor)["event"] & _REFUSAL_EVENTS:
            return (
                f"the daemon at {target} does not let this client in: tcp:// takes the daemon's public key and a key "
                "of the client's own that the daemon knows (connect(curve=...))"
            )
        return f"lost the daemon at {target}, or nobody answers there"

    def send(self, frames: list[Any]) -> None:
        for frame in frames[:-1]:
            self.socket.send(frame, _MORE)
        self.socket.send(frames[-1], _NOBLOCK)

    def receive(self) -> list[zmq.Frame]:
        frames = [self.socket.recv(copy=False)]
        while frames[-1].more:
            frames.append(self.socket.recv(copy=False))
        return frames

    def wait(self, timeout_ms: int) -> bool:
        """Waits for a reply or a loss; whether a reply is there."""
        return any(ready is self.socket for ready, _ in self._poller.poll(timeout_ms))

    def close(self) -> None:
        if self.socket.closed:  # the garbage collector may have taken it first
            return
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class ControlRequest:
    """A request in flight. finish() or drop() ends it."""

    def __init__(self, channel: ControlChannel, link: _Link, number: int) -> None:
        self._channel = channel
        self._link: _Link | None = link
        self._number = number

    def finish(self, timeout: float | None) -> tuple[dict[str, Any], memoryview | None]:
        """The reply's map and the rows behind it, where there are any. After RequestTimeout it can be called again."""
        link = self._link
        if link is None:
            raise EngramError(f"{self._channel.target}: the request is over")
        deadline = deadline_of(timeout)
        while True:
            left_ms = SLICE_MS if deadline is None else min(SLICE_MS, int((deadline - time.monotonic()) * 1000) + 1)
            if link.wait(max(0, left_ms)):
                break
            if self._channel.is_closed:
                self.drop()
                raise EngramError(f"the client of {self._channel.target} is closed")
            if link.is_lost():
                text = link.loss(self._channel.target)
                self.drop()
                raise DaemonLost(text)
            if deadline is not None and time.monotonic() >= deadline:
                raise RequestTimeout(f"{self._channel.target}: no reply within {timeout} s")
        frames = link.receive()
        try:
            reply = _unpack(frames[0].buffer, self._channel.target)
            if reply.get("id") != self._number or len(frames) > 2:
                raise EngramError(f"{self._channel.target}: the reply does not belong to the request")
        except EngramError:
            self.drop()
            raise
        self._link = None
        self._channel.put_back(link)
        if reply.get("ok") is not True:
            _raise_reply(reply)
        return reply, frames[1].buffer.toreadonly() if len(frames) == 2 else None

    def drop(self) -> None:
        """Gives the request up; its reply is thrown away."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def __del__(self) -> None:
        self.drop()


class ControlChannel:
    """Requests to one daemon. Any number of threads."""

    def __init__(self, endpoint: str, target: str, keys: CurveKeys | None = None) -> None:
        self.target = target
        self.is_closed = False
        self._endpoint = endpoint
        self._keys = keys
        self._idle: list[_Link] = []  # a stack; list operations are atomic
        self._numbers = itertools.count(1)

    def start(self, verb: str, fields: dict[str, Any] | None = None, ids: Any = None) -> ControlRequest:
        """Sends a request; `ids` is a buffer that must not change until it is finished."""
        if self.is_closed:
            raise EngramError(f"the client of {self.target} is closed")
        number = next(self._numbers)
        frames = [msgpack.packb({"v": PROTOCOL_VERSION, "id": number, "verb": verb, **(fields or {})})]
        if ids is not None:
            frames.append(ids)
        link = self._take_link()
        try:
            link.send(frames)
        except zmq.ZMQError as error:
            link.close()
            raise Busy(f"{self.target}: cannot send: {error}") from error
        return ControlRequest(self, link, number)

    def call(
        self, verb: str, fields: dict[str, Any] | None = None, ids: Any = None, timeout: float | None = None
    ) -> tuple[dict[str, Any], memoryview | None]:
        """Sends a request and waits for its reply."""
        request = self.start(verb, fields, ids)
        try:
            return request.finish(timeout)
        finally:
            request.drop()

    def stats(self, timeout: float | None) -> dict[str, Any]:
        """The daemon's counters."""
        stats = self.call("stats", timeout=timeout)[0].get("stats")
        if not isinstance(stats, dict):
            raise EngramError(f"{self.target}: the reply has no statistics")
        return stats

    def put_back(self, link: _Link) -> None:
        """Keeps a link for the next request."""
        if self.is_closed or len(self._idle) >= MAX_IDLE_LINKS:
            link.close()
        else:
            self._idle.append(link)

    def close(self) -> None:
        """Hangs up. Requests in flight in other threads end within a tenth of a second."""
        self.is_closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                break

    def _take_link(self) -> _Link:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                break
            if not link.is_lost():
                return link
            # Its daemon is gone. The request goes out on a fresh link: nothing was in flight that could be lost.
            link.close()
        try:
            return _Link(self._endpoint, self._keys)
        except zmq.ZMQError as error:
            if error.errno == errno.EMFILE:
                raise Busy(f"{self.target}: too many requests in flight or open files: {error}") from error
            raise DaemonLost(f"cannot connect to the daemon at {self.target}: {error}") from error


def _unpack(frame: memoryview, target: str) -> dict[str, Any]:
    if len(frame) > MAX_REPLY_HEADER_BYTES:
        raise EngramError(f"{target}: the reply's head is too long ({len(frame)} bytes)")
    try:
        reply = msgpack.unpackb(frame, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise EngramError(f"{target}: the reply is malformed: {error}") from error
    if not isinstance(reply, dict):
        raise EngramError(f"{target}: the reply is no map")
    return reply


def _number(reply: dict[str, Any], key: str) -> int:
    value = reply.get(key)
    return value if isinstance(value, int) else -1


def _raise_reply(reply: dict[str, Any]) -> None:
    name, text = reply.get("error"), reply.get("text")
    kind = _ERRORS.get(name, EngramError) if isinstance(name, str) else EngramError
    text = text if isinstance(text, str) else "the daemon refused without a reason"
    if kind is RowIdError:
        raise RowIdError(text, _number(reply, "position"), _number(reply, "row_id"))
    if kind in (errors.PageCorrupt, errors.ReadFailed):
        raise kind(text, _number(reply, "page"), _number(reply, "row_id"))
    raise kind(text)
