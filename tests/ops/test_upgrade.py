"""Restarts that keep resident layers: the service manager's descriptor store is this test's, the daemons are real.

The store takes FDSTORE=1 and FDSTOREREMOVE=1 as sd_pid_notify_with_fds(3) describes them and hands its descriptors to
the next daemon by exec, under the numbers and variables of sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

DEADLINE_S = 60.0

# Becomes the rest of the command with descriptors 3, 4, ... under the names given first.
MANAGER = """
import fcntl, os, sys
count = int(sys.argv[1])
pairs = [text.split("=") for text in sys.argv[2 : 2 + count]]
moved = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 64) for _, number in pairs]
for _, number in pairs:
    os.close(int(number))
for target, descriptor in enumerate(moved, 3):
    os.dup2(descriptor, target)
names = ":".join(name for name, _ in pairs)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count), LISTEN_FDNAMES=names)
os.execvp(sys.argv[2 + count], sys.argv[2 + count :])
"""


class Store:
    """A service manager's socket and descriptor store. What daemons say it passes on to the sockets of `start_daemon`,
    which wait for readiness."""

    def __init__(self, folder: str) -> None:
        self.descriptors: dict[str, int] = {}
        self._folder = Path(folder)
        self.path = path = str(self._folder / "manager.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 8)
            except OSError:
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines() if "=" in line)
            if not fields:
                return
            name = fields.get("FDNAME", "stored")
            if "FDSTORE" in fields and descriptors:
                self.descriptors[name] = descriptors.pop()
            if "FDSTOREREMOVE" in fields and name in self.descriptors:
                os.close(self.descriptors.pop(name))
            for descriptor in descriptors:  # a barrier's
                os.close(descriptor)
            for waiting in self._folder.glob("n*.sock"):
                with contextlib.suppress(OSError):
                    self._socket.sendto(data, str(waiting))

    def arguments(self) -> dict[str, Any]:
        """Arguments of `start_daemon` for a daemon of this manager, which gets what is stored."""
        pairs = [f"{name}={descriptor}" for name, descriptor in self.descriptors.items()]
        return {
            "wrapper": [sys.executable, "-c", MANAGER, str(len(pairs)), *pairs],
            "pass_fds": list(self.descriptors.values()),
            "environment": {"NOTIFY_SOCKET": self.path},
        }

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)


@pytest.fixture
def store(socket_folder: str) -> Iterator[Store]:
    made = Store(socket_folder)
    yield made
    made.close()


def wait_until_resident(client: engram_client.Client) -> list[dict[str, Any]]:
    """The layers' statistics, once all are resident."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        layers: list[dict[str, Any]] = client.stats()["tables"][0]["layers"]
        if {layer["tier"] for layer in layers} == {"resident"}:
            return layers
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_the_next_daemon_serves_without_reading(
    start_daemon: Any, store: Store, tmp_path: Path, table: Path, rows: dict[int, np.ndarray], layout: str
) -> None:
    config = tmp_path / "engramd.toml"
    config.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\nresident_layout = "{layout}"\n')
    first = start_daemon(config=str(config), dram=None, **store.arguments())
    with engram_client.connect(first.socket) as client:
        served = client.table(layer=14)
        assert all(layer["background_reads"] > 0 for layer in wait_until_resident(client))
        mapped = served.map()  # of the old daemon, and valid all along
        assert first.stop() == 0
        assert "2 resident layers are left to the service manager" in first.log
        assert len(store.descriptors) == 2
        # In the meantime calls fail; the next daemon's rows come with the same handle.
        with pytest.raises(engram_client.DaemonLost):
            served.fetch(np.arange(10))
        second = start_daemon(config=str(config), dram=None, socket=first.socket, **store.arguments())
        assert not store.descriptors, "the store gives up what was taken: or a reload could not free it"
        layers = wait_until_resident(client)
        assert [(layer["background_reads"], layer["nvme_reads"]) for layer in layers] == [(0, 0), (0, 0)]
        for layer, expected in rows.items():
            for begin in range(0, len(expected), 8192):
                ids = np.arange(begin, min(begin + 8192, len(expected)))
                assert np.array_equal(client.table(layer=layer).fetch(ids), expected[ids])
        assert "demo layer 14 is resident in DRAM, taken over from an earlier daemon" in second.log
        with served.map() as again:
            assert np.array_equal(again.whole, mapped.whole)
        # And once more, from the memory that was taken over.
        assert second.stop() == 0
        third = start_daemon(config=str(config), dram=None, socket=first.socket, **store.arguments())
        assert all(layer["background_reads"] == 0 for layer in wait_until_resident(client))
        with pytest.raises(engram_client.DaemonLost):
            served.fetch(np.arange(100))
        assert np.array_equal(served.fetch(np.arange(100)), rows[14][:100])
        mapped.close()
        assert third.stop() == 0


def test_memory_of_another_generation_is_not_used(
    start_daemon: Any, engramd: Any, store: Store, checkpoint: Path, tmp_path: Path
) -> None:
    """Under the name that the new daemon looks for: the memory itself says that it is another's."""
    table, other = tmp_path / "demo", tmp_path / "other"
    assert engramd("pack", checkpoint, table).returncode == 0
    first = start_daemon(table, **store.arguments())
    with engram_client.connect(first.socket) as client:
        wait_until_resident(client)
        old = client.table(layer=1).fetch(np.arange(1000))
    assert first.stop() == 0
    assert engramd("synth", other, "--vocab-size", "2000", "--seed", "8").returncode == 0
    assert engramd("pack", other, table).returncode == 0
    for name in list(store.descriptors):
        store.descriptors[name.replace("-1-", "-2-")] = store.descriptors.pop(name)
    second = start_daemon(table, socket=first.socket, **store.arguments())
    with engram_client.connect(second.socket) as client:
        assert all(layer["background_reads"] > 0 for layer in wait_until_resident(client))
        new = client.table(layer=1).fetch(np.arange(1000))
        assert not np.array_equal(new, old)
    assert not store.descriptors
    second.wait_for_log("what an earlier daemon left is not used: it holds other rows")


def test_what_is_not_wanted_any_more_is_given_back(start_daemon: Any, store: Store) -> None:
    first = start_daemon(**store.arguments())
    with engram_client.connect(first.socket) as client:
        wait_until_resident(client)
    assert first.stop() == 0
    second = start_daemon(socket=first.socket, dram="1MiB", **store.arguments())
    assert not store.descriptors
    memory = [link for link in Path(f"/proc/{second.pid}/fd").iterdir() if "engramd-resident" in os.readlink(link)]
    assert memory == []
    with engram_client.connect(second.socket) as client:
        assert {layer["tier"] for layer in client.stats()["tables"][0]["layers"]} == {"cached"}


def test_a_daemon_without_a_manager_keeps_nothing(start_daemon: Any) -> None:
    daemon = start_daemon(environment={"ENGRAMD_UNUSED": ""})
    with engram_client.connect(daemon.socket) as client:
        wait_until_resident(client)
    assert daemon.stop() == 0
    assert "left to the service manager" not in daemon.log
