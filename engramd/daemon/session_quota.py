"""How much of the sessions and their memory one uid may hold, so that another uid always finds room.

The engine enforces the limits for all; here is the share of each uid (`uid_share`), the same of either.
"""

from __future__ import annotations

from engramd._engine import lib
from engramd.config import Settings
from engramd.daemon.engine import SessionRefused
from engramd.sizes import format_size


class SessionQuota:
    """Counts open sessions and the bytes of their arenas and rings by uid. Event loop's thread only."""

    def __init__(self, settings: Settings) -> None:
        self.session_bytes = settings.arena_bytes  # what a session is taken to need until it is known
        self._all_sessions = settings.sessions
        self._all_memory_bytes = settings.arena_limit_bytes
        self._by_uid: dict[int, tuple[int, int]] = {}
        self.set_share(settings.uid_share)

    def set_share(self, percent: int) -> None:
        """Changes the share of each uid; what is open stays open."""
        self._percent = percent
        self._session_limit = max(1, self._all_sessions * percent // 100)
        self._memory_limit_bytes = self._all_memory_bytes * percent // 100

    def check(self, uid: int) -> None:
        """Raises SessionRefused where the uid's share is used up. The first session of a uid is never refused here."""
        sessions, memory_bytes = self._by_uid.get(uid, (0, 0))
        if sessions >= self._session_limit:
            raise SessionRefused(
                lib.ENGRAM_STATUS_BUSY,
                f"uid {uid} has {sessions} sessions open, the limit for one uid ({self._percent} % of --sessions)",
            )
        if sessions and memory_bytes + self.session_bytes > self._memory_limit_bytes:
            raise SessionRefused(
                lib.ENGRAM_STATUS_BUSY,
                f"uid {uid} has {sessions} sessions with {format_size(memory_bytes)} of arenas and rings open, and one "
                f"more would exceed the limit for one uid ({self._percent} % of --arena-limit)",
            )

    def add(self, uid: int, memory_bytes: int) -> None:
        sessions, held = self._by_uid.get(uid, (0, 0))
        self._by_uid[uid] = sessions + 1, held + memory_bytes

    def remove(self, uid: int, memory_bytes: int) -> None:
        sessions, held = self._by_uid[uid]
        if sessions == 1:
            del self._by_uid[uid]
        else:
            self._by_uid[uid] = sessions - 1, held - memory_bytes
