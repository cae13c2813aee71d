"""Where the daemon's sockets are, who may touch them, and that only one daemon owns a path.

`PATH` is the control socket, `PATH.ring` the ring socket, `PATH.lock` a file that the owning daemon holds an flock on.
The lock, not the sockets, decides who owns the path: it goes with the process however that ends, so whatever
sockets lie there once the lock is held are stale and may be replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from types import TracebackType

from engramd.daemon.activation import RING_SUFFIX, activated_sockets, check_path
from engramd.errors import EngramdError
from engramd.listen_fds import Passed

LOCK_SUFFIX = ".lock"
SYSTEM_PATH = "/run/engramd/engramd.sock"
MAX_PATH_BYTES = 107  # sun_path holds 108 with its zero
SOCKET_MODE = 0o660
CONTROL_BACKLOG = 256
RING_BACKLOG = 256


def usual_paths() -> list[str]:
    """Where a daemon may be when nobody says: the system's place, then the user's own."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [SYSTEM_PATH, *([os.path.join(runtime, "engramd.sock")] if runtime else [])]


def client_path(argument: str | None) -> str:
    """The socket that a command talks to: argument, ENGRAMD_SOCKET, the first usual path that exists."""
    chosen = argument or os.environ.get("ENGRAMD_SOCKET")
    if chosen:
        return chosen
    paths = usual_paths()
    return next((path for path in paths if os.path.exists(path)), paths[0])


def server_path(argument: str | None) -> str:
    """The socket that a daemon binds: argument, ENGRAMD_SOCKET, the first usual path whose folder it may write to.

    The system's folder is made where root needs it. Raises EngramdError.
    """
    chosen = argument or os.environ.get("ENGRAMD_SOCKET")
    if not chosen:
        _make_system_folder()
        folders = [os.path.dirname(path) for path in usual_paths()]
        writable = [folder for folder in folders if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)]
        if not writable:
            raise EngramdError(
                f"no place for the socket: {' and '.join(folders)} cannot be written to; name one with --socket PATH"
            )
        chosen = os.path.join(writable[0], "engramd.sock")
    path = os.path.abspath(chosen)
    if path == SYSTEM_PATH:
        _make_system_folder()
    if len(os.fsencode(path + RING_SUFFIX)) > MAX_PATH_BYTES:
        raise EngramdError(
            f"socket path too long: {path}{RING_SUFFIX} is {len(os.fsencode(path + RING_SUFFIX))} bytes, "
            f"and a socket's path holds {MAX_PATH_BYTES}; choose a shorter --socket PATH"
        )
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise EngramdError(f"socket folder {folder} does not exist; make it, or choose another --socket PATH")
    return path


def open_pair(argument: str | None, passed: list[Passed]) -> SocketPair:
    """Those that a service manager passed, else new sockets at `server_path`. Raises EngramdError."""
    activated = activated_sockets(passed)
    if activated is None:
        return SocketPair(server_path(argument))
    try:
        path = activated[0].getsockname()
        check_path(path, argument or os.environ.get("ENGRAMD_SOCKET"))
        return SocketPair(path, activated)
    except BaseException:
        for one in activated:
            one.close()
        raise


def _make_system_folder() -> None:
    """Makes the folder of the usual place where we are root. Where it cannot be made, whoever needs it says so."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(SYSTEM_PATH), mode=0o755, exist_ok=True)


class SocketPair:
    """Both listening sockets of one daemon, and the lock that makes the path its own.

    `control` is a listening stream socket for libzmq, `ring` a non-blocking SEQPACKET listener. Raises EngramdError
    where the path is another daemon's, is not a socket, or cannot be bound. activated: both sockets where they listen
    at the path already, made by a service manager: they are used, and left in the file system.
    """

    def __init__(self, path: str, activated: tuple[socket.socket, socket.socket] | None = None) -> None:
        self.path = path
        self._identities: dict[str, tuple[int, int]] = {}
        self._lock_descriptor = _lock(path)
        if activated is not None:
            self.control, self.ring = activated
            return
        opened: list[socket.socket] = []
        try:
            for bound, kind, backlog in (
                (path, socket.SOCK_STREAM, CONTROL_BACKLOG),
                (path + RING_SUFFIX, socket.SOCK_SEQPACKET, RING_BACKLOG),
            ):
                opened.append(self._listen(bound, kind, backlog))
        except BaseException:
            for listener in opened:
                listener.close()
            self.release()
            raise
        self.control, self.ring = opened

    def __enter__(self) -> SocketPair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.control.close()
        self.ring.close()
        self.release()

    def _listen(self, path: str, kind: socket.SocketKind, backlog: int) -> socket.socket:
        _remove_stale(path, kind)
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        try:
            # The mode must be right from the first moment on, so it comes from the umask rather than a later chmod.
            umask = os.umask(0o777 & ~SOCKET_MODE)
            try:
                listener.bind(path)
            finally:
                os.umask(umask)
            self._identities[path] = _identity(path)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            raise EngramdError(f"{path}: the socket cannot be made: {error.strerror}") from None
        return listener

    def unlink(self) -> None:
        """Removes the sockets from the file system, each only if it is still the one that was bound here."""
        for path, identity in self._identities.items():
            try:
                if _identity(path) == identity:
                    os.unlink(path)
            except OSError:
                continue  # gone already, or no longer removable: either way not ours to mend
        self._identities.clear()

    def release(self) -> None:
        """Removes the sockets and gives the path up. May be called twice."""
        self.unlink()
        if self._lock_descriptor >= 0:
            # Removed while still locked: whoever holds the old file's lock after us sees that it is no longer there.
            lock_path = self.path + LOCK_SUFFIX
            if _is_at(self._lock_descriptor, lock_path):
                os.unlink(lock_path)
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _lock(path: str) -> int:
    """Takes PATH.lock and writes our pid into it."""
    lock_path = path + LOCK_SUFFIX
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(lock_path, flags, 0o600)
        except OSError as error:
            raise EngramdError(
                f"{lock_path}: cannot be opened: {error.strerror}; choose a --socket PATH in a folder that uid "
                f"{os.geteuid()} may write to"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, lock_path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
            os.close(descriptor)  # its owner removed it between our open and our lock
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                raise EngramdError(
                    f"another engramd{f' (pid {holder})' if holder.isdigit() else ''} already serves {path}; "
                    "stop it with `engramd shutdown`, or choose another --socket PATH"
                ) from None
            raise EngramdError(f"{lock_path}: cannot be locked: {error.strerror}") from None


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_stale(path: str, kind: socket.SocketKind) -> None:
    """Removes what a dead daemon left at the path. Called with the lock held; refuses what is alive or no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise EngramdError(f"{path}: cannot be looked at: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise EngramdError(f"{path} exists and is not a socket; remove it, or choose another --socket PATH")
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
            alive = True
        except OSError as error:
            alive = error.errno in (errno.EAGAIN, errno.EPROTOTYPE, errno.EACCES)
    if alive:
        raise EngramdError(f"another program already listens on {path}; stop it, or choose another --socket PATH")
    try:
        os.unlink(path)
    except OSError as error:
        raise EngramdError(f"{path}: the stale socket cannot be removed: {error.strerror}") from None
