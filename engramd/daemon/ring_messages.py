"""The ring socket's messages as the daemon reads and writes them (docs/protocol.md): what a client sends is checked
here before anything in it is believed.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

from engramd._engine import ffi, lib

MAX_BYTES = lib.ENGRAM_MESSAGE_MAX_BYTES
HEADER_BYTES = ffi.sizeof("engram_message")
_LOG = logging.getLogger("engramd")


class Violation(Exception):
    """The client broke the protocol; the text goes to the log and to the client, and the connection ends."""


@dataclass(frozen=True)
class Hello:
    """A client's first message. `name` is one printable line, whatever it sent."""

    name: str
    version_min: int
    version_max: int
    arena_bytes: int
    flags: int


def kind_of(data: bytes) -> int:
    """The kind of a message whose header is right. Raises Violation."""
    if len(data) < HEADER_BYTES:
        raise Violation(f"sent {len(data)} bytes, less than a message's header of {HEADER_BYTES}")
    header = ffi.new("engram_message *")
    ffi.buffer(header)[:] = data[:HEADER_BYTES]
    if header.magic != lib.ENGRAM_MESSAGE_MAGIC:
        raise Violation(f"sent a message with magic {header.magic:#010x}, not {lib.ENGRAM_MESSAGE_MAGIC:#010x}")
    if header.version != lib.ENGRAM_PROTOCOL_VERSION:
        raise Violation(
            f"sent a message of layout version {header.version}; this daemon speaks {lib.ENGRAM_PROTOCOL_VERSION}"
        )
    if header.bytes != len(data):
        raise Violation(f"sent {len(data)} bytes in a message that says {header.bytes}")
    return int(header.kind)


def check_length(data: bytes, expected_bytes: int) -> None:
    """Raises Violation where a message is not as long as its kind."""
    if len(data) != expected_bytes:
        raise Violation(f"sent a message of {len(data)} bytes where its kind takes {expected_bytes}")


def hello_of(data: bytes) -> Hello:
    """What an engram_hello says. Raises Violation where it is no such message."""
    check_length(data, ffi.sizeof("engram_hello"))
    hello = ffi.new("engram_hello *")
    ffi.buffer(hello)[:] = data
    name = _printable(bytes(ffi.buffer(hello.client_name)))
    return Hello(name, hello.version_min, hello.version_max, hello.arena_bytes, hello.message.flags)


def check_version(hello: Hello) -> None:
    """Raises Violation where the client speaks no protocol version of this daemon."""
    low, high, ours = hello.version_min, hello.version_max, lib.ENGRAM_PROTOCOL_VERSION
    if low > high:
        raise Violation(f"speaks protocol versions {low} to {high}, which is no range")
    if not low <= ours <= high:
        raise Violation(
            f"speaks protocol versions {low} to {high}, this daemon {ours} to {ours}: "
            f"update {'the daemon' if low > ours else 'the client'}"
        )


def handle_of(data: bytes) -> int:
    """The handle that an engram_map_request names. Raises Violation."""
    check_length(data, ffi.sizeof("engram_map_request"))
    request = ffi.new("engram_map_request *")
    ffi.buffer(request)[:] = data
    return int(request.handle)


def fill_header(message: Any, kind: int) -> None:
    """Of a cffi pointer to any message that the daemon sends."""
    message.message.magic = lib.ENGRAM_MESSAGE_MAGIC
    message.message.version = lib.ENGRAM_PROTOCOL_VERSION
    message.message.kind = kind
    message.message.bytes = ffi.sizeof(ffi.typeof(message).item)


def fill_text(message: Any, text: str) -> None:
    """Its `text`, cut off between two characters where it does not fit."""
    limit = ffi.sizeof(message.text) - 1
    message.text = text.encode()[:limit].decode("utf-8", "ignore").encode()


def send_refused(target: socket.socket, status: int, text: str) -> None:
    """Tells a client why, if it listens; it may be gone or may not read, and neither is our concern."""
    refused = ffi.new("engram_refused *")
    fill_header(refused, lib.ENGRAM_KIND_REFUSED)
    refused.status = status
    fill_text(refused, text)
    try:
        target.send(bytes(ffi.buffer(refused)), socket.MSG_NOSIGNAL)
    except OSError:
        _LOG.debug("a refusal was not taken", exc_info=True)


def _printable(name: bytes) -> str:
    text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)
