"""A peer in a process of its own, so that a memory cgroup can hold it: reads rows by ids and prints its seconds.

python bench/peer.py KIND IDS.npy CHUNK GROUP_PROCS FILE...
KIND: memmap (numpy fancy indexing over the packed pages), direct (O_DIRECT, 64 reads in flight, no cache), store or
ring (EngramDB's Store.fetch over shard files, and its IoUringPageReader over the packed pages; run by the Python of the
environment that has engramdb).
IDS: int64 [layers, rows], one array of ids for each FILE in turn, CHUNK at a time. GROUP_PROCS: the cgroup.procs to
join, or "-". Prints {"seconds", "rows", "checksum"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROW_BYTES, ROWS_PER_PAGE, PAGE_BYTES = 264, 15, 4096
READER_BATCH = 256
SHARDS = 64

Fetch = Callable[[Any], Any]


def memmap_reader(path: str) -> Fetch:
    import mmap

    file = open(path, "rb")  # noqa: SIM115 - lives as long as the process
    mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_RANDOM)
    pages = len(mapping) // PAGE_BYTES
    rows = np.ndarray((pages, ROWS_PER_PAGE, ROW_BYTES), np.uint8, mapping, 0, (PAGE_BYTES, ROW_BYTES, 1))
    return lambda ids: rows[ids // ROWS_PER_PAGE, ids % ROWS_PER_PAGE]


def direct_reader(path: str) -> Fetch:
    from engramd._engine import ffi, lib

    def fetch(ids: Any) -> Any:
        out = np.empty((len(ids), ROW_BYTES), np.uint8)
        number = ffi.new("int *")
        taken = lib.engram_bench_direct_read(
            os.fsencode(path), ffi.from_buffer("int64_t[]", ids), len(ids), ROWS_PER_PAGE, ROW_BYTES, 64,
            ffi.from_buffer("uint8_t[]", out), number,
        )  # fmt: skip
        if taken < 0:
            raise OSError(number[0], os.strerror(number[0]), path)
        return out

    return fetch


def store_reader(folder: str) -> Fetch:
    import engramdb  # type: ignore[import-not-found]

    rows = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)) // ROW_BYTES
    store = engramdb.Store(folder, shards=SHARDS, rows_per_shard=-(-rows // SHARDS), width=ROW_BYTES)
    return lambda ids: np.frombuffer(store.fetch(ids.tolist()), np.uint8).reshape(-1, ROW_BYTES)


def ring_reader(path: str) -> Fetch:
    import engramdb

    descriptor = os.open(path, os.O_RDONLY)
    reader = engramdb.IoUringPageReader(PAGE_BYTES)

    def fetch(ids: Any) -> Any:
        out = np.empty((len(ids), ROW_BYTES), np.uint8)
        for start in range(0, len(ids), READER_BATCH):
            part = ids[start : start + READER_BATCH]
            offsets = (part // ROWS_PER_PAGE * PAGE_BYTES).tolist()
            pages = b"".join(reader.read_pages([descriptor] * len(offsets), offsets))
            rows = np.frombuffer(pages, np.uint8).reshape(len(part), PAGE_BYTES)[:, : ROWS_PER_PAGE * ROW_BYTES]
            places = rows.reshape(len(part), ROWS_PER_PAGE, ROW_BYTES)
            out[start : start + len(part)] = places[np.arange(len(part)), part % ROWS_PER_PAGE]
        return out

    return fetch


READERS = {"memmap": memmap_reader, "direct": direct_reader, "store": store_reader, "ring": ring_reader}


def main() -> None:
    kind, ids_path, chunk_text, group, *files = sys.argv[1:]
    if group != "-":
        with open(group, "w", encoding="ascii") as procs:
            procs.write(str(os.getpid()))
    ids, chunk = np.load(ids_path), int(chunk_text)
    readers = [READERS[kind](file) for file in files]
    checksum = 0
    began = time.perf_counter()
    for start in range(0, ids.shape[1], chunk):
        for fetch, of_layer in zip(readers, ids, strict=True):
            checksum ^= int(fetch(of_layer[start : start + chunk])[0, 0])
    print(json.dumps({"seconds": time.perf_counter() - began, "rows": ids.size, "checksum": checksum}))


if __name__ == "__main__":
    main()
