"""DeviceTarget: a layer's rows go into device memory of the engine's, by engram_client.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram_client import Table
from engram_client.arrays import Ids, Layout
from engram_client.cuda import DeviceTable

from .step_stager import LayerTarget, Pending


class DeviceTarget(LayerTarget):
    """Waiting for a part enqueues its copy on the stream that was current when it was submitted.

    device, max_rows, layout: as in DeviceTable. place: place(first_token, tokens) is the device memory for the rows of
    those tokens, of exactly their size (a pair in split layout). stream: stream() is the stream to copy on; None
    leaves it to DeviceTable, which takes torch's current one. Raises GpuError, ValueError.
    """

    def __init__(
        self,
        table: Table,
        device: object,
        max_rows: int,
        place: Callable[[int, int], Any],
        *,
        layout: Layout = "split",
        stream: Callable[[], Any] | None = None,
    ) -> None:
        self.max_rows = max_rows
        self._rows = DeviceTable(table, device, max_rows, layout=layout)
        self._place = place
        self._stream = stream

    def submit(self, ids: Ids, first_token: int) -> Pending:
        stream = self._stream() if self._stream is not None else None
        return self._rows.submit(ids, self._place(first_token, ids.shape[0]), stream)

    def reclaim(self) -> None:
        # Rows stay in the arena until their copy is done.
        self._rows.synchronize()
