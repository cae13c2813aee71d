"""Rows straight into GPU memory, over CUDA's or ROCm's driver library, which is opened at run time.

from engram_client.cuda import DeviceTable
with DeviceTable(client.table("demo", layer=1), "cuda:0", max_rows=12288) as table:
    table.fetch(ids, out, stream)
"""

from __future__ import annotations

from .device_table import DeviceTable, Timing, rank_columns
from .device_ticket import DeviceTicket
from .driver import GpuError
from .mapped_table import MappedTable
from .stream_lane import StreamLane

__all__ = ["DeviceTable", "DeviceTicket", "GpuError", "MappedTable", "StreamLane", "Timing", "rank_columns"]
