"""Headers of safetensors files: an 8-byte little-endian length, a JSON header, then the tensors' bytes.

Only headers are read here, and nothing in them is believed before it is checked: sizes, offsets, overlaps, duplicate
names. Tensor data is described by absolute byte offsets for whoever reads it.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from dataclasses import dataclass
from typing import Any

from engramd import strict_json
from engramd.errors import EngramdError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_MAX_DIMENSIONS = 16
_ANEW = "; download or copy the file again"
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard: `bytes` bytes from absolute file offset `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Shard:
    """A checked header. size, mtime_ns and header_sha256 tell whether the file is still the same one later."""

    path: str
    size: int
    mtime_ns: int
    header_sha256: str
    tensors: dict[str, Tensor]


def read_header(path: str) -> Shard:
    """Reads and checks the header of the safetensors file at `path`. Raises EngramdError."""
    try:
        # Not blocking: a FIFO under a shard's name must not hang the reader.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise EngramdError(f"{path}: not a regular file")
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or (8 + length > found.st_size and length <= MAX_HEADER_BYTES):
                raise EngramdError(
                    f"{path}: truncated: {found.st_size} bytes do not hold the safetensors header{_ANEW}"
                )
            if length > MAX_HEADER_BYTES:
                raise EngramdError(f"{path}: header of {length} bytes (the limit is {MAX_HEADER_BYTES})")
            header = file.read(length)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if len(header) != length:
        raise EngramdError(f"{path}: truncated inside its header{_ANEW}")
    tensors = _parse(header, path, 8 + length, found.st_size)
    digest = hashlib.sha256(prefix + header).hexdigest()
    return Shard(path, found.st_size, found.st_mtime_ns, digest, tensors)


def _parse(header: bytes, path: str, data_start: int, file_size: int) -> dict[str, Tensor]:
    entries = strict_json.loads(header, f"{path}: header")
    if not isinstance(entries, dict):
        raise EngramdError(f"{path}: header is not a JSON object")
    tensors = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            tensors[name] = _tensor(name, entry, path, data_start, file_size)
    last: Tensor | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if last is not None and tensor.bytes and tensor.offset < last.offset + last.bytes:
            raise EngramdError(f"{path}: tensors {last.name[:200]!r} and {tensor.name[:200]!r} overlap")
        if tensor.bytes:
            last = tensor
    return tensors


def _tensor(name: str, entry: Any, path: str, data_start: int, file_size: int) -> Tensor:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise EngramdError(f"{where}: its entry is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise EngramdError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise EngramdError(f"{where}: bad shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise EngramdError(f"{where}: bad data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if data_start + end > file_size:
        raise EngramdError(
            f"{where}: ends at byte {data_start + end}, but the file has {file_size}: truncated or damaged shard{_ANEW}"
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise EngramdError(
            f"{where}: {dtype} {list(shape)} takes {bits / 8:g} bytes, but its data_offsets span {end - begin}"
        )
    return Tensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in value)
