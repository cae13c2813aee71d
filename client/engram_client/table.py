"""Table and Ticket: what callers hold. How requests travel is in ring_table and control_table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import deadline_of
from .arrays import UINT8, Ids, Layout, OutOfRangeId, Rows, as_ids, check_out, check_split_out
from .context import Releasable
from .errors import RowIdError
from .layer import LayerInfo
from .layer_map import LayerMap

OnFull = Literal["wait", "busy"]


def check_waiting(on_full: str, timeout: float | None) -> None:
    """Checks what submit() is to do without room. TypeError, ValueError."""
    if on_full not in ("wait", "busy"):
        raise ValueError(f"on_full must be 'wait' or 'busy', not {on_full!r}")
    deadline_of(timeout)


class Ticket(Releasable, ABC):
    """A batch on its way: from Table.submit() to release(). A context manager that releases at its end.

    A ticket that is dropped without release gives its room back when it is collected: at once, or, where views of its
    rows live, when the last of them dies.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Rows | tuple[Rows, Rows]:
        """The rows, read-only uint8 [*S, row_bytes]; in split layout the pair [*S, value_bytes], [*S, scale_bytes].

        They lie in the session's reply arena and are valid until release(): using them afterwards reads other rows, or
        memory that is gone. Waiting again returns the same rows. timeout in seconds.
        Raises RowIdError, RequestTimeout (the ticket stays usable), DaemonLost, PageCorrupt, ReadFailed, EngramError.
        """

    @abstractmethod
    def release(self) -> None:
        """Gives the ticket's room back. Does nothing where that was done before."""


