"""Resident layers mapped by clients: exact, read-only, and in the way of a reload only as far as memory is."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

DEADLINE_S = 60.0


def map_when_resident(table: engram_client.Table) -> engram_client.LayerMap:
    """The layer's map, as soon as the daemon has read and checked it."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(engram_client.Busy):
            return table.map()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def configured(tmp_path: Path, table: Path) -> Callable[[str], str]:
    """`configured(lines)` is a configuration file with these lines for the table."""

    def write(lines: str) -> str:
        path = tmp_path / "engramd.toml"
        path.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\n{lines}\n')
        return str(path)

    return write


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_rows_are_exact_and_read_only(
    start_daemon: Any, configured: Any, layout: str, rows: dict[int, np.ndarray]
) -> None:
    daemon = start_daemon(config=configured(f'resident_layout = "{layout}"'), dram=None)
    with engram_client.connect(daemon.socket) as client:
        table = client.table(layer=14)
        mapped = map_when_resident(table)
        assert (mapped.layout, mapped.generation, mapped.identity) == (layout, table.generation, table.identity)
        parts = [mapped.rows] if layout == "packed" else [mapped.values, mapped.scales]
        assert np.array_equal(np.concatenate(parts, axis=1), rows[14])
        with pytest.raises(engram_client.EngramError, match=f"lies in memory in {layout} layout"):
            _ = mapped.values if layout == "packed" else mapped.rows
        ids = np.arange(-1, 3000)
        assert np.array_equal(table.fetch(ids)[1:], rows[14][:3000])
        values, scales = table.fetch(ids, layout="split")
        assert np.array_equal(np.concatenate([values, scales], axis=1)[1:], rows[14][:3000])
        assert not values[0].any()
        assert not scales[0].any()
        assert not parts[0].flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            parts[0].setflags(write=True)
        parts.clear()
        mapped.close()
        with pytest.raises(engram_client.EngramError, match="is closed"):
            _ = mapped.whole


def test_nobody_else_can_write_the_memory(start_daemon: Any) -> None:
    daemon = start_daemon()
    with engram_client.connect(daemon.socket) as client, map_when_resident(client.table(layer=1)):
        maps = Path("/proc/self/maps").read_text().splitlines()
        (name,) = {line.split()[0] for line in maps if "engramd-resident" in line and line.split()[1] == "r--s"}
        descriptor = os.open(f"/proc/self/map_files/{name}", os.O_RDWR)  # as far as the file's owner gets
        try:
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)


def test_refusals_name_the_reason(start_daemon: Any, configured: Any, tcp: Any) -> None:
    daemon = start_daemon(config=configured('tier = "cached"'), dram=None, **tcp.flags)
    with engram_client.connect(daemon.socket) as client, pytest.raises(engram_client.Busy, match="not resident"):
        client.table(layer=1).map()
    with (
        engram_client.connect(f"tcp://{tcp.address}", curve=tcp.curve) as client,
        pytest.raises(engram_client.EngramError, match="a map needs shared memory"),
    ):
        client.table(layer=1).map()


def maps_of(stats: Any, daemon: Any) -> int:
    """How often clients have the first layer mapped, as the daemon counts."""
    return int(stats(daemon)["tables"][0]["layers"][0]["maps"])


