"""Recording files: a sample of the rows that a daemon was asked for. docs/sizing.md describes the format.

    8 bytes "ENGREC01" | u32 header bytes | u32 zero | header, JSON, padded with spaces to 8 bytes
    u64 keys in order, layer handle << 40 | row id | u32 CRC32C of everything before it

Little-endian. Row ids alone: no text, no tokens, no addresses. A file is hostile until `read` returned.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engramd import strict_json
from engramd._engine import ffi, lib
from engramd.errors import EngramdError
from engramd.plan.stream import KEY_ROW_BITS, Column, Stream
from engramd.private_file import replacing
from engramd.table.codec import crc32c

MAGIC = b"ENGREC01"
MAX_HEADER_BYTES = 1 << 20
MAX_FILE_BYTES = 8 << 30
MAX_CLASSES = 256


@dataclass(frozen=True)
class RecordedLayer:
    """A layer that was served, in one generation. heads: of each n-gram order, 0 where the hash is not known."""

    handle: int
    table: str
    layer: int
    rows: int
    row_bytes: int
    identity: str
    generation: int
    heads: int
    head_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """threshold: share of 2^32 of the rows that were sampled. lookups: all rows asked for meanwhile. lost: samples of
    those rows that nobody could take in time, about. keys: uint64 [n]."""

    layers: tuple[RecordedLayer, ...]
    threshold: int
    lookups: int
    lost: int
    seconds: float
    keys: NDArray[np.uint64]


def thin(keys: NDArray[np.uint64], threshold: int) -> NDArray[np.uint64]:
    """The keys that a lower threshold would have sampled; `keys` is overwritten."""
    kept = lib.engram_thin_samples(ffi.from_buffer("uint64_t[]", keys, require_writable=True), keys.size, threshold)
    return keys[:kept]


def write(path: str, recording: Recording) -> None:
    """Writes a new file for its owner alone (mode 0600), whole or not at all. Raises EngramdError."""
    header = json.dumps(
        {
            "threshold": recording.threshold,
            "lookups": recording.lookups,
            "lost": recording.lost,
            "seconds": round(recording.seconds, 3),
            "layers": [{**vars(layer), "head_sizes": list(layer.head_sizes)} for layer in recording.layers],
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    head = MAGIC + struct.pack("<II", len(header), 0) + header
    keys = recording.keys.astype("<u8", copy=False).data
    checksum = crc32c(keys, crc32c(head))
    try:
        with replacing(path) as file:
            file.write(head)
            file.write(keys)
            file.write(struct.pack("<I", checksum))
    except OSError as error:
        raise EngramdError(f"{path}: cannot be written: {error.strerror}") from None


def read(path: str) -> Recording:
    """Reads and checks a recording. Raises EngramdError."""
    data = read_checked(path, MAGIC, MAX_FILE_BYTES)
    header_bytes, zero = struct.unpack_from("<II", data, 8)
    end = 16 + header_bytes
    if zero or header_bytes > MAX_HEADER_BYTES or end > len(data) or (len(data) - end) % 8:
        raise EngramdError(f"{path}: damaged: its header does not fit the file")
    try:
        fields = strict_json.loads(bytes(data[16:end]), path)
        layers = tuple(_layer(entry) for entry in fields["layers"])
        numbers = [_integer(fields[name], 1 << 62) for name in ("threshold", "lookups", "lost")]
        seconds = float(fields["seconds"])
        if not layers or not 1 <= numbers[0] <= lib.ENGRAM_SAMPLE_ALL or not 0 <= seconds < 1e9:
            raise ValueError("a value is out of range")
    except (ValueError, TypeError, KeyError, AttributeError, EngramdError) as error:
        raise EngramdError(f"{path}: its header is not that of a recording: {error}") from None
    keys = np.frombuffer(data[end:], dtype="<u8").astype(np.uint64)
    rows = {layer.handle: layer.rows for layer in layers}
    for handle in np.unique(keys >> np.uint64(KEY_ROW_BITS)).tolist():
        ids = keys[keys >> np.uint64(KEY_ROW_BITS) == handle] & np.uint64((1 << KEY_ROW_BITS) - 1)
        if handle not in rows or int(ids.max()) >= rows[handle]:
            raise EngramdError(f"{path}: holds rows of a layer that its header does not describe")
    return Recording(layers, numbers[0], numbers[1], numbers[2], seconds, keys)


def read_checked(path: str, magic: bytes, limit_bytes: int) -> memoryview:
    """A file's content without its checksum. Raises EngramdError where magic, size or checksum are not right."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise EngramdError(f"{path}: {size} bytes, more than the {limit_bytes} that such a file may have")
            data = memoryview(file.read(limit_bytes + 1))
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) < 20 or bytes(data[:8]) != magic:
        raise EngramdError(f"{path}: not a file of this kind: it does not begin with {magic.decode()}")
    if struct.unpack_from("<I", data, len(data) - 4)[0] != crc32c(data[:-4]):
        raise EngramdError(f"{path}: damaged: its checksum is wrong")
    return data[:-4]


