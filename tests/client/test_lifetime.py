"""Finding, losing and finding again a daemon; forks; the end of clients and of the interpreter."""

from __future__ import annotations

import os
import signal
import socket
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
from engram_client import DaemonLost, EngramError, TableMismatch

from tests.waiting import eventually

LOSS_S = 1.0  # ten times what is aimed at


def eventually_fetch(handle: Any, ids: Any) -> Any:
    """The rows, once a restarted daemon answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return handle.fetch(ids)
        except DaemonLost:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_nobody_answers(tmp_path: Path, socket_folder: str) -> None:
    path = socket_folder + "/none.sock"
    with pytest.raises(DaemonLost, match=r"none\.sock"):
        engram_client.connect(path)
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(path + ".ring")
    dead.close()
    with pytest.raises(DaemonLost, match=r"none\.sock"):
        engram_client.connect(Path(path))
    with pytest.raises(DaemonLost, match=r"none\.sock"):
        engram_client.connect("ipc-control:" + path)
    with pytest.raises(DaemonLost, match=r"127\.0\.0\.1:1"):
        engram_client.connect("tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="too long"):
        engram_client.connect("/tmp/" + "x" * 200)
    with pytest.raises(ValueError, match="udp"):
        engram_client.connect("udp://x")


def test_the_path_that_was_tried_is_named(tmp_path: Path) -> None:
    (tmp_path / "passwd.ring").touch()
    for name in ("passwd", "none"):
        with pytest.raises(engram_client.DaemonLost, match=rf"no daemon answers at {tmp_path}/{name}\.ring: "):
            engram_client.connect(tmp_path / name)


def test_a_silent_listener(socket_folder: str) -> None:
    path = socket_folder + "/silent.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".ring")
    listener.listen()
    with listener, pytest.raises(DaemonLost, match="in time"):
        engram_client.connect(path, timeout=0.2)


def test_search_order(start_daemon: Any, socket_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon(socket=socket_folder + "/engramd.sock")
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    engram_client.connect().close()
    with pytest.raises(DaemonLost, match="other"):
        engram_client.connect(socket_folder + "/other")
    monkeypatch.delenv("ENGRAMD_SOCKET")
    with pytest.raises(DaemonLost, match=r"/run/engramd/engramd\.sock"):
        engram_client.connect()
    monkeypatch.setenv("XDG_RUNTIME_DIR", socket_folder)
    engram_client.connect().close()


@pytest.mark.parametrize("transport", ["ring", "control"])
def test_kill_in_the_middle_of_a_wait(start_daemon: Any, connect: Any, transport: str) -> None:
    daemon = start_daemon()
    client = connect(daemon.socket if transport == "ring" else f"ipc-control:{daemon.socket}")
    handle = client.table(layer=1)
    daemon.freeze()  # so that it cannot answer before it dies
    ended: list[float] = []

    def lose(call: Callable[[], Any]) -> None:
        with pytest.raises(DaemonLost):
            call()
        ended.append(time.monotonic())

    ticket = handle.submit([1])
    calls = [ticket.wait, lambda: handle.fetch(np.arange(10)), lambda: handle.fetch(np.zeros(200_000, np.int32))]
    threads = [threading.Thread(target=lose, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not ended
    killed = time.monotonic()
    daemon.kill()
    for thread in threads:
        thread.join()
    assert len(ended) == len(calls)
    assert max(ended) - killed < LOSS_S
    with pytest.raises(DaemonLost, match=Path(daemon.socket).name):
        handle.fetch([1])


@pytest.mark.parametrize("transport", ["ring", "control"])
def test_a_restart(start_daemon: Any, connect: Any, rows_of: Any, transport: str) -> None:
    daemon = start_daemon()
    client = connect(daemon.socket if transport == "ring" else f"ipc-control:{daemon.socket}")
    handle = client.table(layer=1)
    pinned = client.table(layer=1, identity=handle.identity)
    old_view = handle.submit([5]).wait()
    for end in (daemon.kill, None):
        if end is not None:
            end()
        else:
            daemon.stop()
        daemon = start_daemon(socket=daemon.socket)
        assert (eventually_fetch(handle, [1, -1, 2]) == rows_of([1, -1, 2], 1)).all()
        assert (eventually_fetch(pinned, [3]) == rows_of([3], 1)).all()
        assert client.stats()["pid"] == daemon.pid
    assert (old_view == rows_of([5], 1)).all()


def test_many_threads_reconnect_once(start_daemon: Any, connect: Any, rows_of: Any) -> None:
    daemon = start_daemon()
    client = connect(daemon)
    handle = client.table(layer=1)
    daemon.kill()
    with pytest.raises(DaemonLost):
        handle.fetch([1])
    daemon = start_daemon(socket=daemon.socket)
    threads = [threading.Thread(target=eventually_fetch, args=(handle, [1])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(client.stats()["sessions"]) == 1


@pytest.mark.parametrize("transport", ["ring", "control"])
def test_another_table_after_a_restart(
    start_daemon: Any, connect: Any, make_table: Any, rows_of: Any, transport: str
) -> None:
    daemon = start_daemon()
    client = connect(daemon.socket if transport == "ring" else f"ipc-control:{daemon.socket}")
    handle = client.table(layer=1)
    pinned = client.table(layer=1, identity=handle.identity)
    # The same geometry, other content: followed, unless the identity is pinned.
    daemon.kill()
    daemon = start_daemon(make_table(2000, 9), socket=daemon.socket)
    assert (eventually_fetch(handle, [1, 2]) == rows_of([1, 2], 1, 9)).all()
    with pytest.raises(TableMismatch, match=pinned.identity):
        eventually_fetch(pinned, [1])
    # Another geometry: never.
    daemon.kill()
    daemon = start_daemon(make_table(1000, 7), socket=daemon.socket)
    with pytest.raises(TableMismatch, match="rows"):
        eventually_fetch(handle, [1])
    assert client.table(layer=1).num_rows != handle.num_rows


def test_a_stop_is_a_loss(start_daemon: Any, connect: Any) -> None:
    daemon = start_daemon()
    handle = connect(daemon).table(layer=1)
    handle.fetch([1])
    daemon.stop()
    with pytest.raises(DaemonLost):
        handle.fetch([1])


def test_close(start_daemon: Any, connect: Any) -> None:
    daemon = start_daemon()
    client = connect(daemon)
    handle = client.table(layer=1)
    daemon.freeze()
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(EngramError):
            handle.fetch([1])
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    closed = time.monotonic()
    client.close()
    client.close()
    thread.join()
    assert ended[0] - closed < LOSS_S
    daemon.signal(signal.SIGCONT)
    for call in (lambda: handle.fetch([1]), lambda: client.table(layer=1), client.stats):
        with pytest.raises(EngramError, match="closed"):
            call()


def test_sessions_end_with_their_clients(start_daemon: Any, connect: Any) -> None:
    daemon = start_daemon()
    watcher = connect(f"ipc-control:{daemon.socket}")

    def one() -> None:
        with engram_client.connect(daemon.socket, name="short-lived") as client:
            client.table(layer=1).fetch([1])
            assert len(watcher.stats()["sessions"]) == 1
        eventually(lambda: watcher.stats()["sessions"] == [] and watcher.stats()["arenas"]["count"] == 0)

    one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        one()
    assert len(os.listdir("/proc/self/fd")) == before


def in_child(function: Callable[[], bool]) -> bool:
    """Runs a function in a forked child; whether it returned True."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if function() else 2
        except BaseException as error:  # noqa: BLE001 - the child must end here
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("transport", ["ring", "control"])
def test_fork(start_daemon: Any, connect: Any, rows_of: Any, transport: str) -> None:
    daemon = start_daemon()
    before = set(os.listdir("/proc/self/fd"))
    client = connect(daemon.socket if transport == "ring" else f"ipc-control:{daemon.socket}")
    session_descriptors = set(os.listdir("/proc/self/fd")) - before
    handle = client.table(layer=1)
    ticket, other = handle.submit([4]), handle.submit([4])
    view = other.wait()

    def child() -> bool:
        if transport == "ring":
            assert len(session_descriptors) >= 2
            assert not session_descriptors & set(os.listdir("/proc/self/fd"))
            with pytest.raises(EngramError, match="parent"):
                ticket.wait()
        assert (handle.fetch([7, -1]) == rows_of([7, -1], 1)).all()
        assert client.stats()["pid"] == daemon.pid
        ticket.release()
        return in_child(lambda: bool((handle.fetch([8]) == rows_of([8], 1)).all()))

    assert in_child(child)
    assert (handle.fetch([9]) == rows_of([9], 1)).all()
    assert (view == rows_of([4], 1)).all()
    assert (ticket.wait(30) == view).all()


