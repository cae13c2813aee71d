"""DeviceTicket: a batch for device memory, between its submission and its copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..context import Releasable
from ..ring_table import RingTicket

if TYPE_CHECKING:
    from .device_table import DeviceTable


class DeviceTicket(Releasable):
    """A batch on its way into device memory: from DeviceTable.submit() on. wait() enqueues its copy."""

    __slots__ = ("_out", "_pieces", "_stream", "_table", "_ticket")

    def __init__(
        self,
        table: DeviceTable,
        ticket: RingTicket | None,
        pieces: list[tuple[int, int]],
        out: Any,
        stream: int,
    ) -> None:
        self._table = table
        self._ticket = ticket
        self._pieces = pieces
        self._out = out
        self._stream = stream

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the reply, enqueues the copy, and returns the `out` given to submit().

        The rows are there in the order of the stream: for what is enqueued on it afterwards. Waiting again does
        nothing. timeout: of the daemon's reply, in seconds; after RequestTimeout it may be called again.
        Raises what Ticket.wait() raises (nothing is copied then), and GpuError.
        """
        ticket = self._ticket
        if ticket is not None:
            driver = self._table.driver
            entered = driver.enter()
            try:
                self._table._finish(ticket, self._pieces, self._stream, timeout)
            finally:
                driver.leave(entered)
            self._ticket = None
        return self._out

    def release(self) -> None:
        """Gives up a batch that was not waited for. What wait() has enqueued goes on."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()
