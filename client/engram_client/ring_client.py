"""RingClient: a client over shared memory, and its life across restarts of the daemon and forks of this process."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from .client import Client
from .errors import DaemonLost, EngramError
from .layer import check_wish, select_layer
from .ring_session import TOTALS, RingSession
from .ring_table import RingTable

if TYPE_CHECKING:
    from .control import ControlChannel


class RingClient(Client):
    """See Client. At most one session is alive at a time; `session` is None before the first call after a loss."""

    def __init__(
        self,
        path: str,
        *,
        arena_bytes: int = 0,
        spin_us: int | None = None,
        timeout: float = 5.0,
        name: str | None = None,
        writable_arena: bool = False,
    ) -> None:
        self.path = path
        self._options = {
            "arena_bytes": arena_bytes,
            "spin_us": spin_us,
            "timeout": timeout,
            "name": name,
            "writable_arena": writable_arena,
        }
        self._swap_lock = threading.Lock()  # guards `session` and `_closed`; held for a moment only
        self._lock = threading.Lock()  # held while one thread connects and others wait for the outcome
        self._attempts = 0
        self._failure: Exception | None = None
        self._closed = False
        self._control: ControlChannel | None = None
        self._past = dict.fromkeys(TOTALS, 0)  # of sessions that are gone; guarded by _swap_lock
        self.session: RingSession | None = None
        self.connected()
        _clients.add(self)

    def connected(self) -> RingSession:
        """The session, after connecting where there is none."""
        session = self.session
        if session is not None:
            return session
        attempts_seen = self._attempts
        with self._lock:
            session = self.session
            if session is not None:
                return session
            if self._closed:
                raise EngramError(f"the client of {self.path} is closed")
            # Another thread has just failed while this one waited: its failure counts for all who waited.
            if self._attempts != attempts_seen and self._failure is not None:
                raise type(self._failure)(str(self._failure))
            self._attempts += 1
            try:
                session = RingSession(self.path, **self._options)  # type: ignore[arg-type]
            except EngramError as error:
                self._failure = error
                raise
            self._failure = None
            self.max_ticket_rows = session.ticket_rows
            if not self._install(session):
                session.close()
                raise EngramError(f"the client of {self.path} is closed")
            return session

    def _install(self, session: RingSession) -> bool:
        """Makes a new session the client's own; False where the client was closed meanwhile."""
        with self._swap_lock:
            if not self._closed:
                self.session = session
            return not self._closed

    def forget(self, session: RingSession) -> None:
        """Drops a lost session, so that the next call connects. Its tickets keep its memory alive."""
        with self._swap_lock:
            if self.session is session:
                self.session = None
                self._add_past(session)

    def _add_past(self, session: RingSession) -> None:
        """Keeps a session's counts when it goes. Called with the lock held."""
        for name, count in session.totals().items():
            self._past[name] += count

    def table(self, name: str | None = None, layer: int | None = None, identity: str | None = None) -> RingTable:
        name, layer, identity = check_wish(name, layer, identity)
        session = self.connected()
        try:
            session.refresh()  # a table may have been loaded since
        except DaemonLost:
            self.forget(session)
            raise
        self.max_ticket_rows = session.ticket_rows
        info = select_layer(list(session.layers.values()), name, layer, identity, self.path)
        return RingTable(self, info, identity)

    def stats(self, *, timeout: float | None = 5.0) -> dict[str, Any]:
        if self._closed:
            raise EngramError(f"the client of {self.path} is closed")
        control = self._control
        if control is None:
            from .control import ControlChannel

            control = self._control = ControlChannel(f"ipc://{self.path}", self.path)
        return control.stats(timeout)

    def counters(self) -> dict[str, int]:
        with self._swap_lock:
            now = self.session.totals() if self.session is not None else {}
            return {name: count + now.get(name, 0) for name, count in self._past.items()}

    def close(self) -> None:
        with self._swap_lock:
            self._closed = True
            session, self.session = self.session, None
            if session is not None:
                self._add_past(session)
        if session is not None:
            session.close()
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _start_over_in_child(self) -> None:
        # The native part has closed its descriptors at the fork itself. A thread of the parent may hold the locks.
        self._swap_lock = threading.Lock()
        self._lock = threading.Lock()
        self.session = None
        self._past = dict.fromkeys(TOTALS, 0)
        self._control = None


_clients: weakref.WeakSet[RingClient] = weakref.WeakSet()


def _start_over_in_child() -> None:
    for client in list(_clients):
        client._start_over_in_child()


os.register_at_fork(after_in_child=_start_over_in_child)
