"""SIGKILL of the daemon under load, and of clients in every phase of their lives.

The packer's kills and power losses are in tests/table. Times that are promised are printed as measured and asserted at
ten times the promise.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client import DaemonLost

from tests.waiting import eventually

SEED = int(os.environ.get("ENGRAM_SEED", "1"))
KILLS = int(os.environ.get("ENGRAM_N", "3"))
SESSIONS = 50 * int(os.environ.get("ENGRAM_N", "4"))
LOST_S, LOST_ASSERTED_S = 0.1, 1.0
SERVING_S, SERVING_ASSERTED_S = 0.5, 5.0
CHURN = Path(__file__).parent / "client_churn.py"
DEADLINE_S = 60.0


class Load:
    """Threads that fetch until the daemon is gone, and note when they learnt of it."""

    def __init__(self, clients: list[Any], rows: dict[int, Any], chosen: random.Random) -> None:
        self.lost_at: list[float] = []
        self.wrong = 0
        self.served = 0
        self._rows = rows
        jobs = [self._fetch, self._wait, self._sleep, self._large]
        self.threads = [
            threading.Thread(target=job, args=(table, chosen.getrandbits(32)), daemon=True)
            for table in [client.table(layer=1) for client in clients]
            for job in jobs
        ]
        for thread in self.threads:
            thread.start()

    def wait_until_served(self) -> None:
        eventually(lambda: self.served > 0, lambda: f"seed {SEED}: nothing is served")

    def _run(self, step: Callable[[], None]) -> None:
        while True:
            try:
                step()
            except DaemonLost:
                self.lost_at.append(time.monotonic())
                return

    def _check(self, got: Any, layer: int, ids: Any) -> None:
        self.served += 1
        self.wrong += not np.array_equal(got, self._rows[layer][ids])

    def _fetch(self, table: Any, seed: int) -> None:
        chosen = np.random.default_rng(seed)

        def step() -> None:
            ids = chosen.integers(0, table.num_rows, 48)
            self._check(table.fetch(ids), 1, ids)

        self._run(step)

    def _large(self, table: Any, seed: int) -> None:
        chosen = np.random.default_rng(seed)

        def step() -> None:
            ids = chosen.integers(0, table.num_rows, 3000)
            self._check(table.fetch(ids), 1, ids)

        self._run(step)

    def _wait(self, table: Any, seed: int) -> None:
        """Several tickets at once."""
        chosen = np.random.default_rng(seed)

        def step() -> None:
            ids = [chosen.integers(0, table.num_rows, 20) for _ in range(3)]
            tickets = [table.submit(one) for one in ids]
            try:
                for one, ticket in zip(ids, tickets, strict=True):
                    self._check(ticket.wait(), 1, one)
            finally:
                for ticket in tickets:
                    ticket.release()

        self._run(step)

    def _sleep(self, table: Any, seed: int) -> None:
        """A request now and then: the session is idle when the daemon dies."""

        def step() -> None:
            self._check(table.fetch([seed % 1000]), 1, [seed % 1000])
            time.sleep(0.02)

        self._run(step)


def test_daemon_killed_under_load(start_daemon: Any, rows: dict[int, Any]) -> None:
    """Every waiter learns of it in time, clients go on with the next daemon, nothing is left behind."""
    chosen = random.Random(SEED)
    daemon = start_daemon(dram="2MiB", arena="1MiB")
    path = daemon.socket
    shared_before = set(os.listdir("/dev/shm"))
    lost: list[float] = []
    serving: list[float] = []
    clients = [engram_client.connect(path) for _ in range(2)]
    for number in range(KILLS):
        load = Load(clients, rows, chosen)
        load.wait_until_served()
        time.sleep(chosen.uniform(0.0, 0.3))
        killed_at = time.monotonic()
        daemon.signal(signal.SIGKILL)
        for thread in load.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"seed {SEED}, kill {number}: a waiter is stuck"
        assert load.wrong == 0, f"seed {SEED}, kill {number}"
        lost += [at - killed_at for at in load.lost_at]
        daemon.wait()
        begin = time.monotonic()
        daemon = start_daemon(socket=path, dram="2MiB", arena="1MiB")
        for client in clients:
            while True:
                try:
                    got = client.table(layer=1).fetch([number])
                    break
                except DaemonLost:  # the first call after a loss may still find the old socket
                    assert time.monotonic() - begin < DEADLINE_S
            assert np.array_equal(got, rows[1][[number]])
            if client is clients[0]:
                serving.append(time.monotonic() - begin)
    # This process's old sessions are gone with their last tickets: two live ones are left.
    del load, client, got, thread
    gc.collect()
    eventually(
        lambda: Path("/proc/self/maps").read_text().count("memfd:engram-ring") <= len(clients),
        lambda: f"seed {SEED}: old sessions' rings stay mapped",
    )
    assert set(os.listdir("/dev/shm")) <= shared_before
    for client in clients:
        client.close()
    assert daemon.stop() == 0
    left = [name for name in os.listdir(os.path.dirname(path)) if name.startswith("s0.sock") and "lock" not in name]
    assert left == []
    print(
        f"seed {SEED}: {KILLS} kills; DaemonLost after {max(lost) * 1e3:.0f} ms at most, "
        f"{sorted(lost)[len(lost) // 2] * 1e3:.1f} ms in the middle (promised {LOST_S * 1e3:.0f}); serving "
        f"{max(serving):.2f} s after the start at most (promised {SERVING_S})"
    )
    if "ENGRAM_SANITIZE" not in os.environ:
        assert max(lost) < LOST_ASSERTED_S, f"seed {SEED}"
        assert max(serving) < SERVING_ASSERTED_S, f"seed {SEED}"


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind."""
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {kind: int(found[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem")}


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_clients_killed_in_every_phase(start_daemon: Any, stats: Any, rows: dict[int, Any]) -> None:
    """Clients come and are killed; the daemon's memory, descriptors and arenas return to their level."""
    daemon = start_daemon(dram="2MiB", arena="1MiB")
    with engram_client.connect(daemon.socket, arena_bytes=1 << 16) as client:
        table = client.table(layer=1)

        def churn(seed: int, sessions: int) -> dict[str, int]:
            command = [sys.executable, str(CHURN), daemon.socket, str(seed), str(sessions), "20"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120 + sessions / 10, check=False)
            assert done.returncode == 0, f"seed {seed}: {done.stderr}"
            return dict(json.loads(done.stdout))

        def settle(most: int) -> None:
            eventually(
                lambda: stats(daemon)["arenas"]["count"] <= 1 and descriptors(daemon.pid) <= most,
                lambda: f"seed {SEED}: {stats(daemon)['arenas']}, {descriptors(daemon.pid)} descriptors, not {most}",
            )

        level = descriptors(daemon.pid) + 2  # the pools' threads may come with the first requests
        churn(SEED, 60)  # caches and pools fill
        settle(level)
        before = memory(daemon.pid)
        phases = churn(SEED + 1, SESSIONS)
        settle(level)
        after = memory(daemon.pid)
        print(f"seed {SEED}: {SESSIONS} clients killed, by phase {phases}; memory {before} before, {after} after")
        ids = np.arange(0, 3000, 3)
        assert np.array_equal(table.fetch(ids), rows[1][ids])
        if "ENGRAM_SANITIZE" not in os.environ:
            assert after["RssAnon"] < before["RssAnon"] + (16 << 20), f"seed {SEED}"
            assert after["RssShmem"] < before["RssShmem"] + (2 << 20), f"seed {SEED}"
    assert daemon.process.poll() is None


def test_memory_of_a_dead_client_stays_until_its_reads_have_landed(
    faulty_daemon: Any, stats: Any, rows: dict[int, Any]
) -> None:
    held_ms = 8000 if "ENGRAM_SANITIZE" in os.environ else 2000  # longer than it takes to ask for the statistics
    daemon = faulty_daemon(f"slow=1,slow_ms={held_ms}", dram="0", arena="1MiB")
    child = os.fork()
    if child == 0:
        table = engram_client.connect(daemon.socket).table(layer=1)
        tickets = [table.submit(np.arange(number * 100, number * 100 + 60)) for number in range(4)]
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(len(tickets))
    os.waitpid(child, 0)
    seen = stats(daemon)
    assert seen["reader"]["in_flight"] > 0
    assert seen["arenas"]["count"] == 1
    assert seen["sessions"] == []
    eventually(lambda: stats(daemon)["arenas"]["count"] == 0, lambda: "the dead client's arena stays")
    assert stats(daemon)["reader"]["in_flight"] == 0
    with engram_client.connect(daemon.socket) as client:
        assert np.array_equal(client.table(layer=1).fetch([5, 6]), rows[1][[5, 6]])


def test_daemon_killed_while_a_reader_is_slow(faulty_daemon: Any, copy: Path) -> None:
    """A waiter whose read never ends learns of the death as fast as any other."""
    daemon = faulty_daemon("slow=1,slow_ms=60000", copy, dram="0")
    with engram_client.connect(daemon.socket) as client:
        waiting = client.table(layer=1).submit([1, 2, 3])
        learnt: list[float] = []

        def wait() -> None:
            try:
                waiting.wait()
            except DaemonLost:
                learnt.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        killed_at = time.monotonic()
        daemon.kill()
        thread.join(DEADLINE_S)
        assert learnt
        print(f"DaemonLost after {(learnt[0] - killed_at) * 1e3:.1f} ms")
        assert learnt[0] - killed_at < LOST_ASSERTED_S


# Listens where a daemon would, with much memory in small pages, which the kernel frees before the socket.
LARGE_LISTENER = """
import mmap, socket, sys, time
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for place in range(0, len(memory), 4096):
    memory[place] = 1
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1] + ".ring")
listener.listen(8)
print("ready", flush=True)
time.sleep(600)
"""


def test_nobody_waits_for_the_memory_of_a_dead_daemon(socket_folder: str) -> None:
    """A call that connects while the kernel still frees a dead daemon's memory learns of the death at once. (The daemon
    is a stand-in that never accepts: it has the memory and the socket, which is all that counts here.)"""
    available = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    if int(available) < 3 << 20:
        pytest.skip("takes 1 GiB of memory, and leaves the machine less than 2 GiB")
    path = f"{socket_folder}/large"
    command = [sys.executable, "-c", LARGE_LISTENER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            listener.kill()
            killed_at = time.monotonic()
            with pytest.raises(DaemonLost, match="its memory is going"):
                engram_client.connect(path, timeout=30)
            took = time.monotonic() - killed_at
        finally:
            listener.kill()
    print(f"DaemonLost after {took * 1e3:.0f} ms (promised {LOST_S * 1e3:.0f})")
    assert took < LOST_ASSERTED_S
