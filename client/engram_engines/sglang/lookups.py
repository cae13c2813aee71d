"""Rows of ids that only a forward pass knows: decoding steps that run without a graph, and prompts that end in a
token which is still on the device. The host waits for the ids, then for the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from engram_client import Table

from ..core.device_target import DeviceTarget
from ..core.host_target import HostTarget
from ..core.step_stager import LayerTarget, StepStager


class SplitRows:
    """Memory for the rows of one layer's ids in one step: values and scales apart, as SGLang's kernel reads them."""

    def __init__(self, table: Table, columns: int) -> None:
        self._columns = columns
        self._value_bytes = table.value_bytes
        self._scale_bytes = table.row_bytes - table.value_bytes
        self.values = torch.empty(0)
        self.scales = torch.empty(0)

    def allocate(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh memory, uint8 [tokens * columns, 256] and [tokens * columns, 8]: earlier steps keep theirs."""
        rows = tokens * self._columns
        self.values = torch.empty((rows, self._value_bytes), dtype=torch.uint8, device=device)
        self.scales = torch.empty((rows, self._scale_bytes), dtype=torch.uint8, device=device)
        return self.values, self.scales

    def places(self, first_token: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of these tokens lie."""
        part = slice(first_token * self._columns, (first_token + tokens) * self._columns)
        return self.values[part], self.scales[part]


def make_target(
    table: Table, max_rows: int, memory: SplitRows, device: torch.device, stream: Callable[[], Any] | None = None
) -> LayerTarget:
    """A target that fills `memory`, on whatever device that is."""
    if device.type == "cuda":
        return DeviceTarget(table, device, max_rows, memory.places, stream=stream)
    return HostTarget(table, max_rows, memory.places)


class LayerLookup:
    """One layer. Used by the thread that runs the model.

    columns: of the hash. max_ticket_rows: of the client; longer requests go in parts. deadline_s: for a whole request.
    """

    def __init__(
        self, table: Table, columns: int, max_ticket_rows: int, device: torch.device, deadline_s: float
    ) -> None:
        self._device = device
        self._columns = columns
        self._memory = SplitRows(table, columns)
        self._stager = StepStager(
            [make_target(table, max_ticket_rows, self._memory, device)], [0], columns, deadline_s=deadline_s
        )

    @property
    def counters(self) -> Any:
        """See StageCounters."""
        return self._stager.counters

    def rows(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of ids [tokens, columns] on the model's device, in the order of its current stream.

        Raises RowIdError, RequestTimeout, DaemonLost, PageCorrupt, ReadFailed, TableMismatch, Busy, GpuError.
        """
        began = time.perf_counter()
        host = indices.reshape(-1, 1, self._columns).contiguous().cpu().numpy()
        self.counters.ids_wait_s += time.perf_counter() - began
        rows = self._memory.allocate(host.shape[0], self._device)
        with self._stager.begin(host) as step:
            step.finish(0)
        return rows
