"""Accepts connections of a listening socket, also where the daemon runs out of descriptors: one that is kept spare
tells the client why, and accepting pauses, since poll would fire at once. Event loop's thread only.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable

from engramd._engine import lib
from engramd.daemon.ring_messages import send_refused

ACCEPTS_A_TURN = 32
PAUSE_S = 0.1  # without descriptors, look again after this long
_LOG = logging.getLogger("engramd")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Hands each connection to `admit`, which owns it from then on. Owns the listener."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, admit: Callable[[socket.socket], None]
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._admit = admit
        self._spare_descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.resumes_at: float | None = None  # time.monotonic, while accepting pauses
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def resume(self, now: float) -> None:
        """Accepts again where the pause is over."""
        if self.resumes_at is not None and self.resumes_at <= now:
            self.resumes_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Accepts no more. May be called twice."""
        if self._listener.fileno() >= 0:
            if self.resumes_at is None:
                self._selector.unregister(self._listener)
            self.resumes_at = None
            self._listener.close()
        self._close_spare()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone before we looked
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._refuse_one(error)
                return
            self._admit(accepted)

    def _refuse_one(self, error: OSError) -> None:
        _LOG.error("a connection is refused: %s (raise LimitNOFILE or ulimit -n)", error.strerror)
        self._close_spare()
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                accepted.setblocking(False)
                send_refused(accepted, lib.ENGRAM_STATUS_BUSY, "the daemon has no file descriptors left")
        except OSError:
            _LOG.debug("no connection to refuse", exc_info=True)
        try:
            self._spare_descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            _LOG.debug("no spare descriptor", exc_info=True)
        self._selector.unregister(self._listener)
        self.resumes_at = time.monotonic() + PAUSE_S

    def _close_spare(self) -> None:
        if self._spare_descriptor >= 0:
            os.close(self._spare_descriptor)
            self._spare_descriptor = -1
