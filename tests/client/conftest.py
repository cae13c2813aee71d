"""What the client's tests share: an oracle of the rows, further tables, and clients over both transports.

The oracle computes the rows of `engramd synth` from their written-down formula; it shares no code with the project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

MIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
VALUE_BYTES, SCALE_BYTES = 256, 8
ROW_BYTES = VALUE_BYTES + SCALE_BYTES


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * MIX_FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * MIX_FACTORS[1]
    return z ^ (z >> np.uint64(31))


def synthetic_rows(ids: ArrayLike, layer: int, seed: int = 7) -> NDArray[np.uint8]:
    """Rows of the checkpoint with this seed, uint8 [*S, 264]; zeros for -1."""
    shape = np.shape(ids)
    flat = np.asarray(ids, np.int64).reshape(-1)
    start = np.array([seed], np.uint64) + GOLDEN
    base = _mix(_mix(_mix(start) + np.uint64(layer) + GOLDEN) + flat.astype(np.uint64) + GOLDEN)
    words = _mix(base[:, None] + np.arange(1, ROW_BYTES // 8 + 1, dtype=np.uint64) * GOLDEN)
    rows = words.astype("<u8").view(np.uint8).reshape(-1, ROW_BYTES)
    values, scales = rows[:, :VALUE_BYTES], rows[:, VALUE_BYTES:]
    values[(values & 0x7F) == 0x7F] &= 0xBF
    scales[:] = 107 + scales % 21
    rows[flat == -1] = 0
    return rows.reshape(*shape, ROW_BYTES)


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., NDArray[np.uint8]]:
    """`rows_of(ids, layer, seed=7)`: the oracle."""
    return synthetic_rows


@pytest.fixture(scope="session")
def make_table(engramd: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """`make_table(vocab_size, seed)`: the path of a packed table, made once."""
    made: dict[tuple[int, int], Path] = {}

    def make(vocab_size: int, seed: int) -> Path:
        if (vocab_size, seed) not in made:
            folder = tmp_path_factory.mktemp("other")
            for command in (
                ("synth", folder / "source", "--vocab-size", str(vocab_size), "--seed", str(seed)),
                ("pack", folder / "source", folder / "demo"),
            ):
                done = engramd(*command, timeout_s=120)
                assert done.returncode == 0, done.stderr
            made[vocab_size, seed] = folder / "demo"
        return made[vocab_size, seed]

    return make


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """`connect(daemon or target, **options)`; what it opened is closed at the end."""
    clients: list[engram_client.Client] = []

    def open_client(target: Any, **options: Any) -> engram_client.Client:
        client = engram_client.connect(getattr(target, "socket", target), **options)
        clients.append(client)
        return client

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture(params=["ring", "control"])
def client(request: pytest.FixtureRequest, start_daemon: Any, connect: Any) -> engram_client.Client:
    """A client of a fresh daemon, over each transport."""
    daemon = start_daemon()
    made: engram_client.Client = connect(daemon if request.param == "ring" else f"ipc-control:{daemon.socket}")
    return made
