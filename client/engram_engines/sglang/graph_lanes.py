"""Rows inside captured CUDA graphs: the stream fetches them by itself at each replay (engram_client.cuda.StreamLane).

A layer has a lane for each power of two of tokens that was captured, and graphs of fewer tokens share it, filled up
with -1. Lanes are made in the runs that SGLang makes before it captures, since a capture allows no allocation. A replay
goes on whatever the daemon does, so what its rows were worth is asked after the step, before any of its tokens leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from engram_client import EngramError
from engram_client.cuda import DeviceTable

from .lookups import SplitRows


class _Lane(NamedTuple):
    lane: Any
    ids: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor


def lane_tokens(tokens: int) -> int:
    """Tokens of the lane that serves a graph of so many: the next power of two."""
    return 1 << (tokens - 1).bit_length()


class GraphLanes:
    """The lanes of one layer. Used by the thread that runs the model.

    rows: a DeviceTable in split layout. columns: of the hash. deadline_s: the longest that a stream waits in one use.
    """

    def __init__(self, rows: DeviceTable, columns: int, device: torch.device, deadline_s: float) -> None:
        self._rows = rows
        self._columns = columns
        self._device = device
        self._deadline_s = deadline_s
        self._lanes: dict[int, _Lane] = {}

    def prepare(self, tokens: int) -> None:
        """Makes the lane for graphs of so many tokens. Raises Busy (no slot or arena left), GpuError, ValueError."""
        size = lane_tokens(tokens)
        if size in self._lanes:
            return
        ids = torch.full((size, self._columns), -1, dtype=torch.int64, device=self._device)
        values, scales = SplitRows(self._rows.table, self._columns).allocate(size, self._device)
        lane = self._rows.stream_lane(
            size * self._columns, (values, scales), ids_dtype=np.int64, deadline_s=self._deadline_s
        )
        self._lanes[size] = _Lane(lane, ids, values, scales)

    def enqueue(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Captures one use for ids [tokens, columns]; returns where its values and scales will lie."""
        tokens = indices.shape[0]
        lane = self._lanes.get(lane_tokens(tokens))
        if lane is None:
            raise RuntimeError(
                f"a graph of {tokens} tokens is captured that is no decoding step's, or without a run before it: the "
                "engramd plug-in has no lane for it (use --cuda-graph-backend-prefill breakable, or "
                "--disable-prefill-cuda-graph; for decoding steps --disable-cuda-graph)"
            )
        lane.ids[:tokens].copy_(indices)
        lane.ids[tokens:].fill_(-1)  # a larger graph's ids may be left there
        lane.lane.enqueue(lane.ids)
        rows = tokens * self._columns
        return lane.values[:rows], lane.scales[:rows]

    def check(self, after: Any) -> None:
        """Raises what went wrong in any replay since the last call, once `after` (an event or stream) has passed.

        Raises RowIdError, PageCorrupt, ReadFailed, DaemonLost, RequestTimeout, GpuError.
        """
        for lane in self._lanes.values():
            try:
                lane.lane.check(after)
            except EngramError as error:
                error.add_note("the step's tokens are given up: its Engram rows are not known to be right")
                raise
