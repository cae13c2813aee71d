"""Client of the engramd daemon: rows of its tables by row id, over shared memory or ZeroMQ.

import engram_client
with engram_client.connect() as client:
    table = client.table("demo", layer=1)
    rows = table.fetch(ids)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client import Client, connect
from .errors import (
    Busy,
    DaemonLost,
    EngramError,
    PageCorrupt,
    ReadFailed,
    RequestTimeout,
    RowIdError,
    TableMismatch,
    UnknownTable,
)
from .layer_map import LayerMap
from .table import Table, Ticket

if TYPE_CHECKING:
    from .curve import CurveKeys
    from .hasher import NgramHasher

__all__ = [
    "Busy",
    "Client",
    "CurveKeys",
    "DaemonLost",
    "EngramError",
    "LayerMap",
    "NgramHasher",
    "PageCorrupt",
    "ReadFailed",
    "RequestTimeout",
    "RowIdError",
    "Table",
    "TableMismatch",
    "Ticket",
    "UnknownTable",
    "connect",
]


def __getattr__(name: str) -> Any:
    # Loaded at first use: programs that only fetch rows need no hash, nor ZeroMQ.
    if name == "NgramHasher":
        from .hasher import NgramHasher

        return NgramHasher
    if name == "CurveKeys":
        from .curve import CurveKeys

        return CurveKeys
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
