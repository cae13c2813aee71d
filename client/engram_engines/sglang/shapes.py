"""What the plug-in stands on in SGLang 0.5.23: classes, methods and their parameters."""

from __future__ import annotations

from ..core.class_shapes import ClassShape

_ENGRAM = "sglang.srt.layers.engram"
_STAGING = "sglang.srt.layers.engram_staging"
_SCHEDULER = "sglang.srt.managers.scheduler"

SHAPES = (
    ClassShape(
        _ENGRAM,
        functions={"get_parallel": (), "get_model": (), "_sorted_host_reads": ("device",)},
        constants=("FP8_BLOCK_SIZE",),
    ),
    ClassShape(
        _ENGRAM,
        "EngramEmbedding",
        {
            "__init__": ("self", "num_embeddings", "dim", "layer_id", "column_bounds"),
            "forward": ("self", "indices", "forward_batch", "cp_all_tokens"),
            "dequant_staged": ("self", "rows", "scales", "copied", "hash_shape"),
            "new_rows": ("self", "indices"),
            "finish_load": ("self", "label"),
            "enable_scheduler_staging": ("self",),
        },
        ("shared_host_table_without_ats",),
    ),
    ClassShape(
        _ENGRAM,
        "Engram",
        {
            "forward": ("self", "x", "hash_ids", "forward_batch", "input_ids", "cp_all_tokens"),
            "embed_rows": ("self", "hash_ids", "forward_batch", "cp_all_tokens"),
        },
    ),
    ClassShape(_ENGRAM, "EngramHasher", {"hash_windows": ("self", "tokens", "blocked")}),
    ClassShape(
        "sglang.kernels.ops.embeddings.engram_gather",
        functions={
            "engram_gather": (
                "weight_ptr",
                "scale_ptr",
                "ids",
                "out",
                "dim",
                "block_size",
                "row_lo",
                "row_hi",
                "sort_ids",
            )
        },
    ),
    ClassShape(
        _STAGING,
        "EngramRowStager",
        {
            "__init__": ("self", "hasher", "embeds", "device"),
            "from_model": ("model", "hasher", "device"),
            "stage": ("self", "batch"),
            "_windows": ("self", "batch"),
        },
    ),
    ClassShape(
        "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager",
        "NgramEmbeddingManager",
        {"prepare_for_forward": ("self", "batch", "chunked_req")},
    ),
    ClassShape("sglang.srt.model_executor.runner_utils.capture_mode", functions={"get_is_capture_mode": ()}),
    ClassShape(
        "sglang.srt.models.deepseek_v4", "DeepseekV4ForCausalLM", {"load_weights": ("self", "weights", "is_nextn")}
    ),
    ClassShape(
        _SCHEDULER,
        "Scheduler",
        {
            "_add_request_to_queue": ("self", "req", "is_retracted"),
            "_release_aborted_request": ("self", "req"),
            "process_batch_result": ("self", "batch", "result"),
            "maybe_init_ngram_embedding": ("self",),
        },
    ),
)
