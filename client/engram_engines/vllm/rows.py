"""Stages the rows of each step: vLLM's own hash on the device, its ids to the host, the daemon's rows to the device.

One StepRows serves a rank's model. It runs on the thread that runs the model, in the eager part before a step's graph
is replayed. The layers' rows are asked for at once, layer 1 first. A step that runs as a graph gets all of them before
its replay; in an eager step later layers are completed when the decoder arrives there (StagedEngram.embed).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from engram_client import Client, Table
from vllm.models.deepseek_v41.common.mm_preprocess import image_sentinel_mask

from ..core.device_target import DeviceTarget
from ..core.host_target import HostTarget
from ..core.settings import EngineSettings
from ..core.step_metrics import StepMetrics
from ..core.step_stager import LayerTarget, Step, StepStager
from .embedding import StagedEngram

#: Device memory for values and for scales.
Places = tuple[torch.Tensor, torch.Tensor]


class StepRows:
    """The rows of one rank's steps.

    layers: this rank's Engram layers in the order of the decoder. tables: those of the same layers. hash_state: vLLM's
    NgramHashState. max_tokens: of one step. rank: what the metrics call it.
    """

    def __init__(
        self,
        client: Client,
        settings: EngineSettings,
        layers: Sequence[StagedEngram],
        tables: Sequence[Table],
        hash_state: Any,
        device: torch.device,
        max_tokens: int,
        rank: int = 0,
    ) -> None:
        self._layers = list(layers)
        self._hash_state = hash_state
        self._step: Step | None = None
        embeddings = [layer.embed_tokens for layer in layers]
        columns = embeddings[0].n_hash_cols
        share = embeddings[0].part_n_hash_cols
        most = min(client.max_ticket_rows, max_tokens * share)
        on_device = device.type == "cuda"
        targets: list[LayerTarget] = [
            DeviceTarget(table, device, most, embedding.place)
            if on_device
            else HostTarget(table, most, embedding.place)
            for table, embedding in zip(tables, embeddings, strict=True)
        ]
        self._stager = StepStager(
            targets,
            [layer.layer_hash_index for layer in layers],
            columns,
            columns=embeddings[0].columns,
            deadline_s=settings.deadline_s,
        )
        ids_shape = (max_tokens, len(hash_state.layout.layer_ids), columns)
        self._host_ids = torch.empty(ids_shape, dtype=torch.int32, device="cpu", pin_memory=on_device)
        self._ids_there = torch.cuda.Event() if on_device else None
        self._metrics = StepMetrics("step", rank, [(self.counters, [table.layer for table in tables])])

    @property
    def counters(self) -> Any:
        """Sums over all steps; see StageCounters."""
        return self._stager.counters

    def skip(self) -> None:
        """For a dummy step: nothing is asked for, and its layers may read whatever is staged."""
        self._give_up()
        for layer in self._layers:
            layer.embed_tokens.staged_tokens = None

    def stage(self, input_batch: Any, lookback_token_ids: torch.Tensor, *, is_graph: bool) -> None:
        """Stages the rows of a step's real tokens.

        input_batch: vLLM's InputBatch. lookback_token_ids: int32 [requests, n-gram length - 1] on the device, tokens
        before each request's chunk, newest first, -1 where there is none. is_graph: the step is a replay, so that
        all rows must be there when this returns.
        Raises DaemonLost, RequestTimeout, RowIdError, PageCorrupt, ReadFailed, TableMismatch, GpuError: the step must
        not go on then.
        """
        self._give_up()
        tokens = input_batch.num_tokens
        input_ids = input_batch.input_ids[:tokens]
        hash_ids = self._hash_state(
            input_ids,
            input_batch.positions[:tokens],
            input_batch.query_start_loc,
            image_sentinel_mask(input_ids),
            lookback_token_ids,
            image_sentinel_mask(lookback_token_ids),
            None,
            None,
        )
        for layer in self._layers:
            layer.embed_tokens.staged_tokens = tokens
        step = self._step = self._stager.begin(self._to_host(hash_ids))
        padded = input_batch.num_tokens_after_padding
        for position, layer in enumerate(self._layers):
            layer.embed_tokens.complete = self._completion(step, position, layer, padded)
        for layer in self._layers if is_graph else self._layers[:1]:
            layer.embed_tokens.complete()
        self._metrics.tick()

    def _completion(self, step: Step, position: int, layer: StagedEngram, padded: int) -> Any:
        def complete() -> None:
            layer.embed_tokens.complete = None
            step.finish(position)
            layer.embed_tokens.write(layer.staged_rows[:padded])

        return complete

    def _to_host(self, hash_ids: torch.Tensor) -> Any:
        """The ids int32 [tokens, layers, columns] in host memory; waits for them."""
        began = time.perf_counter()
        host = self._host_ids[: hash_ids.shape[0]]
        if self._ids_there is None:
            host.copy_(hash_ids)
        else:
            host.copy_(hash_ids, non_blocking=True)
            self._ids_there.record()
            self._ids_there.synchronize()
        self.counters.ids_wait_s += time.perf_counter() - began
        return host.numpy()

    def _give_up(self) -> None:
        """Ends a step whose layers did not all run: it failed elsewhere."""
        step, self._step = self._step, None
        if step is not None:
            step.release()
        for layer in self._layers:
            layer.embed_tokens.complete = None
