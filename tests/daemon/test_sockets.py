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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the system's folder")
def test_the_usual_folder_is_made_also_when_it_is_named(places: tuple[Path, Path]) -> None:
    system, _ = places
    for argument in (None, str(system / "engramd.sock")):
        system.rmdir()
        assert sockets.server_path(argument) == str(system / "engramd.sock")
    with pytest.raises(EngramdError, match="does not exist"):
        sockets.server_path(str(system / "deeper" / "engramd.sock"))


def test_a_usual_folder_that_cannot_be_made(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file lies where it should be: the user's place is taken, or one line says what to do."""
    system, user = places
    system.rmdir()
    system.touch()
    assert sockets.server_path(None) == str(user / "engramd.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(EngramdError, match="--socket PATH"):
        sockets.server_path(None)
    with pytest.raises(EngramdError, match="does not exist"):
        sockets.server_path(str(system / "engramd.sock"))


def test_a_lock_that_cannot_be_opened(places: tuple[Path, Path]) -> None:
    path = str(places[1] / "s.sock")
    os.mkdir(path + ".lock")
    with pytest.raises(EngramdError, match=r"s\.sock\.lock: cannot be opened: .*--socket PATH"):
        sockets.SocketPair(path)
