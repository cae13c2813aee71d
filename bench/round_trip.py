"""b. Round trip of 48 cached rows: over the ring from Python and C, over ZeroMQ, and from a plain pyzmq server. And of
3,072 rows, over ZeroMQ and from that server."""

from __future__ import annotations

import multiprocessing
import os
import tempfile

import engram_client
import numpy as np
import zmq

from bench.environment import ROW_BYTES, Ids, Settings, Table
from engramd._engine import ffi, lib
from engramd.measure.daemon import Daemon
from engramd.measure.report import Question
from engramd.measure.tickets import Seconds, round_trips, time_each

BATCH = 48
LARGE_BATCH = 3072
PAUSE_US = 2000  # long enough for a worker to have gone to sleep


def serve_takes(endpoint: str, rows: int) -> None:
    """The plain peer: a REP server that gathers with numpy.take and sends the rows."""
    table = np.full((rows, ROW_BYTES), 1, np.uint8)
    with zmq.Context() as context, context.socket(zmq.REP) as server:
        server.bind(endpoint)
        while True:
            ids = np.frombuffer(server.recv(), np.int64)
            if ids.size == 0:
                server.send(b"")
                return
            server.send(np.take(table, ids, axis=0, mode="clip").data, copy=False)


def by_c(socket: str, ids: Ids, spin_us: int, pause_us: int) -> Seconds:
    seconds = np.empty(len(ids))
    error = ffi.new("char[256]")
    status = lib.engram_bench_round_trips(
        os.fsencode(socket), 0, ffi.from_buffer("int64_t[]", ids), ids.shape[1], len(ids), spin_us, pause_us,
        ffi.from_buffer("double[]", seconds), error,
    )  # fmt: skip
    if status:
        raise RuntimeError(ffi.string(error).decode())
    return seconds


def measure(settings: Settings, files: Table) -> Question:
    question = Question("b", f"Round trip of {BATCH} rows in DRAM, microseconds (a ratio below 1 is faster)")
    rng = np.random.default_rng(3)
    rounds = 1000 if settings.quick else 5000
    asleep_rounds = 100 if settings.quick else 300
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
        endpoint = f"ipc://{folder}/peer.sock"
        peer = multiprocessing.get_context("spawn").Process(target=serve_takes, args=(endpoint, 1_000_000), daemon=True)
        peer.start()
        with (
            Daemon(files.path, files.row_bytes() * 2, "--workers", "1") as daemon,
            engram_client.connect(daemon.socket) as ring,
            engram_client.connect(f"ipc-control:{daemon.socket}") as control,
            zmq.Context() as context,
            context.socket(zmq.REQ) as plain,
        ):
            daemon.wait_until_resident()
            plain.connect(endpoint)
            count = min(1_000_000, ring.table(layer=1).num_rows)
            control_table = control.table(layer=1)

            def ask(batch: Ids) -> None:
                plain.send(batch.data)
                np.frombuffer(plain.recv(copy=False).buffer, np.uint8).reshape(-1, ROW_BYTES)

            def fetch(batch: Ids) -> None:
                control_table.fetch(batch)

            def view(batch: Ids) -> None:
                with control_table.submit(batch) as ticket:
                    ticket.wait()

            def ids(number: int, rows: int = BATCH) -> Ids:
                return rng.integers(0, count, (number, rows))

            sides = {
                "ring, Python, spinning": lambda: round_trips(ring.table(layer=1), ids(rounds)),
                "ring, C, spinning": lambda: by_c(daemon.socket, ids(rounds), 1000, 0),
                "ring, Python, asleep": lambda: round_trips(ring.table(layer=1), ids(asleep_rounds), PAUSE_US),
                "ring, C, asleep": lambda: by_c(daemon.socket, ids(asleep_rounds), -1, PAUSE_US),
                "ring, C, client never spins": lambda: by_c(daemon.socket, ids(rounds), 0, 0),
                "ZeroMQ fetch": lambda: time_each(ids(rounds), 0, fetch),
                "pyzmq": lambda: time_each(ids(rounds), 0, ask),
                "pyzmq, asleep": lambda: time_each(ids(asleep_rounds), PAUSE_US, ask),
                "ZeroMQ fetch, 3,072 rows": lambda: time_each(ids(rounds // 5, LARGE_BATCH), 0, fetch),
                "ZeroMQ ticket, 3,072 rows": lambda: time_each(ids(rounds // 5, LARGE_BATCH), 0, view),
                "pyzmq, 3,072 rows": lambda: time_each(ids(rounds // 5, LARGE_BATCH), 0, ask),
            }
            for side in sides.values():
                side()  # type: ignore[no-untyped-call]
            found: dict[str, list[Seconds]] = {name: [] for name in sides}
            for _ in range(settings.repetitions):
                for name, side in sides.items():
                    found[name].append(side() * 1e6)
            plain.send(b"")
            plain.recv()
        peer.join(10)
    for name, seconds in found.items():
        if name.startswith("pyzmq"):
            continue
        against = next((peer for peer in ("pyzmq, asleep", "pyzmq, 3,072 rows") if name.endswith(peer[7:])), "pyzmq")
        whole = np.concatenate(seconds)
        other = np.concatenate(found[against])
        question.add(
            name,
            "us p50",
            [float(np.median(one)) for one in seconds],
            f"{against} server, numpy.take",
            [float(np.median(one)) for one in found[against]],
            p99=float(np.percentile(whole, 99)),
            p999=float(np.percentile(whole, 99.9)),
            peer_p99=float(np.percentile(other, 99)),
            peer_p999=float(np.percentile(other, 99.9)),
        )
    question.note(f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}; asleep: {PAUSE_US} us between requests")
    return question
