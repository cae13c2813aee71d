"""The cost of a step of an engine's plug-in beside a bare ring fetch of the same ids.

    engine_step.py [--sequences N] [--rounds N]

A decode step of `--sequences` sequences asks for 48 rows of each, all cached: from ids on the host to the rows of both
layers in the reply arena. Bare: submit both layers, wait for both, release. StepStager: the same through begin() and
parts(). Rounds alternate, so that a change of the machine's speed meets both. Prints medians, their ratio, the Python
work outside the waits for the daemon, and a profile of it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import engram_client
import numpy as np
from engram_engines.core import ArenaTarget, StepStager

from bench.environment import make_table
from engramd.measure.daemon import Daemon

LAYERS = (1, 14)
COLUMNS = 24


def main() -> int:
    parser = argparse.ArgumentParser(description="cost of an engine's step beside a bare ring fetch")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--scratch", type=Path, help="where the table lies between runs; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engram-step-") as name:
        table = make_table(args.scratch or Path(name), 20_000)
        with Daemon(table.path, 2 * table.row_bytes()) as daemon:
            daemon.wait_until_resident()
            measure(daemon.socket, args.sequences, args.rounds)
    return 0


def measure(socket: str, sequences: int, rounds: int) -> None:
    with engram_client.connect(socket) as client:
        tables = [client.table(layer=layer) for layer in LAYERS]
        generator = np.random.default_rng(1)
        most = min(table.num_rows for table in tables)
        steps = [generator.integers(0, most, (sequences, 2, COLUMNS)).astype(np.int32) for _ in range(16)]
        stager = StepStager([ArenaTarget(table, client.max_ticket_rows) for table in tables], (0, 1), COLUMNS)
        waits: list[float] = []

        def bare(number: int) -> None:
            ids = steps[number % 16]
            first, second = tables[0].submit(ids[:, 0]), tables[1].submit(ids[:, 1])
            began = time.perf_counter()
            first.wait()
            waited = time.perf_counter() - began
            first.release()
            began = time.perf_counter()
            second.wait()
            waits.append(waited + time.perf_counter() - began)
            second.release()

        def staged(number: int) -> None:
            before = sum(stager.counters.store_wait_s)
            with stager.begin(steps[number % 16]) as step:
                for position in range(len(LAYERS)):
                    for part in step.parts(position):
                        assert part.tokens == sequences
            waits.append(sum(stager.counters.store_wait_s) - before)

        works: dict[str, Callable[[int], None]] = {"bare": bare, "staged": staged}
        whole: dict[str, list[float]] = {key: [] for key in works}
        outside: dict[str, list[float]] = {key: [] for key in works}
        for number in range(rounds + 50):
            for key, work in works.items():
                began = time.perf_counter()
                work(number)
                seconds = time.perf_counter() - began
                if number >= 50:
                    whole[key].append(seconds)
                    outside[key].append(seconds - waits[-1])
        medians = {key: statistics.median(values) * 1e6 for key, values in whole.items()}
        own = {key: statistics.median(values) * 1e6 for key, values in outside.items()}
        print(f"a step of {sequences} sequences, {sequences * 2 * COLUMNS} rows in {len(LAYERS)} batches")
        print(f"  bare ring fetch    p50 {medians['bare']:8.1f} us, outside the waits {own['bare']:6.1f} us")
        print(f"  StepStager         p50 {medians['staged']:8.1f} us, outside the waits {own['staged']:6.1f} us")
        print(f"  ratio              {medians['staged'] / medians['bare']:.3f}")
        print(f"  Python work beyond {own['staged'] - own['bare']:.1f} us")
        profile = cProfile.Profile()
        profile.enable()
        for number in range(rounds):
            staged(number)
        profile.disable()
        print(f"profile of {rounds} steps (cProfile adds its own cost to each call):")
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    sys.exit(main())
