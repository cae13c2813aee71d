"""Power loss at every step of a pack. The fault model: a machine that stops loses

* file content that was not synced: each block is the new or the old one, as chance has it, and a length likewise;
* names that were not synced: renames, links and removals happen in order, and those behind the last sync of their
  directory may or may not have happened (as a journalling file system does it);
* nothing else.

`PowerLossFiles` runs the pack on real files and keeps beside them what such a machine would still have.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from engramd.checkpoint.index import open_checkpoint
from engramd.checkpoint.mapping import TableSource, table_source
from engramd.errors import EngramdError
from engramd.table import manifest as manifests
from engramd.table.files import Files
from engramd.table.packer import pack
from engramd.table.verify import verify

BLOCK = 4096
Operation = tuple[str, str, str]  # (kind, path, other path or "")


class PowerLoss(BaseException):
    """The machine stopped."""


class NoSync(Files):
    """For the packs around the one that is watched: they always end, so nothing rests on their syncs."""

    def fsync(self, fd: int) -> None:
        pass

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class PowerLossFiles(Files):
    """Stops before step `stop_at`; `surviving` then builds what is left of the directory `root`."""

    def __init__(self, root: Path, stop_at: int, lost_syncs: str = "") -> None:
        super().__init__()
        self.root = str(root)
        self.stop_at = stop_at
        self.lost_syncs = lost_syncs  # "fdatasync", "fsync" or "directory": a sync that does nothing
        self.steps = 0
        self.lock = threading.Lock()
        self.operations: list[Operation] = []
        self.forced = 0  # operations that have surely happened
        self.inodes: dict[str, int] = {}  # path -> number of the file there
        self.synced: dict[int, bytes] = {}
        self.fds: dict[int, str] = {}
        self.before: dict[str, bytes | None] = {}
        for folder, _, names in os.walk(self.root):
            self.before[folder] = None
            for name in names:
                path = os.path.join(folder, name)
                self.before[path] = Path(path).read_bytes()

    def step(self) -> None:
        with self.lock:
            self.steps += 1
            if self.steps > self.stop_at:
                raise PowerLoss

    def log(self, kind: str, path: str, other: str = "") -> None:
        with self.lock:
            self.operations.append((kind, path, other))

    # Changes

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        if not path.startswith(self.root) or not flags & (os.O_WRONLY | os.O_RDWR):
            return super().open(path, flags, mode)
        self.step()
        new = not os.path.exists(path)
        fd = super().open(path, flags, mode)
        if new:
            self.inodes[path] = len(self.operations) + 1000
            self.synced[self.inodes[path]] = b""
            self.log("create", path)
        self.fds[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self.fds.pop(fd, None)
        super().close(fd)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self.step()
        return super().pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self.step()
        super().truncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        path = self.fds[fd]
        self.synced[self.inodes[path]] = Path(path).read_bytes()

    def fsync(self, fd: int) -> None:
        self.step()
        if self.lost_syncs != "fsync":
            self.sync(fd)

    def fdatasync(self, fd: int) -> None:
        self.step()
        if self.lost_syncs != "fdatasync":
            self.sync(fd)

    def sync_directory(self, path: str) -> None:
        self.step()
        if self.lost_syncs == "directory":
            return
        with self.lock:
            for number, (_, first, second) in enumerate(self.operations):
                if path in (os.path.dirname(first), os.path.dirname(second)):
                    self.forced = max(self.forced, number + 1)

    def rename(self, source: str, target: str) -> None:
        self.step()
        super().rename(source, target)
        self.log("rename", source, target)
        self.inodes[target] = self.inodes.pop(source)

    def unlink(self, path: str) -> None:
        self.step()
        super().unlink(path)
        self.log("unlink", path)
        self.inodes.pop(path, None)

    def mkdir(self, path: str) -> None:
        self.step()
        super().mkdir(path)
        self.log("mkdir", path)

    def rmdir(self, path: str) -> None:
        self.step()
        super().rmdir(path)
        self.log("rmdir", path)

    # What is left

    def surviving(self, target: Path, chance: random.Random) -> None:
        """Builds at `target` one of the states that the machine could come back with."""
        current = {number: Path(path).read_bytes() for path, number in self.inodes.items() if os.path.exists(path)}
        state = dict(self.before)
        numbers: dict[str, int] = {}
        happened = chance.randint(self.forced, len(self.operations))
        for position, (kind, path, other) in enumerate(self.operations[:happened]):
            if kind == "create":
                numbers[path] = position + 1000
                state[path] = None
            elif kind == "mkdir":
                state[path] = None
            elif kind == "rename":
                state[other] = state.pop(path)
                numbers.pop(other, None)
                if path in numbers:
                    numbers[other] = numbers.pop(path)
            else:
                del state[path]
                numbers.pop(path, None)
        for path, content in state.items():
            place = target / os.path.relpath(path, self.root)
            if path in numbers:
                synced = self.synced[numbers[path]]
                content = mixture(synced, current.get(numbers[path], synced), chance)
            if content is None:
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def mixture(old: bytes, new: bytes, chance: random.Random) -> bytes:
    """Some blocks of the old content and some of the new."""
    length = max(len(old), chance.choice((len(old), len(new))))
    blocks = []
    for at in range(0, length, BLOCK):
        block = chance.choice((old, new))[at : at + BLOCK]
        blocks.append(block.ljust(min(BLOCK, length - at), b"\0"))
    return b"".join(blocks)


def losses(source: TableSource, root: Path, generations: int, lost_syncs: str = "") -> int:
    """Packs onto `generations` older ones, stopping at each step in turn; returns the number of steps. Raises
    AssertionError where what survives is not the old table or the new one, or cannot be packed onto."""
    stop_at = 0
    while True:
        case = root / str(stop_at)
        table = case / "t"
        case.mkdir()
        for _ in range(generations):
            old = pack(source, str(table), files=NoSync())
        files = PowerLossFiles(case, stop_at, lost_syncs)
        try:
            whole = pack(source, str(table), files=files, sync_interval_s=0)
            assert whole.generation == generations + 1
            finished = True
        except PowerLoss:
            finished = False
        for seed in range(4):
            left = root / f"{stop_at}-{seed}"
            files.surviving(left, random.Random(seed))
            survivor = left / "t"
            if finished or (survivor / "manifest.json").exists():
                manifest = manifests.load(survivor)
                assert manifest.generation in (generations, generations + 1)
                assert manifest.generation == generations + 1 or not finished
                assert verify(manifest).bad_pages == 0
                assert not generations or manifest.identity == old.identity
            else:
                assert generations == 0, "the old generation is gone"
            again = pack(source, str(survivor), files=NoSync())
            assert verify(manifests.load(survivor), source).bad_pages == 0
            assert again.generation in (generations + 1, generations + 2)
        if finished:
            return files.steps
        stop_at += 1


@pytest.fixture
def small_source(tmp_path: Path) -> TableSource:
    """Three layers of one chunk each, of a few pages."""
    import json
    import struct

    path = tmp_path / "source"
    path.mkdir()
    rows, width = 60, 264
    header = {
        f"w.{layer}": {"dtype": "U8", "shape": [rows, width], "data_offsets": [at, at + rows * width]}
        for layer, at in ((0, 0), (1, rows * width), (2, 2 * rows * width))
    }
    text = json.dumps(header).encode()
    data = random.Random(1).randbytes(3 * rows * width)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    toml = "".join(f'[[layers]]\nlayer = {layer}\nvalue = "w.{layer}"\n' for layer in range(3))
    (path / "tensors.toml").write_text(toml)
    return table_source(open_checkpoint(str(path)), str(path / "tensors.toml"))


@pytest.mark.parametrize("generations", [0, 1])
def test_power_loss_at_every_step(small_source: TableSource, tmp_path: Path, generations: int) -> None:
    (tmp_path / "cases").mkdir()
    steps = losses(small_source, tmp_path / "cases", generations)
    assert steps > 40


@pytest.mark.parametrize("lost", ["fdatasync", "fsync", "directory"])
def test_each_kind_of_sync_is_needed(small_source: TableSource, tmp_path: Path, lost: str) -> None:
    """The fault model can tell: without one kind of sync something is lost."""

    def every_try() -> NoReturn:
        for generations in (0, 1):
            (tmp_path / f"cases-{generations}").mkdir()
            losses(small_source, tmp_path / f"cases-{generations}", generations, lost)
        pytest.fail(f"nothing is lost without {lost}")

    with pytest.raises((AssertionError, EngramdError)):
        every_try()
