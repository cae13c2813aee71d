"""j. A restart with saved heat: how soon its hits are those of before, and what requests suffer meanwhile.

A daemon is warmed with text and probed with other text: its steady hit ratio. It is stopped, which saves its heat, and
started again, with the heat and without, and probed with yet other text from the first moment on. The limit for being
warm again is the time that the drive needs for as many reads as there were hot rows, at its best queue depth.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import numpy.typing as npt

from bench.drive import DEPTHS
from bench.environment import Ids, Settings, Table, documents, fio, hasher_for
from engramd.measure.daemon import Daemon, total
from engramd.measure.report import Question

PERCENT = 10  # of the table in DRAM
PROBE_TOKENS = 12  # a request: 288 rows
WARM_SHARE = 0.8
PAUSE_S = 0.002
STATS_EVERY_S = 0.25
SMOOTHED = 6
ENOUGH = 0.95


@dataclass
class Watched:
    """seconds: of each request. at_s, ratios: hit ratios of successive intervals, and when they ended."""

    seconds: list[float]
    at_s: list[float]
    ratios: list[float]

    def reached_s(self, ratio: float) -> float:
        """The end of the first SMOOTHED intervals in a row with that ratio on average; infinite where none had it."""
        for last in range(SMOOTHED, len(self.ratios) + 1):
            if np.mean(self.ratios[last - SMOOTHED : last]) >= ratio:
                return self.at_s[last - 1]
        return float("inf")


def probe(client: Any, requests: list[npt.NDArray[np.int32]], duration_s: float) -> Watched:
    """Paced requests to one layer for a while, and the hits of each interval."""
    table = client.table(layer=1)
    watched = Watched([], [], [])
    began = time.perf_counter()
    before, due = client.stats(), STATS_EVERY_S
    for ids in requests:
        started = time.perf_counter()
        with table.submit(ids) as ticket:
            ticket.wait()
        watched.seconds.append(time.perf_counter() - started)
        if (now := time.perf_counter() - began) >= due:
            after = client.stats()
            hits, misses = (total(after, key) - total(before, key) for key in ("dram_hits", "dram_misses"))
            watched.at_s.append(now)
            watched.ratios.append(hits / max(1, hits + misses))
            before, due = after, now + STATS_EVERY_S
        if now >= duration_s:
            break
        time.sleep(PAUSE_S)
    return watched


def split(hasher: Any, texts: list[Ids]) -> tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]]]:
    """(chunks that warm, requests that probe): int32 rows of the first layer."""
    ids = np.concatenate([hasher.row_ids(text)[:, 0] for text in texts])
    cut = int(len(ids) * WARM_SHARE)
    # In a random order, so that the ratio does not drift with the text.
    begins = np.random.default_rng(7).permutation(np.arange(cut, len(ids) - PROBE_TOKENS, PROBE_TOKENS))
    probes = [np.ascontiguousarray(ids[at : at + PROBE_TOKENS]) for at in begins]
    return [np.ascontiguousarray(ids[at : at + 512]) for at in range(0, cut, 512)], probes


def measure(settings: Settings, files: Table) -> Question:
    question = Question("j", f"Restart with saved heat, {PERCENT} % of the table in DRAM")
    texts, source = documents(settings.trace, 100_000 if settings.quick else 1_500_000)
    warming, probes = split(hasher_for(files.config), texts)
    path = files.data_files()[0]
    depth = max(DEPTHS, key=lambda one: fio(path, one, 1).rows_per_s)
    state = settings.scratch / "restart-state"
    shutil.rmtree(state, ignore_errors=True)
    saved = settings.scratch / "restart-saved"
    budget = files.row_bytes() * PERCENT // 100
    with Daemon(files.path, budget, "--state", str(state)) as daemon, engram_client.connect(daemon.socket) as client:
        table = client.table(layer=1)
        for ids in warming:
            table.fetch(ids)
        watched = probe(client, probes[::2], 10.0)
        hot_rows = int(client.stats()["dram"]["rows_cached"])
    steady = float(np.mean(watched.ratios))
    question.note(f"{source}; steady hit ratio {steady:.3f} with {hot_rows:,} rows cached")
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(state, saved)
    warm_s, limit_s = [], []
    latency: dict[str, list[list[float]]] = {"with heat": [], "without": []}
    for _ in range(settings.repetitions):
        drive_s = hot_rows / fio(path, depth, 1).rows_per_s
        for side, folder in (("with heat", saved), ("without", None)):
            watched = restarted(files, budget, state, folder, probes[1::2], 1.25 * drive_s)
            latency[side].append([1e6 * one for one in watched.seconds])
            if folder is not None:
                warm_s.append(watched.reached_s(ENOUGH * steady))
                limit_s.append(drive_s)
    question.add(f"{ENOUGH:.0%} of the steady ratio after", "s", warm_s, "the drive's time for those rows", limit_s)
    for name, share in (("p50", 50), ("p99", 99)):
        sides = [[float(np.percentile(one, share)) for one in latency[side]] for side in ("with heat", "without")]
        question.add(f"{PROBE_TOKENS * 24} rows meanwhile, {name}", "us", sides[0], "without heat", sides[1])
    for folder in (state, saved):
        shutil.rmtree(folder, ignore_errors=True)
    return question


def restarted(
    files: Table, budget: int, state: Path, saved: Path | None, probes: list[npt.NDArray[np.int32]], seconds: float
) -> Watched:
    """Probes a daemon just started, with the saved heat (None: without any)."""
    shutil.rmtree(state, ignore_errors=True)
    if saved is not None:
        shutil.copytree(saved, state)
    with Daemon(files.path, budget, "--state", str(state)) as daemon, engram_client.connect(daemon.socket) as client:
        return probe(client, probes, seconds)
