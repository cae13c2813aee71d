"""Start, refusal to start, and end of the real daemon."""

from __future__ import annotations

import grp
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.damage import flip_bit

Engramd = Callable[..., "subprocess.CompletedProcess[str]"]


def test_second_daemon_is_refused_by_name(start_daemon: Any, engramd: Engramd, table: Path) -> None:
    daemon = start_daemon()
    second = engramd("serve", table, "--socket", daemon.socket)
    assert second.returncode == 1
    assert f"pid {daemon.pid}" in second.stderr
    assert daemon.socket in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert daemon.process.poll() is None
    assert engramd("stats", "--socket", daemon.socket).returncode == 0


def test_stale_sockets_are_replaced(start_daemon: Any, engramd: Engramd, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "same.sock")
    first = start_daemon(socket=path)
    first.kill()
    assert stat.S_ISSOCK(os.stat(path).st_mode), "a killed daemon leaves its socket: else this test shows nothing"
    second = start_daemon(socket=path)
    stats = json.loads(engramd("stats", "--socket", path, "--json").stdout)
    assert stats["pid"] == second.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_in_order(start_daemon: Any, raw_client: Any, number: int) -> None:
    daemon = start_daemon()
    client = raw_client(daemon.socket)
    client.open()
    daemon.signal(number)
    assert daemon.wait() == 0
    assert client.receive()[0] == 0
    assert "drained" in daemon.log
    for path in (daemon.socket, daemon.socket + ".ring", daemon.socket + ".lock"):
        assert not os.path.exists(path)


