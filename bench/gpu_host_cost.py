"""The host's cost of DeviceTable.fetch beyond a bare ring fetch, against the double of a driver that costs nothing.

    .venv/bin/python -m bench.gpu_host_cost [--rows 12288]

Starts a daemon over a small synthetic table, all of it resident, and builds the double of libcuda.so.1 from
tests/fake_gpu; its copies do nothing, so what is left is what the client itself does. The bare fetch is submit, wait
and release of the same ids, without any copy. Prints both medians, their difference, and a profile of the rest.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path

import engram_client
import numpy as np
from engram_client.cuda import DeviceTable

from bench.environment import make_table
from engramd.measure.daemon import Daemon
from tests.fake_gpu.build import build_double


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_288)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engram-gpu-") as name:
        folder = Path(name)
        library = ctypes.CDLL(str(build_double("cuda", folder)), mode=ctypes.RTLD_GLOBAL)
        table = make_table(folder, 20_000)
        with Daemon(table.path, 2 * table.row_bytes()) as daemon:
            daemon.wait_until_resident()
            measure(daemon.socket, library, args.rows, args.rounds)
    return 0


def measure(socket: str, library: ctypes.CDLL, rows: int, rounds: int) -> None:
    with engram_client.connect(socket) as client:
        table = client.table(layer=1)
        generator = np.random.default_rng(1)
        batches = [generator.integers(0, table.num_rows, rows) for _ in range(16)]
        with DeviceTable(table, 0) as device:
            entered = device.driver.enter()
            out = device.driver.allocate(rows * table.row_bytes)
            stream = device.driver.create_stream()
            library.fake_gpu_set_option(b"zero_cost", ctypes.c_int64(1))

            waited: list[float] = []

            def bare(number: int) -> None:
                ticket = table.submit(batches[number % 16])
                started = time.perf_counter()
                ticket.wait()
                waited.append(time.perf_counter() - started)
                ticket.release()

            def fetch(number: int) -> None:
                before = device.timing.store_wait_s
                # Other rows than the bare fetch before it has just brought into the CPU's caches.
                device.fetch(batches[(number + 8) % 16], out, stream)
                waited.append(device.timing.store_wait_s - before)

            for number in range(50):
                bare(number)
                fetch(number)
            seconds: dict[str, list[float]] = {"bare": [], "device": []}
            outside: dict[str, list[float]] = {"bare": [], "device": []}
            # Alternating, so that a change of the machine's speed meets both.
            for number in range(rounds):
                for key, work in (("bare", bare), ("device", fetch)):
                    started = time.perf_counter()
                    work(number)
                    seconds[key].append(time.perf_counter() - started)
                    outside[key].append(seconds[key][-1] - waited[-1])
            medians = {key: statistics.median(values) * 1e6 for key, values in seconds.items()}
            print(f"bare ring fetch of {rows} rows (submit, wait, release): p50 {medians['bare']:.1f} us")
            print(f"DeviceTable.fetch of {rows} rows, free copies:          p50 {medians['device']:.1f} us")
            print(
                f"host cost beyond the bare fetch:                        {medians['device'] - medians['bare']:.1f} us"
            )
            own = {key: statistics.median(values) * 1e6 for key, values in outside.items()}
            print(
                f"outside the wait for the daemon: bare {own['bare']:.1f} us, DeviceTable {own['device']:.1f} us, "
                f"difference {own['device'] - own['bare']:.1f} us"
            )
            profile = cProfile.Profile()
            profile.enable()
            for number in range(rounds):
                fetch(number)
            profile.disable()
            print(f"profile of {rounds} fetches (cProfile adds its own cost to each call):")
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
            device.driver.leave(entered)


if __name__ == "__main__":
    sys.exit(main())
