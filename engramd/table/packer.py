"""Packing: a checkpoint's rows into the next generation of a table.

Three threads: one reads source chunks ahead, the caller's digests and interleaves them, one writes pages behind and
keeps the journal. All three spend their time in calls that release the interpreter lock. Memory is a few chunks,
whatever the table's size. Killed at any moment, the next run goes on behind the last durable chunk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from engramd import strict_json
from engramd.checkpoint.mapping import TableSource
from engramd.errors import EngramdError
from engramd.progress import Progress
from engramd.sizes import format_size
from engramd.table.chunk_writer import ChunkWriter, LayerPlan, WriteSlot, try_sync
from engramd.table.codec import PageFormat
from engramd.table.files import Files, aligned_buffer, explain
from engramd.table.geometry import Chunk, Geometry, Striping
from engramd.table.identity import identity_of, parts_of
from engramd.table.journal import RECORD_BYTES, DigestLog, Journal, read_digests, read_journal
from engramd.table.manifest import NAME as MANIFEST_NAME
from engramd.table.manifest import Layer, Manifest, Source
from engramd.table.pipeline import WriteBehind, read_ahead
from engramd.table.publish import (
    DIGESTS_NAME,
    JOURNAL_NAME,
    PARTIAL,
    PlannedFile,
    TableDirectory,
    check_stripes,
    now,
    plan_files,
)
from engramd.table.source_reader import SourceReader, SourceSlot

READ_SLOTS = 3
WRITE_SLOTS = 3
SYNC_INTERVAL_S = 2.0
SPARE_BYTES = 1 << 20  # for the manifest, the journal and directories


def pack(
    source: TableSource,
    table: str,
    *,
    restart: bool = False,
    stripes: Sequence[str] | None = None,
    files: Files | None = None,
    sync_interval_s: float = SYNC_INTERVAL_S,
    progress_label: str = "packing",
) -> Manifest:
    """Packs `source` as the next generation of the table at `table`, going on with an interrupted pack of the same
    source unless `restart`. Returns the published manifest. Raises EngramdError; the old generation is then
    untouched."""
    packer = _Packer(source, files or Files(), sync_interval_s, progress_label)
    try:
        with TableDirectory(table, packer.files) as directory:
            return packer.run(directory, restart, None if stripes is None else check_stripes(stripes))
    except OSError as error:
        raise explain(error, os.path.abspath(table), "packing failed", _way_on(table)) from None


def _way_on(table: str) -> str:
    """What a person can do after a pack has failed, by what it has left behind."""
    untouched = "the older generation is untouched; " if os.path.exists(os.path.join(table, MANIFEST_NAME)) else ""
    goes_on = " to go on" if os.path.exists(os.path.join(table, PARTIAL, JOURNAL_NAME)) else ""
    return f"{untouched}once that is settled, run the same command again{goes_on}"


class _Packer:
    def __init__(self, source: TableSource, files: Files, sync_interval_s: float, label: str) -> None:
        self.source = source
        self.files = files
        self.shape = Geometry(source.row_bytes)
        self.sync_interval_s = sync_interval_s
        self.label = label
        self.chunk_count = sum(self.shape.chunk_count(layer.rows) for layer in source.layers)

    # The plan

    def striping(self, stripes: Sequence[str]) -> Striping:
        # One chunk is one stripe: it is written by one call to one file.
        return Striping(max(1, len(stripes)), self.shape.chunk_pages, self.shape.page_bytes)

    def plan(self, directory: TableDirectory, journal: Journal) -> list[LayerPlan]:
        striping = self.striping(journal.stripes)
        plans = []
        for layer in self.source.layers:
            pages = self.shape.pages(layer.rows)
            planned = plan_files(
                directory.path, journal.table_id, journal.generation, layer.layer, pages, striping, journal.stripes
            )
            page_format = PageFormat(
                journal.table_id,
                journal.generation,
                layer.layer,
                layer.rows,
                self.source.row_bytes,
                layer.value.row_bytes,
            )
            plans.append(LayerPlan(layer, page_format, tuple(planned), pages))
        return plans

    # The run

    def run(self, directory: TableDirectory, restart: bool, stripes: tuple[str, ...] | None) -> Manifest:
        journal, digests = self.resumable(directory, restart, stripes)
        fresh = journal is None
        if journal is None:
            journal = Journal(
                pack_id=secrets.token_bytes(16),
                table_id=directory.published.table_id if directory.published else secrets.token_bytes(16),
                generation=directory.next_generation,
                stripes=stripes or (),
                source=self.source.fingerprint(),
            )
        plans = self.plan(directory, journal)
        planned = [file for plan in plans for file in plan.files]
        self.check_space(directory, planned)
        if fresh:
            directory.begin(planned, journal.to_json(), RECORD_BYTES * self.chunk_count)
        digests = self.write(directory, journal, plans, digests)
        self.source.check_unchanged()
        manifest = self.manifest(directory, journal, plans, digests)
        directory.publish(planned, manifest)
        return manifest

    def resumable(
        self, directory: TableDirectory, restart: bool, stripes: tuple[str, ...] | None
    ) -> tuple[Journal | None, list[bytes]]:
        """The journal and digests to go on with; (None, []) with the ground cleared where there is none.

        Raises EngramdError where the work folder is of another source or other options, unless `restart`."""
        path = os.path.join(directory.partial, JOURNAL_NAME)
        try:
            journal = read_journal(path)
        except EngramdError:
            if not restart:
                raise
            journal = None
        if journal is not None:
            current = journal.generation == directory.next_generation and (
                directory.published is None or directory.published.table_id == journal.table_id
            )
            if current and not restart:
                self.check_same_source(directory, journal, stripes)
                digests = self.durable_digests(directory, journal)
                self.files.notify(
                    f"going on with an interrupted pack: {len(digests)} of {self.chunk_count} chunks are there"
                )
                return journal, digests
            # Another try's, or what a pack left that was killed after it had published.
            directory.discard(self.planned_of(directory, journal))
        directory.discard()
        return None, []

    def planned_of(self, directory: TableDirectory, journal: Journal) -> list[PlannedFile]:
        """The stripes of a journal that is given up."""
        if not journal.stripes:
            return []
        striping = self.striping(journal.stripes)
        layers = {entry[0] for entry in journal.source.get("layers", []) if isinstance(entry, list) and entry}
        return [
            file
            for layer in sorted(layer for layer in layers if type(layer) is int)
            for file in plan_files(
                directory.path, journal.table_id, journal.generation, layer, 0, striping, journal.stripes
            )
        ]

    def check_same_source(self, directory: TableDirectory, journal: Journal, stripes: tuple[str, ...] | None) -> None:
        if journal.source != strict_json.loads(strict_json.canonical(self.source.fingerprint()), "fingerprint"):
            raise EngramdError(
                f"{directory.partial} holds a pack in progress of another source ({self.difference(journal)}): "
                "it cannot go on; `engramd pack --restart` gives it up and begins anew"
            )
        if stripes is not None and stripes != journal.stripes:
            raise EngramdError(
                f"{directory.partial} holds a pack in progress with --stripe {','.join(journal.stripes) or '(none)'}, "
                f"not {','.join(stripes)}: give the same, or give it up with --restart"
            )

    def difference(self, journal: Journal) -> str:
        before: dict[Any, Any] = {}
        for entry in journal.source.get("shards", []):
            if isinstance(entry, list) and entry:
                before[str(entry[0])] = entry
        for shard in self.source.fingerprint()["shards"]:
            was = before.get(shard[0])
            if was != shard:
                names = ("name", "size", "mtime", "header")
                what = [name for name, a, b in zip(names, was or [], shard, strict=False) if a != b]
                return f"{shard[0]} {'has another ' + ' and '.join(what) if was else 'is new'}"
        return "other tensors, layers or config"

    def durable_digests(self, directory: TableDirectory, journal: Journal) -> list[bytes]:
        path = os.path.join(directory.partial, DIGESTS_NAME)
        digests = read_digests(path, journal.pack_id, self.chunk_count)
        striping = self.striping(journal.stripes)
        for plan, chunk in itertools.islice(self.chunks(self.plan(directory, journal)), len(digests)):
            for extent in striping.extents(chunk.first_page, chunk.pages):
                file = plan.files[extent.file_index]
                path = file.work_path if os.path.exists(file.work_path) else file.data_file.path
                size = os.path.getsize(path) if os.path.exists(path) else 0
                if size < extent.offset + extent.pages * self.shape.page_bytes:
                    raise EngramdError(
                        f"{path}: {size} bytes, shorter than what the pack in progress had written: "
                        "`engramd pack --restart` begins anew"
                    )
        return digests

    def check_space(self, directory: TableDirectory, planned: Sequence[PlannedFile]) -> None:
        """Refuses before anything is written where the drives have less room than the generation still needs."""
        needed: dict[int, int] = {}
        folders: dict[int, str] = {}
        for file in planned:
            folder = os.path.dirname(file.work_path)
            if not os.path.isdir(folder):
                folder = directory.path  # the work folder is yet to be made
            device = os.stat(folder).st_dev
            allocated = 0
            for path in (file.work_path, file.data_file.path):
                if os.path.exists(path):
                    allocated = max(allocated, os.stat(path).st_blocks * 512)
            folders.setdefault(device, folder)
            needed[device] = needed.get(device, SPARE_BYTES) + max(0, file.data_file.bytes - allocated)
        for device, count in needed.items():
            found = os.statvfs(folders[device])
            free = found.f_bavail * found.f_frsize
            if free < count:
                raise EngramdError(
                    f"{folders[device]}: not enough space: the new generation needs {format_size(count)} "
                    f"({count} bytes) more, {format_size(free)} ({free} bytes) are free (an older generation is only "
                    "removed when the new one is there); nothing more was written"
                )

    def chunks(self, plans: Sequence[LayerPlan]) -> Iterator[tuple[LayerPlan, Chunk]]:
        for plan in plans:
            for chunk in self.shape.chunks(plan.source.rows):
                yield plan, chunk

    # The data

    def write(
        self, directory: TableDirectory, journal: Journal, plans: Sequence[LayerPlan], done: list[bytes]
    ) -> list[bytes]:
        """Writes the chunks behind the `done` ones; returns the digests of all."""
        row_bytes = self.source.row_bytes
        work = self.chunks(plans)
        before = sum(chunk.rows for _, chunk in itertools.islice(work, len(done))) * row_bytes
        total = sum(plan.source.rows for plan in plans) * row_bytes
        if before == total:
            return done
        writer = ChunkWriter(self.files, self.striping(journal.stripes), self.sync_interval_s)
        path = os.path.join(directory.partial, DIGESTS_NAME)
        log = DigestLog(self.files, path, journal.pack_id, done, writer.sync_data)
        writer.log = log
        slots = [SourceSlot(self.source) for _ in range(READ_SLOTS)]
        out = [WriteSlot(aligned_buffer(self.shape.chunk_pages * self.shape.page_bytes)) for _ in range(WRITE_SLOTS)]
        try:
            with (
                SourceReader(self.source, self.files) as reader,
                contextlib.closing(
                    read_ahead(
                        work,
                        slots,
                        lambda slot, item: reader.read_chunk(slot, item[0].source, item[1]),
                    )
                ) as filled,
                Progress(self.label, total, before) as progress,
                WriteBehind(out, writer.write) as behind,
            ):
                for (plan, chunk), slot in filled:
                    target = behind.take()
                    plan.format.encode(chunk.first_page, chunk.pages, slot.values, slot.scales, target.buffer)
                    target.plan, target.chunk, target.digest = plan, chunk, slot.digest()
                    behind.give(target)
                    progress.advance(chunk.rows * row_bytes)
                behind.finish()
            log.sync()
        except BaseException as error:
            # What was written is worth keeping: an interrupted or failed pack goes on from here.
            if not writer.sync_failed:
                try_sync(log, error)
            raise
        finally:
            log.close()
            writer.close()
        return log.digests

    def manifest(
        self, directory: TableDirectory, journal: Journal, plans: Sequence[LayerPlan], digests: Sequence[bytes]
    ) -> Manifest:
        parts = parts_of(self.source)
        layers = tuple(
            Layer(
                plan.source.layer,
                plan.source.rows,
                plan.pages,
                plan.source.head_sizes,
                tuple(file.data_file for file in plan.files),
            )
            for plan in plans
        )
        return Manifest(
            directory=directory.path,
            table_id=journal.table_id,
            generation=journal.generation,
            identity=identity_of(
                self.source.row_bytes, parts, [(layer.layer, layer.rows) for layer in layers], digests
            ),
            row_bytes=self.source.row_bytes,
            parts=parts,
            page_bytes=self.shape.page_bytes,
            rows_per_page=self.shape.rows_per_page,
            stripe_pages=self.shape.chunk_pages,
            layers=layers,
            hash=self.source.hash,
            sparse=None,
            source=Source("checkpoint", _printable(self.source.directory), self.source.revision),
            created=now(),
        )


def _printable(path: str) -> str:
    return path if len(path) <= 4096 and path.isprintable() else ascii(path)[:4096]
