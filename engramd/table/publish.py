"""How a generation appears: names of data files, the lock, the work folder, and the order of syncs and renames.

docs/table_format.md, "How a generation appears", is the contract. At every moment the table shows its old generation,
none, or the whole new one.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engramd.errors import EngramdError
from engramd.table import manifest as manifests
from engramd.table.files import Files
from engramd.table.geometry import MAX_FILES, Striping
from engramd.table.manifest import DataFile, Manifest

PARTIAL = ".partial"
JOURNAL_NAME = "journal.json"
DIGESTS_NAME = "digests.bin"
UNFINISHED = ".unfinished"
_OWN_NAME = re.compile(r"layer-[0-9]+\.g[0-9]{6,}(\.s[0-9]+)?\.pages", re.ASCII)


@dataclass(frozen=True)
class PlannedFile:
    """A data file of the generation in work: where it is written, where it ends up, its name in the manifest."""

    work_path: str
    data_file: DataFile


def plan_files(
    directory: str, table_id: bytes, generation: int, layer: int, pages: int, striping: Striping, stripes: Sequence[str]
) -> list[PlannedFile]:
    """The data files of one layer: one in the table's own directory, or one in each of the stripe directories."""
    stem = f"layer-{layer}.g{generation:06}"
    if not stripes:
        name = stem + ".pages"
        found = DataFile(name, os.path.join(directory, name), striping.file_bytes(pages, 0))
        return [PlannedFile(os.path.join(directory, PARTIAL, name), found)]
    planned = []
    for index, stripe in enumerate(stripes):
        # Other tables may lie on the same drives, so the name says whose it is.
        path = os.path.join(stripe, f"engram-{table_id.hex()}.{stem}.s{index}.pages")
        planned.append(PlannedFile(path + UNFINISHED, DataFile(path, path, striping.file_bytes(pages, index))))
    return planned


def check_stripes(stripes: Sequence[str]) -> tuple[str, ...]:
    """Absolute stripe directories; raises EngramdError where one is missing, named twice, or there are too many."""
    if len(stripes) > MAX_FILES:
        raise EngramdError(f"--stripe names {len(stripes)} directories (the limit is {MAX_FILES})")
    found: list[str] = []
    for stripe in stripes:
        path = os.path.realpath(stripe)
        if not os.path.isdir(path):
            raise EngramdError(f"--stripe {stripe}: not a directory")
        if path in found:
            raise EngramdError(f"--stripe {stripe}: named twice")
        if not manifests.is_safe_path(path):
            raise EngramdError(f"--stripe {stripe}: a path with such characters cannot be written in a manifest")
        found.append(path)
    return tuple(found)


