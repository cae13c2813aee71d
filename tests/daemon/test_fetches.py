"""Fetches over ZeroMQ: in flight without a thread each, and what becomes of those whose time is over."""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from engramd._engine import lib
from engramd.config import Settings, TablePath
from engramd.daemon.control_memory import ByteBudget
from engramd.daemon.control_peer import Peer
from engramd.daemon.engine import Engine
from engramd.daemon.fetches import OPEN_LIMIT, REQUEST_TIMEOUT_S, Fetches
from engramd.daemon.messages import Request, RequestError
from engramd.daemon.service import POOL_THREADS
from engramd.daemon.tables import open_table

COUNT = 40
ROWS_A_PAGE = 15


def test_more_are_in_flight_than_there_are_threads(faulty_daemon: Any, control: Any, rows: Any) -> None:
    daemon = faulty_daemon("seed=1,slow=1,slow_ms=1000", dram="0")
    client, watcher = control(daemon.socket), control(daemon.socket)
    fields = {"v": 1, "verb": "fetch", "table": "demo", "layer": 1, "width": 4}
    for number in range(COUNT):
        client.socket.send_multipart([msgpack.packb({**fields, "id": number}), struct.pack("=i", number * ROWS_A_PAGE)])
    most_in_flight = 0
    answered = 0
    while answered < COUNT:
        # Statistics do not wait behind the fetches.
        most_in_flight = max(most_in_flight, watcher.request("stats")[0]["stats"]["reader"]["in_flight"])
        while client.socket.poll(50):
            reply, (row,) = client.receive()
            assert reply["ok"], reply
            assert row == rows[1][reply["id"] * ROWS_A_PAGE].tobytes()
            answered += 1
    assert most_in_flight > POOL_THREADS


class Mailbox:
    """An endpoint that keeps the replies and has sent each at once."""

    def __init__(self) -> None:
        self.replies: list[tuple[dict[str, Any], list[bytes]]] = []

    def send(self, peer: Peer, frames: Sequence[Any]) -> None:
        self.replies.append((msgpack.unpackb(frames[0]), [bytes(frame) for frame in frames[1:]]))


class Fixture:
    """Fetches over an engine of their own, with a clock that the test turns."""

    def __init__(self, table: Path, dram_bytes: int = 1 << 20) -> None:
        opened = open_table(TablePath("demo", str(table)))
        self.engine = Engine(Settings(dram_bytes=dram_bytes, arena_bytes=1 << 20), [opened])
        opened.close()
        self.now = 100.0
        self.budget = ByteBudget(lambda: self.now)
        self.fetches = Fetches(self.engine, self.budget, lambda: self.now)
        self.mailbox = Mailbox()
        self.peer = Peer(self.mailbox, (b"client",), None)

    def fetch(self, number: int, *ids: int) -> None:
        request = Request({"id": number, "table": "demo", "layer": 1, "width": 4})
        request.verb = "fetch"
        self.fetches.fetch(self.peer, request, struct.pack(f"={len(ids)}i", *ids))

    def collect(self) -> None:
        """Waits until something has completed, and answers it."""
        assert select.select([self.fetches.descriptor], [], [], 30)[0]
        self.fetches.collect()


@pytest.fixture
def here(table: Path) -> Iterator[Fixture]:
    fixture = Fixture(table)
    yield fixture
    fixture.engine.destroy()


def test_a_request_whose_time_is_over_is_answered_once(here: Fixture, rows: Any) -> None:
    here.fetch(1, 5)
    assert here.fetches.next_deadline() == here.now + REQUEST_TIMEOUT_S
    here.fetches.expire()
    assert here.mailbox.replies == []
    here.now += REQUEST_TIMEOUT_S
    here.fetches.expire()
    here.fetches.expire()
    ((reply, rest),) = here.mailbox.replies
    assert (reply["id"], reply["ok"], reply["error"], rest) == (1, False, "RequestTimeout", [])
    assert "not served within 30 s" in reply["text"]
    # Its memory is in use until the engine is done with it.
    assert here.fetches.next_deadline() is None
    assert here.budget.reserved_bytes == 4 + 264
    here.fetch(2, 6)
    while not here.fetches.is_idle:
        here.collect()
    assert here.mailbox.replies[1:] == [({"id": 2, "ok": True}, [rows[1][6].tobytes()])]
    assert here.budget.reserved_bytes == 0


def test_the_limit_on_open_requests_is_busy_and_reserves_nothing(here: Fixture, rows: Any) -> None:
    for number in range(OPEN_LIMIT):
        here.fetch(number, number, -1)
    with pytest.raises(RequestError, match=f"reach {OPEN_LIMIT} requests") as refused:
        here.fetch(OPEN_LIMIT, 1)
    assert refused.value.kind == "Busy"
    while not here.fetches.is_idle:
        here.collect()
    assert sorted(reply["id"] for reply, _ in here.mailbox.replies) == list(range(OPEN_LIMIT))
    for reply, (got,) in here.mailbox.replies:
        assert got == rows[1][reply["id"]].tobytes() + bytes(264)
    assert here.budget.reserved_bytes == 0


def test_small_fetches_of_resident_rows_are_answered_at_once(table: Path, rows: Any) -> None:
    here = Fixture(table, dram_bytes=64 << 20)
    deadline = time.monotonic() + 60
    while {one["tier"] for one in here.engine.layer_counters().values()} != {lib.ENGRAM_TIER_RESIDENT}:
        assert time.monotonic() < deadline, "the table is not resident"
        time.sleep(0.01)
    here.fetch(1, 5, -1, len(rows[1]) - 1)
    here.fetch(2, 5, len(rows[1]))
    assert here.fetches.is_idle
    (first, (got,)), (second, rest) = here.mailbox.replies
    assert first == {"id": 1, "ok": True}
    assert got == rows[1][5].tobytes() + bytes(264) + rows[1][-1].tobytes()
    assert (second["id"], second["error"], second["position"], rest) == (2, "RowIdError", 1, [])
    assert here.budget.reserved_bytes == 0
    here.engine.destroy()


def test_rows_outlive_the_engine(table: Path, rows: Any) -> None:
    """libzmq may still hold replies when the daemon has stopped its engine."""
    here = Fixture(table)
    kept: list[Any] = []
    here.mailbox.send = lambda peer, frames: kept.append(frames[1])  # type: ignore[method-assign]
    here.fetch(1, *range(4000))
    here.collect()
    here.engine.destroy()
    assert np.array_equal(np.frombuffer(kept[0], np.uint8).reshape(4000, 264), rows[1][:4000])
