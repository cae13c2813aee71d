"""The record of a pack in progress: what it packs (journal.json) and which chunks are durable (digests.bin).

A record in digests.bin vouches for the data of its chunk: it is written only after the data files were synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engramd import strict_json
from engramd.errors import EngramdError
from engramd.table.codec import crc32c
from engramd.table.files import Files

FORMAT = "engramd pack journal 1"
MAX_JOURNAL_BYTES = 256 << 20
DIGEST_BYTES = 32
RECORD_BYTES = DIGEST_BYTES + 4


@dataclass(frozen=True)
class Journal:
    """What a pack in progress packs: the names and bytes of its files follow from it. `source` is the fingerprint of
    the checkpoint; `pack_id` is random, so that records of an earlier try never pass for this one's."""

    pack_id: bytes
    table_id: bytes
    generation: int
    stripes: tuple[str, ...]
    source: dict[str, Any]

    def to_json(self) -> bytes:
        return strict_json.canonical(
            {
                "format": FORMAT,
                "pack_id": self.pack_id.hex(),
                "table_id": self.table_id.hex(),
                "generation": self.generation,
                "stripes": list(self.stripes),
                "source": self.source,
            }
        )


def read_journal(path: str) -> Journal | None:
    """The journal at `path`; None where there is none. Raises EngramdError where it is damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_JOURNAL_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if len(data) > MAX_JOURNAL_BYTES:
            raise ValueError
        body = strict_json.loads(data, path)
        journal = Journal(
            bytes.fromhex(body["pack_id"]),
            bytes.fromhex(body["table_id"]),
            body["generation"],
            tuple(body["stripes"]),
            body["source"],
        )
        valid = (
            body["format"] == FORMAT
            and len(journal.pack_id) == len(journal.table_id) == 16
            and type(journal.generation) is int
            and all(isinstance(stripe, str) for stripe in journal.stripes)
            and isinstance(journal.source, dict)
        )
    except (EngramdError, ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise EngramdError(f"{path}: damaged; `engramd pack --restart` begins anew")
    return journal


def _record(pack_id: bytes, index: int, digest: bytes) -> bytes:
    return digest + crc32c(pack_id + index.to_bytes(8, "little") + digest).to_bytes(4, "little")


def read_digests(path: str, pack_id: bytes, limit: int) -> list[bytes]:
    """The digests of the chunks that are durable: the good records from the front of the file on, at most `limit`."""
    try:
        with open(path, "rb") as file:
            data = file.read(RECORD_BYTES * limit)
    except FileNotFoundError:
        return []
    digests: list[bytes] = []
    for begin in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        digest = data[begin : begin + DIGEST_BYTES]
        if data[begin : begin + RECORD_BYTES] != _record(pack_id, len(digests), digest):
            break
        digests.append(digest)
    return digests


class DigestLog:
    """Collects the digests of written chunks and, at each `sync`, makes first the data and then the records durable.

    Used by one thread. `done` are the digests that are there already.
    """

    def __init__(
        self, files: Files, path: str, pack_id: bytes, done: Sequence[bytes], sync_data: Callable[[], None]
    ) -> None:
        self._files = files
        self._path = path
        self._pack_id = pack_id
        self._sync_data = sync_data
        self._durable = len(done)
        self.digests = list(done)
        self._fd = files.open(path, os.O_RDWR)

    def add(self, digest: bytes) -> None:
        self.digests.append(digest)

    def sync(self) -> None:
        if self._durable == len(self.digests):
            return
        self._sync_data()
        new = range(self._durable, len(self.digests))
        data = b"".join(_record(self._pack_id, index, self.digests[index]) for index in new)
        done = 0
        while done < len(data):
            done += self._files.pwrite(self._fd, data[done:], self._durable * RECORD_BYTES + done)
        self._files.fdatasync(self._fd)
        self._durable = len(self.digests)

    def close(self) -> None:
        self._files.close(self._fd)
