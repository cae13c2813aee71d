"""i. What sampling costs: rows a second with the daemon's own miss curve, and with `engramd record` beside it.

Two daemons hold the same rows in DRAM, one with the curve (as by default) and one without; slices alternate between
them, and a recording runs at its default rate in every second slice of the first. The recorder shares the machine with
daemon and client, as it would.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import engram_client
import numpy as np

from bench.environment import Settings, Table
from engramd.cli.control_client import ControlClient
from engramd.errors import EngramdError
from engramd.measure.daemon import ENGRAMD, Daemon
from engramd.measure.report import Question, interleave
from engramd.measure.tickets import by_ticket

BATCHES = (48, 12_288)
SLICES_A_REPETITION = 4
START_DEADLINE_S = 60.0


@contextmanager
def recording(daemon: Daemon, file: Path, *options: str) -> Iterator[None]:
    """`engramd record`, past its start; the file is there afterwards."""
    command = [*ENGRAMD, "record", str(file), "--socket", daemon.socket, *options]
    recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        with ControlClient(daemon.socket) as control:
            while True:
                with suppress(EngramdError):
                    control.ask("record_take")
                    break
                if recorder.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("engramd record does not begin")
                time.sleep(0.05)
        yield
    finally:
        recorder.terminate()
        recorder.wait(START_DEADLINE_S)


def measure(settings: Settings, files: Table) -> Question:
    question = Question("i", "Rows a second while look-ups are sampled, against none sampled (a ratio of 1 is free)")
    dram = files.row_bytes() * 2
    with (
        Daemon(files.path, dram) as sampled,
        Daemon(files.path, dram, "--miss-curve", "off") as plain,
        engram_client.connect(sampled.socket) as sampled_client,
        engram_client.connect(plain.socket) as plain_client,
    ):
        for daemon in (sampled, plain):
            daemon.wait_until_resident()
        for batch in BATCHES:
            measure_batch(
                settings, question, sampled, sampled_client.table(layer=1), plain_client.table(layer=1), batch
            )
    return question


def measure_batch(
    settings: Settings,
    question: Question,
    daemon: Daemon,
    sampled: engram_client.Table,
    plain: engram_client.Table,
    batch: int,
) -> None:
    """Cases of one batch size. daemon: that of `sampled`."""
    rows = (200_000 if settings.quick else 4_000_000) * (1 if batch == BATCHES[0] else 5) // batch * batch
    ids = np.random.default_rng(17).integers(0, plain.num_rows, rows)

    def with_recording(_: int) -> float:
        with recording(daemon, settings.scratch / "cost.rec"):
            return by_ticket(sampled, ids, batch)

    by_ticket(plain, ids, batch)
    found = interleave(
        {
            "recording": with_recording,
            "curve": lambda _: by_ticket(sampled, ids, batch),
            "none": lambda _: by_ticket(plain, ids, batch),
        },
        settings.repetitions * (1 if settings.quick else SLICES_A_REPETITION),
    )
    name = f"batches of {batch:,} rows in DRAM"
    question.add(f"{name}, miss curve", "rows/s", found["curve"], "no sampling", found["none"])
    (settings.scratch / "cost.rec").unlink(missing_ok=True)
    question.add(f"{name}, curve and record", "rows/s", found["recording"], "no sampling", found["none"])
