"""The catalogue: what is served and under which handles, as sealed memory that every client maps.

Layout: engram_catalogue, its records, then all head sizes as int64 (native/include/engram/wire.h).
"""

from __future__ import annotations

import fcntl
import os
import struct

from engramd._engine import ffi, lib
from engramd.daemon.engine import ServedLayer

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def encode(layers: list[ServedLayer], epoch: int) -> bytes:
    """The catalogue's bytes."""
    header_bytes, record_bytes = ffi.sizeof("engram_catalogue"), ffi.sizeof("engram_catalogue_record")
    head_offset = header_bytes + record_bytes * len(layers)
    records, heads = [], []
    for layer in layers:
        manifest = layer.table.manifest
        record = ffi.new("engram_catalogue_record *")
        record.name = layer.table.name.encode()
        record.identity = bytes.fromhex(manifest.identity)
        record.table_id = manifest.table_id
        record.generation = manifest.generation
        record.rows = layer.rows
        record.handle = layer.handle
        record.layer = layer.layer
        record.row_bytes = manifest.row_bytes
        record.value_bytes = manifest.value_bytes
        record.head_sizes_offset = head_offset
        record.head_count = len(layer.head_sizes)
        head_offset += 8 * len(layer.head_sizes)
        records.append(bytes(ffi.buffer(record)))
        heads.append(struct.pack(f"={len(layer.head_sizes)}q", *layer.head_sizes))
    header = ffi.new("engram_catalogue *")
    header.magic = lib.ENGRAM_CATALOGUE_MAGIC
    header.version = lib.ENGRAM_PROTOCOL_VERSION
    header.epoch = epoch
    header.bytes = head_offset
    header.record_count = len(layers)
    header.record_bytes = record_bytes
    return b"".join([bytes(ffi.buffer(header)), *records, *heads])


class Catalogue:
    """One state of the catalogue in a memfd sealed against every change. Owns the descriptor."""

    def __init__(self, layers: list[ServedLayer], epoch: int = 1) -> None:
        self.epoch = epoch
        content = encode(layers, epoch)
        self.bytes = len(content)
        self.descriptor = os.memfd_create("engramd-catalogue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(self.descriptor, view) :]
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes our descriptor; clients keep theirs."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