def _integer(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not an integer from 0 to {limit}")
    return value


def _layer(entry: dict[str, Any]) -> RecordedLayer:
    sizes = tuple(_integer(size, 1 << KEY_ROW_BITS) for size in entry["head_sizes"])
    layer = RecordedLayer(
        handle=_integer(entry["handle"], (1 << 24) - 1),
        table=str(entry["table"]),
        layer=_integer(entry["layer"], 1 << 31),
        rows=_integer(entry["rows"], 1 << KEY_ROW_BITS),
        row_bytes=_integer(entry["row_bytes"], 65_536),
        identity=str(entry["identity"]),
        generation=_integer(entry["generation"], 1 << 62),
        heads=_integer(entry["heads"], 1 << 16),
        head_sizes=sizes,
    )
    if layer.row_bytes < 1 or (sizes and sum(sizes) != layer.rows):
        raise ValueError(f"layer {layer.layer} has head sizes that do not add up to its rows")
    return layer


def of_table(recording: Recording, path: str, name: str) -> Recording:
    """The look-ups of one table alone. Raises EngramdError where the recording has none of that name."""
    layers = tuple(layer for layer in recording.layers if layer.table == name)
    if not layers:
        known = ", ".join(sorted({layer.table for layer in recording.layers}))
        raise EngramdError(f"{path}: has no table {name!r}; it has {known}")
    mine = np.isin(recording.keys >> np.uint64(KEY_ROW_BITS), [layer.handle for layer in layers])
    share = float(mine.mean()) if mine.size else 0.0
    return replace(
        recording,
        layers=layers,
        lookups=round(share * recording.lookups),
        lost=round(share * recording.lost),
        keys=recording.keys[mine],
    )


def to_stream(recording: Recording, path: str) -> Stream:
    """The recording as a stream. Where the hash is known each of a layer's columns has an equal share of the look-ups,
    as it has for every batch of whole tokens. Raises EngramdError for rows of several sizes and for an empty sample."""
    if not recording.keys.size:
        raise EngramdError(
            f"{path}: holds no sample of its {recording.lookups} look-ups: record for longer, under load, or at a "
            "higher --rate"
        )
    sizes = {layer.row_bytes for layer in recording.layers}
    if len(sizes) > 1:
        raise EngramdError(f"{path}: rows of {sorted(sizes)} bytes share no cache: choose a table with --name")
    handles = (recording.keys >> np.uint64(KEY_ROW_BITS)).astype(np.int64)
    ids = recording.keys & np.uint64((1 << KEY_ROW_BITS) - 1)
    columns = np.zeros(recording.keys.size, np.uint8)
    # A reload in between gave a layer a second handle: its rows are others, its columns the same.
    newest = {(layer.table, layer.layer): layer for layer in recording.layers}
    by_column = all(
        layer.head_sizes and layer.heads and layer.head_sizes == newest[layer.table, layer.layer].head_sizes
        for layer in recording.layers
    )
    by_column = by_column and sum(len(layer.head_sizes) for layer in newest.values()) <= MAX_CLASSES
    classes: list[Column] = []
    first_class: dict[tuple[str, int], int] = {}
    for key, layer in newest.items():
        first_class[key] = len(classes)
        if by_column:
            classes += [
                Column(layer.layer, 2 + column // layer.heads, column % layer.heads)
                for column in range(len(layer.head_sizes))
            ]
        else:
            classes.append(Column(layer.layer, 0, -1))
    for layer in recording.layers:
        mine = handles == layer.handle
        first = first_class[layer.table, layer.layer]
        if by_column:
            ends = np.cumsum(layer.head_sizes).astype(np.uint64)
            columns[mine] = first + np.searchsorted(ends, ids[mine], side="right")
        else:
            columns[mine] = min(first, MAX_CLASSES - 1)
    sampled = np.bincount(columns, minlength=len(classes)).astype(np.float64)
    shares = sampled / max(1.0, sampled.sum())
    if by_column and sampled.all():
        shares = np.full(len(classes), 1.0 / len(classes))
    # What was lost makes the sample thinner, about evenly.
    taken = recording.keys.size / max(1, recording.keys.size + recording.lost)
    return Stream(
        keys=recording.keys,
        columns=columns,
        classes=tuple(classes),
        lookups=np.round(shares * recording.lookups).astype(np.int64),
        rate=recording.threshold / lib.ENGRAM_SAMPLE_ALL * taken,
        rows=sum(layer.rows for layer in newest.values()),
        row_bytes=sizes.pop(),
        tokens=None,
        seconds=recording.seconds,
        source=f"{path}, {recording.lookups:,} look-ups in {recording.seconds:,.1f} s",
    )
