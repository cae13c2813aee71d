"""`engramd bench drive`, `dram` and `serve`: that each measures what it says, with the real daemon and drive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engramd.doctor.storage import measure
from tests.conftest import DEADLINE_S

Engramd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(engramd: Engramd) -> Callable[..., dict[str, dict[str, Any]]]:
    """`bench("drive", ...)` returns its questions' cases by the question's letter and the case's name and peer."""

    def run(*arguments: str | Path) -> dict[str, dict[str, Any]]:
        done = engramd("bench", *arguments, "--repetitions", "1", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["machine"]["cpus"] == os.cpu_count()
        for question in found["questions"]:
            for case in question["cases"]:
                assert case["ratio"] == pytest.approx(case["ours"] / case["limit"])
        return {
            one["letter"]: {f"{case['name']}, {case['against']}": case for case in one["cases"]}
            for one in found["questions"]
        }

    return run


@pytest.fixture
def drive(table: Path) -> None:
    """Tests that need it are left out where io_uring is forbidden, since the limit cannot be measured there."""
    found = measure(str(next(table.glob("*.pages"))), 1, 10)
    if isinstance(found, str):
        pytest.skip(f"the drive cannot be measured: {found}")


@pytest.mark.usefixtures("drive")
def test_drive_reads_every_row_from_the_drive(bench: Callable[..., Any], table: Path) -> None:
    cases = bench("drive", table, "--seconds", "0.05", "--layer", "14")["drive"]
    assert {case["name"] for case in cases.values()} == {"48 rows"}  # the table is too small for more
    assert all(case["extra"]["missed"] == 1 and case["ours"] > 0 and case["limit"] > 0 for case in cases.values())


@pytest.mark.parametrize("dram", ["16MiB", "1GiB"])  # a cache, and all rows
def test_dram_reads_none(bench: Callable[..., Any], table: Path, dram: str) -> None:
    cases = bench("dram", table, "--dram", dram)["dram"]
    rates = [case for case in cases.values() if case["unit"] == "rows/s"]
    # A row in some hundred finds both places of the cache's index taken.
    assert rates
    assert all(case["extra"]["missed"] < 0.02 for case in rates)
    p50, p99 = (cases[f"round trip of 48 rows, {name}, ZeroMQ fetch"] for name in ("p50", "p99"))
    assert 0 < p50["ours"] < p99["ours"]
    assert 0 < p50["limit"] < p99["limit"]


@pytest.mark.usefixtures("drive")
def test_serve_measures_a_running_daemon(bench: Callable[..., Any], start_daemon: Callable[..., Any]) -> None:
    def asked(dram: str) -> set[str]:
        daemon = start_daemon(dram=dram)
        return set(bench("serve", "--socket", daemon.socket, "--seconds", "0.05"))

    assert asked("8MiB") == {"dram", "drive"}
    assert asked("0") == {"drive"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("drive", "/nowhere"), "/nowhere"),
        (("drive", "TABLE", "--layer", "3"), "the layers 1, 14"),
        (("dram", "TABLE", "--dram", "0"), "raise --dram"),
        (("dram", "TABLE", "--repetitions", "0"), "--repetitions 0"),
        (("drive", "TABLE", "--seconds", "0"), "--seconds 0"),
        (("serve", "--socket", "/nowhere.sock"), "/nowhere.sock"),
    ],
)
def test_refusals(engramd: Engramd, table: Path, arguments: tuple[str, ...], expected: str) -> None:
    done = engramd("bench", *(str(table) if one == "TABLE" else one for one in arguments))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert expected in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_bench_takes_its_daemon_along(table: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "engramd.cli.main", "bench", "dram", str(table), "--repetitions", "1000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + DEADLINE_S
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(DEADLINE_S)
    while Path("/proc", found[0]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
