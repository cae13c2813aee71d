"""What a daemon says about one layer of one table, and how a caller's wish is matched with what there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import integer, text_or_none
from .errors import TableMismatch, UnknownTable

MAX_LAYER = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer. handle is the daemon's number for this layer of this generation (0 where there is none)."""

    name: str
    layer: int
    rows: int
    row_bytes: int
    value_bytes: int
    generation: int
    identity: str
    head_sizes: tuple[int, ...]
    handle: int = 0

    def has_geometry_of(self, other: LayerInfo) -> bool:
        """Whether row ids and rows mean the same in both."""
        return (self.rows, self.row_bytes, self.value_bytes, self.head_sizes) == (
            other.rows,
            other.row_bytes,
            other.value_bytes,
            other.head_sizes,
        )

    def __str__(self) -> str:
        return f"{self.name} layer {self.layer}"


def check_identity(identity: str) -> str:
    """The identity in lower case; ValueError where it is not 64 hexadecimal digits."""
    lowered = identity.lower()
    if len(lowered) != 64 or not set(lowered) <= set("0123456789abcdef"):
        raise ValueError(f"identity must be 64 hexadecimal digits, not {identity!r}")
    return lowered


def check_wish(name: str | None, layer: int | None, identity: str | None) -> tuple[str | None, int | None, str | None]:
    """What a caller asks for, checked: name, layer, identity in lower case. TypeError, ValueError."""
    if layer is not None:
        layer = integer("layer", layer, 0, MAX_LAYER)
    if text_or_none("identity", identity) is not None:
        identity = check_identity(str(identity))
    return text_or_none("name", name), layer, identity


def select_layer(
    layers: Sequence[LayerInfo], name: str | None, layer: int | None, identity: str | None, source: str
) -> LayerInfo:
    """The one layer that fits; UnknownTable where none or several do, TableMismatch where only the identity differs."""
    named = [info for info in layers if name in (None, info.name) and layer in (None, info.layer)]
    fitting = [info for info in named if identity in (None, info.identity)]
    if len(fitting) == 1:
        return fitting[0]
    served = ", ".join(str(info) for info in layers) or "nothing"
    wanted = f"table {name!r}" if name is not None else "table"
    if layer is not None:
        wanted += f" with layer {layer}"
    if named and not fitting:
        have = ", ".join(f"{info}: {info.identity}" for info in named)
        raise TableMismatch(f"{wanted} at {source} has another identity than {identity} (there is {have})")
    if not fitting:
        raise UnknownTable(f"{source} serves no {wanted}; it serves {served}")
    raise UnknownTable(
        f"several layers fit {wanted} at {source} ({', '.join(str(info) for info in fitting)}): give name and layer"
    )


def check_successor(old: LayerInfo, new: LayerInfo | None, pinned_identity: str | None, source: str) -> LayerInfo:
    """What a handle on `old` goes on with after a reload or restart, once it is known to be the same table."""
    if new is None:
        raise UnknownTable(f"{source} no longer serves {old}: client.table() gives what it serves now")
    if pinned_identity is not None and new.identity != pinned_identity:
        raise TableMismatch(f"{new} at {source} now has identity {new.identity}, but {pinned_identity} was asked for")
    if not new.has_geometry_of(old):
        raise TableMismatch(
            f"{new} at {source} now has {new.rows} rows of {new.row_bytes} bytes ({new.value_bytes} of them values) "
            f"and {len(new.head_sizes)} head sizes; the handle was made for {old.rows} rows of {old.row_bytes} bytes "
            f"({old.value_bytes}) and {len(old.head_sizes)} head sizes: get a new one with client.table()"
        )
    return new
