"""Reads and writes heat files (docs/heat_format.md) in pieces, so that neither needs memory for the whole list."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engramd.errors import EngramdError
from engramd.private_file import replacing
from engramd.table.codec import crc32c

MAGIC = b"ENGHEAT1"
MAX_BLOCK_ROWS = 65_536
_END_LAYER = 0xFFFFFFFF
_BLOCK_HEAD = struct.Struct("<II")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Block:
    """Rows of one layer. `rows`: array of unsigned 64-bit integers, at most MAX_BLOCK_ROWS."""

    layer: int
    rows: array[int]


def write(path: str, identity: str, blocks: Iterable[Block]) -> int:
    """Writes a heat file, which appears whole or not at all; mode 0600. Returns the number of rows.

    Raises OSError, with nothing left behind.
    """
    count = 0
    with replacing(path) as file:
        file.write(MAGIC + bytes.fromhex(identity))
        for block in blocks:
            if not block.rows:
                continue
            content = _BLOCK_HEAD.pack(block.layer, len(block.rows)) + block.rows.tobytes()
            file.write(content + _CHECKSUM.pack(crc32c(content)))
            count += len(block.rows)
        end = _BLOCK_HEAD.pack(_END_LAYER, 0)
        file.write(end + _CHECKSUM.pack(crc32c(end)))
    return count


def read(path: str, identity: str | None = None) -> Iterator[Block]:
    """The blocks of a heat file, each checked before it is handed out. identity: what the file must be of, or None.

    Raises EngramdError naming the file and what is wrong with it; OSError where it cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(len(MAGIC) + 32)
        if len(head) < len(MAGIC) + 32 or not head.startswith(MAGIC):
            raise EngramdError(f"{path}: not a heat file: it does not begin with {MAGIC.decode()}")
        found = head[len(MAGIC) :].hex()
        if identity is not None and found != identity:
            raise EngramdError(f"{path}: heat of the table with identity {found}, not of {identity}")
        while True:
            begin = file.tell()
            content = file.read(_BLOCK_HEAD.size)
            if len(content) < _BLOCK_HEAD.size:
                raise EngramdError(f"{path}: ends at byte {begin} without its end block: cut off")
            layer, count = _BLOCK_HEAD.unpack(content)
            if count > MAX_BLOCK_ROWS or (layer == _END_LAYER) != (count == 0):
                raise EngramdError(f"{path}: the block at byte {begin} is damaged")
            rows = file.read(8 * count)
            checksum = file.read(_CHECKSUM.size)
            if len(rows) < 8 * count or checksum != _CHECKSUM.pack(crc32c(content + rows)):
                raise EngramdError(f"{path}: the block at byte {begin} does not match its checksum")
            if layer == _END_LAYER:
                return
            block = Block(layer, array("Q"))
            block.rows.frombytes(rows)
            yield block
