"""Stands where SGLang has a layer's table: rows come from the daemon, and SGLang's own kernel turns them into bfloat16.

DaemonEmbedding takes the place of EngramEmbedding. It has no parameters and allocates nothing. Its rows arrive in one
of four ways, always values and scales apart, as SGLang's own host table has them: staged by the scheduler for prompts
(stager.py, SGLang's own path); of other steps read in place where the daemon's layer is mapped (mapped_rows.py), else
looked up while the host waits (lookups.py), or by the stream itself inside a captured graph (graph_lanes.py). Every
rank asks for all rows of its own tokens, as with SGLang's shared host table: no collective is needed, whatever the kind
of parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.embeddings.engram_gather import engram_gather
from sglang.srt.layers import engram as native
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

from .graph_lanes import GraphLanes
from .loading import refuse_unsupported
from .lookups import LayerLookup
from .mapped_rows import MappedRows


class DaemonEmbedding(native.EngramEmbedding):  # type: ignore[misc]
    """One layer. connect() gives it its sources, before the first forward.

    The attributes are those of EngramEmbedding that the rest of SGLang reads.
    """

    def __init__(self, num_embeddings: int, dim: int, layer_id: int, column_bounds: tuple[int, ...]) -> None:
        torch.nn.Module.__init__(self)
        refuse_unsupported()
        self.dim = dim
        self.layer_id = layer_id
        self.tp_size = native.get_parallel().tp_size
        self.row_start = 0
        self.rows = num_embeddings
        self.host_table = None
        self.peer = None
        self.staged_by_scheduler = True
        self._sort_host_reads = False
        self._lookup: LayerLookup | None = None
        self._lanes: GraphLanes | None = None
        self._mapped: MappedRows | None = None

    @property
    def shared_host_table_without_ats(self) -> bool:
        """There is no host table."""
        return False

    def enable_scheduler_staging(self) -> None:
        """It is always on."""

    def finish_load(self, label: str) -> None:
        """Nothing was loaded."""

    def connect(self, lookup: LayerLookup, lanes: GraphLanes | None, mapped: MappedRows | None = None) -> None:
        """Where rows come from that the scheduler does not stage. lanes: None where there are no CUDA graphs.
        mapped: where the layer can be read in place, which goes before the others."""
        self._lookup = lookup
        self._lanes = lanes
        self._mapped = mapped

    def forward(self, indices: torch.Tensor, forward_batch: Any = None, *, cp_all_tokens: bool = False) -> torch.Tensor:
        """bfloat16 [tokens, columns, dim] of row ids [tokens, columns]. Raises what LayerLookup.rows() raises; what a
        captured graph's rows are worth is told by GraphLanes.check() after the step."""
        if indices.shape[0] == 0:
            return self.new_rows(indices)
        if self._lookup is None:
            raise RuntimeError("Engram rows were asked for before the engramd plug-in has connected to its daemon")
        out = self.new_rows(indices)
        if self._mapped is not None:
            self._mapped.gather(indices, out)
            return out
        if indices.is_cuda and torch.cuda.is_current_stream_capturing():
            if self._lanes is None:
                raise RuntimeError("this device has no stream waits, so engramd needs --disable-cuda-graph")
            values, scales = self._lanes.enqueue(indices)
        else:
            if self._lanes is not None and _will_be_captured(forward_batch):
                self._lanes.prepare(indices.shape[0])
            values, scales = self._lookup.rows(indices)
        self._dequantise(values, scales, out.view(-1, self.dim))
        return out

    def dequant_staged(
        self, rows: torch.Tensor, scales: torch.Tensor, copied: Any, hash_shape: torch.Size
    ) -> torch.Tensor:
        """As SGLang's own; also where the model lies in host memory, where nothing is under way (copied is None)."""
        if copied is not None:
            return super().dequant_staged(rows, scales, copied, hash_shape)
        out = torch.zeros(*hash_shape, self.dim, dtype=torch.bfloat16, device=rows.device)
        self._dequantise(rows, scales, out.view(-1, self.dim)[: rows.shape[0]])
        return out

    def _dequantise(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """values uint8 [rows, dim] and scales uint8 [rows, dim / 32] into out, bfloat16 [rows, dim]."""
        if out.is_cuda:
            order = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
            engram_gather(
                values.data_ptr(), scales.data_ptr(), order, out, self.dim, native.FP8_BLOCK_SIZE, row_hi=out.shape[0]
            )
            return
        # As EngramEmbedding does it without a GPU.
        grouped = values.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, native.FP8_BLOCK_SIZE))
        product = grouped * scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
        out.copy_(product.flatten(-2).to(torch.bfloat16))


def _will_be_captured(forward_batch: Any) -> bool:
    """Whether this is a run before the capture of a decoding or verification step. Prompts are staged, not captured."""
    return (
        get_is_capture_mode()
        and forward_batch is not None
        and not forward_batch.forward_mode.is_extend_without_speculative()
    )
