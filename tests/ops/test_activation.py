"""Socket activation: this test makes and keeps the listening sockets, as systemd would; a real daemon inherits them.

The descriptors travel by exec under the numbers and variables of sd_listen_fds(3); no service manager runs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engram_client
import pytest

from engramd import listen_fds
from engramd.errors import EngramdError
from tests.conftest import ENGRAMD

Engramd = Callable[..., "subprocess.CompletedProcess[str]"]

# Moves the descriptors named first to 3, 4, ... and becomes the rest of the command.
MANAGER = """
import fcntl, os, sys
count = int(sys.argv[1])
descriptors = [fcntl.fcntl(int(text), fcntl.F_DUPFD, 64) for text in sys.argv[2 : 2 + count]]  # none is overwritten
for target, descriptor in enumerate(descriptors, 3):
    os.dup2(descriptor, target)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count), LISTEN_FDNAMES=":".join(["engramd"] * count))
os.execvp(sys.argv[2 + count], sys.argv[2 + count :])
"""


def started_with(sockets: list[socket.socket], *others: int) -> dict[str, Any]:
    """Arguments of `start_daemon` or of Popen that hand these sockets over, and other descriptors in front of them."""
    numbers = [*others, *(one.fileno() for one in sockets)]
    return {
        "wrapper": [sys.executable, "-c", MANAGER, str(len(numbers)), *map(str, numbers)],
        "pass_fds": numbers,
    }


def listener(path: str, kind: socket.SocketKind) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, kind)
    one.bind(path)
    one.listen(16)
    return one


@pytest.fixture
def kept(socket_folder: str) -> Iterator[tuple[str, list[socket.socket]]]:
    """(path, [ring, control]): the manager's sockets."""
    path = os.path.join(socket_folder, "kept.sock")
    sockets = [listener(path + ".ring", socket.SOCK_SEQPACKET), listener(path, socket.SOCK_STREAM)]
    yield path, sockets
    for one in sockets:
        one.close()


def test_the_sockets_outlive_the_daemon(start_daemon: Any, stats: Any, kept: tuple[str, list[socket.socket]]) -> None:
    """Both sockets serve; a client that connects while no daemon runs waits for the next one."""
    path, sockets = kept
    inodes = [os.stat(path + suffix).st_ino for suffix in ("", ".ring")]
    first = start_daemon(socket=path, **started_with(sockets))
    with engram_client.connect(path) as client:
        rows = client.table(layer=1).fetch([0, 1])
    assert stats(first)["pid"] == first.pid
    assert first.stop() == 0
    assert "drained" in first.log
    assert [os.stat(path + suffix).st_ino for suffix in ("", ".ring")] == inodes, "they are the manager's to remove"
    found: list[Any] = []

    def fetch() -> None:
        with engram_client.connect(path, timeout=30) as client:
            found.append(client.table(layer=1).fetch([0, 1]))

    waiting = threading.Thread(target=fetch)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it waits in the backlog instead of failing"
    second = start_daemon(socket=path, **started_with(sockets))
    waiting.join(60)
    assert (found[0] == rows).all()
    assert stats(second)["pid"] == second.pid
    variables = Path(f"/proc/{second.pid}/environ").read_bytes()
    assert b"LISTEN_FDS=2" in variables, "else this test shows nothing"


def test_other_descriptors_may_come_along(start_daemon: Any, stats: Any, kept: tuple[str, list[socket.socket]]) -> None:
    """A service manager passes stored memory among the same descriptors; of a name that means nothing it is left."""
    path, sockets = kept
    memory = os.memfd_create("other")
    try:
        daemon = start_daemon(socket=path, **started_with(sockets, memory))
    finally:
        os.close(memory)
    assert stats(daemon)["pid"] == daemon.pid
    with engram_client.connect(path) as client:
        assert client.table(layer=1).fetch([0]).shape == (1, 264)


def refusal(table: Path, sockets: list[socket.socket], *options: str, **environment: str) -> str:
    """What a daemon that does not start says."""
    how = started_with(sockets)
    command = [*how["wrapper"], *ENGRAMD, "serve", str(table), *options]
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, pass_fds=how["pass_fds"], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_sockets_that_are_no_pair_are_refused(table: Path, socket_folder: str) -> None:
    folder = Path(socket_folder)
    control = listener(str(folder / "a"), socket.SOCK_STREAM)
    ring = listener(str(folder / "b.ring"), socket.SOCK_SEQPACKET)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind(str(folder / "a.ring"))
    tcp = socket.create_server(("127.0.0.1", 0))
    with control, ring, silent, tcp:
        assert "ListenSequentialPacket=PATH.ring" in refusal(table, [control])
        assert f"is at {folder}/b.ring, but clients look for it at {folder}/a.ring" in refusal(table, [control, ring])
        assert "not a listening Unix socket" in refusal(table, [control, silent])
        assert "'127.0.0.1'" in refusal(table, [tcp, ring])
        assert "SOCK_STREAM" in refusal(table, [control, ring, control])


def test_another_path_in_the_configuration_is_refused(table: Path, kept: tuple[str, list[socket.socket]]) -> None:
    path, sockets = kept
    assert f"{path}, but the configuration says /tmp/x.sock" in refusal(table, sockets, "--socket", "/tmp/x.sock")
    assert "says /tmp/y.sock" in refusal(table, sockets, ENGRAMD_SOCKET="/tmp/y.sock")


def test_a_running_daemon_keeps_the_path(start_daemon: Any, table: Path, kept: tuple[str, list[socket.socket]]) -> None:
    path, sockets = kept
    daemon = start_daemon(socket=path, **started_with(sockets))
    assert f"pid {daemon.pid}" in refusal(table, sockets)


def test_descriptors_meant_for_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert listen_fds.take() == []
    assert "LISTEN_FDS" not in os.environ


@pytest.mark.parametrize(
    ("count", "names", "words"),
    [
        ("many", "", "'many' is not a number"),
        ("5000", "", "'5000' is not a number from 0 to 4096"),
        ("2", "one", "1 names for the 2 descriptors"),
        ("4000", "", "is not open"),
    ],
)
def test_variables_that_cannot_be(monkeypatch: pytest.MonkeyPatch, count: str, names: str, words: str) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    monkeypatch.setenv("LISTEN_FDNAMES", names)
    with pytest.raises(EngramdError, match=words):
        listen_fds.take()
