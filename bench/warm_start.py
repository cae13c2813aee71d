"""k. What `engramd warm` brings: hits of the first tokens after a start, warmed from other text against cold.

By simulation at the true geometry, with the row cache's own policy code and the ranking of `engramd warm` itself. The
first half of the text is ranked and the second half is read. One head of each n-gram order of one layer, with a
sixteenth of the room, stands for all sixteen, as in question e.

What any content of that size could bring: the best one, chosen with all of the second half known, beside the ranking of
the first half; both by the rows that are in the content when they are asked for first, on average over all windows of
FIRST_TOKENS of the second half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from engram_client.hasher import NgramHasher

from bench.cache_quality import COLUMNS, SAMPLE, SIZES_GIB
from bench.environment import PUBLISHED_CONFIG, ROW_BYTES, Ids, Settings, documents, hasher_for
from engramd._engine import lib
from engramd.cache_simulation import CacheSimulation
from engramd.cli.warm import FILL_SHARE
from engramd.heat.ngrams import hottest_rows
from engramd.measure.report import Question
from engramd.plan.token_files import Documents

FIRST_TOKENS = 100_000
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class OneHead:
    """The first layer's COLUMNS alone, its rows numbered without gaps: what hottest_rows needs of a hasher."""

    whole: NgramHasher

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.whole.layer_ids[:1]

    @property
    def head_sizes(self) -> npt.NDArray[np.int64]:
        return self.whole.head_sizes[:1, COLUMNS]

    @property
    def max_ngram_size(self) -> int:
        return self.whole.max_ngram_size

    @property
    def token_map(self) -> npt.NDArray[np.int32]:
        return self.whole.token_map

    def row_ids(self, tokens: Any, *, history: Any = ()) -> npt.NDArray[np.int32]:
        """int32 [tokens, 1, columns]."""
        begins = np.cumsum(self.whole.head_sizes[0]) - self.whole.head_sizes[0]
        moved = begins[list(COLUMNS)] - (np.cumsum(self.head_sizes[0]) - self.head_sizes[0])
        ids = self.whole.row_ids(tokens, history=history)[:, :1, COLUMNS]
        return np.ascontiguousarray(ids - moved.astype(np.int32))


def hit_ratio(capacity: int, warmed: Ids, first: Ids, batch_tokens: int) -> float:
    """Share of hits among `first` int64 [tokens, columns] in batches; as the daemon counts, all occurrences of a row in
    one batch fare as its first one does."""
    missed = 0
    with CacheSimulation(capacity) as cache:
        cache.run(warmed)
        for begin in range(0, len(first), batch_tokens):
            keys = first[begin : begin + batch_tokens].ravel()
            _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
            missed += int(np.count_nonzero(cache.misses(keys)[index][inverse]))
    return 1 - missed / first.size


def windows_of(ids: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
    """The distinct rows of each whole window of FIRST_TOKENS; ids int32 [tokens, columns]."""
    return [
        np.unique(ids[begin : begin + FIRST_TOKENS]) for begin in range(0, len(ids) - FIRST_TOKENS + 1, FIRST_TOKENS)
    ]


def best_content(windows: list[npt.NDArray[np.int32]], rows: int, count: int) -> npt.NDArray[np.int64]:
    """The `count` rows of `rows` that the most windows ask for: no content has more of them on average."""
    asking = np.zeros(rows, np.uint16)
    for window in windows:
        asking[window] += 1
    asked = np.flatnonzero(asking)
    return asked[np.argsort(-asking[asked].astype(np.int32), kind="stable")[:count]]


def share_found(content: npt.NDArray[np.integer[Any]], windows: list[npt.NDArray[np.int32]], rows: int) -> float:
    """First look-ups of a window's rows that the content answers, as a share of the window's look-ups; on average."""
    there = np.zeros(rows, bool)
    there[content.astype(np.int64)] = True
    found = sum(int(np.count_nonzero(there[window])) for window in windows)
    return found / (len(windows) * FIRST_TOKENS * len(COLUMNS))


def measure(settings: Settings) -> Question:
    question = Question("k", f"Hit ratio of the first {FIRST_TOKENS:,} tokens, warmed from other text against cold")
    wanted = 1_000_000 if settings.quick else 1 << 62
    texts, source = documents(settings.trace, wanted if settings.trace else min(wanted, 3_000_000))
    ends = np.cumsum([len(text) for text in texts])
    half = int(np.searchsorted(ends, ends[-1] // 2))
    known, unseen = texts[:half], texts[half:]
    hasher = OneHead(hasher_for(PUBLISHED_CONFIG))
    ids = np.concatenate([hasher.row_ids(text)[:, 0] for text in unseen])
    first, windows = ids[:FIRST_TOKENS].astype(np.int64), windows_of(ids)
    rows = int(hasher.head_sizes.sum())
    ranked = Documents(np.concatenate(known), np.concatenate([[0], ends[:half]]).astype(np.int64))
    question.note(f"{source}; the first {ends[half - 1] if half else 0:,} are ranked")
    for size in SIZES_GIB:
        capacity = int(lib.engram_cache_rows(size << 30, ROW_BYTES)) // SAMPLE
        (hottest,) = hottest_rows(ranked, hasher, int(capacity * FILL_SHARE)).values()
        for batch_tokens, name in ((1, "one row at a time"), (BATCH_TOKENS, f"batches of {BATCH_TOKENS:,} tokens")):
            warmed = hit_ratio(capacity, hottest[::-1].astype(np.int64), first, batch_tokens)
            cold = hit_ratio(capacity, np.empty(0, np.int64), first, batch_tokens)
            question.add(
                f"{size} GiB, {name}", "hit ratio", [warmed], "cold", [cold], points=100 * (warmed - cold),
                rows_warmed=len(hottest) * SAMPLE,
            )  # fmt: skip
        best = best_content(windows, rows, len(hottest))
        question.add(
            f"{size} GiB, content alone, {len(windows)} windows", "share", [share_found(hottest, windows, rows)],
            "best in hindsight", [share_found(best, windows, rows)],
        )  # fmt: skip
    return question
