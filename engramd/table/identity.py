"""What a table's identity is taken over: its canonical geometry and the digests of its source's chunks.

docs/table_format.md, "Identity", is the definition. Equal for every pack of the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engramd import strict_json
from engramd.checkpoint.mapping import TableSource
from engramd.table.manifest import PART_NAMES, Part


def identity_of(
    row_bytes: int, parts: Sequence[Part], layers: Sequence[tuple[int, int]], digests: Sequence[bytes]
) -> str:
    """The identity of packed content, in hex. layers: (number, rows) in the table's order; digests: of all chunks, in
    the same order (SourceSlot.digest)."""
    geometry = {
        "format": "engramd identity 1",
        "row_bytes": row_bytes,
        "parts": [[part.name, part.bytes, part.dtype] for part in parts],
        "layers": [list(layer) for layer in layers],
    }
    return hashlib.sha256(strict_json.canonical(geometry) + b"".join(digests)).hexdigest()


def parts_of(source: TableSource) -> tuple[Part, ...]:
    """The parts of a row packed from `source`, as the manifest names them."""
    return tuple(Part(name, part.row_bytes, part.dtype) for name, part in zip(PART_NAMES, source.parts, strict=False))
