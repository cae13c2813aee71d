"""A sampled stream of look-ups: the rows whose hash lies below a threshold, in the order in which they were asked for.

A row is either always in the sample or never, so a cache of C rows is imitated by one of C x rate rows on the sample
(native/include/engram/sampling.h names the papers). Look-ups are counted exactly and only misses are scaled up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.plan.token_files import Documents

CHUNK_TOKENS = 32_768
DEFAULT_SAMPLES = 6_000_000
KEY_ROW_BITS: int = lib.ENGRAM_KEY_ROW_BITS


class Hasher(Protocol):
    """What is needed of engram_client.NgramHasher."""

    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    @property
    def head_sizes(self) -> NDArray[np.int64]: ...
    @property
    def max_ngram_size(self) -> int: ...
    @property
    def token_map(self) -> NDArray[np.int32]: ...
    def row_ids(self, tokens: Any, *, history: Any = ...) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class Column:
    """A class of look-ups that is counted by itself. `order` and `head` are 0 and -1 where the hash is not known."""

    layer: int
    order: int
    head: int


@dataclass(frozen=True)
class Stream:
    """keys: uint64 [n], layer key << 40 | row id. columns: uint8 [n], index into `classes`. lookups: exact look-ups of
    each class. rate: share of all rows that the sample holds. rows: of all layers together."""

    keys: NDArray[np.uint64]
    columns: NDArray[np.uint8]
    classes: tuple[Column, ...]
    lookups: NDArray[np.int64]
    rate: float
    rows: int
    row_bytes: int
    tokens: int | None
    seconds: float | None
    source: str

    @property
    def all_lookups(self) -> int:
        return int(self.lookups.sum())

    @property
    def table_bytes(self) -> int:
        return self.rows * self.row_bytes


def threshold_for(lookups: int, samples: int) -> int:
    """The threshold that makes about `samples` of so many look-ups; a share of 2^32."""
    whole: int = lib.ENGRAM_SAMPLE_ALL
    return whole if lookups <= samples else max(1, whole * samples // lookups)


def columns_of(hasher: Hasher) -> tuple[Column, ...]:
    """The classes of a hasher's columns, layer by layer."""
    layers, width = hasher.head_sizes.shape
    heads = width // (hasher.max_ngram_size - 1)
    return tuple(
        Column(hasher.layer_ids[layer], 2 + column // heads, column % heads)
        for layer in range(layers)
        for column in range(width)
    )


def hashed_chunks(documents: Documents, hasher: Hasher, longest: int = CHUNK_TOKENS) -> Iterator[tuple[int, Any]]:
    """(begin, row ids int32 [tokens, layers, columns]) of each piece of the documents, in order; several threads hash
    at once. Raises EngramdError for a token outside the vocabulary."""

    def hash_piece(piece: tuple[int, int, int]) -> tuple[int, NDArray[np.int32]]:
        begin, end, first = piece
        history = documents.tokens[max(first, begin - hasher.max_ngram_size + 1) : begin]
        return begin, hasher.row_ids(documents.tokens[begin:end], history=history)

    yield from in_order(hash_piece, documents.chunks(longest))


def in_order(work: Callable[[Any], Any], pieces: list[Any]) -> Iterator[Any]:
    """work(piece) for each piece, in order, on a few threads; only a few results are held at once. ValueErrors become
    EngramdErrors."""
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        pending = [pool.submit(work, piece) for piece in pieces[: 2 * threads]]
        try:
            for index in range(len(pieces)):
                yield pending[index % len(pending)].result()
                following = index + len(pending)
                if following < len(pieces):
                    pending[index % len(pending)] = pool.submit(work, pieces[following])
        except ValueError as error:
            raise EngramdError(f"the tokens do not fit the tokenizer and config: {error}") from None
        finally:
            for future in pending:
                future.cancel()


def from_tokens(
    documents: Documents,
    hasher: Hasher,
    row_bytes: int,
    samples: int = DEFAULT_SAMPLES,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Stream:
    """Samples the look-ups of a server that reads the documents one after the other."""
    classes = columns_of(hasher)
    layers, width = hasher.head_sizes.shape
    tokens = int(documents.tokens.size)
    threshold = threshold_for(tokens * len(classes), samples)
    rate = threshold / lib.ENGRAM_SAMPLE_ALL

    def sample_piece(piece: tuple[int, int, int]) -> tuple[int, NDArray[np.uint64], NDArray[np.uint8]]:
        begin, end, first = piece
        history = documents.tokens[max(first, begin - hasher.max_ngram_size + 1) : begin]
        ids = hasher.row_ids(documents.tokens[begin:end], history=history)
        room = int(ids.size * rate * 1.5) + 4096
        while True:
            keys, columns = np.empty(room, np.uint64), np.empty(room, np.uint8)
            found = lib.engram_sample_rows(
                ffi.from_buffer("int32_t[]", ids),
                ids.size,
                layers * width,
                width,
                1,
                threshold,
                ffi.from_buffer("uint64_t[]", keys, require_writable=True),
                ffi.from_buffer("uint8_t[]", columns, require_writable=True),
                room,
            )
            if found <= room:
                return end - begin, keys[:found].copy(), columns[:found].copy()
            room = found

    keys: list[NDArray[np.uint64]] = []
    columns: list[NDArray[np.uint8]] = []
    for count, piece_keys, piece_columns in in_order(sample_piece, documents.chunks(CHUNK_TOKENS)):
        keys.append(piece_keys)
        columns.append(piece_columns)
        progress(count)
    return Stream(
        keys=np.concatenate(keys),
        columns=np.concatenate(columns),
        classes=classes,
        lookups=np.full(len(classes), tokens, np.int64),
        rate=rate,
        rows=int(hasher.head_sizes.sum()),
        row_bytes=row_bytes,
        tokens=tokens,
        seconds=None,
        source=f"{len(documents):,} documents of {tokens:,} tokens",
    )