class Table(ABC):
    """One layer of one table. Made by Client.table(); may be used from any number of threads.

    Survives a restart of its daemon and a reload of the table: the layer is looked up again, and where it is not the
    same any more (see Client.table), calls raise TableMismatch or UnknownTable.
    """

    _info: LayerInfo
    _head_sizes: NDArray[np.int64]
    num_rows: int
    row_bytes: int

    def _set_info(self, info: LayerInfo) -> None:
        self._info = info
        self.num_rows = info.rows
        self.row_bytes = info.row_bytes
        self._head_sizes = np.array(info.head_sizes, np.int64)
        self._head_sizes.setflags(write=False)

    @property
    def name(self) -> str:
        """The table's name in the daemon."""
        return self._info.name

    @property
    def layer(self) -> int:
        """The layer's number in the model."""
        return self._info.layer

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's first part; the rest is its scale part, which may be empty."""
        return self._info.value_bytes

    @property
    def identity(self) -> str:
        """Content hash of the table, 64 hexadecimal digits: equal for every pack of the same bytes."""
        return self._info.identity

    @property
    def generation(self) -> int:
        """Number of the published content at the daemon's path; grows by one with each publish."""
        return self._info.generation

    @property
    def head_sizes(self) -> NDArray[np.int64]:
        """Rows of each hash head, int64 [columns], read-only; their sum is num_rows in hashed tables."""
        return self._head_sizes

    @abstractmethod
    def map(self) -> LayerMap:
        """All rows of the layer as read-only arrays over the daemon's own memory: one copy a machine, no requests.

        Only where the daemon holds the layer resident and has checked every page. See LayerMap for lifetimes.
        Raises Busy (not resident, still being read, or with damaged pages; the text says which), EngramError over
        ZeroMQ, DaemonLost, UnknownTable, TableMismatch.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info}: {self.num_rows} rows of {self.row_bytes} bytes>"

    @overload
    def fetch(
        self,
        ids: ArrayLike,
        *,
        out: Rows | None = None,
        layout: Literal["packed"] = "packed",
        timeout: float | None = None,
    ) -> Rows: ...
    @overload
    def fetch(
        self,
        ids: ArrayLike,
        *,
        out: tuple[Rows, Rows] | None = None,
        layout: Literal["split"],
        timeout: float | None = None,
    ) -> tuple[Rows, Rows]: ...
    def fetch(
        self,
        ids: ArrayLike,
        *,
        out: Rows | tuple[Rows, Rows] | None = None,
        layout: Layout = "packed",
        timeout: float | None = None,
    ) -> Rows | tuple[Rows, Rows]:
        """The rows of `ids`, in the caller's own memory.

        ids: int32 or int64 array of any shape S, also () and empty (other integers are converted). -1 gives zeros.
        Returns uint8 [*S, row_bytes]; with layout="split" the pair uint8 [*S, value_bytes], [*S, scale_bytes].
        out: where to write instead, C-contiguous and of that shape (a pair for split); it is also returned.
        timeout: in seconds. After an error nothing in `out` is of use.
        Raises RowIdError, TypeError (ids are no integers), ValueError (out, layout), Busy, RequestTimeout, DaemonLost,
        PageCorrupt, ReadFailed, TableMismatch, UnknownTable.
        """
        array = self._as_ids(ids)
        shape = array.shape
        if layout == "packed":
            row_shape = (*shape, self.row_bytes)
            rows = np.empty(row_shape, UINT8) if out is None else check_out(out, row_shape)
            if array.size:
                self._fetch(array, rows, None, timeout)
            return rows
        values_shape, scales_shape = self._split_shapes(shape, layout)
        if out is None:
            pair = np.empty(values_shape, UINT8), np.empty(scales_shape, UINT8)
        else:
            pair = check_split_out(out, values_shape, scales_shape)
        if array.size:
            self._fetch(array, pair[0], pair[1], timeout)
        return pair

    @abstractmethod
    def submit(
        self, ids: ArrayLike, *, layout: Layout = "packed", on_full: OnFull = "wait", timeout: float | None = None
    ) -> Ticket:
        """Sends a batch of at most client.max_ticket_rows rows and returns at once; the ids may be changed afterwards.

        on_full: what to do where the session has no room left: "wait" until another ticket is released (for at most
        `timeout` seconds, then RequestTimeout), or raise Busy. Waiting raises Busy too where it is hopeless: when all
        room is held by tickets of this thread, or of threads that wait for room themselves.
        Raises ValueError (too many rows), TypeError, Busy, RequestTimeout, DaemonLost, TableMismatch, UnknownTable;
        a bad id raises RowIdError here or in Ticket.wait().
        """

    def prefetch(self, ids: ArrayLike, *, timeout: float | None = None) -> None:
        """Asks the daemon to have rows ready soon, behind all demand; best effort. -1 is ignored, bad ids raise.

        Returns when the reads are queued, not when they are done. Raises as fetch() does.
        """
        array = self._as_ids(ids)
        if array.size:
            self._prefetch(array, timeout)

    def _as_ids(self, ids: ArrayLike) -> Ids:
        try:
            return as_ids(ids, self.num_rows)
        except OutOfRangeId as error:
            raise self._row_id_error(error.position, error.row_id) from None

    @abstractmethod
    def _fetch(self, ids: Ids, rows: Rows, scales: Rows | None, timeout: float | None) -> None: ...

    @abstractmethod
    def _prefetch(self, ids: Ids, timeout: float | None) -> None: ...

    def _split_shapes(self, shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if layout != "split":
            raise ValueError(f"layout must be 'packed' or 'split', not {layout!r}")
        info = self._info
        if info.value_bytes == info.row_bytes:
            raise ValueError(f"{info} has no scale part, so its rows cannot be split")
        return (*shape, info.value_bytes), (*shape, info.row_bytes - info.value_bytes)

    def _row_id_error(self, position: int, row_id: int) -> RowIdError:
        return RowIdError(
            f"row id {row_id} at position {position} is outside table {self._info}: ids are -1 (zeros) or "
            f"0 .. {self.num_rows - 1} ({self.num_rows} rows)",
            position,
            row_id,
        )

    def _too_many_rows(self, count: int, limit: int) -> ValueError:
        return ValueError(
            f"{count} rows are more than one ticket holds: client.max_ticket_rows is {limit}; fetch() takes any number"
        )
