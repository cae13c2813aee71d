"""Stages a step's rows where vLLM prepares the step's inputs: eagerly, before the model or its graph runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm.config import CUDAGraphMode

from .model import engram_layers
from .rows import StepRows


@lru_cache
def staging(state: type) -> type:
    """A subclass of vLLM's DeepseekV41ModelState that stages rows."""
    return type(f"Engramd{state.__name__}", (_Staging, state), {})


class _Staging:
    """Goes before DeepseekV41ModelState in the method order."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        inner = model.language_model.model
        layers = engram_layers(inner)
        connection = model.engramd
        self._is_graph = True
        # A pipeline stage without Engram layers has nothing to stage.
        self.engram_rows: StepRows | None = None
        if layers:
            self.engram_rows = StepRows(
                connection.client,
                connection.settings,
                layers,
                [connection.tables[layer.layer_hash_index] for layer in layers],
                inner.engram_hash,
                device,
                vllm_config.scheduler_config.max_num_batched_tokens,
                vllm_config.parallel_config.rank,
            )

    def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM prepares attention before the inputs, and only here says how the step runs.
        self._is_graph = cudagraph_mode != CUDAGraphMode.NONE
        return super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        if self.engram_rows is not None:
            if is_dummy(input_batch, req_states):
                self.engram_rows.skip()
            else:
                self.engram_rows.stage(input_batch, inputs["lookback_token_ids"], is_graph=self._is_graph)
        return inputs


def is_dummy(input_batch: Any, req_states: Any) -> bool:
    """Whether the batch only warms up, profiles or keeps step with other replicas: none of its requests is known."""
    return not any(request in req_states.req_id_to_index for request in input_batch.req_ids)
