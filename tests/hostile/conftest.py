"""Bystanders and measures for tests with hostile clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 60.0


class Victim:
    """An honest client in a process of its own, which compares every row it gets."""

    def __init__(self, socket_path: str, table: Path) -> None:
        command = [sys.executable, str(HERE / "victim.py"), socket_path, str(table / "layer-1.g000001.pages"), "1"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def latencies_us(self) -> dict[str, float]:
        """count, p50, p99, worst, wrong since the last call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the honest client has died"
        return dict(json.loads(line))

    def end(self) -> None:
        """Raises where a row was wrong, or the client has died."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(DEADLINE_S) == 0


@pytest.fixture
def victim() -> Iterator[Callable[[Any, Path], Victim]]:
    """`victim(daemon, table)` starts an honest client."""
    started: list[Victim] = []

    def start(daemon: Any, table: Path) -> Victim:
        started.append(Victim(daemon.socket, table))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(DEADLINE_S)


class Level:
    """What a daemon holds: descriptors, memory, arenas."""

    def __init__(self, daemon: Any, engramd: Callable[..., Any]) -> None:
        self._daemon = daemon
        self._engramd = engramd

    def arenas(self) -> int:
        done = self._engramd("stats", "--socket", self._daemon.socket, "--json")
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["arenas"]["count"])

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._daemon.pid}/fd"))

    def memory(self) -> dict[str, int]:
        """Resident bytes by kind."""
        text = Path(f"/proc/{self._daemon.pid}/status").read_text()
        found = dict(line.split(":", 1) for line in text.splitlines())
        return {kind: int(found[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem")}

    def wait_for(self, arenas: int, descriptors: int) -> None:
        """Returns once the daemon holds no more than this."""
        end = time.monotonic() + DEADLINE_S
        while (self.arenas(), self.descriptors()) > (arenas, descriptors) or self.descriptors() > descriptors:
            assert time.monotonic() < end, (
                f"{self.arenas()} arenas and {self.descriptors()} descriptors are left, not {arenas} and {descriptors}"
            )
            time.sleep(0.1)


@pytest.fixture
def level(engramd: Callable[..., Any]) -> Callable[[Any], Level]:
    """`level(daemon)`: what it holds now."""
    return lambda daemon: Level(daemon, engramd)
