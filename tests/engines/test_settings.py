"""Settings of a plug-in: where they come from, what is refused, and the wait for a daemon that starts later."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import engram_client
import pytest
from engram_engines.core import EngineSettings, connect_when_up


def test_nothing_names_a_socket() -> None:
    assert EngineSettings.find(None, {}) is None
    assert EngineSettings.find({}, {"ENGRAMD_WAIT_S": "3"}) is None


def test_environment_and_options() -> None:
    environment = {"ENGRAMD_SOCKET": "/run/a.sock", "ENGRAMD_WAIT_S": "2.5", "ENGRAMD_TABLE": "flash"}
    assert EngineSettings.find(None, environment) == EngineSettings("/run/a.sock", table="flash", wait_s=2.5)
    options = {"socket": "/run/b.sock", "deadline_s": 7, "columns": "contiguous", "table": None}
    assert EngineSettings.find(options, environment) == EngineSettings(
        "/run/b.sock", table="flash", wait_s=2.5, deadline_s=7.0, columns="contiguous"
    )


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        ({"table": "a"}, {}, "name no socket"),
        ({"socket": "/a", "colums": "strided"}, {}, "'colums' is not known"),
        ({"socket": "tcp://localhost:1"}, {}, "shared memory"),
        ({"socket": ""}, {}, "must be a text"),
        ({"socket": "/a", "columns": "diagonal"}, {}, "'contiguous' or 'strided'"),
        ({"socket": "/a", "rows": "both"}, {}, "'auto' or 'mapped' or 'staged'"),
        ({"socket": "/a", "deadline_s": 0}, {}, "more than 0"),
        ({"socket": "/a", "deadline_s": True}, {}, "engramd option deadline_s is True"),
        (None, {"ENGRAMD_SOCKET": "/a", "ENGRAMD_WAIT_S": "soon"}, "ENGRAMD_WAIT_S is 'soon'"),
        (None, {"ENGRAMD_SOCKET": "/a", "ENGRAMD_WAIT_S": "-1"}, "0 to 86400"),
        (["/a"], {}, "must be a mapping"),
    ],
)
def test_refusals(options: Any, environment: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineSettings.find(options, environment)


def test_a_daemon_that_starts_later(start_daemon: Any, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "later.sock")
    started: list[Any] = []

    def start() -> None:
        time.sleep(0.5)
        started.append(start_daemon(socket=path))

    starter = threading.Thread(target=start)
    starter.start()
    try:
        with connect_when_up(EngineSettings(path, wait_s=60.0), name="test") as client:
            assert client.table(layer=1).num_rows > 0
    finally:
        starter.join()
    assert started


def test_a_daemon_that_never_comes(socket_folder: str) -> None:
    path = os.path.join(socket_folder, "never.sock")
    began = time.monotonic()
    with pytest.raises(engram_client.DaemonLost, match=r"never\.sock.*ENGRAMD_WAIT_S"):
        connect_when_up(EngineSettings(path, wait_s=0.3), name="test")
    assert 0.3 <= time.monotonic() - began < 3.0
