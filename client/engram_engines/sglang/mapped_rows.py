"""Rows of a layer that the daemon holds resident, gathered by SGLang's own kernel from the daemon's memory.

Where a layer is resident in split layout (`resident_layout = "split"` in the daemon's configuration), it lies as
SGLang's shared host table would: all values, then all scales. The kernel is given these addresses, and decoding steps
run as in SGLang itself, in graphs and without, with nothing to wait for. Prompts are staged all the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from engram_client import Busy, Table
from engram_client.cuda import GpuError, MappedTable
from sglang.kernels.ops.embeddings.engram_gather import engram_gather
from sglang.srt.layers import engram as native

logger = logging.getLogger(__name__)


class MappedRows:
    """One layer. Keeps the map for the life of the process, and with it the layer resident in the daemon.

    sort_ids: read in the order of addresses, as SGLang does where the GPU has page tables of its own for host memory.
    """

    def __init__(self, mapped: MappedTable, sort_ids: bool) -> None:
        self._mapped = mapped
        self._values = mapped.values_pointer
        self._scales = mapped.scales_pointer
        self._rows = mapped.map.num_rows
        self._sort_ids = sort_ids

    @classmethod
    def open(cls, table: Table, device: torch.device) -> MappedRows | None:
        """None, with a line in the log that says why, where the layer cannot be mapped: it is not resident (or not all
        read yet), lies in packed layout, or the device registers no read-only memory."""
        try:
            mapped = MappedTable(table, device)
        except (Busy, GpuError) as error:
            logger.info("engramd: rows of layer %d are fetched in each step: %s", table.layer, error)
            return None
        if mapped.map.layout != "split":
            mapped.close()
            logger.info(
                "engramd: rows of layer %d are fetched in each step: it lies in packed layout in the daemon "
                '(resident_layout = "split" lets SGLang\'s kernel read them in place)',
                table.layer,
            )
            return None
        return cls(mapped, bool(native._sorted_host_reads(torch.cuda.current_device())))

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