def test_shutdown_verb_waits_for_the_end(start_daemon: Any, engramd: Engramd) -> None:
    daemon = start_daemon()
    done = engramd("shutdown", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    assert str(daemon.pid) in done.stdout
    assert daemon.wait() == 0


def test_no_daemon_is_told_with_its_path(engramd: Engramd, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "none.sock")
    for verb in ("stats", "shutdown"):
        done = engramd(verb, "--socket", path)
        assert done.returncode == 1
        assert path in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_daemon_that_does_not_answer_is_told(engramd: Engramd, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "mute.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        done = engramd("stats", "--socket", path, "--timeout", "0.3")
    assert done.returncode == 1
    assert path in done.stderr
    assert "0.3 s" in done.stderr


@pytest.mark.parametrize("umask", [0, 0o077])
def test_sockets_are_for_owner_and_group(start_daemon: Any, umask: int) -> None:
    daemon = start_daemon(umask=umask)
    for path in (daemon.socket, daemon.socket + ".ring"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    assert stat.S_IMODE(os.stat(daemon.socket + ".lock").st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")
def test_others_cannot_connect(start_daemon: Any, as_nobody: Any) -> None:
    daemon = start_daemon()
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    for path, kind in ((daemon.socket, socket.SOCK_STREAM), (daemon.socket + ".ring", socket.SOCK_SEQPACKET)):

        def connect(path: str = path, kind: socket.SocketKind = kind) -> str:
            with socket.socket(socket.AF_UNIX, kind) as client:
                client.connect(path)
            return "connected"

        assert "PermissionError" in as_nobody(connect)


def test_commands_of_another_user_name_the_group(start_daemon: Any, as_nobody: Any) -> None:
    from engramd.cli.control_client import ControlClient  # before the child loses the right to read it

    daemon = start_daemon()
    group = grp.getgrgid(os.stat(daemon.socket).st_gid).gr_name
    for open_folder in (True, False):
        os.chmod(os.path.dirname(daemon.socket), 0o755 if open_folder else 0o700)

        def ask() -> str:
            ControlClient(daemon.socket)
            return "no error"

        text = as_nobody(ask)
        assert "uid 65534 may not use this socket" in text
        assert (f"group {group}; join the group" in text) == open_folder
        assert "engramd serve" not in text


def test_another_programs_socket_is_left_alone(engramd: Engramd, table: Path, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "theirs.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        done = engramd("serve", table, "--socket", path)
        assert done.returncode == 1
        assert path in done.stderr
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)


def test_a_file_at_the_path_is_left_alone(engramd: Engramd, table: Path, socket_folder: str) -> None:
    path = Path(socket_folder, "file")
    path.write_text("precious")
    done = engramd("serve", table, "--socket", path)
    assert done.returncode == 1
    assert "not a socket" in done.stderr
    assert path.read_text() == "precious"


def test_sockets_of_a_successor_stay(start_daemon: Any) -> None:
    daemon = start_daemon()
    os.rename(daemon.socket, daemon.socket + ".moved")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as successor:
        successor.bind(daemon.socket)
        assert daemon.stop() == 0
        assert os.path.exists(daemon.socket)


@pytest.mark.parametrize(
    ("path", "words"),
    [("/tmp/engram-no-such-folder/s.sock", "does not exist"), ("/tmp/" + "long" * 30 + ".sock", "107")],
)
def test_a_socket_path_that_cannot_be(engramd: Engramd, table: Path, path: str, words: str) -> None:
    done = engramd("serve", table, "--socket", path)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_table_is_refused_in_one_line(engramd: Engramd, socket_folder: str, copy: Path) -> None:
    data_file = next(copy.glob("*.pages"))
    with open(data_file, "r+b") as file:
        file.truncate(data_file.stat().st_size - 4096)
    done = engramd("serve", copy, "--socket", os.path.join(socket_folder, "s.sock"))
    assert done.returncode == 1
    assert str(data_file) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    data_file.unlink()
    done = engramd("serve", copy, "--socket", os.path.join(socket_folder, "s.sock"))
    assert done.returncode == 1
    assert str(data_file) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(socket_folder) == [], "a failed start leaves nothing behind"


def test_a_data_file_that_is_a_fifo_does_not_hang(engramd: Engramd, socket_folder: str, copy: Path) -> None:
    data_file = next(copy.glob("*.pages"))
    data_file.unlink()
    os.mkfifo(data_file)
    done = engramd("serve", copy, "--socket", os.path.join(socket_folder, "s.sock"))
    assert done.returncode == 1
    assert "not a regular file" in done.stderr


def test_two_tables_and_their_names(start_daemon: Any, engramd: Engramd, table: Path, copy: Path) -> None:
    done = engramd("serve", table, table)
    assert done.returncode == 1
    assert "two tables are named 'demo'" in done.stderr
    daemon = start_daemon(table, f"second={copy}")
    stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
    assert [(one["name"], one["path"]) for one in stats["tables"]] == [("demo", str(table)), ("second", str(copy))]
    assert [layer["layer"] for one in stats["tables"] for layer in one["layers"]] == [1, 14, 1, 14]


def test_environment_names_the_socket(start_daemon: Any, engramd: Engramd, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon()
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    assert json.loads(engramd("stats", "--json").stdout)["pid"] == daemon.pid


def test_config_file(start_daemon: Any, engramd: Engramd, table: Path, tmp_path: Path, socket_folder: str) -> None:
    path = os.path.join(socket_folder, "config.sock")
    config = tmp_path / "engramd.toml"
    config.write_text(f'socket = "{path}"\ndram = "3MiB"\n[[table]]\nname = "named"\npath = "{table}"\n')
    checked = engramd("serve", "--config", config, "--check-config")
    assert checked.returncode == 0, checked.stderr
    assert "named" in checked.stdout
    assert not os.path.exists(path)
    config.write_text(config.read_text().replace("dram", "drum"))
    wrong = engramd("serve", "--config", config, "--check-config")
    assert wrong.returncode == 1
    assert f"{config}:2: drum" in wrong.stderr
    config.write_text(config.read_text().replace(str(table), str(tmp_path / "nothing")).replace("drum", "dram"))
    missing = engramd("serve", "--config", config, "--check-config")
    assert missing.returncode == 1
    assert str(tmp_path / "nothing") in missing.stderr


def test_usage_errors_are_status_2(engramd: Engramd) -> None:
    for arguments in ((), ("no-such-verb",), ("serve", "--no-such-flag"), ("stats", "--interval", "-1")):
        done = engramd(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_wrong_values_name_the_flag(engramd: Engramd, table: Path) -> None:
    for flag, value in (("--dram", "12parsecs"), ("--workers", "-1"), ("--reader", "mmap"), ("--tcp", "0.0.0:5555")):
        done = engramd("serve", table, flag, value)
        assert done.returncode in (1, 2)
        assert flag in done.stderr
        assert value.split(":")[0] in done.stderr
        assert "Traceback" not in done.stderr


def test_service_manager_hears_of_the_stop(start_daemon: Any, socket_folder: str) -> None:
    # The factory has seen READY=1 on a socket of its own; here the end is listened for.
    path = os.path.join(socket_folder, "manager.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        daemon = start_daemon()
        manager.bind(path)
        manager.settimeout(30)
        os.rename(path, os.path.join(socket_folder, "n0.sock"))
        assert daemon.stop() == 0
        assert manager.recv(4096) == b"STOPPING=1"


def test_daemon_never_loads_the_client(start_daemon: Any) -> None:
    daemon = start_daemon()
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "_engine" in maps
    assert "engram_client" not in maps
    assert "numpy" not in maps, "numpy costs a tenth of a second of start-up"


def test_file_limit_is_raised(start_daemon: Any) -> None:
    daemon = start_daemon()
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert soft == hard


def test_interrupted_stats_end_quietly(start_daemon: Any) -> None:
    daemon = start_daemon()
    command = [
        sys.executable,
        "-m",
        "engramd.cli.main",
        "stats",
        "--socket",
        daemon.socket,
        "--json",
        "--interval",
        "0.05",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        assert second["uptime_s"] > first["uptime_s"]
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""


def test_checking_says_where_state_cannot_be_kept(engramd: Engramd, table: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    common = ("serve", table, "--socket", tmp_path / "s.sock", "--check-config", "--state")
    for state, words in (
        ("/proc/x", "state /proc/x: this directory cannot be made"),
        (tmp_path / "file", "--state DIR"),
    ):
        done = engramd(*common, state)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = engramd(*common, tmp_path / "new" / "state")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "new").exists()  # checking leaves nothing behind


@pytest.mark.parametrize(("bad", "words"), [(1, "1 bad page, which is"), (2, "2 bad pages, which are")])
def test_bad_pages_of_a_resident_table_are_a_warning(start_daemon: Any, bad: int, words: str, copy: Path) -> None:
    for page in range(bad):
        flip_bit(copy / "layer-14.g000001.pages", 4096 * 3 * page + 100)
    daemon = start_daemon(copy)
    daemon.wait_for_log("table demo layer 1 is resident in DRAM\n")
    daemon.wait_for_log(f"table demo layer 14 is resident in DRAM except for {words} left to NVMe\n")
    (line,) = [line for line in daemon.log.splitlines() if "except for" in line]
    assert "warning" in line.lower().split("table demo")[0]
