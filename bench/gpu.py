"""Rows into a real GPU: correct in every mode, then latency and bandwidth beside a plain pinned copy of the same run.

    make build && .venv/bin/python bench/gpu.py [--device cuda:0] [--vocab-size 200000] [--quick] [--json FILE]

Self-contained: makes a synthetic table, starts its own daemon, needs no network and no torch (torch's tensors, streams
and graphs are tried where it is installed). Every figure says what it is, and bandwidths are ratios to a plain copy of
pinned memory with the same bytes. Exit status 1 where a check fails. --quick: all checks over a small table, and too
few rounds for figures that mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
from engram_client.cuda import DeviceTable, GpuError, MappedTable, rank_columns
from engram_client.cuda.driver import Driver, open_driver
from numpy.typing import NDArray

from engramd.measure.daemon import ENGRAMD, Daemon

#: More than the table has: all of it becomes resident.
DRAM_BYTES = 64 << 30
LATENCY_ROWS = (48, 288, 12_288)


def freeze(daemon: Daemon) -> None:
    """SIGSTOP; returns once all its threads have stopped: until then it may still answer."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


class Buffer:
    """Device memory with pinned host memory of the same size beside it."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self.driver, self.size_bytes = driver, size_bytes
        self.address = driver.allocate(size_bytes)
        self.pinned = driver.allocate_host(size_bytes)

    def host(self) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size_bytes).from_address(self.pinned))

    def write(self, array: NDArray[Any], stream: int) -> None:
        self.host()[: array.nbytes] = array.view(np.uint8).reshape(-1)
        self.driver.copy_to_device(self.address, self.pinned, array.nbytes, stream)

    def read(self, stream: int, size_bytes: int) -> NDArray[np.uint8]:
        self.driver.copy_to_host(self.pinned, self.address, size_bytes, stream)
        self.driver.synchronize_stream(stream)
        return self.host()[:size_bytes].copy()


class Checks:
    """Names of what was checked, each printed at once, and how often the work is repeated."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.failed: list[str] = []

    def expect(self, holds: bool, name: str) -> None:
        print(f"{'ok    ' if holds else 'FAILED'} {name}")
        if not holds:
            self.failed.append(name)


def graph_calls() -> Any:
    """CUDA's graph functions, for the replay checks alone."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"):
        getattr(library, name).restype = ctypes.c_int
    return library


def call(code: int, what: str) -> None:
    if code:
        raise SystemExit(f"error: {what}: CUDA error {code}")


def capture(driver: Driver, stream: int, work: Callable[[], None]) -> tuple[Any, ctypes.c_void_p]:
    """An executable graph of what `work` enqueues."""
    library = graph_calls()
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    call(library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0), "cuStreamBeginCapture")
    work()
    call(library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)), "cuStreamEndCapture")
    flags = ctypes.c_ulonglong(0)
    call(library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, flags), "cuGraphInstantiate")
    return library, executable


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_us": statistics.median(ordered) * 1e6, "p99_us": ordered[int(len(ordered) * 0.99)] * 1e6}


def check_host_wait(checks: Checks, table: Any, device: DeviceTable, stream: int, out: Buffer) -> None:
    generator = np.random.default_rng(1)
    driver = device.driver
    exact = True
    for _ in range(checks.rounds):
        ids = generator.integers(-1, table.num_rows, int(generator.integers(1, 3000)))
        device.fetch(ids, out.address, stream)
        exact &= bool(np.array_equal(out.read(stream, ids.size * table.row_bytes), table.fetch(ids).reshape(-1)))
    checks.expect(exact, "host wait: random batches are exact")
    ids = generator.integers(-1, table.num_rows, (64, 24)).astype(np.int32)
    device_ids = Buffer(driver, ids.nbytes)
    device_ids.write(ids, stream)
    device.fetch(device_ids.address, out.address, stream, ids_shape=ids.shape, ids_dtype=np.int32)
    exact = np.array_equal(out.read(stream, ids.size * table.row_bytes), table.fetch(ids).reshape(-1))
    checks.expect(bool(exact), "host wait: ids in device memory")
    # Two in flight, each into its own half of the buffer.
    halves = [out.address, out.address + ids.size * table.row_bytes]
    tickets = [device.submit(ids + number, half, stream) for number, half in enumerate(halves)]
    for ticket in tickets:
        ticket.wait()
    got = out.read(stream, 2 * ids.size * table.row_bytes)
    expected = np.concatenate([table.fetch(ids).reshape(-1), table.fetch(ids + 1).reshape(-1)])
    checks.expect(np.array_equal(got, expected), "host wait: two batches in flight")
    bad = ids.copy()
    bad[3, 5] = table.num_rows
    try:
        device.fetch(bad, out.address, stream)
        told = False
    except engram_client.RowIdError as error:
        told = error.position == 3 * 24 + 5
    checks.expect(told, "host wait: a bad id is named")


def check_shares(checks: Checks, table: Any, device_name: Any, stream: int, out: Buffer) -> None:
    """Split layout, and the columns of one of four ranks."""
    generator = np.random.default_rng(4)
    ids = generator.integers(-1, table.num_rows, (64, 24)).astype(np.int32)
    values_bytes = ids.size * table.value_bytes
    with DeviceTable(table, device_name, layout="split") as device:
        device.fetch(ids, (out.address, out.address + values_bytes), stream)
        got = out.read(stream, ids.size * table.row_bytes)
    values, scales = table.fetch(ids, layout="split")
    expected = np.concatenate([values.reshape(-1), scales.reshape(-1)])
    checks.expect(np.array_equal(got, expected), "host wait: split layout")
    for strided in (False, True):
        columns = rank_columns(24, 2, 4, strided=strided)
        with DeviceTable(table, device_name, columns=columns) as device:
            device.fetch(ids, out.address, stream)
            got = out.read(stream, ids.size // 4 * table.row_bytes)
        exact = np.array_equal(got, table.fetch(np.ascontiguousarray(ids[:, columns])).reshape(-1))
        checks.expect(exact, f"host wait: {'strided' if strided else 'contiguous'} columns of one rank")


def check_mapped(checks: Checks, table: Any, device_name: Any, stream: int, out: Buffer) -> None:
    """The daemon's own resident rows under a device address, once it has read them all."""
    deadline = time.monotonic() + 60
    while True:
        try:
            mapped = MappedTable(table, device_name)
            break
        except engram_client.Busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except GpuError as error:
            print(f"mapped: refused here: {error}")
            return
    with mapped:
        count, exact = 4096, True
        for first in np.random.default_rng(6).integers(0, table.num_rows - count, checks.rounds):
            source = mapped.rows_pointer + int(first) * table.row_bytes
            mapped.driver.copy_any(out.address, source, count * table.row_bytes, stream)
            got = out.read(stream, count * table.row_bytes)
            exact &= bool(np.array_equal(got, table.fetch(np.arange(first, first + count)).reshape(-1)))
    checks.expect(exact, "mapped: rows read by device address are exact")


