"""A daemon for a measurement alone: `engramd serve` as a process of its own, on a socket nobody else knows."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engramd.cli.control_client import ControlClient
from engramd.errors import EngramdError

ENGRAMD = [sys.executable, "-m", "engramd.cli.main"]
START_DEADLINE_S = 120.0
RESIDENT_DEADLINE_S = 600.0
ANSWER_DEADLINE_S = 60.0  # a machine that loads a table at full speed answers late
STOP_DEADLINE_S = 60.0


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent(parent: int) -> None:
    """In the child: SIGTERM where the measuring process is killed, also when that has happened already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


class Daemon:
    """Serves one table, named `bench`; the end of the `with` block stops it. Raises EngramdError, with the last line
    of its log, where it does not start. ready_s: from its start to readiness."""

    def __init__(self, table: Path, dram_bytes: int, *options: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="engram-bench-")
        self.socket = os.path.join(self._folder, "s.sock")
        log = Path(self._folder, "log")
        command = [*ENGRAMD, "serve", f"bench={table}", "--socket", self.socket, "--dram", str(dram_bytes), *options]
        notify = os.path.join(self._folder, "n.sock")
        began = time.perf_counter()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, open(log, "wb") as stderr:
            manager.bind(notify)
            manager.settimeout(0.005)
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "NOTIFY_SOCKET": notify},
                stderr=stderr,
                preexec_fn=functools.partial(_end_with_parent, os.getpid()),
            )
            try:
                self._wait_until_ready(manager, log)
            except BaseException:
                self.close()
                raise
        self.ready_s = time.perf_counter() - began

    def _wait_until_ready(self, manager: socket.socket, log: Path) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            with suppress(TimeoutError):
                if b"READY=1" in manager.recv(4096):
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()
                raise EngramdError(
                    f"the daemon to measure with did not start: {said[-1] if said else 'no reason given'}"
                )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops it and removes what it left behind."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until_resident(self) -> None:
        """Returns once all rows are in DRAM. Raises EngramdError where that takes too long."""
        with ControlClient(self.socket, ANSWER_DEADLINE_S) as control:
            deadline = time.monotonic() + RESIDENT_DEADLINE_S
            while any(layer["tier"] != "resident" for layer in layers_of(control.ask("stats")["stats"])):
                if time.monotonic() > deadline:
                    raise EngramdError(f"the table is not resident after {RESIDENT_DEADLINE_S:.0f} s")
                time.sleep(0.05)


def layers_of(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """All layers of a daemon's statistics."""
    return [layer for table in stats["tables"] for layer in table["layers"]]


def total(stats: dict[str, Any], key: str) -> int:
    """A counter, added up over all layers."""
    return sum(int(layer[key]) for layer in layers_of(stats))
