"""h. What watching costs: rows a second with `stats --interval 1`, `top` and a scrape a second, against none of them.

The counters themselves are always on: they live in the engine, and no build without them exists to compare with. What
is compared here is reading them. All watchers and the client share the machine with the daemon, as they would.
"""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import engram_client
import numpy as np

from bench.environment import Settings, Table
from engramd.measure.daemon import ENGRAMD, Daemon
from engramd.measure.report import Question, interleave

BATCHES = (48, 49_152)
SLICES_A_REPETITION = 4  # watched and unwatched slices alternate more often than repetitions do
FIRST_LINE_DEADLINE_S = 60.0


def scrape_each_second(port: int, scraped: Event, end: Event) -> None:
    """A Prometheus of its own process; stops when told."""
    due = time.monotonic()
    while not end.is_set():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            reply.read()
        scraped.set()
        due += 1.0
        end.wait(max(0.0, due - time.monotonic()))


@contextmanager
def watchers(daemon: Daemon, port: int) -> Iterator[None]:
    """All of them running, each past its start and its first look."""
    context = multiprocessing.get_context("spawn")
    scraped, end = context.Event(), context.Event()
    scraper = context.Process(target=scrape_each_second, args=(port, scraped, end))
    scraper.start()
    views = [
        subprocess.Popen([*ENGRAMD, verb, "--socket", daemon.socket, "--interval", "1"], stdout=subprocess.PIPE)
        for verb in ("stats", "top")
    ]
    try:
        for view in views:
            assert view.stdout is not None
            if not view.stdout.readline():
                raise RuntimeError(f"{view.args!r} shows nothing")
        if not scraped.wait(FIRST_LINE_DEADLINE_S):
            raise RuntimeError(f"nothing was scraped from port {port}")
        yield
    finally:
        end.set()
        for view in views:
            view.kill()
            view.communicate()
        scraper.join(60)


def measure(settings: Settings, files: Table) -> Question:
    question = Question(
        "h", "Rows a second while everything watches, against nobody watching (a ratio of 1 costs nothing)"
    )
    slice_s = 1.2 if settings.quick else 3.0
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    rng = np.random.default_rng(11)
    with (
        Daemon(files.path, files.row_bytes() * 2, "--metrics", f"127.0.0.1:{port}") as daemon,
        engram_client.connect(daemon.socket) as client,
    ):
        daemon.wait_until_resident()
        table = client.table(layer=1)
        for batch in BATCHES:
            ids = rng.integers(0, table.num_rows, (64, batch))

            def rows_per_s(ids: np.ndarray = ids) -> float:
                rows, began = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - began) < slice_s:
                    for one in ids[: 64 if ids.shape[1] < 1000 else 4]:
                        with table.submit(one) as ticket:
                            rows += len(ticket.wait())
                return rows / elapsed

            def watched(_: int, rate: Callable[[], float] = rows_per_s) -> float:
                with watchers(daemon, port):
                    return rate()

            def alone(_: int, rate: Callable[[], float] = rows_per_s) -> float:
                return rate()

            rows_per_s()
            slices = settings.repetitions * (1 if settings.quick else SLICES_A_REPETITION)
            found = interleave({"watched": watched, "alone": alone}, slices)
            question.add(f"batches of {batch:,} rows in DRAM", "rows/s", found["watched"], "unwatched", found["alone"])
        idle_s = 3.0 if settings.quick else 10.0
        shares = []
        for _ in range(settings.repetitions):
            with watchers(daemon, port):
                before, began = daemon.cpu_s(), time.perf_counter()
                time.sleep(idle_s)
                shares.append((daemon.cpu_s() - before) / (time.perf_counter() - began))
        question.add("the daemon's CPU, idle but watched", "CPUs", shares, "one CPU", [1.0] * len(shares))
    question.note(f"slices of {slice_s:g} s, alternating; stats --interval 1, top --interval 1, /metrics once a second")
    return question
