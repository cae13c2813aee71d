"""Budgets, reloads and heat while the real daemon serves."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

DEADLINE_S = 60.0


class Load:
    """A client that fetches random rows all the time and compares each with what its generation holds."""

    def __init__(self, socket: str, truths: list[np.ndarray]) -> None:
        self._socket = socket
        self._truths = truths
        self._stop = threading.Event()
        self.batches = 0
        self.matches = [0] * len(truths)
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        random = np.random.default_rng(1)
        with engram_client.connect(self._socket) as client:
            table = client.table(layer=1)
            while not self._stop.is_set():
                ids = random.integers(0, table.num_rows, random.integers(1, 2000))
                try:
                    rows = table.fetch(ids)
                except engram_client.EngramError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return
                which = [index for index, truth in enumerate(self._truths) if (rows == truth[ids]).all()]
                if not which:
                    self.failures.append("rows of no single generation")
                    return
                self.matches[which[0]] += 1
                self.batches += 1

    def wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition() and not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not self.failures


def all_rows(socket: str) -> np.ndarray:
    with engram_client.connect(socket) as client:
        table = client.table(layer=1)
        return table.fetch(np.arange(table.num_rows))


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Rss line")


def test_budget_changes_under_load(start_daemon: Any, engramd: Any) -> None:
    daemon = start_daemon(dram="16MiB")
    truth = all_rows(daemon.socket)
    with Load(daemon.socket, [truth]) as load, engram_client.connect(daemon.socket) as client:
        for budget in ("1MiB", "0", "256MiB", "8MiB"):
            before = load.batches
            done = engramd("budget", budget, "--socket", daemon.socket)
            assert done.returncode == 0, done.stderr
            assert budget.replace("MiB", ".0 MiB") in done.stdout or budget == "0"
            load.wait_for(lambda before=before: load.batches > before + 20)
            dram = client.stats()["dram"]
            assert dram["budget_bytes"] == (0 if budget == "0" else int(budget[:-3]) << 20)
            assert dram["used_bytes"] <= dram["budget_bytes"]
    assert load.matches[0] == load.batches > 0


def test_memory_returns_when_the_budget_shrinks(start_daemon: Any, engramd: Any) -> None:
    daemon = start_daemon(dram="256MiB")
    with engram_client.connect(daemon.socket) as client:
        deadline = time.monotonic() + DEADLINE_S
        while {layer["tier"] for layer in client.stats()["tables"][0]["layers"]} != {"resident"}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        full, table_bytes = resident_bytes(daemon.pid), 264 * client.table(layer=1).num_rows
        done = engramd("budget", "1MiB", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert resident_bytes(daemon.pid) < full - table_bytes


def test_budget_refuses_what_is_no_size(start_daemon: Any, engramd: Any) -> None:
    daemon = start_daemon()
    done = engramd("budget", "lots", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "lots" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("dram", ["1MiB", "256MiB"])
def test_reload_switches_generations_under_load(
    start_daemon: Any, engramd: Any, checkpoint: Path, tmp_path: Path, dram: str
) -> None:
    table, other = tmp_path / "demo", tmp_path / "other"
    assert engramd("pack", checkpoint, table).returncode == 0
    assert engramd("synth", other, "--vocab-size", "2000", "--seed", "8").returncode == 0
    daemon = start_daemon(table, dram=dram)
    old_rows = all_rows(daemon.socket)
    with engram_client.connect(daemon.socket) as client:
        pinned = client.table(layer=1, identity=client.table(layer=1).identity)
        following = client.table(layer=1)
        assert engramd("pack", other, table).returncode == 0
        assert (pinned.fetch(np.arange(100)) == old_rows[:100]).all(), "packing alone switches nothing"
        new_daemon = start_daemon(table, dram="0")
        new_rows = all_rows(new_daemon.socket)
        new_daemon.stop()
        with Load(daemon.socket, [old_rows, new_rows]) as load:
            load.wait_for(lambda: load.matches[0] > 20)
            done = engramd("reload", "demo", "--socket", daemon.socket)
            assert done.returncode == 0, done.stderr
            assert "generation 2 serves" in done.stdout
            load.wait_for(lambda: load.matches[1] > 20)
        with pytest.raises(engram_client.TableMismatch):
            pinned.fetch(np.arange(100))
        assert (following.fetch(np.arange(100)) == new_rows[:100]).all()
        assert following.generation == 2
        assert client.stats()["tables"][0]["generation"] == 2
        stats = client.stats()["dram"]
        assert stats["used_bytes"] <= stats["budget_bytes"]
    assert not any("deleted" in name for name in open_files(daemon.pid)), "files of the old generation stay open"
    done = engramd("reload", str(table), "--socket", daemon.socket)
    assert done.returncode == 0
    assert "serves already" in done.stdout


def open_files(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    names = []
    for entry in folder.iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue
        if name.startswith("/") and ".pages" in name:
            names.append(name)
    return names


def test_reload_of_a_damaged_table_keeps_the_old_one(
    start_daemon: Any, engramd: Any, table: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "demo"
    shutil.copytree(table, copy)
    daemon = start_daemon(copy)
    rows = all_rows(daemon.socket)
    (copy / "manifest.json").write_text("{}")
    done = engramd("reload", "demo", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "stays at generation 1" in done.stderr
    assert (all_rows(daemon.socket) == rows).all()
    done = engramd("reload", "nothing", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "nothing" in done.stderr


def test_heat_survives_a_restart(start_daemon: Any, tmp_path: Path) -> None:
    state = tmp_path / "state"
    daemon = start_daemon(dram="1MiB", state=str(state))
    hot = np.random.default_rng(3).permutation(20_000)[:1000]
    with engram_client.connect(daemon.socket) as client:
        rows = client.table(layer=1).fetch(hot)
        for _ in range(3):
            client.table(layer=1).fetch(hot)
    assert daemon.stop() == 0
    (path,) = state.glob("*.heat")
    assert path.stat().st_mode & 0o777 == 0o600
    second = start_daemon(dram="1MiB", state=str(state))
    second.wait_for_log("saved hot rows are back")
    with engram_client.connect(second.socket) as client:
        assert (client.table(layer=1).fetch(hot) == rows).all()
        layer = client.stats()["tables"][0]["layers"][0]
        assert layer["dram_hits"] > 900
        assert layer["background_reads"] > 0
        assert layer["prefetch_reads"] == 0


@pytest.mark.parametrize("damage", [b"", b"ENGHEAT1", b"garbage" * 100])
def test_a_damaged_heat_file_is_a_line_in_the_log(start_daemon: Any, tmp_path: Path, damage: bytes) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "demo.heat").write_bytes(damage)
    daemon = start_daemon(dram="1MiB", state=str(state))
    daemon.wait_for_log("demo.heat")
    with engram_client.connect(daemon.socket) as client:
        client.table(layer=1).fetch(np.arange(10))
    assert daemon.stop() == 0


def test_a_cut_off_heat_file_warms_what_it_has(tmp_path: Path) -> None:
    from array import array

    from engramd.errors import EngramdError
    from engramd.heat import heat_file

    path = str(tmp_path / "one.heat")
    identity = "ab" * 32
    blocks = [heat_file.Block(1, array("Q", range(10))), heat_file.Block(14, array("Q", [5, 3]))]
    assert heat_file.write(path, identity, blocks) == 12
    assert list(heat_file.read(path, identity)) == blocks
    with pytest.raises(EngramdError, match="identity"):
        list(heat_file.read(path, "cd" * 32))
    content = Path(path).read_bytes()
    for length in range(len(content)):
        Path(path).write_bytes(content[:length])
        with pytest.raises(EngramdError):
            list(heat_file.read(path, identity))
    for position in range(40, len(content)):
        Path(path).write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(EngramdError):
            list(heat_file.read(path, identity))


def test_a_table_is_named_by_its_directory(start_daemon: Any, engramd: Any, table: Path, monkeypatch: Any) -> None:
    daemon = start_daemon()
    monkeypatch.chdir(table)
    for name in (".", str(table), f"{table}/"):
        done = engramd("reload", name, "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
