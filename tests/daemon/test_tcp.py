"""The TCP endpoint: off unless configured, for known keys alone, without administration."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import msgpack
import numpy as np
import pytest
import zmq
from engram_client import CurveKeys, DaemonLost

from engramd.config import Flags, settings_from
from engramd.errors import EngramdError
from engramd.options import tcp_endpoint


def fetches(address: str, curve: CurveKeys | None, rows: dict[int, Any]) -> bool:
    ids = np.arange(0, 900, 7)
    with engram_client.connect(f"tcp://{address}", curve=curve) as client:
        return bool(np.array_equal(client.table("demo", layer=14).fetch(ids), rows[14][ids]))


def make_keys(engramd: Callable[..., Any], path: Path) -> Path:
    assert engramd("keygen", path).returncode == 0
    return path


def test_known_keys_get_rows_and_no_administration(start_daemon: Any, tcp: Any, rows: dict[int, Any]) -> None:
    daemon = start_daemon(**tcp.flags)
    assert fetches(tcp.address, tcp.curve, rows)
    with zmq.Context() as context, context.socket(zmq.REQ) as administrator:
        administrator.setsockopt(zmq.RCVTIMEO, 30_000)
        tcp.curve.apply(administrator)
        administrator.connect(f"tcp://{tcp.address}")
        administrator.send(msgpack.packb({"v": 1, "id": 1, "verb": "shutdown"}))
        assert "not permitted" in msgpack.unpackb(administrator.recv())["text"]
    assert daemon.process.poll() is None


def test_others_are_refused(
    start_daemon: Any, tcp: Any, rows: dict[int, Any], engramd: Callable[..., Any], tmp_path: Path
) -> None:
    """No keys, keys that the daemon does not know, another daemon's key: no byte of a row, and the text says why."""
    daemon = start_daemon(**tcp.flags)
    stranger = make_keys(engramd, tmp_path / "stranger")
    unknown = CurveKeys.from_files(f"{tcp.daemon_keys}.key", f"{stranger}.key_secret")
    misled = CurveKeys.from_files(f"{stranger}.key", f"{tcp.client_keys}.key_secret")
    # A client may say anything about its public key; the handshake wants the secret that belongs to it.
    thief = CurveKeys(unknown.daemon_public, tcp.curve.public, unknown.secret)
    for keys in (None, unknown, misled, thief):
        with pytest.raises(DaemonLost, match=r"does not let this client in.*curve="):
            fetches(tcp.address, keys, rows)
    assert daemon.log.count("is not in tcp_clients") >= 1
    assert unknown.public.decode() in daemon.log
    assert tcp.curve.secret.decode() not in daemon.log
    assert fetches(tcp.address, tcp.curve, rows)


