"""The engine's events become log lines, and a session that broke the protocol ends."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict

from engramd._engine import lib
from engramd.daemon.engine import ERROR_CLASSES, Engine, Event
from engramd.daemon.ring_listener import RingListener

EVENTS_A_TURN = 256
REMEMBERED_PAGES = 4096
TAKEN_OVER = "taken over"  # the engine's text of ENGRAM_EVENT_RESIDENT
_LOG = logging.getLogger("engramd")


class EventLog:
    """Takes events off the engine. Event loop's thread only."""

    def __init__(self, engine: Engine, listener: RingListener) -> None:
        self._engine = engine
        self._listener = listener
        self._pages: OrderedDict[tuple[int, int, int], None] = OrderedDict()

    def process(self) -> None:
        """Handles what has happened, at most EVENTS_A_TURN events."""
        try:
            os.eventfd_read(self._engine.event_descriptor)
        except BlockingIOError:
            return
        for _ in range(EVENTS_A_TURN):
            event = self._engine.next_event()
            if event is None:
                return
            self._handle(event)
        # The count was taken with the first read: what is left must make the descriptor readable again.
        os.eventfd_write(self._engine.event_descriptor, 1)

    def _handle(self, event: Event) -> None:
        if event.kind == lib.ENGRAM_EVENT_VIOLATION:
            self._listener.close_session(event.session, f"broke the ring protocol: {event.text}")
        elif event.kind == lib.ENGRAM_EVENT_PAGE:
            self._page(event)
        elif event.kind == lib.ENGRAM_EVENT_RESIDENT:
            self._resident(event)
        elif event.kind == lib.ENGRAM_EVENT_READER:
            _LOG.info("reader: %s", event.text)
        else:
            _LOG.debug("unknown event %s", event)

    def _resident(self, event: Event) -> None:
        how = ", taken over from an earlier daemon" if event.text == TAKEN_OVER else ""
        if event.text and not how:
            _LOG.warning("%s: what an earlier daemon left is not used: %s", self._where(event.handle), event.text)
        if event.row_id <= 0:
            _LOG.info("%s is resident in DRAM%s", self._where(event.handle), how)
            return
        bad = "1 bad page, which is" if event.row_id == 1 else f"{event.row_id} bad pages, which are"
        _LOG.warning("%s is resident in DRAM except for %s left to NVMe", self._where(event.handle), bad)

    def _page(self, event: Event) -> None:
        """One line for each page and kind of failure, however often it is asked for."""
        key = (event.handle, event.page, event.status)
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        self._pages[key] = None
        if len(self._pages) > REMEMBERED_PAGES:
            self._pages.popitem(last=False)
        reason = ERROR_CLASSES.get(event.status, f"status {event.status}")
        if event.status == lib.ENGRAM_STATUS_READ_FAILED:
            reason += f", {os.strerror(abs(event.error_number))}"
        _LOG.error(
            "%s: page %d cannot be served (%s, row %d; %s); `engramd verify` checks the whole table",
            self._where(event.handle),
            event.page,
            reason,
            event.row_id,
            f"session {event.session}, request {event.request_id}" if event.session else "a control request",
            extra={"session": event.session, "request": event.request_id} if event.session else None,
        )

    def _where(self, handle: int) -> str:
        layer = self._engine.by_handle.get(handle)
        return f"table {layer.table.name} layer {layer.layer}" if layer else f"handle {handle}"
