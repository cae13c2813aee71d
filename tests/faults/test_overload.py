"""More than the drive can serve: bounded queues, deadlines, turns. The fault build holds each read back, so that any
machine's drive is slow enough: about 6,400 pages a second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
from engram_client import Busy, RequestTimeout

SEED = int(os.environ.get("ENGRAM_SEED", "1"))
SECONDS = 4.0 if "ENGRAM_N" not in os.environ else min(600.0, int(os.environ["ENGRAM_N"]) / 15_000)
LARGE, SMALL = 1000, 48
DEADLINE_S = 0.2
Rows = dict[int, np.ndarray[Any, np.dtype[np.uint8]]]


def resident_bytes(pid: int) -> int:
    """Private memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


class Clients:
    """Threads that each do one kind of thing until the time is over; what they count, and what went wrong."""

    def __init__(self, rows: Rows) -> None:
        self.end = time.monotonic() + SECONDS
        self.rows = rows
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, client: Any, step: Callable[[str, Any, np.random.Generator], None]) -> None:
        def run(seed: int) -> None:
            table, chosen = client.table("demo", 1), np.random.default_rng(seed)
            try:
                while time.monotonic() < self.end:
                    step(name, table, chosen)
            except Exception as error:  # noqa: BLE001 - the test's own thread judges it
                self.failures.append(f"{name}: {error!r}")

        thread = threading.Thread(target=run, args=(SEED * 100 + len(self._threads),))
        self._threads.append(thread)
        thread.start()

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + amount

    def check(self, name: str, got: Any, ids: Any) -> None:
        if not np.array_equal(got, self.rows[1][ids]):
            self.failures.append(f"{name}: a wrong row")
        self.count(name, len(ids))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS + 60)
            assert not thread.is_alive(), "a client is stuck"

    # What they do.

    def greedy(self, name: str, table: Any, chosen: np.random.Generator) -> None:
        """Waits for room, and then for its rows, however long it takes."""
        ids = chosen.integers(0, table.num_rows, LARGE)
        with table.submit(ids) as ticket:
            self.check(name, ticket.wait(), ids)

    def impatient(self, name: str, table: Any, chosen: np.random.Generator) -> None:
        """Asks without waiting until there is no more room, and is told so."""
        tickets = []
        try:
            while time.monotonic() < self.end:
                ids = chosen.integers(0, table.num_rows, LARGE)
                tickets.append((table.submit(ids, on_full="busy"), ids))
        except Busy:
            self.count("busy")
        for ticket, ids in tickets:
            with ticket:
                self.check(name, ticket.wait(), ids)

    def hurried(self, name: str, table: Any, chosen: np.random.Generator) -> None:
        """Gives up at its deadline, which comes before its rows."""
        ids = chosen.integers(0, table.num_rows, LARGE)
        began = time.monotonic()
        try:
            self.check(name, table.fetch(ids, timeout=DEADLINE_S), ids)
        except RequestTimeout:
            self.count("timeouts")
        if time.monotonic() - began > 10 * DEADLINE_S:
            self.failures.append(f"{name}: a deadline of {DEADLINE_S} s kept for {time.monotonic() - began:.2f} s")

    def modest(self, name: str, table: Any, chosen: np.random.Generator) -> None:
        """Few rows at a time."""
        ids = chosen.integers(0, table.num_rows, SMALL)
        self.check(name, table.fetch(ids), ids)


def test_more_than_the_drive_can_serve(faulty_daemon: Any, stats: Any, rows: Rows) -> None:
    daemon = faulty_daemon(f"seed={SEED},slow=1,slow_ms=20", dram="0", arena="2MiB")
    opened = [engram_client.connect(daemon.socket) for _ in range(5)]
    opened[0].table("demo", 1).fetch([1])
    before = resident_bytes(daemon.pid)
    clients = Clients(rows)
    for _ in range(6):
        clients.start("crowd", opened[0], clients.greedy)
    clients.start("alone", opened[1], clients.greedy)
    clients.start("impatient", opened[2], clients.impatient)
    for _ in range(4):
        clients.start("hurried", opened[3], clients.hurried)
    clients.start("modest", opened[4], clients.modest)
    most_waiting = most_bytes = 0
    while time.monotonic() < clients.end:
        seen = stats(daemon)
        most_waiting = max(most_waiting, *(session["waiting"] for session in seen["sessions"]))
        most_bytes = max(most_bytes, resident_bytes(daemon.pid))
        assert seen["reader"]["in_flight"] <= seen["reader"]["in_flight_cap"]
    clients.join()
    print(
        f"seed {SEED}: {SECONDS:g} s, {clients.counts}, {most_waiting} requests of a session waiting at most, private "
        f"memory {before >> 20} MiB before, {most_bytes >> 20} at most"
    )
    assert clients.failures == [], f"seed {SEED}"
    counts = clients.counts
    assert counts["busy"] > 0
    assert counts["timeouts"] > 0
    # Turns by session: six threads of one session get no more than one of another, give or take their batches' ends.
    assert counts["alone"] >= 0.3 * counts["crowd"], f"seed {SEED}"
    assert counts["modest"] > SMALL
    assert most_waiting <= 64
    if "ENGRAM_SANITIZE" not in os.environ:
        assert most_bytes < before + (64 << 20)
    # What was given up has landed: all places are free again, and rows come as before.
    end = time.monotonic() + 60
    while any(session["waiting"] for session in stats(daemon)["sessions"]) or stats(daemon)["reader"]["in_flight"]:
        assert time.monotonic() < end, "requests stay open"
    for client in opened:
        assert np.array_equal(client.table("demo", 1).fetch(np.arange(100)), rows[1][:100])
        client.close()
