"""Asks a running daemon one thing over its control socket: for `engramd stats`, `engramd shutdown` and their like."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from types import TracebackType
from typing import Any

import msgpack
import zmq

from engramd.daemon import sockets
from engramd.errors import EngramdError

DEFAULT_TIMEOUT_S = 5.0


class ControlClient:
    """A connection to the daemon at `path` (None: the usual places). Raises EngramdError where nobody answers."""

    def __init__(self, path: str | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.path = sockets.client_path(path)
        self._timeout_s = timeout_s
        _probe(self.path)
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{self.path}")
        self._requests = 0

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._context.term()

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """The reply's fields. Raises EngramdError where the daemon refuses or does not answer in time."""
        self._requests += 1
        self._socket.send(msgpack.packb({"v": 1, "id": self._requests, "verb": verb, **fields}))
        while True:
            if not self._socket.poll(int(self._timeout_s * 1000)):
                raise EngramdError(f"the daemon at {self.path} does not answer within {self._timeout_s:g} s")
            reply = msgpack.unpackb(self._socket.recv())
            if reply.get("id") == self._requests:  # else: an answer that came too late for an earlier question
                break
        if not reply["ok"]:
            raise EngramdError(f"the daemon at {self.path} refuses: {reply['text']}")
        return dict(reply)


def _who_may(path: str) -> str:
    """A socket's owner and group in words, where they can be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return ": one of the folders above it is closed to it"
    import grp
    import pwd

    owner: str | int = found.st_uid
    group: str | int = found.st_gid
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(found.st_uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    return f": it is for user {owner} and group {group}; join the group, or run as {owner}"


def _probe(path: str) -> None:
    """Connects once, since libzmq itself would wait in silence for a daemon to appear."""
    try:
        if len(os.fsencode(path)) > sockets.MAX_PATH_BYTES:
            raise EngramdError(f"{path}: longer than the {sockets.MAX_PATH_BYTES} bytes that a socket's path can have")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return  # alive, with a full backlog
        if error.errno in (errno.EACCES, errno.EPERM):
            raise EngramdError(f"{path}: uid {os.geteuid()} may not use this socket{_who_may(path)}") from None
        raise EngramdError(
            f"no daemon answers at {path}: {error.strerror} (start one with `engramd serve`, or name its --socket PATH)"
        ) from None
