"""The ring socket: the handshake as docs/protocol.md has it, and clients that do not keep to it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engramd.table import manifest

HELLO, WELCOME, REFUSED, CATALOGUE_REQUEST, CATALOGUE, MAPPED = 1, 2, 3, 4, 5, 6
BAD_REQUEST, BUSY = 9, 5
WELCOME_BODY = struct.Struct("=IIQq7QIIQQ")  # engram_welcome behind its header
HANDSHAKE_DEADLINE_S = 5.0


def message(kind: int, body: bytes = b"", *, magic: int = 0x4D474E45, version: int = 1, length: int = -1) -> bytes:
    return struct.pack("=IHHII", magic, version, kind, 16 + len(body) if length < 0 else length, 0) + body


def hello_body(low: int = 1, high: int = 1, arena_bytes: int = 0, name: bytes = b"test") -> bytes:
    return struct.pack("=IIQ64s", low, high, arena_bytes, name)


def stats(engramd: Callable[..., Any], daemon: Any) -> dict[str, Any]:
    done = engramd("stats", "--socket", daemon.socket, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def wait_for_arenas(engramd: Callable[..., Any], daemon: Any, count: int) -> None:
    deadline = time.monotonic() + 30
    while (found := stats(engramd, daemon)["arenas"]["count"]) != count:
        assert time.monotonic() < deadline, f"{found} arenas, not {count}"
        time.sleep(0.02)


def test_welcome(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon()
    client = raw_client(daemon.socket)
    fields = WELCOME_BODY.unpack(client.open())
    version, worker, session, pid = fields[:4]
    ring_bytes, arena_bytes, submit, slots, ids, ids_bytes, max_reply, slot_count, _, state_bytes, catalogue = fields[
        4:
    ]
    assert (version, pid) == (1, daemon.pid)
    assert worker < 64
    assert session > 0
    assert slot_count & (slot_count - 1) == 0
    assert 4096 <= submit < slots < ids
    assert ids + ids_bytes <= ring_bytes
    assert 0 < max_reply <= arena_bytes <= 64 << 20
    assert len(client.descriptors) == 5
    sizes = [os.fstat(client.descriptors[place]).st_size for place in (0, 1, 2, 4)]
    assert sizes == [ring_bytes, arena_bytes, state_bytes, catalogue]
    wait_for_arenas(engramd, daemon, 1)
    found = stats(engramd, daemon)
    assert [(one["pid"], one["uid"]) for one in found["sessions"]] == [(os.getpid(), os.geteuid())]


def test_seals(start_daemon: Any, raw_client: Any) -> None:
    client = raw_client(start_daemon().socket)
    client.open()
    ring, arena, state, doorbell, catalogue = client.descriptors
    seal, shrink, grow, write, future_write = 1, 2, 4, 8, 16
    assert fcntl.fcntl(ring, fcntl.F_GET_SEALS) & (shrink | grow) == shrink | grow
    for descriptor in (arena, state):
        wanted = seal | shrink | grow | future_write
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
        with pytest.raises(OSError, match=r"not permitted|denied"):
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    assert fcntl.fcntl(catalogue, fcntl.F_GET_SEALS) & ~future_write == seal | shrink | grow | write
    os.eventfd_write(doorbell, 1)
    # Once the ring is sealed too, nobody can punch holes into it.
    deadline = time.monotonic() + 30
    while fcntl.fcntl(ring, fcntl.F_GET_SEALS) & (seal | future_write) != seal | future_write:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_catalogue(start_daemon: Any, raw_client: Any, table: Path) -> None:
    client = raw_client(start_daemon(f"näme={table}").socket)
    client.open()
    first = os.pread(client.descriptors[4], 1 << 20, 0)
    os.lseek(client.descriptors[4], 100, os.SEEK_SET)
    client.send(message(CATALOGUE_REQUEST))
    kind, body = client.receive()
    assert kind == CATALOGUE
    content = os.pread(client.descriptors[0], 1 << 20, 0)
    assert content == first
    assert os.lseek(client.descriptors[0], 0, os.SEEK_CUR) == 0, "no file offset is shared"
    assert struct.unpack("=Q", body)[0] == len(content)
    magic, version, epoch, total, count, record_bytes = struct.unpack_from("=IIQQII", content)
    assert (magic, version, total, count) == (0x43474E45, 1, len(content), 2)
    assert epoch > 0
    wanted = manifest.load(table)
    handles = set()
    for index, layer in enumerate(wanted.layers):
        record = struct.unpack_from("=128s32s16sQQIIIIQII", content, 32 + index * record_bytes)
        name, identity, table_id, generation, rows, handle, number, row_bytes, value_bytes, offset, heads, _ = record
        assert name.rstrip(b"\0").decode() == "näme"
        assert identity.hex() == wanted.identity
        assert table_id == wanted.table_id
        assert (generation, rows, number) == (wanted.generation, layer.rows, layer.layer)
        assert (row_bytes, value_bytes) == (264, 256)
        assert struct.unpack_from(f"={heads}q", content, offset) == layer.head_sizes
        handles.add(handle)
    assert len(handles) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (message(HELLO, hello_body(), magic=0x12345678), "magic"),
        (message(HELLO, hello_body(), version=2), "version"),
        (message(HELLO, hello_body(), length=95), "95"),
        (message(HELLO, hello_body()[:-1]), "bytes"),
        (message(HELLO, hello_body() + b"x"), "bytes"),
        (message(HELLO, hello_body())[:10], "10 bytes"),
        (b"x", "1 bytes"),
        (message(CATALOGUE_REQUEST), "instead of hello"),
        (message(MAPPED), "instead of hello"),
        (message(65535), "65535"),
        (message(HELLO, hello_body(2, 7)), "2 to 7, this daemon 1 to 1: update the daemon"),
        (message(HELLO, hello_body(0, 0)), "0 to 0, this daemon 1 to 1: update the client"),
        (message(HELLO, hello_body(3, 1)), "no range"),
        (message(HELLO, bytes(8192)), "4096"),
    ],
)
def test_a_wrong_hello_is_refused_with_its_reason(start_daemon: Any, raw_client: Any, data: bytes, words: str) -> None:
    daemon = start_daemon()
    client = raw_client(daemon.socket)
    client.send(data)
    status, text = client.refusal()
    assert status == BAD_REQUEST
    assert words in text
    assert daemon.log.count("connection closed") == 1
    raw_client(daemon.socket).open()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (message(HELLO, hello_body()), "hello"),
        (message(MAPPED), "mapped"),
        (message(CATALOGUE_REQUEST, b"x"), "17 bytes"),
        (message(77), "77"),
        (b"garbage", "7 bytes"),
    ],
)
def test_a_wrong_message_ends_the_session(
    start_daemon: Any, raw_client: Any, engramd: Any, data: bytes, words: str
) -> None:
    daemon = start_daemon()
    client, bystander = raw_client(daemon.socket), raw_client(daemon.socket)
    client.open()
    bystander.open()
    client.send(data)
    assert words in client.refusal()[1]
    wait_for_arenas(engramd, daemon, 1)
    bystander.send(message(CATALOGUE_REQUEST))
    assert bystander.receive()[0] == CATALOGUE


def test_a_session_that_is_not_mapped_serves_nothing(start_daemon: Any, raw_client: Any) -> None:
    client = raw_client(start_daemon().socket)
    client.send(message(HELLO, hello_body()))
    assert client.receive()[0] == WELCOME
    client.send(message(CATALOGUE_REQUEST))
    assert client.receive()[0] == REFUSED
    assert client.receive()[0] == 0


def test_silence_ends_after_five_seconds(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon()
    started = time.monotonic()
    silent, half = raw_client(daemon.socket), raw_client(daemon.socket)
    half.send(message(HELLO, hello_body()))
    assert half.receive()[0] == WELCOME
    wait_for_arenas(engramd, daemon, 1)
    assert "said hello" in silent.refusal()[1]
    assert time.monotonic() - started >= HANDSHAKE_DEADLINE_S
    assert "mapped its ring" in half.refusal()[1]
    wait_for_arenas(engramd, daemon, 0)


def test_descriptors_from_a_client_never_arrive(start_daemon: Any, raw_client: Any) -> None:
    daemon = start_daemon()
    opened, fresh = raw_client(daemon.socket), raw_client(daemon.socket)
    opened.open()
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    reader, writer = os.pipe()
    for client, data in ((opened, message(CATALOGUE_REQUEST)), (fresh, message(HELLO, hello_body()))):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer] * 100))]
        client.socket.sendmsg([data], rights)
        assert "file descriptors" in client.refusal()[1]
    os.close(writer)
    # The last writer is gone only if the daemon holds none: then the pipe is at its end.
    assert select.select([reader], [], [], 30)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < before


def test_a_client_that_does_not_read_ends_its_session_alone(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon()
    greedy, other = raw_client(daemon.socket), raw_client(daemon.socket)
    greedy.open()
    other.open()

    def ask_without_reading() -> None:
        for _ in range(10_000):
            greedy.send(message(CATALOGUE_REQUEST))

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        ask_without_reading()
    wait_for_arenas(engramd, daemon, 1)
    other.send(message(CATALOGUE_REQUEST))
    assert other.receive()[0] == CATALOGUE


def test_a_thousand_connections_keep_nobody_out(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    daemon = start_daemon()
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    silent = []
    try:
        for _ in range(1000):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            one.connect(daemon.socket + ".ring")
            silent.append(one)
        raw_client(daemon.socket).open()
        wait_for_arenas(engramd, daemon, 1)
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < before + 200
    finally:
        for one in silent:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raw_client(daemon.socket).open()


def test_without_descriptors_clients_are_told(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon()
    first = raw_client(daemon.socket)
    first.open()
    wait_for_arenas(engramd, daemon, 1)
    in_use = max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd"))
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (in_use + 4, hard))
    waiting = [raw_client(daemon.socket) for _ in range(8)]
    cpu_before = _cpu_s(daemon.pid)
    refused = waiting[-1].refusal()
    assert refused[0] == BUSY
    assert "descriptors" in refused[1]
    time.sleep(1)
    assert _cpu_s(daemon.pid) - cpu_before < 0.8, "it must not spin on a connection that it cannot accept"
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))
    for client in waiting:
        client.close()
    raw_client(daemon.socket).open()
    first.send(message(CATALOGUE_REQUEST))
    assert first.receive()[0] == CATALOGUE


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_sessions_are_limited_and_freed(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon(sessions=4, arena="1MiB")
    clients = [raw_client(daemon.socket) for _ in range(4)]
    for client in clients[:3]:
        client.open()
    clients[3].send(message(HELLO, hello_body()))
    status, text = clients[3].refusal()
    assert status == BUSY
    assert "3 sessions" in text
    wait_for_arenas(engramd, daemon, 3)
    for client in clients:
        client.close()
    wait_for_arenas(engramd, daemon, 0)
    found = stats(engramd, daemon)
    assert found["arenas"]["bytes"] == 0
    assert found["sessions"] == []
    raw_client(daemon.socket).open()


def test_arena_memory_is_limited(start_daemon: Any, raw_client: Any) -> None:
    daemon = start_daemon(arena="16MiB", arena_limit="64MiB")
    opened = 0
    while True:
        client = raw_client(daemon.socket)
        client.send(message(HELLO, hello_body()))
        kind, body = client.receive()
        if kind == REFUSED:
            break
        client.send(message(MAPPED))
        opened += 1
        assert opened < 10
    assert opened >= 1
    assert struct.unpack_from("=I", body)[0] == BUSY
    assert "arena" in body[8:].split(b"\0")[0].decode()


def test_wanted_arena_is_never_exceeded(start_daemon: Any, raw_client: Any) -> None:
    daemon = start_daemon(arena="8MiB")
    for wanted, at_most in ((1 << 20, 1 << 20), (1 << 40, 8 << 20), (2**64 - 1, 8 << 20)):
        client = raw_client(daemon.socket)
        assert WELCOME_BODY.unpack(client.open(arena_bytes=wanted))[5] <= at_most


def test_any_bytes_leave_the_daemon_serving(start_daemon: Any, raw_client: Any, engramd: Any) -> None:
    daemon = start_daemon(arena="1MiB")
    kinds = st.integers(0, 8) | st.integers(0, 65535)
    bodies = st.binary(max_size=120) | st.builds(
        hello_body, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2**64 - 1), st.binary(max_size=64)
    )
    lengths = st.just(-1) | st.integers(0, 2**32 - 1)
    versions = st.sampled_from([1, 1, 1, 0, 2, 65535])
    messages = st.builds(
        lambda kind, body, length, version: message(kind, body, length=length, version=version),
        kinds,
        bodies,
        lengths,
        versions,
    )

    @given(st.lists(messages | st.binary(min_size=1, max_size=5000), min_size=1, max_size=4))
    @settings(max_examples=150)
    def talk(sent: list[bytes]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(daemon.socket + ".ring")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for data in sent:
                    client.send(data)

    talk()
    wait_for_arenas(engramd, daemon, 0)
    raw_client(daemon.socket).open()


def test_a_hostile_name_is_one_line_of_the_log(start_daemon: Any, raw_client: Any) -> None:
    daemon = start_daemon()
    raw_client(daemon.socket).open(name=b"\x1b[31mred\nINFO forged\xff\xfe")
    daemon.wait_for_log("session 1")
    line = next(line for line in daemon.log.splitlines() if "session 1" in line)
    assert "\x1b" not in line
    assert "red?INFO forged" in line


def test_a_replaced_generation_is_found(
    start_daemon: Any, engramd: Any, checkpoint: Path, table: Path, copy: Path
) -> None:
    assert engramd("pack", checkpoint, copy).returncode == 0
    daemon = start_daemon(copy)
    found = stats(engramd, daemon)["tables"][0]
    assert found["generation"] == 2
    assert found["identity"] == manifest.load(table).identity
    assert len(hashlib.sha256().hexdigest()) == len(found["identity"])
