"""Which of a checkpoint's tensors are the tables that a daemon has already, and that an engine need not load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

# layers.L.engram.embed.{weight,scale}, also where an export prefixes the layers or calls the scale weight_scale(_inv),
# or the embedding embed_tokens.
_TABLE_TENSOR = re.compile(r"(^|\.)layers\.\d+\.engram\.embed(_tokens)?\.(weight|scale|weight_scale|weight_scale_inv)$")


def is_table_tensor(name: str) -> bool:
    """Whether a checkpoint's tensor holds rows or scales of an Engram table."""
    return _TABLE_TENSOR.search(name) is not None


def without_table_tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The weights but for the tables'; what is left out is not touched."""
    return ((name, weight) for name, weight in weights if not is_table_tensor(name))
