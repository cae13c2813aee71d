"""Rows of resident layers, where the daemon holds them: vLLM's own look-up from host memory reads them over the bus.

MappedEmbedding is vLLM's ParallelEngramEmbedding with the daemon's memory as its storage, as vLLM has it for tables in
pinned host memory: the same kernel, stream and events, captured into graphs as in vLLM. Nothing is staged, and no
request is sent in a step. The memory stays readable for as long as this process has it mapped, also when the daemon
has ended.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from engram_client import LayerMap, Table
from engram_client.cuda import MappedTable
from torch import nn
from vllm.models.deepseek_v41.common import engram as native

from ..core.model_check import VALUES_PER_SCALE


class MappedRows:
    """One layer mapped in split layout, registered with the device where there is one.

    values: float8_e4m3fn [rows, dim]; scales: uint8 [rows, dim / 32]; read-only host memory of the daemon's.
    Raises what Table.map() raises, EngramError in packed layout, GpuError.
    """

    def __init__(self, table: Table, device: torch.device) -> None:
        self._registered = MappedTable(table, device) if device.type == "cuda" else None
        self._map: LayerMap = table.map() if self._registered is None else self._registered.map
        try:
            with warnings.catch_warnings():
                # torch knows no read-only tensors; nothing writes into these.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                values, scales = torch.from_numpy(self._map.values), torch.from_numpy(self._map.scales)
        except BaseException:
            self.close()
            raise
        self.values = values.view(torch.float8_e4m3fn)
        self.scales = scales

    def close(self) -> None:
        """Gives the mapping back; only while nothing reads the tensors."""
        self.values = self.scales = None
        (self._map if self._registered is None else self._registered).close()


class MappedEmbedding(native.ParallelEngramEmbedding):  # type: ignore[misc]
    """vLLM's embedding over a mapped layer: this rank's columns, in vLLM's order. head_sizes: rows of each column."""

    def __init__(self, rows: MappedRows, head_sizes: tuple[int, ...], device: torch.device) -> None:
        # Not vLLM's own __init__, which allocates a table.
        nn.Module.__init__(self)
        is_device = device.type == "cuda"
        self.cpu_offload = is_device
        self.dp_shared_memory = self.use_thp = False
        self.dp_size = 1
        self.peer_rows = 0
        self._views = self._view_src = None
        self.num_embeddings, self.dim = rows.values.shape
        self.block_size = VALUES_PER_SCALE
        self.n_hash_cols = len(head_sizes)
        self.tp_size, rank = native.get_tensor_model_parallel_world_size(), native.get_tensor_model_parallel_rank()
        self.part_n_hash_cols = self.n_hash_cols // self.tp_size
        self.head_start = rank * self.part_n_hash_cols
        self.vocab_start_idx = sum(head_sizes[: self.head_start])
        self.vocab_end_idx = sum(head_sizes[: self.head_start + self.part_n_hash_cols])
        self.part_num_embeddings = self.vocab_end_idx - self.vocab_start_idx
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_device else 1
        self._rows = rows
        # Plain tensors, not parameters: nothing loads, moves or saves them.
        self.weight = rows.values[self.vocab_start_idx : self.vocab_end_idx]
        self.weight_scale_inv = rows.scales[self.vocab_start_idx : self.vocab_end_idx]
        if is_device and not (self.weight.is_pinned() and self.weight_scale_inv.is_pinned()):
            # vLLM would copy the table into memory of its own.
            raise RuntimeError("the device does not know the mapped rows as pinned memory: set ENGRAMD_ROWS=staged")


class MappedEngram(native.Engram):  # type: ignore[misc]
    """The layer over a mapped one. `mapped` and `device` are set on a subclass for each model, by over_maps()."""

    mapped: ClassVar[list[MappedRows]]
    device: ClassVar[torch.device]

    def _create_embedding(self, layout: Any, layer_hash_index: int) -> MappedEmbedding:
        sizes = tuple(size for order in layout.primes[layer_hash_index] for size in order)
        return MappedEmbedding(self.mapped[layer_hash_index], sizes, self.device)


def over_maps(mapped: list[MappedRows], device: torch.device) -> type[MappedEngram]:
    """The layer's class for one model. mapped: its layers, in the order of the model's configuration."""
    return type("MappedEngram", (MappedEngram,), {"mapped": mapped, "device": device})