def test_a_key_is_added_and_taken_away_while_the_daemon_serves(
    start_daemon: Any, tcp: Any, rows: dict[int, Any], engramd: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = start_daemon(**tcp.flags)
    late = make_keys(engramd, tmp_path / "late")
    keys = CurveKeys.from_files(f"{tcp.daemon_keys}.key", f"{late}.key_secret")
    with pytest.raises(DaemonLost):
        fetches(tcp.address, keys, rows)
    (tcp.clients / "broken.key").write_text("no key at all\n")
    shutil.copy(f"{late}.key", tcp.clients / "late.key")
    assert fetches(tcp.address, keys, rows)
    assert "broken.key: holds no public key" in daemon.log
    os.unlink(tcp.clients / "late.key")
    with pytest.raises(DaemonLost):
        fetches(tcp.address, keys, rows)
    assert fetches(tcp.address, tcp.curve, rows)


def test_keys_from_the_environment(
    start_daemon: Any, tcp: Any, rows: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_daemon(**tcp.flags)
    monkeypatch.setenv("ENGRAMD_CURVE", f"{tcp.daemon_keys}.key:{tcp.client_keys}.key_secret")
    assert fetches(tcp.address, None, rows)
    monkeypatch.setenv("ENGRAMD_CURVE", f"{tcp.daemon_keys}.key")
    with pytest.raises(ValueError, match="ENGRAMD_CURVE"):
        fetches(tcp.address, None, rows)


def test_connections_that_say_nothing_hold_nobody_up(start_daemon: Any, tcp: Any, rows: dict[int, Any]) -> None:
    """Silence and noise on the TCP port: clients with keys are served, and the silent ones are hung up on."""
    daemon = start_daemon(**tcp.flags)
    host, _, port = tcp.address.partition(":")
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    others = [socket.create_connection((host, int(port))) for _ in range(50)]
    for number, one in enumerate(others):
        if number % 2:
            one.send(os.urandom(200))
    assert fetches(tcp.address, tcp.curve, rows)
    end = time.monotonic() + 60
    while len(os.listdir(f"/proc/{daemon.pid}/fd")) > before + 5:
        assert time.monotonic() < end, "silent connections stay"
        time.sleep(0.1)
    for one in others:
        one.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tcp: os.chmod(f"{tcp.daemon_keys}.key_secret", 0o640), "mode 0640.*chmod 0600"),
        (lambda tcp: os.unlink(f"{tcp.daemon_keys}.key_secret"), "key_secret: cannot be read: No such file"),
        (lambda tcp: shutil.copyfile(f"{tcp.daemon_keys}.key", f"{tcp.daemon_keys}.key_secret"), "holds no secret key"),
        (lambda tcp: shutil.rmtree(tcp.clients), "tcp_clients .*cannot be read"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_at_the_start(
    engramd: Callable[..., Any], tcp: Any, table: Path, socket_folder: str, spoil: Callable[[Any], None], words: str
) -> None:
    spoil(tcp)
    flags = [text for key, value in tcp.flags.items() for text in (f"--{key.replace('_', '-')}", value)]
    done = engramd("serve", table, "--socket", f"{socket_folder}/s", *flags)
    assert done.returncode == 1
    assert re.search(words, done.stderr), done.stderr


def test_tcp_without_keys_is_refused() -> None:
    for values in ({}, {"tcp_key": "/k"}, {"tcp_clients": "/c"}):
        with pytest.raises(EngramdError, match=r"tcp .* needs tcp_key.*keygen.*tcp_clients"):
            settings_from(Flags(tables=["/t"], tcp="5750", **values))


def test_where_tcp_is_bound() -> None:
    for value, endpoint in (
        (5750, "127.0.0.1:5750"),
        ("5750", "127.0.0.1:5750"),
        ("localhost:1", "127.0.0.1:1"),
        ("0.0.0.0:65535", "0.0.0.0:65535"),
        ("[::1]:80", "[::1]:80"),
    ):
        assert tcp_endpoint(value, "tcp") == endpoint
    for wrong in (
        "0",
        "65536",
        ":5",
        "host:5",
        "1.2.3:5",
        "::1:5",
        "[::1]",
        "[1.2.3.4]:5",
        True,
        None,
        1.5,
        "1.2.3.4:",
    ):
        with pytest.raises(EngramdError, match=r"^tcp: "):
            tcp_endpoint(wrong, "tcp")


def test_keygen_replaces_nothing_and_hides_the_secret(engramd: Callable[..., Any], tmp_path: Path) -> None:
    keys = make_keys(engramd, tmp_path / "mine")
    assert (os.stat(f"{keys}.key_secret").st_mode & 0o777, os.stat(f"{keys}.key").st_mode & 0o777) == (0o600, 0o644)
    secret = Path(f"{keys}.key_secret").read_bytes()
    done = engramd("keygen", keys)
    assert done.returncode == 1
    assert "exists; remove it" in done.stderr
    assert Path(f"{keys}.key_secret").read_bytes() == secret
    assert engramd("keygen", tmp_path / "nowhere" / "x").returncode == 1
