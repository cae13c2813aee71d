"""Where the socket is looked for and made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engramd.daemon import sockets
from engramd.errors import EngramdError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(system's folder, user's folder) for these tests; both exist."""
    system, user = tmp_path / "run" / "engramd", tmp_path / "user"
    system.mkdir(parents=True)
    user.mkdir()
    monkeypatch.setattr(sockets, "SYSTEM_PATH", str(system / "engramd.sock"))
    monkeypatch.setattr(sockets, "MAX_PATH_BYTES", 4096)  # the folders of these tests have long names
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(user))
    monkeypatch.delenv("ENGRAMD_SOCKET", raising=False)
    return system, user


def test_a_command_takes_the_first_that_exists(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    system, user = places
    assert sockets.client_path(None) == str(system / "engramd.sock")
    (user / "engramd.sock").touch()
    assert sockets.client_path(None) == str(user / "engramd.sock")
    (system / "engramd.sock").touch()
    assert sockets.client_path(None) == str(system / "engramd.sock")
    monkeypatch.setenv("ENGRAMD_SOCKET", "/from/environment.sock")
    assert sockets.client_path(None) == "/from/environment.sock"
    assert sockets.client_path("/from/argument.sock") == "/from/argument.sock"


def test_a_daemon_takes_the_first_that_it_may_write(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    system, user = places
    assert sockets.server_path(None) == str(system / "engramd.sock")
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != str(system))
    assert sockets.server_path(None) == str(user / "engramd.sock")
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    with pytest.raises(EngramdError, match="--socket PATH"):
        sockets.server_path(None)
    monkeypatch.setenv("ENGRAMD_SOCKET", str(user / "named.sock"))
    assert sockets.server_path(None) == str(user / "named.sock")
    assert sockets.server_path(str(system / "argument.sock")) == str(system / "argument.sock")


def test_a_relative_path_becomes_absolute(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places[1])
    assert sockets.server_path("s.sock") == str(places[1] / "s.sock")


def test_the_lock_changes_hands(places: tuple[Path, Path]) -> None:
    path = str(places[1] / "s.sock")
    for _ in range(2):
        with sockets.SocketPair(path), pytest.raises(EngramdError, match=f"pid {os.getpid()}"):
            sockets.SocketPair(path)
        assert os.listdir(places[1]) == []
