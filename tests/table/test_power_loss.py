"""Power loss at every step of a pack. The fault model: a machine that stops loses

* file content that was not synced: each block is the new or the old one, as chance has it, and a length likewise;
* names that were not synced: of the changes in one directory those up to its last sync have happened, and of those
  behind it the first few, as chance has it, whatever happened in other directories. A rename is a change in each of its
  two, but no file leaves its old name before it has the new one. A directory whose own name is lost is lost with all
  that is in it;
* nothing else.

`PowerLossFiles` runs the pack on real files and keeps beside them what such a machine would still have.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from pathlib import Path

import pytest

from engramd.checkpoint.index import open_checkpoint
from engramd.checkpoint.mapping import TableSource, table_source
from engramd.errors import EngramdError
from engramd.table import files as files_module
from engramd.table import manifest as manifests
from engramd.table.files import Files
from engramd.table.journal import RECORD_BYTES
from engramd.table.packer import pack
from engramd.table.publish import DIGESTS_NAME, JOURNAL_NAME, PARTIAL
from engramd.table.verify import verify

BLOCK = 4096
DIRECTORY = 0
Operation = tuple[str, str, int]  # (kind: add, leave, remove, mkdir, rmdir; path; number of the file)


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


class Interrupted(NoSync):
    """Ends a pack just before it publishes."""

    def rename(self, source: str, target: str) -> None:
        if target.endswith(manifests.NAME):
            raise PowerLoss
        super().rename(source, target)


class PowerLossFiles(Files):
    """Stops before step `stop_at`; `surviving` then builds what is left of the directory `root`."""

    def __init__(self, root: Path, stop_at: int, lost_sync: str = "") -> None:
        super().__init__()
        self.root = str(root)
        self.stop_at = stop_at
        self.lost_sync = lost_sync  # the place of a sync that does nothing
        self.sync_places: set[str] = set()
        self.steps = 0
        self.lock = threading.Lock()
        self.operations: list[Operation] = []
        self.forced: dict[str, int] = {}  # directory -> operations of which those in it have surely happened
        self.inodes: dict[str, int] = {}  # path -> number of the file there
        self.synced: dict[int, bytes] = {}
        self.fds: dict[int, str] = {}
        for folder, _, names in os.walk(self.root):
            self.inodes[folder] = DIRECTORY
            for name in names:
                path = os.path.join(folder, name)
                self.inodes[path] = len(self.inodes)
                self.synced[self.inodes[path]] = Path(path).read_bytes()
        self.before = dict(self.inodes)
        self.current: dict[int, bytes] | None = None  # content of the files when the machine stopped

    def step(self) -> None:
        with self.lock:
            self.steps += 1
            if self.steps > self.stop_at:
                raise PowerLoss

    def log(self, kind: str, path: str, number: int = DIRECTORY) -> None:
        with self.lock:
            self.operations.append((kind, path, number))

    def does_sync(self, what: str) -> bool:
        """Notes a sync's place: the function that asks for it and what it syncs. Whether it is to happen."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in (__file__, files_module.__file__):
            assert frame.f_back is not None
            frame = frame.f_back
        place = f"{frame.f_code.co_name}: {what}"
        with self.lock:
            self.sync_places.add(place)
        return place != self.lost_sync

    # Changes

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        if not path.startswith(self.root) or not flags & (os.O_WRONLY | os.O_RDWR):
            return super().open(path, flags, mode)
        self.step()
        new = not os.path.exists(path)
        fd = super().open(path, flags, mode)
        if new:
            self.inodes[path] = 1_000_000 + len(self.operations)
            self.synced[self.inodes[path]] = b""
            self.log("add", path, self.inodes[path])
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
        name = os.path.basename(self.fds[fd])
        if self.does_sync("data" if name.endswith(".pages") else name):
            self.sync(fd)

    fdatasync = fsync

    def sync_directory(self, path: str) -> None:
        self.step()
        if self.does_sync("directory"):
            with self.lock:
                self.forced[path] = len(self.operations)

    def rename(self, source: str, target: str) -> None:
        self.step()
        super().rename(source, target)
        number = self.inodes.pop(source)
        self.inodes[target] = number
        self.log("add", target, number)
        self.log("leave", source, number)

    def unlink(self, path: str) -> None:
        self.step()
        super().unlink(path)
        self.log("remove", path, self.inodes.pop(path))

    def mkdir(self, path: str) -> None:
        self.step()
        super().mkdir(path)
        self.inodes[path] = DIRECTORY
        self.log("mkdir", path)

    def rmdir(self, path: str) -> None:
        self.step()
        super().rmdir(path)
        del self.inodes[path]
        self.log("rmdir", path)

    # What is left

    def vouched_for(self) -> int:
        """Chunks whose records are durable: a pack that goes on need not make them again."""
        counts = [durable_records(self.synced[number]) for path, number in self.inodes.items() if is_digests(path)]
        return max(counts, default=0)

    def surviving(self, target: Path, chance: random.Random) -> None:
        """Builds at `target` one of the states that the machine could come back with."""
        if self.current is None:
            self.current = {n: Path(path).read_bytes() for path, n in self.inodes.items() if n != DIRECTORY}
        current, state = self.current, dict(self.before)
        keeps = chance.choice((0.0, 0.5, 0.9, 1.0))  # how far what was not synced has come
        lost: set[str] = set()  # directories whose further changes have not happened
        renamed = True  # whether the last add has happened, which a rename's other half waits for
        for position, (kind, path, number) in enumerate(self.operations):
            folder = os.path.dirname(path)
            if position >= self.forced.get(folder, 0) and (folder in lost or chance.random() >= keeps):
                lost.add(folder)
                renamed = renamed and kind != "add"
            elif kind in ("add", "mkdir"):
                state[path] = number
                renamed = True
            elif kind == "leave" and not renamed:
                continue
            elif state.get(path) == number:
                del state[path]
        for path in sorted(state):
            place = target / os.path.relpath(path, self.root)
            if path != self.root and os.path.dirname(path) not in state:
                del state[path]  # its directory is lost
            elif state[path] == DIRECTORY:
                place.mkdir()
            else:
                synced = self.synced[state[path]]
                place.write_bytes(mixture(synced, current.get(state[path], synced), chance))