def check_torch(checks: Checks, table: Any, device: DeviceTable) -> None:
    """torch's own tensors, stream and graph, where torch and a device for it are."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    name = f"cuda:{device.driver.device}"
    stream = torch.cuda.Stream(name)
    with torch.cuda.stream(stream):
        ids = torch.randint(-1, table.num_rows, (288,), dtype=torch.int32, device=name)
        out = torch.empty((288, table.row_bytes), dtype=torch.uint8, device=name)
        device.fetch(ids, out)
    stream.synchronize()
    checks.expect(np.array_equal(out.cpu().numpy(), table.fetch(ids.cpu().numpy())), "torch: tensors and its stream")
    if not device.driver.has_stream_waits:
        return
    with device.stream_lane(288, out, deadline_s=10) as lane:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            lane.enqueue(ids, stream)
        exact = True
        for _ in range(checks.rounds):
            with torch.cuda.stream(stream):
                ids.copy_(torch.randint(-1, table.num_rows, (288,), dtype=torch.int32, device=name))
                graph.replay()
            lane.result(stream)
            exact &= np.array_equal(out.cpu().numpy(), table.fetch(ids.cpu().numpy()))
        checks.expect(exact, "torch: replays of its graph")


def check_streams(
    checks: Checks, daemon: Daemon, table: Any, device: DeviceTable, stream: int, out: Buffer, results: dict[str, Any]
) -> None:
    driver = device.driver
    generator = np.random.default_rng(2)
    for rows in LATENCY_ROWS:
        ids_buffer = Buffer(driver, rows * 4)
        lane = device.stream_lane(rows, out.address, deadline_s=10)
        library, executable = capture(driver, stream, lambda: lane.enqueue(ids_buffer.address, stream))  # noqa: B023
        exact, eager, seconds = True, True, []
        for number in range(checks.rounds):
            ids = generator.integers(-1, table.num_rows, rows).astype(np.int32)
            ids_buffer.write(ids, stream)
            driver.synchronize_stream(stream)
            started = time.perf_counter()
            if number % 3 == 0:
                lane.enqueue(ids_buffer.address, stream)
            else:
                call(library.cuGraphLaunch(executable, ctypes.c_void_p(stream)), "cuGraphLaunch")
            lane.result(stream)
            seconds.append(time.perf_counter() - started)
            same = np.array_equal(out.read(stream, rows * table.row_bytes), table.fetch(ids).reshape(-1))
            if number % 3 == 0:
                eager &= bool(same)
            else:
                exact &= bool(same)
        checks.expect(eager, f"stream mode, {rows} rows: eager uses are exact")
        checks.expect(exact, f"stream mode, {rows} rows: graph replays with changing ids are exact")
        results[f"stream_{rows}"] = percentiles(seconds)
        lane.close()
    # Last: the daemon dies in the middle of a stream's wait.
    ids_buffer = Buffer(driver, 48 * 4)
    ids_buffer.write(np.arange(48, dtype=np.int32), stream)
    lane = device.stream_lane(48, out.address, deadline_s=60)
    freeze(daemon)
    lane.enqueue(ids_buffer.address, stream)
    daemon.process.kill()
    daemon.process.wait()
    started = time.monotonic()
    try:
        lane.result(stream)
        lost = False
    except engram_client.DaemonLost:
        lost = True
    checks.expect(lost and time.monotonic() - started < 5, "stream mode: a daemon killed mid-wait ends the wait")


def measure_host_wait(
    table: Any, device: DeviceTable, stream: int, out: Buffer, rounds: int, results: dict[str, Any]
) -> None:
    generator = np.random.default_rng(3)
    driver = device.driver
    largest = min(device.max_rows, out.size_bytes // table.row_bytes)
    for rows in (*LATENCY_ROWS, largest):
        batches = [generator.integers(0, table.num_rows, rows) for _ in range(32)]
        seconds, plain = [], []
        for number in range(rounds):
            ids = batches[number % len(batches)]
            started = time.perf_counter()
            device.fetch(ids, out.address, stream)
            driver.synchronize_stream(stream)
            seconds.append(time.perf_counter() - started)
            # The limit, in the same run: the copy alone, of pinned memory that lies ready.
            started = time.perf_counter()
            driver.copy_to_device(out.address, out.pinned, rows * table.row_bytes, stream)
            driver.synchronize_stream(stream)
            plain.append(time.perf_counter() - started)
        size_bytes = rows * table.row_bytes
        results[f"host_wait_{rows}"] = {
            **percentiles(seconds),
            "plain_copy_p50_us": statistics.median(plain) * 1e6,
            "plain_copy_GB_per_s": size_bytes / statistics.median(plain) / 1e9,
        }
    # Batches back to back: the copy of one overlaps the gather of the next.
    ids = generator.integers(0, table.num_rows, largest)
    count = max(4, rounds // 5)
    started = time.perf_counter()
    for _ in range(count):
        device.fetch(ids, out.address, stream)
    driver.synchronize_stream(stream)
    taken = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(count):
        driver.copy_to_device(out.address, out.pinned, largest * table.row_bytes, stream)
    driver.synchronize_stream(stream)
    plain_taken = time.perf_counter() - started
    size_bytes = count * largest * table.row_bytes
    results["back_to_back"] = {
        "rows": largest,
        "GB_per_s": size_bytes / taken / 1e9,
        "plain_copy_GB_per_s": size_bytes / plain_taken / 1e9,
        "share_of_plain_copy": plain_taken / taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="0", help="cuda:N, hip:N or N")
    parser.add_argument("--vocab-size", help="of the synthetic table (default: 200000, 1.6 GB; 4000 with --quick)")
    parser.add_argument("--quick", action="store_true", help="all checks, few rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    device_name: Any = int(args.device) if args.device.isdigit() else args.device
    driver = open_driver(device_name)
    checks, results = Checks(6 if args.quick else 300), dict[str, Any]()
    vocab_size = args.vocab_size or ("4000" if args.quick else "200000")
    with tempfile.TemporaryDirectory(prefix="engram-gpu-") as name:
        folder = Path(name)
        for command in (
            ["synth", folder / "source", "--vocab-size", vocab_size],
            ["pack", folder / "source", folder / "table"],
        ):
            subprocess.run([*ENGRAMD, *map(str, command)], check=True)
        entered = driver.enter()
        try:
            with Daemon(folder / "table", DRAM_BYTES) as daemon, engram_client.connect(daemon.socket) as client:
                table = client.table("bench", layer=1)
                stream = driver.create_stream()
                out = Buffer(driver, 16 << 20)
                with DeviceTable(table, device_name) as device:
                    check_host_wait(checks, table, device, stream, out)
                    check_shares(checks, table, device_name, stream, out)
                    if driver.has_stream_waits:
                        check_mapped(checks, table, device_name, stream, out)
                    check_torch(checks, table, device)
                    measure_host_wait(table, device, stream, out, checks.rounds, results)
                    if driver.has_stream_waits:
                        check_streams(checks, daemon, table, device, stream, out, results)
        finally:
            driver.leave(entered)
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
