"""Rows of a layer that the daemon holds resident, gathered by SGLang's own kernel from the daemon's memory.

Where a layer is resident in split layout (`resident_layout = "split"` in the daemon's configuration), it lies as
SGLang's shared host table would: all values, then all scales. The kernel is given these addresses, and decoding steps
run as in SGLang itself, in graphs and without, with nothing to wait for. Prompts are staged all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from engram_client import Table
from engram_client.cuda import GpuError, MappedTable
from sglang.kernels.ops.embeddings.engram_gather import engram_gather
from sglang.srt.layers import engram as native


class MappedRows:
    """One layer, mapped until close(), and with it resident in the daemon; see map_layers() in ..core.

    Raises what Table.map() raises, EngramError in packed layout, and GpuError where the device is no GPU or registers
    no read-only memory.
    """

    def __init__(self, table: Table, device: torch.device) -> None:
        try:
            self._mapped = MappedTable(table, device)
        except ValueError as error:
            raise GpuError(f"layer {table.layer} cannot be registered: {error}") from error
        try:
            self._values = self._mapped.values_pointer
            self._scales = self._mapped.scales_pointer
        except BaseException:
            self.close()
            raise
        self._rows = self._mapped.map.num_rows
        # In the order of addresses, as SGLang does where the GPU has page tables of its own for host memory.
        self._sort_ids = bool(native._sorted_host_reads(torch.cuda.current_device()))

    def close(self) -> None:
        """Gives the mapping back; only while no kernel reads it."""
        self._mapped.close()

    def gather(self, indices: torch.Tensor, out: Any) -> None:
        """Writes bfloat16 [*S, dim] of row ids [*S] into out, in the order of torch's current stream."""
        dim = out.shape[-1]
        engram_gather(
            self._values,
            self._scales,
            indices.reshape(-1),
            out.view(-1, dim),
            dim,
            native.FP8_BLOCK_SIZE,
            row_hi=self._rows,
            sort_ids=self._sort_ids,
        )
