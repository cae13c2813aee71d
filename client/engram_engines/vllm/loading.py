"""Keeps vLLM from reading the tables' tensors: 189 GiB that the daemon has already.

vLLM asks one function whether a tensor of a shard is wanted before it reads it. That function is wrapped, once in a
process, and says no to the tables' tensors of models whose rows come from a daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.model_executor.model_loader import weight_utils

# layers.L.engram.embed.{weight,scale}, also where an export prefixes the layers or calls the scale weight_scale(_inv),
# or the embedding embed_tokens.
_TABLE_TENSOR = re.compile(r"(^|\.)layers\.\d+\.engram\.embed(_tokens)?\.(weight|scale|weight_scale|weight_scale_inv)$")


def is_table_tensor(name: str) -> bool:
    """Whether a checkpoint's tensor holds rows or scales of an Engram table."""
    return _TABLE_TENSOR.search(name) is not None


def skip_table_tensors() -> None:
    """From now on this process reads no table tensor of any checkpoint. Calling it again is harmless."""
    asked = weight_utils.should_skip_weight
    if getattr(asked, "skips_table_tensors", False):
        return

    def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
        return is_table_tensor(weight_name) or bool(asked(weight_name, local_expert_ids))

    vars(should_skip_weight)["skips_table_tensors"] = True
    weight_utils.should_skip_weight = should_skip_weight


def without_table_tensors(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The weights but for the tables', for loaders that do not ask."""
    return ((name, weight) for name, weight in weights if not is_table_tensor(name))
