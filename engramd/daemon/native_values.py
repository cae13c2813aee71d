"""Values of the native engine as Python's own."""

from __future__ import annotations

from typing import Any

from engramd._engine import ffi


def text_of(characters: Any) -> str:
    """A zero-terminated char array as text."""
    return str(ffi.string(characters).decode("utf-8", "replace"))


def fields_of(structure: Any) -> dict[str, Any]:
    """A C structure's fields as Python values, arrays as lists: independent of the memory it lies in."""
    fields: dict[str, Any] = {}
    for name, field in ffi.typeof(structure).fields:
        value = getattr(structure, name)
        if field.type.kind == "array":
            value = [fields_of(item) if field.type.item.kind == "struct" else item for item in value]
        fields[name] = value
    return fields
