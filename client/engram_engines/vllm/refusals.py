"""What of vLLM's configuration the plug-in cannot serve, said before anything is loaded.

docs/vllm.md has the same list for operators, with what works and what has not been run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Load formats that read tensor by tensor, so that the tables' own are never read.
_LAZY_FORMATS = ("auto", "hf", "safetensors", "dummy")


def refuse_unsupported(vllm_config: Any, platform: Any) -> None:
    """Raises ValueError, which names every setting that stands in the way.

    vllm_config: vLLM's VllmConfig. platform: its current_platform.
    """
    problems = list(_problems(vllm_config, platform))
    if problems:
        raise ValueError(f"engramd cannot serve this vLLM configuration: {'; '.join(problems)}")


def _problems(vllm_config: Any, platform: Any) -> Iterator[str]:
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    if not platform.is_cuda():
        yield f"the platform is {platform.device_name or 'not CUDA'}, and rows are staged for CUDA devices alone"
    if not vllm_config.use_v2_model_runner:
        yield "the V1 model runner has no step at which rows could be staged (unset VLLM_USE_V2_MODEL_RUNNER=0)"
    columns = (model.hf_config.engram_max_ngram_size - 1) * model.hf_config.engram_n_heads
    if columns % parallel.tensor_parallel_size:
        yield f"{columns} hash columns cannot be split over tensor_parallel_size={parallel.tensor_parallel_size} ranks"
    if parallel.prefill_context_parallel_size > 1:
        size = parallel.prefill_context_parallel_size
        yield f"prefill_context_parallel_size={size} splits sequences over ranks (use 1)"
    if parallel.enable_elastic_ep:
        yield "enable_elastic_ep rebuilds ranks while it serves"
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds has tokens without ids, and rows are found by token ids"
    if model.enable_sleep_mode:
        yield "enable_sleep_mode throws staged memory away"
    yield from _loading_problems(vllm_config.load_config)


def _loading_problems(load: Any) -> Iterator[str]:
    load_format = getattr(load.load_format, "value", load.load_format)
    if load_format not in _LAZY_FORMATS:
        yield f"load_format={load_format} reads whole shards, the tables with them (use {' or '.join(_LAZY_FORMATS)})"
    if (load.model_loader_extra_config or {}).get("enable_multithread_load"):
        yield "enable_multithread_load reads whole shards, the tables with them"
    if load.safetensors_load_strategy not in (None, "lazy"):
        yield f"safetensors_load_strategy={load.safetensors_load_strategy} reads whole shards (use lazy)"
