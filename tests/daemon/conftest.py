"""Clients for tests that speak to the daemon byte by byte, with layouts of their own: nothing of the daemon's code."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq

MAGIC = 0x4D474E45
HELLO, WELCOME, REFUSED, CATALOGUE_REQUEST, CATALOGUE, MAPPED = 1, 2, 3, 4, 5, 6
TIMEOUT_S = 30.0


def message(kind: int, body: bytes = b"", *, magic: int = MAGIC, version: int = 1, length: int | None = None) -> bytes:
    """A message of the handshake, right or wrong."""
    return struct.pack("=IHHII", magic, version, kind, 16 + len(body) if length is None else length, 0) + body


def hello(low: int = 1, high: int = 1, arena_bytes: int = 0, name: bytes = b"test", **header: int) -> bytes:
    """A hello message."""
    return message(HELLO, struct.pack("=IIQ64s", low, high, arena_bytes, name), **header)


class RawClient:
    """A connection to the ring socket. `descriptors` are those of the last message received."""

    def __init__(self, socket_path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(socket_path + ".ring")  # waits where the daemon's backlog is full
        self.socket.settimeout(TIMEOUT_S)
        self.descriptors: list[int] = []

    def send(self, data: bytes) -> None:
        self.socket.send(data)

    def receive(self) -> tuple[int, bytes]:
        """(kind, body) of the next message; (0, b"") at the socket's end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 8192, 16)
        except ConnectionResetError:
            return 0, b""
        self.close_descriptors()
        self.descriptors = list(descriptors)
        if not data:
            return 0, b""
        magic, version, kind, length, _ = struct.unpack_from("=IHHII", data)
        assert (magic, version, length) == (MAGIC, 1, len(data))
        return kind, data[16:]

    def open(self, **fields: Any) -> bytes:
        """Hello and welcome and mapped; the welcome's body."""
        self.send(hello(**fields))
        kind, body = self.receive()
        assert kind == WELCOME, body
        self.send(message(MAPPED))
        return body

    def refusal(self) -> tuple[int, str]:
        """(status, text) of a refusal, which is the next message and the last."""
        kind, body = self.receive()
        assert kind == REFUSED, (kind, body)
        status = struct.unpack_from("=I", body)[0]
        assert self.receive()[0] == 0
        return status, body[8:].split(b"\0", 1)[0].decode()

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def close(self) -> None:
        self.close_descriptors()
        self.socket.close()


class ControlSocket:
    """A DEALER to the control socket."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        self.socket.connect(endpoint)
        self._ids = itertools.count(1)

    def request(self, verb: str, ids: bytes | None = None, **fields: Any) -> tuple[dict[str, Any], list[bytes]]:
        """(first frame, further frames) of the reply to a request in the right form."""
        number = next(self._ids)
        frames = [msgpack.packb({"v": 1, "id": number, "verb": verb, **fields})]
        self.socket.send_multipart(frames if ids is None else [*frames, ids])
        reply, rest = self.receive()
        assert reply["id"] == number
        return reply, rest

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        first, *rest = self.socket.recv_multipart()
        return msgpack.unpackb(first), rest

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def raw_client() -> Iterator[Callable[[str], RawClient]]:
    """`raw_client(socket_path)` connects to the ring socket."""
    clients: list[RawClient] = []

    def connect(socket_path: str) -> RawClient:
        clients.append(RawClient(socket_path))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def control() -> Iterator[Callable[[str], ControlSocket]]:
    """`control(socket_path)` connects to the control socket; a name with `://` is a whole endpoint."""
    sockets: list[ControlSocket] = []

    def connect(socket_path: str) -> ControlSocket:
        sockets.append(ControlSocket(socket_path if "://" in socket_path else f"ipc://{socket_path}"))
        return sockets[-1]

    yield connect
    for one in sockets:
        one.close()
