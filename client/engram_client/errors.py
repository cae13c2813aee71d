"""The errors that callers may want to tell apart. All derive from EngramError."""

from __future__ import annotations


class EngramError(Exception):
    """Anything that keeps a request from being answered exactly."""


class UnknownTable(EngramError):
    """The daemon serves no such table or layer, or several fit; the text lists what there is."""


class RowIdError(EngramError):
    """An id is neither -1 nor a row of the table. No row of the batch is returned.

    position is the flat (C order) index of the first such id in the array that was passed, row_id the id itself.
    """

    def __init__(self, text: str = "", position: int = -1, row_id: int = 0) -> None:
        super().__init__(text)
        self.position = position
        self.row_id = row_id


class TableMismatch(EngramError):
    """The table is not the one that was asked for: another identity, or after a reload another geometry."""


class Busy(EngramError):
    """A limit is reached: of the daemon, or of this session's slots and arena."""


class RequestTimeout(EngramError):
    """The caller's time limit passed. The daemon may be stuck, or merely slow."""


class DaemonLost(EngramError):
    """Nobody answers the socket, or the daemon went away. The next call tries to connect again."""


class _RowUnavailable(EngramError):
    def __init__(self, text: str = "", page: int = -1, row_id: int = -1) -> None:
        super().__init__(text)
        self.page = page
        self.row_id = row_id


class PageCorrupt(_RowUnavailable):
    """The stored row does not match its checksum. page is its page in the layer, row_id the row."""


class ReadFailed(_RowUnavailable):
    """The storage could not be read. page is the page in the layer, row_id the row that was asked for."""
