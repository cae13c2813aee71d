"""f. Mixed load: small requests while another client runs cold prefill-sized batches at full speed."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event

import engram_client
import numpy as np

from bench.environment import Ids, Settings, Table
from engramd.measure.daemon import Daemon, total
from engramd.measure.report import Question

SMALL = 288
PREFILL = 49_152


def load(socket: str, seed: int, begin: Event, end: Event) -> None:
    """The other client: cold batches, two in flight."""
    rng = np.random.default_rng(seed)
    with engram_client.connect(socket, spin_us=0) as client:
        table = client.table(layer=14)
        tickets: list[engram_client.Ticket] = []
        begin.set()
        while not end.is_set():
            tickets.append(table.submit(rng.integers(0, table.num_rows, PREFILL)))
            if len(tickets) == 2:
                with tickets.pop(0) as ticket:
                    ticket.wait()
        for ticket in tickets:
            ticket.wait()
            ticket.release()


def measure(settings: Settings, files: Table) -> Question:
    question = Question("f", f"Latency of {SMALL} rows, 75 % of them cached, microseconds (loaded over unloaded)")
    rounds = 300 if settings.quick else 1500
    rng = np.random.default_rng(9)
    with (
        Daemon(files.path, files.row_bytes() // 10) as daemon,
        engram_client.connect(daemon.socket) as client,
    ):
        table = client.table(layer=1)
        hot = rng.permutation(table.num_rows)[:100_000]

        def warm() -> None:
            for _ in range(4):
                table.fetch(hot)

        def ids() -> Ids:
            cold = rng.integers(0, table.num_rows, SMALL // 4)
            return np.concatenate([hot[rng.integers(0, len(hot), SMALL - len(cold))], cold])

        def latencies() -> tuple[float, float, float]:
            before = client.stats()
            seconds = np.empty(rounds)
            for index in range(rounds):
                batch = ids()
                began = time.perf_counter()
                with table.submit(batch) as ticket:
                    ticket.wait()
                seconds[index] = time.perf_counter() - began
                time.sleep(0.0005)
            after = client.stats()
            rows = SMALL * rounds
            missed = [
                (one["dram_misses"] - two["dram_misses"])
                for one, two in zip(after["tables"][0]["layers"], before["tables"][0]["layers"], strict=True)
                if one["layer"] == 1
            ]
            return float(np.percentile(seconds, 99) * 1e6), float(np.median(seconds) * 1e6), missed[0] / rows

        warm()
        context = multiprocessing.get_context("spawn")
        figures: dict[str, list[tuple[float, float, float]]] = {"unloaded": [], "loaded": []}
        rates = []
        for repetition in range(settings.repetitions):
            warm()
            figures["unloaded"].append(latencies())
            begin, end = context.Event(), context.Event()
            other = context.Process(target=load, args=(daemon.socket, repetition, begin, end))
            other.start()
            begin.wait(30)
            time.sleep(0.3)
            before, began = total(client.stats(), "rows"), time.perf_counter()
            figures["loaded"].append(latencies())
            rates.append((total(client.stats(), "rows") - before) / (time.perf_counter() - began))
            end.set()
            other.join(60)
    for index, name in ((0, "p99"), (1, "p50")):
        question.add(
            f"{SMALL} rows, {name}",
            "us",
            [one[index] for one in figures["loaded"]],
            "unloaded",
            [one[index] for one in figures["unloaded"]],
            missed=float(np.median([one[2] for one in figures["loaded"]])),
            load_rows_s=float(np.median(rates)),
        )
    return question