def now() -> str:
    """The time as manifests write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class TableDirectory:
    """The directory TABLE, held by an exclusive lock while a generation is made. A context manager.

    `published` is the manifest that is there, or None. Raises EngramdError where another pack holds the lock, or the
    directory holds something that is no table.
    """

    def __init__(self, directory: str, files: Files) -> None:
        self.path = os.path.abspath(directory)
        self.partial = os.path.join(self.path, PARTIAL)
        self.published: Manifest | None = None
        self._files = files
        self._lock_fd = -1
        self._created = False

    def __enter__(self) -> TableDirectory:
        parent = os.path.dirname(self.path)
        if not os.path.isdir(self.path):
            if os.path.lexists(self.path):
                raise EngramdError(f"{self.path}: not a directory")
            if not os.path.isdir(parent):
                raise EngramdError(f"{self.path}: cannot be made: {parent} is not a directory")
            self._files.mkdir(self.path)
            self._files.sync_directory(parent)
            self._created = True
        self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EngramdError(f"{self.path}: another pack is at work on this table; wait for it to end") from None
            names = set(os.listdir(self.path))
            if manifests.NAME in names:
                self.published = manifests.load(self.path, check_files=False)
            else:
                strange = sorted(name for name in names - {PARTIAL, "lost+found"} if not _OWN_NAME.fullmatch(name))
                if strange:
                    raise EngramdError(
                        f"{self.path}: not a packed table, and not empty (it holds {strange[0]!r}): "
                        "name a new directory"
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._created and not os.listdir(self.path):
            self._files.rmdir(self.path)  # refused before anything was written
        os.close(self._lock_fd)

    @property
    def next_generation(self) -> int:
        return self.published.generation + 1 if self.published else 1

    def begin(self, planned: Sequence[PlannedFile], journal: bytes, digests_bytes: int = 0) -> None:
        """Makes a fresh work folder. The journal appears last, so a folder without one holds nothing to go on with.

        The room for the digests is taken at once: where a drive fills up later, finished chunks can still be recorded.
        """
        files = self._files
        files.mkdir(self.partial)
        for file in planned:
            files.close(files.open(file.work_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        files.write_file(os.path.join(self.partial, DIGESTS_NAME), bytes(digests_bytes))
        self._sync_folders(planned)
        files.write_file(os.path.join(self.partial, JOURNAL_NAME + ".new"), journal)
        files.rename(os.path.join(self.partial, JOURNAL_NAME + ".new"), os.path.join(self.partial, JOURNAL_NAME))
        files.sync_directory(self.partial)

    def discard(self, planned: Iterable[PlannedFile] = ()) -> None:
        """Removes the work folder, unfinished stripes (`planned`) and data files that no manifest names."""
        files = self._files
        if os.path.isdir(self.partial):
            journal = os.path.join(self.partial, JOURNAL_NAME)
            if os.path.lexists(journal):
                # Its end is durable before the files that it vouches for go.
                files.unlink(journal)
                files.sync_directory(self.partial)
            for name in os.listdir(self.partial):
                files.unlink(os.path.join(self.partial, name))
            files.rmdir(self.partial)
        kept = {file.path for layer in self.published.layers for file in layer.files} if self.published else set()
        unfinished = list(planned)
        doomed = [file.work_path for file in unfinished] + [file.data_file.path for file in unfinished]
        doomed += [os.path.join(self.path, name) for name in os.listdir(self.path) if _OWN_NAME.fullmatch(name)]
        for path in dict.fromkeys(doomed):
            if path not in kept and os.path.lexists(path):
                files.unlink(path)

    def publish(self, planned: Sequence[PlannedFile], manifest: Manifest) -> None:
        """Makes the finished generation the table's. Every data file is complete; this may be a second try."""
        files = self._files
        data = manifests.serialize(manifest)
        for file in planned:
            if not os.path.exists(file.work_path):
                continue  # renamed by an earlier try
            fd = files.open(file.work_path, os.O_RDWR)
            try:
                files.truncate(fd, file.data_file.bytes)
                files.fsync(fd)
            finally:
                files.close(fd)
            files.rename(file.work_path, file.data_file.path)
        self._sync_folders(planned)
        manifests.check_data_files(manifest)
        work = os.path.join(self.partial, manifests.NAME)
        files.write_file(work, data)
        files.rename(work, os.path.join(self.path, manifests.NAME))
        files.sync_directory(self.path)
        before, self.published = self.published, manifest
        self.discard()
        if before is not None:
            self._remove_old_stripes(before)

    def _remove_old_stripes(self, before: Manifest) -> None:
        """Removes the previous generation's files outside TABLE. Only names that pack itself gives are touched,
        whatever the old manifest says."""
        assert self.published is not None
        kept = {file.path for layer in self.published.layers for file in layer.files}
        prefix = f"engram-{before.table_id.hex()}."
        for layer in before.layers:
            for file in layer.files:
                name = os.path.basename(file.path)
                if file.path in kept or not name.startswith(prefix) or not _OWN_NAME.fullmatch(name[len(prefix) :]):
                    continue
                if os.path.lexists(file.path):
                    self._files.unlink(file.path)

    def _sync_folders(self, planned: Iterable[PlannedFile]) -> None:
        folders = {self.path, self.partial}
        for file in planned:
            folders |= {os.path.dirname(file.work_path), os.path.dirname(file.data_file.path)}
        for folder in sorted(folders):
            self._files.sync_directory(folder)
