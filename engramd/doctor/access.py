"""Who may reach the daemon, whether one is there, and which GPU libraries its clients would find."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Iterator

from engramd.daemon import sockets
from engramd.daemon.activation import RING_SUFFIX
from engramd.doctor.finding import Finding, ok, warn

GPU_LIBRARIES = {"libcuda.so.1": "CUDA", "libamdhip64.so": "ROCm"}


def findings(socket_path: str | None) -> Iterator[Finding]:
    """All of them. socket_path None: the usual places."""
    yield daemon_socket(sockets.client_path(socket_path))
    yield gpu_libraries()


def daemon_socket(path: str) -> Finding:
    """Whether a daemon answers, and whether this user may talk to it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            return ok("socket", f"no daemon; {folder} does not exist yet (the service makes it)")
        if not os.access(folder, os.W_OK):
            return ok("socket", f"no daemon; {folder} belongs to another user, as it does to serve others")
        return ok("socket", f"no daemon at {path}")
    except OSError as error:
        return warn("socket", f"{path}: {error.strerror}", "let this user into the folder")
    if not stat.S_ISSOCK(mode):
        return warn("socket", f"{path} is no socket", "remove it, or name another --socket")
    for target, kind in ((path, socket.SOCK_STREAM), (path + RING_SUFFIX, socket.SOCK_SEQPACKET)):
        try:
            with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
                probe.connect(target)
        except PermissionError:
            return warn(
                "socket",
                f"{target} does not let this user in",
                "add the user to the daemon's group (engramd) and log in again",
            )
        except BlockingIOError:
            continue
        except OSError as error:
            return warn(
                "socket", f"nobody answers at {target}: {error.strerror}", "start the service, or remove the socket"
            )
    return ok("socket", f"a daemon answers at {path}")


def gpu_libraries() -> Finding:
    """The client loads them at run time, where a DeviceTable is asked for; the daemon never does."""
    found = []
    for library, name in GPU_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        found.append(f"{name} ({library})")
    return ok("GPU", ", ".join(found) or "no CUDA or ROCm driver: clients get rows in host memory")
