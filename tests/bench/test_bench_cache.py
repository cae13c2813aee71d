"""engramd bench cache: the hits of the row cache's own policy code, without rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest


def bench_cache(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engramd.cli.main", "bench", "cache", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def hits_of(folder: Path, ids: npt.NDArray[Any], dram: str) -> dict[str, Any]:
    np.save(folder / "ids.npy", ids)
    done = bench_cache("--ids", str(folder / "ids.npy"), "--dram", dram, "--json")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert isinstance(fields, dict)
    return fields


def test_with_room_for_all_only_first_requests_miss(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 5000, (3000, 2, 24), dtype=np.int32)
    ids[::7, :, 3] = -1
    distinct = sum(len(np.unique(layer[layer >= 0])) for layer in (ids[:, 0], ids[:, 1]))
    fields = hits_of(tmp_path, ids, str(264 * 20_000))
    asked = int(np.count_nonzero(ids >= 0))
    assert fields["capacity_rows"] == 20_000
    assert fields["requests"] == asked
    # The index gives up a row now and then where both places for its key are full.
    assert asked - distinct - 10 <= fields["hits"] <= asked - distinct
    assert fields["hit_ratio"] == pytest.approx(fields["hits"] / asked)


def test_layers_do_not_share_rows(tmp_path: Path) -> None:
    same = np.arange(100, dtype=np.int32).reshape(1, 1, 100).repeat(2, axis=1)
    assert hits_of(tmp_path, same, "1MiB")["hits"] == 0
    assert hits_of(tmp_path, same.reshape(200), "1MiB")["hits"] == 100


def test_a_small_cache_keeps_what_is_hot_through_a_scan(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    hot = rng.integers(0, 300, 40_000)
    once = np.arange(1_000_000, 1_040_000)
    fields = hits_of(tmp_path, np.stack([hot, once], axis=1), str(264 * 1000))
    # Every second request is for a row that never returns; a cache without a policy would still hit most hot rows, so
    # the bar is what room for the hot rows alone would give, less a few per cent.
    assert fields["hits"] > 0.97 * (40_000 - 300)
    assert fields["second_half_hits"] > 0.99 * 20_000


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (np.zeros((2, 2), np.float32), "row ids are integers"),
        (np.zeros((1, 1, 1, 1), np.int32), "row ids are integers"),
        (np.full((1, 2, 1), 1 << 40), "out of range"),
        (b"not an array", "not a whole .npy file"),
        (None, "ids.npy: cannot be read: No such file"),
    ],
)
def test_what_is_no_array_of_ids_is_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "ids.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    done = bench_cache("--ids", str(path), "--dram", "1MiB")
    assert done.returncode == 1
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_room_is_no_hits(tmp_path: Path) -> None:
    for dram in ("0", "263"):
        fields = hits_of(tmp_path, np.zeros(100, np.int64), dram)
        assert (fields["capacity_rows"], fields["requests"], fields["hits"]) == (0, 100, 0)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    for name, content in (("config.toml", b"dram = 5\n"), ("cut.npy", b"\x93NUMPY\x01"), ("empty.npy", b"")):
        (tmp_path / name).write_bytes(content)
        done = bench_cache("--ids", str(tmp_path / name), "--dram", "1MiB")
        assert done.returncode == 1
        assert "not a whole .npy file of integers: save the row ids with numpy.save" in done.stderr
        assert "pickle" not in done.stderr
