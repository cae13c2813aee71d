"""Rows by tickets: rates with one request open, or several, and the time of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class Table(Protocol):
    """What is needed of engram_client.Table."""

    def submit(self, ids: Ids) -> Any: ...


def by_ticket(table: Table, ids: Ids, batch: int) -> float:
    """Rows a second with one request open at a time."""
    began = time.perf_counter()
    for start in range(0, len(ids), batch):
        with table.submit(ids[start : start + batch]) as ticket:
            ticket.wait()
    return len(ids) / (time.perf_counter() - began)


def queued(table: Table, ids: Ids, batch: int, depth: int) -> float:
    """Rows a second with `depth` requests in flight."""
    began = time.perf_counter()
    open_tickets: deque[Any] = deque()
    for start in range(0, len(ids), batch):
        if len(open_tickets) == depth:
            with open_tickets.popleft() as ticket:
                ticket.wait()
        open_tickets.append(table.submit(ids[start : start + batch]))
    while open_tickets:
        with open_tickets.popleft() as ticket:
            ticket.wait()
    return len(ids) / (time.perf_counter() - began)


def time_each(ids: Ids, pause_us: int, call: Callable[[Ids], Any]) -> Seconds:
    """Seconds of call(batch) for each batch, with a sleep of pause_us before it."""
    seconds = np.empty(len(ids))
    for index, batch in enumerate(ids):
        if pause_us:
            time.sleep(pause_us / 1e6)
        began = time.perf_counter()
        call(batch)
        seconds[index] = time.perf_counter() - began
    return seconds


def round_trips(table: Table, ids: Ids, pause_us: int = 0) -> Seconds:
    """Seconds of each request, from submit to release. ids: int64 [requests, rows]."""

    def call(batch: Ids) -> None:
        ticket = table.submit(batch)
        ticket.wait()
        ticket.release()

    return time_each(ids, pause_us, call)
