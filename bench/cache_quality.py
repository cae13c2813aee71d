"""e. Cache quality: the row cache's own policy code against textbook policies and the optimum, without I/O.

At the true geometry (768 M rows) the eight heads of one n-gram order share one rolling value, so one head of each order
of one layer, with a sixteenth of the rows' room, stands for all sixteen: a sample by heads, exact but for chance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.environment import PUBLISHED_CONFIG, ROW_BYTES, Settings, documents, hasher_for
from engramd._engine import ffi, lib
from engramd.cache_simulation import simulate
from engramd.measure.report import Question

COLUMNS = (0, 8, 16)
SAMPLE = 16
SIZES_GIB = (2, 4, 8)
PEERS = ("lru", "s3fifo", "past_frequency", "belady")


def dense(ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.uint32], int]:
    """Row ids numbered from 0, and how many there are; a bitmap's ranks, since sorting all of them takes minutes."""
    bits = np.zeros((int(ids.max()) >> 3) + 1, np.uint8)
    present = np.zeros(len(bits) * 8, bool)
    present[ids.ravel()] = True
    rank = np.cumsum(present, dtype=np.uint32)
    return (rank[ids.ravel()] - 1).astype(np.uint32), int(rank[-1])


def measure(settings: Settings) -> Question:
    question = Question("e", "Hit ratio of the second half, the first half warms (and of the whole)")
    wanted = 1_000_000 if settings.quick else 1 << 62
    texts, source = documents(settings.trace, wanted if settings.trace else min(wanted, 3_000_000))
    hasher = hasher_for(PUBLISHED_CONFIG)
    ids = np.concatenate([hasher.row_ids(text)[:, 0, COLUMNS] for text in texts])
    keys, distinct = dense(ids)
    question.note(
        f"{source}; one head of each n-gram order of one layer stands for 16 columns alike; {distinct / keys.size:.3f} "
        "of its rows are distinct"
    )
    hits = ffi.new("uint64_t[2]")
    for size in SIZES_GIB:
        capacity = (size << 30) // ROW_BYTES // SAMPLE
        ours = simulate(ids, capacity)
        half, whole = ours.second_half_hits / ours.second_half_requests, ours.hits / ours.requests
        for peer in PEERS:
            policy = getattr(lib, f"engram_bench_{peer}")
            if policy(ffi.from_buffer("uint32_t[]", keys), keys.size, distinct, capacity, hits):
                raise MemoryError(peer)
            other = hits[1] / ours.second_half_requests
            extra = {} if peer == "past_frequency" else {"ours_whole": whole, "peer_whole": hits[0] / keys.size}
            question.add(f"{size} GiB", "hit ratio", [half], peer, [other], points=100 * (half - other), **extra)
    return question
