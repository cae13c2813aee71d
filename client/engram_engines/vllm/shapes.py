"""What of vLLM's modules the plug-in stands on, checked before a model is built (core/class_shapes.py)."""

from __future__ import annotations

from ..core.class_shapes import ClassShape

_ENGRAM = "vllm.models.deepseek_v41.common.engram"
_NVIDIA = "vllm.models.deepseek_v41.nvidia"

SHAPES = (
    ClassShape(
        _ENGRAM,
        "Engram",
        {
            "_create_embedding": ("self", "layout", "layer_hash_index"),
            "_init_staging": ("self", "max_tokens", "head_dim"),
            "prepare_embeddings": ("self", "hash_ids"),
            "_ready_rows": ("self", "num_tokens"),
            "embed": ("self", "hash_ids"),
            "forward": ("self", "hidden_states", "hash_ids", "token_mask"),
        },
    ),
    # Replaced as a whole: what vLLM calls on it must be what StagedEmbedding has.
    ClassShape(
        _ENGRAM,
        "ParallelEngramEmbedding",
        {"lookup": ("self", "indices", "out", "background"), "collapse_huge_pages": ("self",)},
    ),
    ClassShape(_ENGRAM, "EngramBatch", {"create": ("layers", "max_tokens")}),
    ClassShape(
        _ENGRAM,
        "NgramHashState",
        {
            "forward": (
                "self",
                "input_ids",
                "positions",
                "query_start_loc",
                "dead_mask",
                "lookback_token_ids",
                "lookback_dead_mask",
                "slot_mapping",
                "block_table",
            )
        },
    ),
    ClassShape(
        _ENGRAM,
        functions={
            "_engram_lookup_kernel": (
                "weight",
                "scales",
                "ids",
                "sorted_dst",
                "out",
                "vocab_start",
                "vocab_end",
                "num_rows",
                "ids_stride_t",
                "ids_stride_h",
                "HEAD_START",
                "LOCAL_HEADS",
                "TOTAL_HEADS",
                "DIM",
                "QUANT_BLOCK",
                "BLOCK_R",
                "GRID",
                "SORTED",
                "PACKED",
                "OUT_STRIDE",
                "PEER_ROWS",
            )
        },
        constants=("EngramLayout", "get_current_vllm_config"),
    ),
    ClassShape("vllm.models.deepseek_v41.common.mm_preprocess", functions={"image_sentinel_mask": ("token_ids",)}),
    ClassShape(
        f"{_NVIDIA}.model_state",
        "DeepseekV41ModelState",
        {
            "__init__": ("self", "vllm_config", "model", "encoder_cache", "device"),
            "prepare_inputs": ("self", "input_batch", "req_states"),
            "prepare_attn": (
                "self",
                "input_batch",
                "cudagraph_mode",
                "block_tables",
                "slot_mappings",
                "attn_groups",
                "kv_cache_config",
                "for_capture",
                "ubatch_idx",
                "model_specific_attn_metadata",
            ),
        },
    ),
    ClassShape(
        f"{_NVIDIA}.vl_model",
        "DeepseekV41ForCausalLM",
        {"get_model_state_cls": ("self",), "load_weights": ("self", "weights")},
    ),
    ClassShape(f"{_NVIDIA}.model", constants=("Engram", "EngramBatch", "NgramHashState")),
    ClassShape("vllm.config", "SchedulerConfig", {"get_scheduler_cls": ("self",)}),
    ClassShape(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        {
            "add_request": ("self", "request"),
            "finish_requests": ("self", "request_ids", "finished_status"),
            "schedule": ("self", "throttle_prefills"),
        },
    ),
    ClassShape(
        "vllm.model_executor.model_loader.weight_utils",
        functions={"should_skip_weight": ("weight_name", "local_expert_ids")},
    ),
)
