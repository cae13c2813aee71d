"""Maps of resident layers on the session's socket, message by message: who gets what, and what ends a session."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import MAGIC, RawClient

MAP_REQUEST, MAP, UNMAP = 7, 8, 9
OK, UNKNOWN_TABLE, BUSY = 1, 3, 5
MAX_MAPS = 256
DEADLINE_S = 60.0


def request(kind: int, handle: int, tail: bytes = b"") -> bytes:
    body = struct.pack("=II", handle, 0) + tail
    return struct.pack("=IHHII", MAGIC, 1, kind, 16 + len(body), 0) + body


def ask(client: RawClient, handle: int) -> dict[str, Any]:
    """The answer to a map request, by the names of engram_map."""
    client.send(request(MAP_REQUEST, handle))
    kind, body = client.receive()
    assert kind == MAP, body
    names = ("status", "handle", "rows", "row_bytes", "value_bytes", "scales_offset", "bytes", "row_layout", "reserved")
    fields = dict(zip(names, struct.unpack_from("=IIQIIQQII", body), strict=True))
    return {**fields, "text": body[struct.calcsize("=IIQIIQQII") :].split(b"\0")[0].decode()}


def ask_when_resident(client: RawClient, handle: int) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while (answer := ask(client, handle))["status"] != OK:
        assert answer["status"] == BUSY, answer
        assert "it is still being read" in answer["text"]
        assert client.descriptors == []
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def maps_of(stats: Callable[[Any], dict[str, Any]], daemon: Any) -> list[int]:
    return [layer["maps"] for layer in stats(daemon)["tables"][0]["layers"]]


def wait_for_maps(stats: Callable[[Any], dict[str, Any]], daemon: Any, wanted: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while maps_of(stats, daemon) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sealed_read_only_descriptor(
    start_daemon: Any, raw_client: Any, stats: Any, rows: dict[int, np.ndarray]
) -> None:
    daemon = start_daemon()
    client = raw_client(daemon.socket)
    client.open()
    answer = ask_when_resident(client, 1)
    (descriptor,) = client.descriptors
    assert (answer["handle"], answer["rows"], answer["row_bytes"], answer["value_bytes"]) == (1, len(rows[1]), 264, 256)
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    seal, shrink, grow, future_write = 1, 2, 4, 16
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == seal | shrink | grow | future_write
    with mmap.mmap(descriptor, answer["bytes"], mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        assert memory[: rows[1].nbytes] == rows[1].tobytes()
    assert maps_of(stats, daemon) == [1, 0]
    client.send(request(UNMAP, 1))
    wait_for_maps(stats, daemon, [0, 0])
    ask_when_resident(client, 2)
    ask(client, 2)
    assert maps_of(stats, daemon) == [0, 2]
    client.close()
    wait_for_maps(stats, daemon, [0, 0])


def test_handles_that_nobody_has(start_daemon: Any, raw_client: Any) -> None:
    client = raw_client(start_daemon().socket)
    client.open()
    for handle in (0, 3, 0xFFFFFFFF):
        answer = ask(client, handle)
        assert answer["status"] == UNKNOWN_TABLE
        assert str(handle) in answer["text"]
        assert client.descriptors == []


def test_a_session_has_so_many_maps(start_daemon: Any, raw_client: Any, stats: Any) -> None:
    daemon = start_daemon()
    client, bystander = raw_client(daemon.socket), raw_client(daemon.socket)
    client.open()
    bystander.open()
    ask_when_resident(client, 1)
    for _ in range(MAX_MAPS - 1):
        assert ask(client, 1)["status"] == OK
    answer = ask(client, 1)
    assert answer["status"] == BUSY
    assert f"{MAX_MAPS} maps" in answer["text"]
    assert ask(bystander, 1)["status"] == OK
    client.close()
    wait_for_maps(stats, daemon, [1, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (request(UNMAP, 1), "unmaps handle 1, which it has not mapped"),
        (request(MAP_REQUEST, 1, b"x"), "25 bytes"),
        (request(MAP, 1), "a message of kind 8"),
    ],
)
def test_a_wrong_message_ends_the_session(start_daemon: Any, raw_client: Any, data: bytes, words: str) -> None:
    daemon = start_daemon()
    client, bystander = raw_client(daemon.socket), raw_client(daemon.socket)
    client.open()
    bystander.open()
    client.send(data)
    assert words in client.refusal()[1]
    ask_when_resident(bystander, 1)


def test_a_client_that_does_not_read_loses_its_session(start_daemon: Any, raw_client: Any, stats: Any) -> None:
    daemon = start_daemon()
    client = raw_client(daemon.socket)
    client.open()
    ask_when_resident(client, 1)
    for _ in range(100):
        try:
            client.send(request(MAP_REQUEST, 1))
        except OSError:
            break  # the daemon has closed it
    daemon.wait_for_log("asks for a layer's memory without having read the last answer")
    wait_for_maps(stats, daemon, [0, 0])
