"""What the tests of packing share: small checkpoints to damage."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engramd.synth.checkpoint import write_checkpoint

TINY_VOCAB_SIZE = 50


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """Writes a safetensors file with any header, also a wrong one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint of a megabyte. Not to be changed."""
    path = tmp_path_factory.mktemp("tiny") / "source"
    write_checkpoint(os.fspath(path), TINY_VOCAB_SIZE, 3)
    return path


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_source` that a test may damage."""
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_source, path)
    return path


@pytest.fixture
def edit_header(tiny: Path) -> Callable[[int, Callable[[dict[str, Any]], None]], None]:
    """`edit_header(47, change)` lets `change` edit the header of a shard of `tiny` in place."""

    def edit(number: int, change: Callable[[dict[str, Any]], None]) -> None:
        path = tiny / f"model-{number:05}-of-000048.safetensors"
        header, data = read_shard(path)
        change(header)
        write_shard(path, header, data)

    return edit
