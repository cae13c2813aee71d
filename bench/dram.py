"""a. DRAM gather: the daemon, resident and from the row cache, against a gather in this process and numpy.take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import engram_client
import numpy as np

from bench.environment import ROW_BYTES, Ids, Settings, Table
from engramd.measure.daemon import Daemon, total
from engramd.measure.gather import LocalGather, by_take
from engramd.measure.report import Question, interleave
from engramd.measure.tickets import by_ticket, queued

BATCHES = (48, 288, 3072, 12_288, 49_152, 393_216)
ROWS_PER_SIDE = 3_000_000


def by_fetch(table: engram_client.Table, ids: Ids, batch: int, out: Any) -> float:
    began = time.perf_counter()
    for start in range(0, len(ids), batch):
        table.fetch(ids[start : start + batch], out=out)
    return len(ids) / (time.perf_counter() - began)


def measure(settings: Settings, table_files: Table) -> Question:
    question = Question("a", "DRAM gather of uniform fresh ids, rows a second")
    batches = BATCHES[:5] if settings.quick else BATCHES
    for workers in (1, 2):
        for tier in ("resident", "cache"):
            measure_tier(settings, table_files, question, workers, tier, batches)
    return question


def measure_tier(
    settings: Settings, files: Table, question: Question, workers: int, tier: str, batches: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(workers)
    # Covering all tables makes them resident; one byte less leaves the cache, which then holds seven eighths or so.
    dram = files.row_bytes() * 2 if tier == "resident" else files.row_bytes() - 1
    spin_us = None if workers == 1 else 0
    with (
        Daemon(files.path, dram, "--workers", str(workers)) as daemon,
        engram_client.connect(daemon.socket, spin_us=spin_us) as client,
    ):
        layer = client.table(layer=1)
        count = layer.num_rows
        if tier == "resident":
            daemon.wait_until_resident()
            known = None
        else:
            known = hot = rng.permutation(count)[: count // 2]
            for _ in range(3):
                for start in range(0, len(hot), 49_152):
                    layer.fetch(hot[start : start + 49_152])
        local = LocalGather(count, max(batches), workers)
        try:
            for batch in batches:
                name = f"{tier}, {workers} worker{'s'[: workers - 1]}, {batch:,} rows"
                if batch > client.max_ticket_rows:
                    question.note(f"{name}: more than one ticket holds ({client.max_ticket_rows:,}): fetch alone")
                rows = (600_000 if settings.quick else ROWS_PER_SIDE) // batch * batch
                rows = max(batch * 4, min(rows, batch * 4000))
                measure_batch(settings, question, name, client, layer, local, batch, Chooser(rng, count, known, rows))
        finally:
            local.close()


@dataclass
class Chooser:
    """Fresh uniform ids for each repetition: of all rows, or of those known to be cached."""

    rng: np.random.Generator
    count: int
    known: Ids | None
    rows: int

    def __call__(self) -> Ids:
        if self.known is None:
            return self.rng.integers(0, self.count, self.rows)
        return self.known[self.rng.integers(0, len(self.known), self.rows)]


def measure_batch(
    settings: Settings,
    question: Question,
    name: str,
    client: engram_client.Client,
    layer: engram_client.Table,
    local: LocalGather,
    batch: int,
    choose: Chooser,
) -> None:
    out = np.empty((batch, ROW_BYTES), np.uint8)
    before = client.stats()
    by_tickets: dict[str, Callable[[int], float]] = {
        "ours": lambda _: by_ticket(layer, choose(), batch),
        "queued": lambda _: queued(layer, choose(), batch, 2),
    }
    sides: dict[str, Callable[[int], float]] = {
        **(by_tickets if batch <= client.max_ticket_rows else {}),
        "limit": lambda _: local.run(choose(), batch),
        "plain": lambda _: local.run_plain(choose(), batch),
        "take": lambda _: by_take(local.rows, choose(), batch, out),
        "fetch": lambda _: by_fetch(layer, choose(), batch, out),
    }
    for side in sides.values():
        side(0)
    figures = interleave(sides, settings.repetitions)
    after = client.stats()
    misses = total(after, "dram_misses") - total(before, "dram_misses")
    rows = total(after, "rows") - total(before, "rows")
    limit = "C++ gather, 2 threads" if local.threads == 2 else "C++ gather"
    if "ours" in figures:
        question.add(name, "rows/s", figures["ours"], limit, figures["limit"], missed=misses / max(1, rows))
        question.add(f"{name}, 2 queued", "rows/s", figures["queued"], limit, figures["limit"])
        question.add(name, "rows/s", figures["ours"], "memcpy row by row, 1 thread", figures["plain"])
        question.add(name, "rows/s", figures["ours"], "numpy.take", figures["take"])
    question.add(f"{name}, fetch(out=)", "rows/s", figures["fetch"], limit, figures["limit"])