def wait_for_maps(stats: Any, daemon: Any, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while maps_of(stats, daemon) != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_daemon_counts_maps(start_daemon: Any, stats: Any) -> None:
    daemon = start_daemon()
    client = engram_client.connect(daemon.socket)
    other = engram_client.connect(daemon.socket)
    table = client.table(layer=1)
    first, second = map_when_resident(table), map_when_resident(table)
    third = map_when_resident(other.table(layer=1))
    assert maps_of(stats, daemon) == 3
    values = first.rows[:10]
    with pytest.raises(BufferError, match="still in use"):
        first.close()
    assert maps_of(stats, daemon) == 3
    del first  # not gone while an array of it lives
    assert maps_of(stats, daemon) == 3
    before = values.copy()
    other.close()  # a session's end lets go of all that it held
    wait_for_maps(stats, daemon, 2)
    assert third.is_open
    assert np.array_equal(third.rows[:10], before)
    del values
    wait_for_maps(stats, daemon, 1)
    second.close()
    second.close()
    wait_for_maps(stats, daemon, 0)
    client.close()


@pytest.mark.parametrize("next_call", ["fetch", "table"])
def test_a_map_that_came_too_late_is_given_back(
    start_daemon: Any, stats: Any, rows: dict[int, np.ndarray], next_call: str
) -> None:
    """An answer after the caller's patience is nobody's: neither the next request's, nor does the daemon count it."""
    daemon = start_daemon()
    with engram_client.connect(daemon.socket) as client:
        table = client.table(layer=1)
        map_when_resident(table).close()
        daemon.freeze()
        with pytest.raises(engram_client.RequestTimeout):
            table.map()
        if next_call == "table":  # asks the daemon too, and before the late answer is there
            asking = threading.Thread(target=lambda: client.table(layer=14))
            asking.start()
            time.sleep(0.1)
            daemon.signal(signal.SIGCONT)
            asking.join(DEADLINE_S)
            assert not asking.is_alive()
        else:
            daemon.signal(signal.SIGCONT)
            wait_for_maps(stats, daemon, 1)
        assert np.array_equal(table.fetch([5, 6]), rows[1][[5, 6]])
        wait_for_maps(stats, daemon, 0)
        with table.map() as again:
            assert np.array_equal(again.rows[:10], rows[1][:10])
        assert "connection closed" not in daemon.log


def test_a_map_outlives_the_daemon(start_daemon: Any, rows: dict[int, np.ndarray]) -> None:
    daemon = start_daemon()
    with engram_client.connect(daemon.socket) as client:
        mapped = map_when_resident(client.table(layer=1))
        daemon.kill()
        assert np.array_equal(mapped.rows, rows[1])
        mapped.close()
        start_daemon(socket=daemon.socket)
        with pytest.raises(engram_client.DaemonLost):
            client.table(layer=1).map()
        with map_when_resident(client.table(layer=1)) as again:
            assert np.array_equal(again.rows, rows[1])


def test_a_reload_is_refused_unless_both_generations_fit(
    start_daemon: Any, engramd: Any, checkpoint: Path, tmp_path: Path
) -> None:
    table, other = tmp_path / "demo", tmp_path / "other"
    assert engramd("pack", checkpoint, table).returncode == 0
    daemon = start_daemon(table, dram="36MiB")  # two layers of 13.2 MiB
    assert engramd("synth", other, "--vocab-size", "2000", "--seed", "8").returncode == 0
    assert engramd("pack", other, table).returncode == 0
    with engram_client.connect(daemon.socket) as client:
        mapped = map_when_resident(client.table(layer=1))
        before = mapped.rows[:100].copy()
        done = engramd("reload", "demo", "--socket", daemon.socket)
        assert done.returncode == 1
        assert "stays at generation 1: layer 1 is mapped by 1 client(s)" in done.stderr
        done = engramd("budget", "1MiB", "--socket", daemon.socket)
        assert done.returncode == 1
        assert "must stay resident" in done.stderr
        assert client.table(layer=1).generation == 1
        # Both fit: the old one stays readable, and counts until it is closed.
        assert engramd("budget", "70MiB", "--socket", daemon.socket).returncode == 0
        done = engramd("reload", "demo", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert np.array_equal(mapped.rows[:100], before)
        with map_when_resident(client.table(layer=1)) as following:
            assert following.generation == 2
            ring: Any = client
            (served,) = (info for info in ring.session.layers.values() if info.layer == 1)
            assert served.handle == 3, "the refused reload has used handles up"
            assert not np.array_equal(following.rows[:100], before)
        mapped.close()
        # Nothing is mapped any more.
        assert engramd("budget", "1MiB", "--socket", daemon.socket).returncode == 0
