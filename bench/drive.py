"""c. NVMe: distinct rows that are nowhere in DRAM, against fio on the same file."""

from __future__ import annotations

import engram_client
import numpy as np

from bench.environment import Settings, Table, drop_pages, fio
from engramd.measure.daemon import Daemon
from engramd.measure.report import Question, interleave
from engramd.measure.tickets import queued

DEPTHS = (32, 64, 128, 256)
BATCHES = (48, 3072, 12_288, 49_152)


def measure(settings: Settings, files: Table) -> Question:
    question = Question("c", "Distinct rows from the drive, no row cache, rows a second")
    path = files.data_files()[0]
    question.note(
        f"{drop_pages(files.data_files())} pages of the table in the page cache after dropping them (mincore)"
    )
    seconds = 1 if settings.quick else 3
    sweep = {depth: fio(path, depth, seconds).rows_per_s for depth in DEPTHS}
    best = max(sweep, key=lambda depth: sweep[depth])
    question.note("fio by depth: " + ", ".join(f"QD{depth} {rate:,.0f}" for depth, rate in sweep.items()))
    rng = np.random.default_rng(5)
    with Daemon(files.path, 0, "--workers", "1") as daemon, engram_client.connect(daemon.socket, spin_us=0) as client:
        table = client.table(layer=1)
        for batch in BATCHES:
            for depth in (1, 2):
                wanted = int(sweep[best] * seconds * (0.3 if batch == BATCHES[0] else 1.0)) // batch * batch
                cpu: list[float] = []
                fio_cpu: list[float] = []

                def ours(
                    _: int, batch: int = batch, depth: int = depth, wanted: int = wanted, cpu: list[float] = cpu
                ) -> float:
                    # Distinct pages too, so that every row costs a read.
                    pages = rng.choice(
                        table.num_rows // 15, min(max(wanted, batch * depth), table.num_rows // 15), False
                    )
                    ids = pages.astype(np.int64)[: len(pages) // batch * batch] * 15 + 7
                    before = daemon.cpu_s()
                    rate = queued(table, ids, batch, depth)
                    cpu.append((daemon.cpu_s() - before) / len(ids) * 1e6)
                    return rate

                def limit(_: int, fio_cpu: list[float] = fio_cpu) -> float:
                    figure = fio(path, best, seconds)
                    fio_cpu.append(figure.cpu_us_per_row)
                    return figure.rows_per_s

                figures = interleave({"ours": ours, "fio": limit}, settings.repetitions)
                question.add(
                    f"{batch:,} rows, {depth} queued", "rows/s", figures["ours"], f"fio QD{best}", figures["fio"],
                    cpu_us_row=float(np.median(cpu)), fio_cpu_us_row=float(np.median(fio_cpu)),
                )  # fmt: skip
    return question
