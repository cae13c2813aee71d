"""What all Python tests share: a small checkpoint and its packed table, and a factory for real daemons.

A daemon of these tests is the real `engramd serve` process on real sockets, shared memory and files. Readiness is what
it tells a service manager; whatever it leaves running is killed at the end, and a traceback or a sanitizer's report in
its log fails the test that started it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import engramd as engramd_package
from engramd.table import manifest as manifests
from engramd.table.codec import synth_rows

# A shell starts its background jobs with SIGINT ignored, which what they start inherits: interrupts would do nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples that start processes or touch files take their time; a repeated run finds the same failures.
settings.register_profile(
    "engramd", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("engramd")

# Long enough for a sanitizer build on a busy machine; a test that waits so long has failed anyway.
DEADLINE_S = 120.0
CHECKPOINT_VOCAB_SIZE = 2000
SYNTH_SEED = 7
CHECKOUT = Path(__file__).parents[1]
ENGRAMD = [sys.executable, "-m", "engramd.cli.main"]
REPORTS = ("Traceback (most recent call last)", "ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")


def run_engramd(*arguments: str | os.PathLike[str], timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    command = [*ENGRAMD, *(os.fspath(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="session")
def engramd() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`engramd("verb", ...)` runs the command and returns its status and output."""
    return run_engramd


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic checkpoint (seed 7, head sizes from vocab size 2000 on)."""
    path = tmp_path_factory.mktemp("checkpoint") / "source"
    done = run_engramd(
        "synth", path, "--vocab-size", str(CHECKPOINT_VOCAB_SIZE), "--seed", str(SYNTH_SEED), timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed table of `checkpoint`, named `demo`. Tests that change it work on a `copy`.

    Tests that run other tests hand their own table on in ENGRAM_TEST_TABLE."""
    if "ENGRAM_TEST_TABLE" in os.environ:
        return Path(os.environ["ENGRAM_TEST_TABLE"])
    checkpoint: Path = request.getfixturevalue("checkpoint")
    path = tmp_path_factory.mktemp("tables") / "demo"
    done = run_engramd("pack", checkpoint, path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def copy(table: Path, tmp_path: Path) -> Path:
    """A copy of `table`, for tests that change it."""
    path = tmp_path / "demo"
    shutil.copytree(table, path)
    return path


class Daemon:
    """One `engramd serve` process. `socket` is its control socket's path."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: str, log_path: Path) -> None:
        self.process = process
        self.socket = socket_path
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, text: str) -> None:
        """Returns once the log contains the text."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.log:
            assert time.monotonic() < deadline, f"{text!r} does not appear in the log:\n{self.log}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP; returns once all its threads have stopped, so that it answers nothing from then on."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.wait()


@pytest.fixture
def socket_folder() -> Iterator[str]:
    """A folder with a short name: a socket's path holds 107 bytes, and pytest's own folders can be longer."""
    folder = tempfile.mkdtemp(prefix="engram-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


NOBODY = 65534


@pytest.fixture
def as_nobody() -> Callable[..., str]:
    """`as_nobody(function, groups=())` runs the function in a child process of another user and returns its text. (A
    new program would have to be readable for that user, and a Python in somebody's home is not.)"""

    def run(function: Callable[[], str], groups: Sequence[int] = ()) -> str:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups(groups)
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                text = function()
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent judges it
                text = repr(error)
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        try:
            assert select.select([reader], [], [], 60)[0], "the child says nothing"
            return os.read(reader, 65536).decode()
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    return run


@pytest.fixture
def start_daemon(socket_folder: str, tmp_path: Path, table: Path) -> Iterator[Callable[..., Daemon]]:
    """`start_daemon(*tables, dram="64MiB", socket=None, environment={}, **options)` starts a daemon and returns a
    `Daemon` once it is ready. Without tables (and without a `config`) it serves `table`; options are flags
    (`arena_limit="1GiB"`)."""
    started: list[Daemon] = []

    def start(
        *tables: str | os.PathLike[str],
        dram: str | None = "64MiB",
        socket: str | None = None,
        environment: dict[str, str] | None = None,
        umask: int = -1,
        wrapper: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        **options: str | int,
    ) -> Daemon:
        number = len(started)
        path = socket or os.path.join(socket_folder, f"s{number}.sock")
        served = [os.fspath(one) for one in tables or (() if "config" in options else (table,))]
        command = [*wrapper, *ENGRAMD, "serve", *served, "--socket", path]
        if dram is not None:
            command += ["--dram", dram]
        for key, value in options.items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        log_path = tmp_path / f"daemon-{number}.log"
        notify_path = os.path.join(socket_folder, f"n{number}.sock")
        with open(log_path, "wb") as log, _datagram_listener(notify_path) as ready:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": notify_path, **(environment or {})},
                umask=umask,
                pass_fds=pass_fds,
            )
            daemon = Daemon(process, path, log_path)
            started.append(daemon)
            _wait_until_ready(daemon, ready)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.kill()
        print(f"--- log of the daemon at {daemon.socket} (status {daemon.process.returncode})\n{daemon.log}")
    for daemon in started:
        assert not any(report in daemon.log for report in REPORTS), daemon.log


@pytest.fixture
def reserve_port() -> Iterator[Callable[[], int]]:
    """`reserve_port()` is a port of the loopback interface for a daemon. It stays bound until the end, so that nobody
    else is given it; a daemon, which allows for reuse as this does, can listen there all the same."""
    bound: list[socket.socket] = []

    def reserve() -> int:
        bound.append(socket.socket())
        bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound[-1].bind(("127.0.0.1", 0))
        return int(bound[-1].getsockname()[1])

    yield reserve
    for one in bound:
        one.close()


class Tcp:
    """An address for a daemon's TCP endpoint, its keys, and those of one client that it lets in."""

    def __init__(self, folder: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.clients = folder / "clients"
        self.clients.mkdir(parents=True)
        self.daemon_keys, self.client_keys = folder / "daemon", self.clients / "client"
        for keys in (self.daemon_keys, self.client_keys):
            done = run_engramd("keygen", keys)
            assert done.returncode == 0, done.stderr

    @property
    def flags(self) -> dict[str, str]:
        """For start_daemon."""
        return {"tcp": self.address, "tcp_key": f"{self.daemon_keys}.key_secret", "tcp_clients": str(self.clients)}

    @property
    def curve(self) -> Any:
        """For engram_client.connect."""
        return engram_client.CurveKeys.from_files(f"{self.daemon_keys}.key", f"{self.client_keys}.key_secret")


@pytest.fixture
def tcp(tmp_path: Path, reserve_port: Callable[[], int]) -> Tcp:
    """See Tcp."""
    return Tcp(tmp_path / "tcp", reserve_port())


def _datagram_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(path)
    return listener


def _wait_until_ready(daemon: Daemon, ready: socket.socket) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if select.select([ready], [], [], 0.05)[0] and b"READY=1" in ready.recv(4096):
            return
        if daemon.process.poll() is not None:
            pytest.fail(f"the daemon ended with status {daemon.process.returncode}:\n{daemon.log}")
    pytest.fail(f"the daemon is not ready after {DEADLINE_S} s:\n{daemon.log}")


def fault_module() -> Path:
    """The module with the fault seam that was built beside the one in use."""
    build = "asan" if os.environ.get("ENGRAM_SANITIZE") == "address" else "release"
    folder = Path(os.environ.get("ENGRAM_FAULT_MODULE", CHECKOUT / "build" / build / "faults" / "engramd"))
    (module,) = folder.glob("_engine*.so")
    return module


@pytest.fixture(scope="session")
def fault_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: the package as it is, but with the module that injects faults."""
    root = tmp_path_factory.mktemp("fault-build")
    package = root / "engramd"
    package.mkdir()
    for entry in Path(engramd_package.__file__).parent.iterdir():
        if not entry.name.startswith(("_engine", "__pycache__")):
            (package / entry.name).symlink_to(entry)
    module = fault_module()
    (package / module.name).symlink_to(module)
    # An editable installation would come before PYTHONPATH.
    (root / "sitecustomize.py").write_text(
        'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]\n'
    )
    return root


@pytest.fixture
def faulty_daemon(start_daemon: Callable[..., Any], fault_path: Path) -> Callable[..., Any]:
    """`faulty_daemon(faults, *tables, **options)`: as start_daemon, with ENGRAMD_FAULTS=faults."""

    def start(faults: str, *tables: os.PathLike[str], **options: Any) -> Any:
        path = os.pathsep.join([os.fspath(fault_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "ENGRAMD_FAULTS": faults}
        return start_daemon(*tables, environment=environment, **options)

    return start


@pytest.fixture
def resident(start_daemon: Any, table: Path, tmp_path: Path) -> Callable[..., Any]:
    """`resident(layout="split")`: a daemon that holds the whole table in this layout."""

    def start(layout: str = "split") -> Any:
        config = tmp_path / f"{layout}.toml"
        config.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\nresident_layout = "{layout}"\n')
        return start_daemon(config=config, dram=None)

    return start


@pytest.fixture
def stats(engramd: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[Any], dict[str, Any]]:
    """`stats(daemon)`: its statistics."""

    def read(daemon: Any) -> dict[str, Any]:
        done = engramd("stats", "--socket", daemon.socket, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return read


@pytest.fixture(scope="session")
def rows(table: Path) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """All rows of the `table` fixture by layer, computed from the formula."""
    manifest = manifests.load(table)
    whole = {}
    for layer in manifest.layers:
        data = bytearray(layer.rows * manifest.row_bytes)
        synth_rows(SYNTH_SEED, layer.layer, 0, layer.rows, manifest.value_bytes, 0, manifest.row_bytes, data)
        whole[layer.layer] = np.frombuffer(data, np.uint8).reshape(layer.rows, manifest.row_bytes)
    return whole


@pytest.fixture
def connect() -> Iterator[Callable[..., engram_client.Client]]:
    """`connect(daemon, **options)`: a client that is closed at the end."""
    clients: list[engram_client.Client] = []

    def open_client(daemon: Any, **options: Any) -> engram_client.Client:
        clients.append(engram_client.connect(daemon.socket, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()
