"""Counts n-grams of documents exactly, and ranks rows by the documents that need them.

An n-gram's rows are those of its compressed ids (engram_client.token_map): tokens that differ in case, accents or white
space alone share rows. Counting by `tokens` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.plan.stream import CHUNK_TOKENS, Hasher, hashed_chunks
from engramd.plan.token_files import Documents


@dataclass(frozen=True)
class NgramCounts:
    """n-grams of one order that occur at least `minimum` times, the most frequent first (equal ones by their ids).
    counts: int64 [n]; ids: int64 [n, order], compressed ids or tokens. positions: all n-grams of that order there are.
    """

    order: int
    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: int


def mapped_tokens(documents: Documents, token_map: NDArray[np.int32]) -> NDArray[np.int64]:
    """Compressed ids of all tokens. Raises EngramdError for a token outside the vocabulary."""
    tokens = documents.tokens
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < token_map.size):
        raise EngramdError(
            f"token {int(tokens.max())} is outside the tokenizer's vocabulary of {token_map.size}: these token files "
            "belong to another model"
        )
    return np.asarray(token_map[tokens], dtype=np.int64)


def count_ngrams(ids: NDArray[np.int64], documents: Documents, max_order: int, minimum: int) -> Iterator[NgramCounts]:
    """Counts of the orders 2 .. max_order within documents. ids: int64 [tokens], each below 2^24.

    An n-gram that occurs `minimum` times begins with an (n-1)-gram that does, so each order looks only where the one
    before was frequent; the ranks of those, with the next id, are exact keys of 64 bits.
    """
    position_in_document = np.arange(ids.size) - np.repeat(documents.starts[:-1], np.diff(documents.starts))
    width = int(ids.max()) + 1
    frequent = np.bincount(ids, minlength=width) >= minimum
    rank = np.where(frequent[ids], ids, -1)  # of the n-gram that ends at each position
    for order in range(2, max_order + 1):
        at = np.flatnonzero((rank[:-1] >= 0) & (position_in_document[1:] >= order - 1)) + 1
        _, first, inverse, counts = np.unique(
            rank[at - 1] * width + ids[at], return_index=True, return_inverse=True, return_counts=True
        )
        kept = counts >= minimum
        rank = np.full(ids.size, -1, np.int64)
        rank[at] = np.where(kept[inverse], inverse, -1)
        # np.unique sorts by key, which is by the ids from left to right: a stable sort keeps that for equal counts.
        hottest = np.flatnonzero(kept)[np.argsort(-counts[kept], kind="stable")]
        ends = at[first[hottest]]
        content = ids[ends[:, None] + np.arange(1 - order, 1)] if hottest.size else np.empty((0, order), np.int64)
        positions = int((position_in_document >= order - 1).sum())
        yield NgramCounts(order, counts[hottest].astype(np.int64), content, positions)


def spelling(
    wanted: NDArray[np.int64], ids: NDArray[np.int64], documents: Documents
) -> tuple[NDArray[np.int64], int, int]:
    """How an n-gram of compressed ids is written: (tokens of its most frequent spelling, how often that occurs, number
    of spellings)."""
    order = wanted.size
    at = np.flatnonzero(ids[: ids.size - order + 1] == wanted[0])
    for shift in range(1, order):
        at = at[ids[at + shift] == wanted[shift]]
    ends = np.searchsorted(documents.starts, at, side="right")
    at = at[at + order <= documents.starts[ends]]
    written, counts = np.unique(documents.tokens[at[:, None] + np.arange(order)], axis=0, return_counts=True)
    best = int(np.argmax(counts))
    return written[best].astype(np.int64), int(counts[best]), int(counts.size)


def hottest_rows(
    documents: Documents,
    hasher: Hasher,
    most_rows: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[int, NDArray[np.uint64]]:
    """Rows in the most documents, hottest first, by layer: uint64 [n], at most most_rows in all.

    Documents count, not occurrences: what one text repeats says little about the next. A single document counts in
    pieces of CHUNK_TOKENS. Takes three bytes for each row of the largest layer.
    """
    if documents.starts.size == 2:
        cuts = np.arange(0, documents.tokens.size, CHUNK_TOKENS)
        documents = Documents(documents.tokens, np.append(cuts, documents.tokens.size))
    layers, width = hasher.head_sizes.shape
    found: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
    for layer in range(layers):
        rows = int(hasher.head_sizes[layer].sum())
        counts, last = np.zeros(rows, np.uint8), np.zeros(rows, np.uint16)
        count_pointer = ffi.from_buffer("uint8_t[]", counts, require_writable=True)
        last_pointer = ffi.from_buffer("uint16_t[]", last, require_writable=True)
        for begin, row_ids in hashed_chunks(documents, hasher):
            document = int(np.searchsorted(documents.starts, begin, side="right")) % 65_535 + 1
            lib.engram_count_rows(
                ffi.from_buffer("int32_t[]", row_ids),
                row_ids.shape[0],
                layers * width,
                layer * width,
                width,
                document,
                count_pointer,
                last_pointer,
            )
            progress(row_ids.shape[0])
        found.append(_candidates(counts, most_rows))
    # The lowest count that all fit with; of the rows with one less, as many as there is room for.
    histogram = sum((np.bincount(counts, minlength=256) for _, counts in found), np.zeros(256, np.int64))
    above = np.cumsum(histogram[::-1])[::-1]
    lowest = int(np.argmax(above <= most_rows)) if (above <= most_rows).any() else 256
    room = most_rows - (int(above[lowest]) if lowest < 256 else 0)
    hottest = {}
    for number, (rows_of_layer, counts_of_layer) in zip(hasher.layer_ids, found, strict=True):
        kept = np.flatnonzero(counts_of_layer >= lowest)
        rest = np.flatnonzero(counts_of_layer == lowest - 1) if lowest > 1 else np.empty(0, np.int64)
        share = min(rest.size, room // layers)
        rest = rest[np.linspace(0, rest.size - 1, share).astype(np.int64)] if share else rest[:0]
        chosen = np.concatenate([kept, rest])
        order = np.argsort(-counts_of_layer[chosen].astype(np.int64), kind="stable")
        hottest[number] = rows_of_layer[chosen[order]].astype(np.uint64)
    return hottest


def _candidates(counts: NDArray[np.uint8], most_rows: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """(rows, their counts) that may be among the most_rows hottest of all layers."""
    above = np.cumsum(np.bincount(counts, minlength=256)[::-1])[::-1]
    lowest = max(1, int(np.argmax(above <= most_rows)) - 1) if (above <= most_rows).any() else 255
    rows = np.flatnonzero(counts >= lowest)
    return rows, counts[rows]
