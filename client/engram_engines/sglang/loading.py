"""Keeps SGLang from loading the tables' tensors, and says which ways of loading would read them all the same.

SGLang hands a model its tensors one by one, each a view of the mapped file that reads nothing until it is touched. The
tables' are taken out of that row. Loaders that read whole shards would read 189 GiB for nothing; they are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.runtime_context import get_model, get_parallel

from ..core.table_tensors import without_table_tensors

_LAZY_FORMATS = ("auto", "safetensors", "dummy")


def skip_table_tensors() -> None:
    """From now on DeepseekV4ForCausalLM, and what derives from it, loads no table. Calling it again is harmless."""
    load_weights = DeepseekV4ForCausalLM.load_weights
    if getattr(load_weights, "skips_table_tensors", False):
        return

    @functools.wraps(load_weights)
    def load_others(self: Any, weights: Iterable[tuple[str, Any]], *arguments: Any, **options: Any) -> Any:
        return load_weights(self, without_table_tensors(weights), *arguments, **options)

    vars(load_others)["skips_table_tensors"] = True
    DeepseekV4ForCausalLM.load_weights = load_others


def refuse_unsupported() -> None:
    """Raises ValueError, which names every option of this server that stands in the way."""
    problems = list(_problems())
    if problems:
        raise ValueError(f"engramd cannot serve this SGLang configuration: {'; '.join(problems)}")


def _problems() -> Iterator[str]:
    model, parallel = get_model(), get_parallel()
    if parallel.attn_cp_size > 1:
        yield f"attn_cp_size={parallel.attn_cp_size} splits sequences over ranks (use 1)"
    load_format = str(getattr(model.load_format, "value", model.load_format))
    if load_format not in _LAZY_FORMATS:
        yield f"--load-format {load_format} reads whole shards, the tables with them (use {' or '.join(_LAZY_FORMATS)})"
    if model.weight_loader_disable_mmap:
        yield "--weight-loader-disable-mmap reads whole shards, the tables with them"
    if model.weight_loader_prefetch_checkpoints:
        yield "--weight-loader-prefetch-checkpoints reads whole shards, the tables with them"
