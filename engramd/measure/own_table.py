"""The questions of `engramd bench`: a table's rows by ticket beside what memory, drive and ZeroMQ give in the same run.

Works on a connected client, whoever started its daemon. Repetitions interleave, and ratios are taken inside each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from engramd.doctor.storage import DEPTHS, measure
from engramd.errors import EngramdError
from engramd.measure.daemon import total
from engramd.measure.gather import Ids, LocalGather, by_take
from engramd.measure.report import Question, interleave
from engramd.measure.tickets import by_ticket, queued, round_trips, time_each
from engramd.table.geometry import PAGE_UNIT_BYTES
from engramd.table.manifest import Manifest

BATCHES = (48, 3072, 12_288, 49_152)
SMALL_ROWS = 48
HOT_ROWS = 500_000
LEAST_ROOM_ROWS = 4 * SMALL_ROWS
RATE_ROWS = 1_000_000  # of one repetition, at most
ROUND_TRIPS = 2000
QUEUED = 2


@dataclass
class Subject:
    """What is measured. client, control: connected over the ring and over ZeroMQ; table: one layer's handle."""

    client: Any
    control: Any
    table: Any
    repetitions: int
    seconds: float
    rng: np.random.Generator

    def batches(self, rows: int) -> list[int]:
        """Those that a ticket holds, and so many rows twice. Raises EngramdError where there is none."""
        found = [batch for batch in BATCHES if batch <= min(self.client.max_ticket_rows, rows // 2)]
        if not found:
            raise EngramdError(f"{self.table.name}, layer {self.table.layer}: too small to be measured")
        return found

    def missed(self, before: dict[str, Any]) -> float:
        """Share of rows that were not in DRAM since then."""
        after = self.client.stats()
        misses = total(after, "dram_misses") - total(before, "dram_misses")
        rows = total(after, "rows") - total(before, "rows")
        return misses / max(1, rows)


def rows_in_dram(subject: Subject, room_rows: int) -> Question:
    """Rows a second from DRAM, and round trips of SMALL_ROWS. room_rows: of the daemon's DRAM; a quarter is used, so
    that nothing of it is evicted. Raises EngramdError where that is too little."""
    question = Question("dram", "Rows in DRAM, by ticket")
    table, rng = subject.table, subject.rng
    if room_rows < LEAST_ROOM_ROWS:
        raise EngramdError(f"DRAM has room for {room_rows:,} rows: too few to measure; raise --dram")
    hot = rng.choice(table.num_rows, min(HOT_ROWS, room_rows // 4, table.num_rows), replace=False)
    for _ in range(3):  # read, asked for again, counted as hot
        table.fetch(hot)
    gather = LocalGather(hot.size, max(BATCHES), row_bytes=table.row_bytes)
    out = np.empty((max(BATCHES), table.row_bytes), np.uint8)
    try:
        for batch in subject.batches(table.num_rows):
            before = subject.client.stats()
            found = _dram_rates(subject, hot, gather, out[:batch])
            missed = subject.missed(before)
            for side, name in (("limit", "the same copy in this process"), ("take", "numpy.take")):
                question.add(f"{batch:,} rows", "rows/s", found["ours"], name, found[side], missed=missed)
    finally:
        gather.close()
    ours, peer = [], []
    for _ in range(subject.repetitions):
        ids = hot[rng.integers(0, hot.size, (ROUND_TRIPS, SMALL_ROWS))]
        ours.append(1e6 * round_trips(table, ids))
        peer.append(1e6 * time_each(ids[: ROUND_TRIPS // 4], 0, subject.control.fetch))
    for name, share in (("p50", 50), ("p99", 99), ("p99.9", 99.9)):
        figures = [[float(np.percentile(one, share)) for one in side] for side in (ours, peer)]
        question.add(f"round trip of {SMALL_ROWS} rows, {name}", "us", figures[0], "ZeroMQ fetch", figures[1])
    return question


def _dram_rates(subject: Subject, hot: Ids, gather: LocalGather, out: Any) -> dict[str, list[float]]:
    """Rows a second of each side, for batches as large as out [rows, row_bytes]."""
    batch = len(out)
    rows = max(batch, min(RATE_ROWS, 2000 * batch) // batch * batch)

    def places() -> Ids:
        return subject.rng.integers(0, hot.size, rows)

    return interleave(
        {
            "ours": lambda _: by_ticket(subject.table, hot[places()], batch),
            "limit": lambda _: gather.run(places(), batch),
            "take": lambda _: by_take(gather.rows, places(), batch, out),
        },
        subject.repetitions,
    )


def rows_from_the_drive(subject: Subject, found: Manifest, layer: int) -> Question:
    """Distinct rows at random places a second, QUEUED requests open, beside bare direct reads of the layer's largest
    file. Raises EngramdError where the drive cannot be measured."""
    if found.page_bytes != PAGE_UNIT_BYTES:
        raise EngramdError(
            f"{found.directory}: its pages have {found.page_bytes} bytes; the drive is measured with {PAGE_UNIT_BYTES}"
        )
    question = Question("drive", f"Rows at random places, rows a second, {QUEUED} requests queued")
    table, rng = subject.table, subject.rng
    part = next(one for one in found.layers if one.layer == layer)
    file = max(part.files, key=lambda one: one.bytes)
    rates = {depth: bare_reads(file.path, depth, 0.25) for depth in DEPTHS}
    best = max(rates, key=lambda depth: rates[depth])
    question.note("direct reads by depth: " + ", ".join(f"{depth}: {rate:,.0f}/s" for depth, rate in rates.items()))
    if len(part.files) > 1:
        question.note(f"layer {layer} is striped over {len(part.files)} files; the limit is that of {file.name} alone")
    for batch in subject.batches(part.pages):
        wanted = max(batch, min(int(rates[best] * subject.seconds), part.pages) // batch * batch)

        def ours(_: int, batch: int = batch, wanted: int = wanted) -> float:
            # A page each, so that every row costs a read.
            pages = rng.choice(part.pages, wanted, replace=False)
            ids = np.minimum(pages * found.rows_per_page + rng.integers(0, found.rows_per_page), part.rows - 1)
            return queued(table, ids, batch, QUEUED)

        before = subject.client.stats()
        figures = interleave(
            {"ours": ours, "limit": lambda _: bare_reads(file.path, best, subject.seconds)}, subject.repetitions
        )
        question.add(
            f"{batch:,} rows", "rows/s", figures["ours"], f"direct reads, depth {best}", figures["limit"],
            missed=subject.missed(before),
        )  # fmt: skip
    return question


def bare_reads(path: str, depth: int, seconds: float) -> float:
    """Direct reads of 4 KiB a second. Raises EngramdError."""
    found = measure(path, depth, round(seconds * 1000))
    if isinstance(found, str):
        raise EngramdError(f"{path}: cannot be measured: {found} (`engramd doctor` says more)")
    return found.reads_per_s


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import platform

    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }
