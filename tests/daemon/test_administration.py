"""Budgets, reloads and heat while the real daemon serves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import engram_client
import msgpack
import numpy as np
import pytest

from engramd.config import Settings, TablePath
from engramd.daemon.administration import Administration

DEADLINE_S = 60.0
LAYERS = (1, 14)


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


@pytest.mark.parametrize("tier", ["resident", "cached"])
def test_memory_returns_when_the_budget_shrinks(
    start_daemon: Any, engramd: Any, table: Path, tmp_path: Path, tier: str
) -> None:
    """Huge pages too, which both tiers ask for."""
    config = tmp_path / "engramd.toml"
    config.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\ntier = "{tier}"\n')
    daemon = start_daemon(config=str(config), dram=None)
    if tier == "resident":
        for layer in LAYERS:
            daemon.wait_for_log(f"layer {layer} is resident")
        config.write_text(config.read_text().replace("resident", "auto"))
        assert engramd("reload", "--config", "--socket", daemon.socket).returncode == 0
    with engram_client.connect(daemon.socket) as client:
        for layer in LAYERS:  # a cache takes its memory as rows come
            client.table(layer=layer).fetch(np.arange(client.table(layer=layer).num_rows))
        assert {layer["tier"] for layer in client.stats()["tables"][0]["layers"]} == {tier}
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


@pytest.fixture
def two_generations(engramd: Any, checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(a table of seed 7, a checkpoint of the same geometry and other rows to be packed over it)."""
    table, other = tmp_path / "demo", tmp_path / "other"
    assert engramd("pack", checkpoint, table).returncode == 0
    assert engramd("synth", other, "--vocab-size", "2000", "--seed", "8").returncode == 0
    return table, other


@pytest.mark.parametrize("dram", ["1MiB", "256MiB"])
def test_reload_switches_generations_under_load(
    start_daemon: Any, engramd: Any, two_generations: tuple[Path, Path], dram: str
) -> None:
    table, other = two_generations
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


def test_a_reload_never_exceeds_the_budget(
    start_daemon: Any, engramd: Any, two_generations: tuple[Path, Path], stats: Any
) -> None:
    """By the kernel's own peak: a generation is resident under the budget, two would not be."""
    table, other = two_generations
    budget = 30 << 20
    daemon = start_daemon(table, dram=str(budget))
    for layer in LAYERS:
        daemon.wait_for_log(f"table demo layer {layer} is resident")
    used = stats(daemon)["dram"]["used_bytes"]
    assert used < budget < 2 * used, "else this test shows nothing"
    assert engramd("pack", other, table).returncode == 0
    Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")  # the peak begins anew
    before = memory_peak(daemon.pid)
    done = engramd("reload", "demo", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + DEADLINE_S
    while daemon.log.count("is resident") < 2 * len(LAYERS):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if "ENGRAM_SANITIZE" not in os.environ:
        assert memory_peak(daemon.pid) - before < budget - used + (6 << 20)


def memory_peak(pid: int) -> int:
    """The most resident bytes of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("others", [0, 12_000], ids=["cache with room", "full cache"])
def test_a_reload_begins_with_the_heat_of_the_old_generation(
    start_daemon: Any, engramd: Any, two_generations: tuple[Path, Path], others: int
) -> None:
    table, other = two_generations
    daemon = start_daemon(table, dram="1MiB", scrub="0")
    hot = np.random.default_rng(3).permutation(20_000)[:1000]
    with engram_client.connect(daemon.socket) as client:
        client.table(layer=1).fetch(np.arange(20_000, 20_000 + others))
        old_rows = client.table(layer=1).fetch(hot)
        for _ in range(3):
            client.table(layer=1).fetch(hot)
        assert engramd("pack", other, table).returncode == 0
        done = engramd("reload", "demo", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr

        def layer() -> dict[str, Any]:
            return dict(client.stats()["tables"][0]["layers"][0])

        # Nothing has been asked for since, so what is read is what was hot.
        deadline = time.monotonic() + DEADLINE_S
        read = -1
        while layer()["background_reads"] == 0 or read != layer()["background_reads"]:
            assert time.monotonic() < deadline, "nothing is read back"
            read = layer()["background_reads"]
            time.sleep(0.2)
        rows = client.table(layer=1).fetch(hot)
        assert layer()["dram_hits"] > 900
        assert not (rows == old_rows).all(axis=1).any(), "a row of the old generation"


def test_reloads_at_once_take_turns(
    start_daemon: Any, engramd: Any, two_generations: tuple[Path, Path], control: Any
) -> None:
    """One of them switches, the others find the new generation in service; nothing is served twice."""
    table, other = two_generations
    daemon = start_daemon(table, dram="1MiB")
    assert engramd("pack", other, table).returncode == 0
    client = control(daemon.socket)
    for number in range(4):
        client.socket.send(msgpack.packb({"v": 1, "id": number, "verb": "reload", "table": "demo"}))
    replies = [client.receive()[0] for _ in range(4)]
    assert [reply["previous_generation"] for reply in replies] == [1, 2, 2, 2]
    assert all(reply["generation"] == 2 for reply in replies)
    served = client.request("tables")[0]["tables"]
    assert [(one["name"], one["layer"], one["generation"]) for one in served] == [("demo", n, 2) for n in LAYERS]
    assert len(open_files(daemon.pid)) == len(LAYERS)


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


def test_reload_of_a_damaged_table_keeps_the_old_one(start_daemon: Any, engramd: Any, copy: Path) -> None:
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


def test_a_mistake_in_a_task_is_an_answer_too() -> None:
    """Whoever administers is told, rather than left waiting. (The engine is a double that can do nothing at all.)"""
    engine: Any = object()
    heat: Any = object()
    settings = Settings(tables=(TablePath("demo", "/nowhere"),))
    administration = Administration(engine, settings, heat, lambda: None)
    answers: list[tuple[object, str | None]] = []
    try:
        administration.reload("demo", lambda fields, refusal: answers.append((fields, refusal)))
        administration.set_budget(1 << 20, lambda fields, refusal: answers.append((fields, refusal)))
    finally:
        administration.close()  # after both
    assert answers == [(None, "internal error of the daemon (see its log)")] * 2
