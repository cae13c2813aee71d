"""Socket activation: listening sockets that a service manager made and passes on (deploy/engramd.socket).

The manager keeps them while no daemon runs, so a client that connects during a restart waits in their backlog and is
served by the next daemon. They are the manager's to remove.
"""

from __future__ import annotations

import os
import socket

from engramd.errors import EngramdError
from engramd.listen_fds import Passed

RING_SUFFIX = ".ring"
_WAY_OUT = "the socket unit needs ListenStream=PATH and ListenSequentialPacket=PATH.ring, and nothing else"


def activated_sockets(passed: list[Passed]) -> tuple[socket.socket, socket.socket] | None:
    """(control, ring) of the descriptors passed, non-blocking; None where no socket is among them.

    Raises EngramdError where the sockets are not one such pair, naming what is there.
    """
    sockets = [socket.socket(fileno=one.descriptor) for one in passed if one.is_socket]
    if not sockets:
        return None
    try:
        by_type = {one.type: one for one in sockets}
        control, ring = by_type.get(socket.SOCK_STREAM), by_type.get(socket.SOCK_SEQPACKET)
        if len(sockets) != 2 or control is None or ring is None or not all(map(_listens, sockets)):
            raise EngramdError(f"sockets passed by the service manager: {_described(sockets)}; {_WAY_OUT}")
        if ring.getsockname() != control.getsockname() + RING_SUFFIX:
            raise EngramdError(
                f"the ring socket passed by the service manager is at {ring.getsockname()}, but clients look for it at "
                f"{control.getsockname()}{RING_SUFFIX}; {_WAY_OUT}"
            )
    except BaseException:
        for one in sockets:
            one.close()
        raise
    for one in (control, ring):
        one.setblocking(False)
    return control, ring


def check_path(path: str, chosen: str | None) -> None:
    """Raises EngramdError where the configuration chooses another path than the sockets have."""
    if chosen and os.path.abspath(chosen) != path:
        raise EngramdError(
            f"the service manager's sockets are at {path}, but the configuration says {os.path.abspath(chosen)}: "
            "give both the same path, or leave --socket and ENGRAMD_SOCKET out"
        )


def _listens(one: socket.socket) -> bool:
    """Whether it is a listening Unix socket with a path in the file system."""
    return (
        one.family == socket.AF_UNIX
        and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and isinstance(one.getsockname(), str)
        and one.getsockname().startswith("/")
    )


def _described(sockets: list[socket.socket]) -> str:
    return ", ".join(
        f"{one.type.name} {one.getsockname()!r}{'' if _listens(one) else ' (not a listening Unix socket)'}"
        for one in sockets
    )
