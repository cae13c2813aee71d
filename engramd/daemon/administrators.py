"""Who may administer: root, the daemon's own user, and the members of a group where one is configured.

A client's groups are those that its process had when it connected, as the kernel tells them of the socket: nothing is
looked up by name, so that no directory service can hold up the event loop.
"""

from __future__ import annotations

import grp
import os

from engramd.daemon.control_memory import Connection
from engramd.errors import EngramdError


class Administrators:
    """group: a name or a number, or None. Raises EngramdError where there is no such group."""

    def __init__(self, group: str | None) -> None:
        self._group = group
        self._gid = None if group is None else _gid_of(group)

    def __str__(self) -> str:
        everybody = f"root and uid {os.geteuid()} (the daemon's)"
        return everybody if self._group is None else f"root, uid {os.geteuid()} (the daemon's) and group {self._group}"

    def allow(self, uid: int | None, connection: Connection | None) -> bool:
        """uid: of the client, where the transport vouches for it."""
        if uid is None:
            return False
        if uid in (0, os.geteuid()):
            return True
        return self._gid is not None and connection is not None and self._gid in connection.groups()


def _gid_of(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise EngramdError(
            f"admin_group {group}: there is no such group; make it with `groupadd --system {group}`, or name its number"
        ) from None