def is_digests(path: str) -> bool:
    return os.path.basename(path) == DIGESTS_NAME


def durable_records(content: bytes) -> int:
    return sum(any(content[at : at + RECORD_BYTES]) for at in range(0, len(content), RECORD_BYTES))


def mixture(old: bytes, new: bytes, chance: random.Random) -> bytes:
    """Some blocks of the old content and some of the new."""
    length = max(len(old), chance.choice((len(old), len(new))))
    blocks = []
    for at in range(0, length, BLOCK):
        block = chance.choice((old, new))[at : at + BLOCK]
        blocks.append(block.ljust(min(BLOCK, length - at), b"\0"))
    return b"".join(blocks)


def is_published(table: Path, generation: int) -> bool:
    return (table / manifests.NAME).exists() and manifests.load(table).generation == generation


def losses(
    source: TableSource,
    root: Path,
    generations: int,
    lost_sync: str = "",
    restart: bool = False,
    striped: bool = False,
) -> int:
    """Packs onto `generations` older ones, stopping at each step in turn; returns the number of steps. With `restart`
    there is an interrupted pack to be given up first; with `striped` data files lie in two other directories. Raises
    AssertionError where what survives is not the old table or the new one, or cannot be packed onto."""
    stop_at = 0
    while True:
        case = root / str(stop_at)
        table = case / "t"
        case.mkdir()
        stripes = [str(case / name) for name in ("a", "b")] if striped else None
        for stripe in stripes or ():
            os.mkdir(stripe)
        for _ in range(generations):
            old = pack(source, str(table), files=NoSync(), stripes=stripes)
        if restart:
            with pytest.raises(PowerLoss):
                pack(source, str(table), files=Interrupted(), stripes=stripes)
        files = PowerLossFiles(case, stop_at, lost_sync)
        try:
            whole = pack(source, str(table), files=files, sync_interval_s=0, restart=restart, stripes=stripes)
            assert whole.generation == generations + 1
            finished = True
        except PowerLoss:
            finished = False
        vouched_for = 0 if restart else files.vouched_for()
        for seed in range(4):
            left = root / f"{stop_at}-{seed}"
            files.surviving(left, random.Random(seed))
            # At its old place, since stripes have absolute paths.
            shutil.rmtree(case)
            left.rename(case)
            survivor = table
            if finished or (survivor / "manifest.json").exists():
                manifest = manifests.load(survivor)
                assert manifest.generation in (generations, generations + 1)
                assert manifest.generation == generations + 1 or not finished
                assert verify(manifest).bad_pages == 0
                assert not generations or manifest.identity == old.identity
            else:
                assert generations == 0, "the old generation is gone"
            if vouched_for and not (finished or is_published(survivor, generations + 1)):
                # Work that was called durable is not done again.
                assert (survivor / PARTIAL / JOURNAL_NAME).exists()
                assert durable_records((survivor / PARTIAL / DIGESTS_NAME).read_bytes()) >= vouched_for
            again = pack(source, str(survivor), files=NoSync(), stripes=stripes)
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


@pytest.mark.parametrize(("generations", "restart", "striped"), [(0, False, False), (0, True, False), (1, False, True)])
def test_power_loss_at_every_step(
    small_source: TableSource, tmp_path: Path, generations: int, restart: bool, striped: bool
) -> None:
    (tmp_path / "cases").mkdir()
    steps = losses(small_source, tmp_path / "cases", generations, restart=restart, striped=striped)
    assert steps > 40


NEEDED_SYNCS = (
    "__enter__: directory",
    "begin: journal.json.new",
    "begin: directory",
    "_sync_folders: directory",
    "sync_data: data",
    "sync: digests.bin",
    "publish: manifest.json",
    "publish: directory",
    "discard: directory",
)
# Without one of these nothing is lost that this fault model knows of.
SPARE_SYNCS = (
    "begin: digests.bin",  # its zeros say the same as an empty file; the sync finds a full drive early
    "publish: data",  # durable since its chunks were written, unless something else has changed the file's length
)


@pytest.mark.parametrize("place", NEEDED_SYNCS)
def test_each_sync_is_needed(small_source: TableSource, tmp_path: Path, place: str) -> None:
    """The fault model can tell: leave any one out and something is lost."""
    with pytest.raises((AssertionError, EngramdError)):
        losses(small_source, tmp_path, 0, place, restart=place.startswith("discard"))


def test_all_syncs_are_known(small_source: TableSource, tmp_path: Path) -> None:
    """A new one belongs into one of the two lists."""
    with pytest.raises(PowerLoss):
        pack(small_source, str(tmp_path / "again"), files=Interrupted())
    places: set[str] = set()
    for name in ("fresh", "again"):
        files = PowerLossFiles(tmp_path, 1_000_000)
        pack(small_source, str(tmp_path / name), files=files, sync_interval_s=0, restart=name == "again")
        places |= files.sync_places
    assert places == {*NEEDED_SYNCS, *SPARE_SYNCS}