def test_fork_beside_busy_threads(start_daemon: Any, connect: Any, rows_of: Any) -> None:
    client = connect(start_daemon())
    handle = client.table(layer=1)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            handle.fetch(np.arange(500))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            assert in_child(lambda: bool((handle.fetch([3]) == rows_of([3], 1)).all()))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_child_does_not_hide_its_parents_death(start_daemon: Any) -> None:
    daemon = start_daemon()
    script = (
        "import engram_client, os, sys, time\n"
        f"client = engram_client.connect({daemon.socket!r})\n"
        "if os.fork() == 0:\n    time.sleep(60)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        with engram_client.connect(f"ipc-control:{daemon.socket}") as watcher:
            assert len(watcher.stats()["sessions"]) == 1
            parent.kill()
            parent.wait()
            eventually(lambda: watcher.stats()["sessions"] == [])
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("keeper", ["__main__", "sys", "builtins"])  # which die in this order
def test_the_interpreters_end(start_daemon: Any, keeper: str) -> None:
    """Whatever is left open ends in silence, with whichever module it goes."""
    daemon = start_daemon()
    daemon.wait_for_log("layer 1 is resident")
    script = (
        "import sys, threading, engram_client\n"
        "assert 'zmq' not in sys.modules and 'msgpack' not in sys.modules\n"
        f"client = engram_client.connect({daemon.socket!r})\n"
        "table = client.table(layer=1)\n"
        "ticket, dropped = table.submit([1]), table.submit([2]).wait()\n"
        "view = ticket.wait()\n"
        "assert 'zmq' not in sys.modules and 'engram_client.hasher' not in sys.modules\n"
        "client.stats()\n"
        f"other = engram_client.connect('ipc-control:' + {daemon.socket!r})\n"
        "pending = other.table(layer=1).submit([1])\n"
        "mapped = table.map()\n"
        "keep = [client, table, ticket, dropped, view, other, pending, mapped, mapped.rows]\n"
        "keep.append(keep)\n"
        f"import {keeper}\n"
        f"{keeper}.keep = keep\n"
        "threading.Thread(target=lambda: [table.fetch([3]) for _ in range(10**7)], daemon=True).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_descriptors_left(start_daemon: Any) -> None:
    daemon = start_daemon()
    script = (
        "import os, resource, engram_client\n"
        "next_fd = os.dup(0); os.close(next_fd)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + 3, next_fd + 3))\n"
        f"try:\n    engram_client.connect({daemon.socket!r})\n"
        "except engram_client.EngramError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("EngramError")
    assert "ulimit -n" in done.stdout


def test_no_address_space(start_daemon: Any) -> None:
    daemon = start_daemon(arena="256MiB")
    script = (
        "import resource, engram_client, engram_client.ring_client\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)\n"
        f"try:\n    engram_client.connect({daemon.socket!r})\n"
        "except engram_client.EngramError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("EngramError")
    assert "cannot map" in done.stdout


def test_over_tcp(start_daemon: Any, connect: Any, rows_of: Any, tcp: Any) -> None:
    daemon = start_daemon(**tcp.flags)
    client = connect(f"tcp://{tcp.address}", curve=tcp.curve)
    ids = np.random.default_rng(0).integers(-1, 1000, (500, 24))
    assert (client.table(layer=14).fetch(ids) == rows_of(ids, 14)).all()
    assert client.stats()["pid"] == daemon.pid


def test_options(start_daemon: Any, connect: Any, rows_of: Any) -> None:
    daemon = start_daemon()
    for options in ({"spin_us": 0}, {"spin_us": 1000}, {"arena_bytes": 4 << 20}, {"name": "é" * 100}):
        handle = connect(daemon, **options).table(layer=1)
        assert (handle.fetch([1, 2]) == rows_of([1, 2], 1)).all()
    for wrong in (
        {"spin_us": -1},
        {"spin_us": 10**9},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"arena_bytes": -1},
        {"arena_bytes": 1 << 64},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            connect(daemon, **wrong)
    for option, value in (("spin_us", "1"), ("timeout", "x"), ("timeout", None), ("arena_bytes", 1.5), ("name", 5)):
        with pytest.raises(TypeError, match=option):
            connect(daemon, **{option: value})
    with pytest.raises(ValueError, match="zero byte"):
        connect("a\0b")
