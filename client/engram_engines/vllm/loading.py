"""Keeps vLLM from reading the tables' tensors: 189 GiB that the daemon has already.

vLLM asks one function whether a tensor of a shard is wanted before it reads it. That function is wrapped, once in a
process, and says no to the tables' tensors of models whose rows come from a daemon.
"""

from __future__ import annotations

from vllm.model_executor.model_loader import weight_utils

from ..core.table_tensors import is_table_tensor, without_table_tensors

__all__ = ["is_table_tensor", "skip_table_tensors", "without_table_tensors"]


def skip_table_tensors() -> None:
    """From now on this process reads no table tensor of any checkpoint. Calling it again is harmless."""
    asked = weight_utils.should_skip_weight
    if getattr(asked, "skips_table_tensors", False):
        return

    def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
        return is_table_tensor(weight_name) or bool(asked(weight_name, local_expert_ids))

    vars(should_skip_weight)["skips_table_tensors"] = True
    weight_utils.should_skip_weight = should_skip_weight
