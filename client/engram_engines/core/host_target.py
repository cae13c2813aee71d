"""HostTarget: a layer's rows, values and scales apart, go into host memory: of models that lie there, as in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram_client import Table, Ticket
from engram_client.arrays import Ids

from .step_stager import LayerTarget, Pending


class HostTarget(LayerTarget):
    """Waiting for a part copies its rows.

    max_rows: at most client.max_ticket_rows. place: place(first_token, tokens) is the pair of uint8 tensors, or other
    objects with numpy(), for the values and scales of those tokens.
    """

    def __init__(self, table: Table, max_rows: int, place: Callable[[int, int], tuple[Any, Any]]) -> None:
        self.max_rows = max_rows
        self._table = table
        self._place = place

    def submit(self, ids: Ids, first_token: int) -> Pending:
        ticket = self._table.submit(ids, layout="split", on_full="busy")
        return _HostCopy(ticket, self._place(first_token, ids.shape[0]))


class _HostCopy:
    """A part on its way."""

    def __init__(self, ticket: Ticket, places: tuple[Any, Any]) -> None:
        self._ticket = ticket
        self._places = places

    def wait(self, timeout: float | None = None) -> None:
        for place, rows in zip(self._places, self._ticket.wait(timeout), strict=True):
            place.numpy()[:] = rows.reshape(place.shape)

    def release(self) -> None:
        self._ticket.release()
