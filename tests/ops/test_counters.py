"""After a random workload all counters add up: of the clients, in the statistics, and in Prometheus' metrics."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from typing import Any

import engram_client
import numpy as np

from .scraping import scrape, total

SEED = int(os.environ.get("ENGRAM_SEED", "1"))
STEPS = int(os.environ.get("ENGRAM_N", "120"))  # of each client
WAYS = ("", "", "ipc-control:")  # two sessions over rings, one client over ZeroMQ


def class_of(rows: int) -> str:
    """The latency class of a request."""
    return "1-256" if rows <= 256 else "257-4096" if rows <= 4096 else "4097-65536"


def settled(client: engram_client.Client) -> dict[str, Any]:
    """The statistics once no prefetch is under way."""
    deadline = time.monotonic() + 60
    while True:
        stats = client.stats()
        if stats["reader"]["prefetch_queued_rows"] == stats["reader"]["in_flight"] == 0:
            return stats
        assert time.monotonic() < deadline, stats["reader"]
        time.sleep(0.05)


class Worker:
    """One client's random fetches, tickets, prefetches and mistakes, in a thread of its own."""

    def __init__(self, target: str, seed: int) -> None:
        self.client = engram_client.connect(target)
        self.expected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._tables = [self.client.table(layer=layer) for layer in (1, 14)]
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for _ in range(STEPS):
                self._step()
        except BaseException as failure:  # noqa: BLE001 - judged by the test's own thread
            self._failure = failure

    def _step(self) -> None:
        table = self._random.choice(self._tables)
        count = self._random.choice([1, 7, 48, 256, 257, 3072, 4097, 9000])
        most = self._random.choice([50, table.num_rows])  # few rows: many duplicates
        ids = np.array([self._random.randrange(-1, most) for _ in range(count)])
        action = self._random.choice(["fetch", "fetch", "ticket", "prefetch", "mistake"])
        if action == "prefetch":
            table.prefetch(ids)
            self.expected["prefetches"] += 1
            return
        if action == "mistake":
            ids[self._random.randrange(count)] = self._random.choice([-2, table.num_rows])
            try:
                table.fetch(ids)
            except engram_client.RowIdError:
                self.expected["failed"] += 1
                return
            raise AssertionError("a bad id was served")
        if action == "ticket":
            with table.submit(ids) as ticket:
                assert len(ticket.wait()) == count
        else:
            assert len(table.fetch(ids)) == count
        self.expected[class_of(count)] += 1
        self.expected.update(
            requests=1, rows=count, zero=int((ids == -1).sum()), distinct=len(np.unique(ids[ids >= 0]))
        )


def test_all_counters_add_up(start_daemon: Any, reserve_port: Any) -> None:
    print(f"SEED={SEED} N={STEPS}")
    port = reserve_port()
    daemon = start_daemon(dram="256KiB", metrics=f"127.0.0.1:{port}")
    workers = [Worker(way + daemon.socket, SEED * 100 + number) for number, way in enumerate(WAYS)]
    for worker in workers:
        worker.finish()
    expected: Counter[str] = Counter()
    for worker in workers:
        own = worker.client.counters()
        assert own["requests"] == worker.expected["requests"]
        assert own["rows"] == worker.expected["rows"]
        assert own["failed_requests"] == worker.expected["failed"]
        assert own["reply_bytes"] == 264 * worker.expected["rows"]
        expected += worker.expected
    stats = settled(workers[0].client)
    samples = scrape(port)
    layers = [layer for table in stats["tables"] for layer in table["layers"]]

    def counted(name: str) -> int:
        return sum(layer[name] for layer in layers)

    assert counted("rows") == expected["rows"] == total(samples, "engramd_rows_total")
    assert counted("rows_zero") == expected["zero"] == total(samples, "engramd_rows_total", source="zero")
    assert counted("rows_failed") == 0
    assert counted("rows") == counted("rows_zero") + counted("dram_hits") + counted("dram_misses")
    assert counted("rows_unique") == expected["distinct"] == total(samples, "engramd_distinct_rows_total")
    assert sum(layer["errors"].get("RowIdError", 0) for layer in layers) == expected["failed"]
    assert total(samples, "engramd_request_errors_total") == expected["failed"]
    taken = expected["requests"] + expected["prefetches"] + expected["failed"]
    assert counted("requests") == taken == total(samples, "engramd_requests_total")
    for cause, name in (("demand", "nvme_reads"), ("prefetch", "prefetch_reads")):
        assert counted(name) == total(samples, "engramd_page_reads_total", cause=cause)
    assert counted("prefetch_reads") > 0
    # Every request that was served has one latency, in the class of its rows.
    for name, latency in stats["latency_us"].items():
        assert latency["count"] == expected[name]
        assert latency["count"] == total(samples, "engramd_request_duration_seconds_count", rows=name)
    # Sessions are the rings' alone.
    by_ring = sum(worker.expected["rows"] for worker in workers[:2])
    assert sum(session["rows"] for session in stats["sessions"]) == by_ring
    assert all(session["waiting"] == 0 for session in stats["sessions"])
    for worker in workers:
        worker.client.close()
