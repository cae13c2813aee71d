"""Requests to a real daemon for the tests of views, metrics and configuration."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest

from engramd.config import Flags, settings_from
from engramd.errors import EngramdError


class Load:
    """A random workload through a client, and what it must have counted to."""

    def __init__(self, path: str, seed: int) -> None:
        self.rows = self.requests = self.refused = self.zero = 0
        self._random = random.Random(seed)
        self.client = engram_client.connect(path)
        self._tables = [self.client.table(layer=layer) for layer in (1, 14)]

    def run(self, requests: int) -> None:
        """Fetches batches of all size classes, some with padding, some refused."""
        for _ in range(requests):
            table = self._random.choice(self._tables)
            count = self._random.choice([1, 48, 300, 3072, 5000])
            ids = np.array([self._random.randrange(-1, table.num_rows) for _ in range(count)])
            if self._random.random() < 0.1:
                ids[self._random.randrange(count)] = table.num_rows
                with pytest.raises(engram_client.RowIdError):
                    table.fetch(ids)
                self.refused += 1
                continue
            assert table.fetch(ids).shape == (count, table.row_bytes)
            self.requests += 1
            self.rows += count
            self.zero += int((ids == -1).sum())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fetches in the background for as long as the block lasts."""
        done = threading.Event()

        def run() -> None:
            while not done.is_set():
                self.run(1)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        done.set()
        thread.join()

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def load() -> Any:
    """`load(daemon, seed=0)` makes a Load."""
    made: list[Load] = []

    def make(daemon: Any, seed: int = 0) -> Load:
        made.append(Load(daemon.socket, seed))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def mistake_of(tmp_path: Path) -> Callable[[str], str]:
    """`mistake_of(text)`: what the daemon says of a configuration file of that content, which it refuses."""

    def refused(text: str) -> str:
        path = tmp_path / "engramd.toml"
        path.write_text(text)
        with pytest.raises(EngramdError) as caught:
            settings_from(Flags(config=str(path)))
        return str(caught.value)

    return refused
