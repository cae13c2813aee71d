"""Control clients that ask for rows and never read the replies."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

import msgpack
import pytest
import zmq

from engramd.daemon.control_memory import STALL_S, ByteBudget
from engramd.daemon.messages import RequestError

REPLY_BYTES = 16 << 20


class GreedyClients:
    """They take a message or two each into their own memory; the rest stays with the daemon."""

    def __init__(self, path: str, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(count)]
        for one in self._sockets:
            one.setsockopt(zmq.RCVHWM, 1)
            one.setsockopt(zmq.LINGER, 0)
            one.connect(f"ipc://{path}")

    def __enter__(self) -> GreedyClients:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()
        self._context.term()

    def ask(self, ids: bytes) -> None:
        fields = {"v": 1, "id": 1, "verb": "fetch", "table": "demo", "layer": 1, "width": 4}
        for one in self._sockets:
            one.send_multipart([msgpack.packb(fields), ids])


def test_they_cannot_keep_the_memory_for_long(start_daemon: Any, control: Any) -> None:
    daemon = start_daemon()
    bystander = control(daemon.socket)
    ids = struct.pack("=i", 3) * bystander.request("tables")[0]["max_fetch_rows"]

    def outcome() -> str:
        reply, _ = bystander.request("fetch", ids, table="demo", layer=1, width=4)
        return "rows" if reply["ok"] else str(reply["error"])

    with GreedyClients(daemon.socket, 6) as greedy:
        deadline = time.monotonic() + 60
        refused = 0
        while refused < 3:
            assert time.monotonic() < deadline, "the budget is never used up: this test shows nothing"
            if not refused:
                greedy.ask(ids)
            time.sleep(0.2)
            refused = refused + 1 if outcome() == "Busy" else 0
        deadline = time.monotonic() + 10 * STALL_S
        while outcome() != "rows":
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.1)
    assert f"(pid {os.getpid()}, uid {os.getuid()}) has taken none of its replies for 10 s: " in daemon.log
    assert "its connection is shut down" in daemon.log


class Tracker:
    """A zmq.MessageTracker as the budget sees it."""

    done = False


def test_a_client_that_takes_something_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever takes its replies slowly keeps its connection; its limit and that of all are kept meanwhile."""
    now = 100.0
    budget = ByteBudget(lambda: now)
    peer = (1, b"a")
    trackers = [Tracker() for _ in range(4)]
    for tracker in trackers:
        budget.take(peer, None, REPLY_BYTES)
        budget.give_back_when_sent(tracker, peer, REPLY_BYTES)
    with pytest.raises(RequestError, match="this client's"):
        budget.take(peer, None, REPLY_BYTES)
    assert budget.next_deadline() == 100 + STALL_S
    for tracker in trackers[:3]:
        now += 0.9 * STALL_S
        tracker.done = True
        budget.take((2, b"b"), None, 0)  # any request looks after what has left
        budget.give_back((2, b"b"), 0)
        budget.expire()
        assert budget.next_deadline() == now + STALL_S
    assert caplog.text == ""
    now += STALL_S
    budget.expire()
    assert "none of its replies" in caplog.text
    trackers[3].done = True
    budget.take(peer, None, 4 * REPLY_BYTES)
    budget.give_back(peer, 4 * REPLY_BYTES)
    assert budget.next_deadline() is None
