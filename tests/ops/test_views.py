"""`stats --interval` and `top`: their arithmetic, and what they print of a real daemon."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from engramd.views.rates import rates
from tests.conftest import ENGRAMD


def sample(
    uptime_s: float, rows: int, buckets: list[list[int]], *, pid: int = 1, generation: int = 1
) -> dict[str, Any]:
    layer = {
        "layer": 1, "rows": rows, "requests": rows // 10, "dram_hits": rows * 3 // 4, "dram_misses": rows // 4,
        "nvme_reads": rows // 4, "prefetch_reads": 0, "background_reads": 0, "errors": {"Busy": rows // 100},
    }  # fmt: skip
    return {
        "uptime_s": uptime_s,
        "pid": pid,
        "tables": [{"name": "demo", "generation": generation, "layers": [layer]}],
        "latency_histogram_ns": {"1-256": {"sum": 0, "buckets": buckets}},
    }


def test_rates_of_an_interval() -> None:
    before = sample(10, 1000, [[2000, 50], [4000, 50]])
    change = rates(before, sample(12, 5000, [[1000, 1], [2000, 50], [4000, 148], [9000, 1]]))
    assert (change.rows, change.requests, change.failed_requests) == (2000, 200, 20)
    assert change.hit_share == 0.75
    assert (change.reads, change.read_bytes) == (500, 500 * 4096)
    # 100 requests of this interval: one of 1 us, 98 of 4 us, one of 9 us.
    latency = change.latency["1-256"]
    assert (latency.count, latency.p50_us, latency.p99_us) == (100, 4.0, 4.0)


def test_nothing_happened() -> None:
    one = sample(10, 1000, [[2000, 50]])
    change = rates(one, sample(11, 1000, [[2000, 50]]))
    assert (change.rows, change.hit_share) == (0, None)
    assert change.latency["1-256"].p99_us is None


def test_a_restart_and_a_reload_count_from_zero() -> None:
    restarted = rates(sample(100, 9000, []), sample(2, 400, [[1000, 3]], pid=2))
    assert (restarted.seconds, restarted.rows, restarted.latency["1-256"].count) == (2, 200, 3)
    assert rates(sample(1, 9000, []), sample(2, 400, [], generation=2)).rows == 400


def test_the_report(start_daemon: Any, load: Any, engramd: Callable[..., Any]) -> None:
    daemon = start_daemon()
    work = load(daemon)
    work.run(5)
    done = engramd("stats", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    for words in (f"pid {daemon.pid}", "DRAM hits", "scrub     0 passes over a layer, 0 bad pages", f"{work.rows:,}"):
        assert words in done.stdout


def test_lines_when_piped(start_daemon: Any, load: Any, engramd: Callable[..., Any]) -> None:
    daemon = start_daemon()
    work = load(daemon)
    with work.running():
        done = engramd("stats", "--socket", daemon.socket, "--interval", "0.3", "--count", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.startswith("#") for line in lines] == [True, True, False, False, False]
    assert len({len(line) for line in lines}) == 1  # aligned
    assert len({len(line.split()) for line in lines[2:]}) == 1
    assert any(float(line.split()[1]) > 0 for line in lines[2:])


def test_json_lines(start_daemon: Any, engramd: Callable[..., Any]) -> None:
    daemon = start_daemon()
    done = engramd("stats", "--socket", daemon.socket, "--interval", "0.05", "--count", "3", "--json")
    assert [json.loads(line)["pid"] for line in done.stdout.splitlines()] == [daemon.pid] * 3


def test_a_count_without_an_interval_is_refused(engramd: Callable[..., Any]) -> None:
    for arguments in ((), ("--json",), ("--mrc",)):
        done = engramd("stats", "--count", "3", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "--interval S" in done.stderr


def test_headers_come_again_on_a_terminal(start_daemon: Any) -> None:
    daemon = start_daemon()
    master, slave = pty.openpty()
    command = [*ENGRAMD, "stats", "--socket", daemon.socket, "--interval", "0.02", "--count", "50"]
    process = subprocess.Popen(command, stdout=slave, env={**os.environ, "LINES": "20", "COLUMNS": "200"})
    os.close(slave)
    text = b""
    try:
        while True:
            text += os.read(master, 65536)
    except OSError:  # the other side is closed
        pass
    os.close(master)
    assert process.wait(30) == 0
    assert text.count(b"hit") == 3  # 17 lines a screen
    assert b"#" not in text


def test_top_names_who_asks(start_daemon: Any, load: Any, engramd: Callable[..., Any]) -> None:
    daemon = start_daemon()
    work = load(daemon)
    with work.running():
        done = engramd("top", "--socket", daemon.socket, "--interval", "0.3", "--count", "2")
    assert done.returncode == 0, done.stderr
    assert f"pid {daemon.pid}" in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(os.getpid())])
    assert row[1] == str(os.getuid())
    assert int(row[3].replace(",", "")) > 0  # rows a second


@pytest.mark.parametrize("verb", ["stats", "top"])
def test_an_interrupt_is_quiet(start_daemon: Any, verb: str) -> None:
    daemon = start_daemon()
    command = [*ENGRAMD, verb, "--socket", daemon.socket, "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == b""


def test_the_daemon_goes_away(start_daemon: Any) -> None:
    daemon = start_daemon()
    command = [*ENGRAMD, "stats", "--socket", daemon.socket, "--interval", "0.1", "--timeout", "0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    daemon.kill()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    assert errors.startswith("engramd: the daemon at ")
    assert len(errors.splitlines()) == 1
