"""The control plane: a ZeroMQ ROUTER whose verbs are statistics, administration and `fetch` with rows inline.

Every frame is hostile until checked (engramd.daemon.messages). Fetches are the engine's business
(engramd.daemon.fetches), other verbs that wait run on the worker pool; only the event loop's thread receives and sends.
Nothing here can block the loop: the queues, the bytes of ids and replies in flight and the queue towards each client
are bounded, and what exceeds them is answered `Busy`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from engramd import __version__
from engramd.daemon import messages
from engramd.daemon.administration import Administration
from engramd.daemon.administrators import Administrators
from engramd.daemon.control_memory import ByteBudget, Connection
from engramd.daemon.control_peer import Peer
from engramd.daemon.engine import Engine
from engramd.daemon.fetches import Fetches
from engramd.daemon.messages import MAX_BULK_BYTES, NoReply, Request, RequestError
from engramd.daemon.reconfigure import Outcome, Reconfigure
from engramd.daemon.sampling import TAKE_SAMPLES, Sampling
from engramd.daemon.scrub import Scrubber
from engramd.daemon.worker_pool import WorkerPool

MESSAGES_A_TURN = 64
HIGH_WATER_MARK = 64  # messages towards or from one client
LINGER_MS = 500
_LOG = logging.getLogger("engramd")
# As plain integers: the operators of zmq's flags are Python functions, called several times a message.
_POLLIN, _NOBLOCK, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_LOCAL_PEER = re.compile(r"localhost:(\d{1,10}):(\d{1,10}):(\d{1,10})", re.ASCII)


class Verbs:
    """What the verbs do. Shared by all endpoints."""

    def __init__(
        self,
        engine: Engine,
        pool: WorkerPool,
        statistics: Callable[[bool], dict[str, Any]],
        administration: Administration,
        reconfigure: Reconfigure,
        scrubber: Scrubber,
        administrators: Administrators,
        stop: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._statistics = statistics
        self._reconfigure = reconfigure
        self._stop = stop
        self._administration = administration
        self._scrubber = scrubber
        self._administrators = administrators
        self._sampling = Sampling(engine)
        self.budget = ByteBudget(time.monotonic)
        self.fetches = Fetches(engine, self.budget, time.monotonic)
        self._verbs: dict[str, Callable[[Peer, Request, bytes | None], None]] = {
            "ping": self._ping,
            "tables": self._tables,
            "fetch": self._fetch,
            "prefetch": self._prefetch,
            "stats": self._stats,
            "budget": self._set_budget,
            "reload": self._reload,
            "reload_config": self._reload_config,
            "scrub": self._scrub,
            "shutdown": self._shutdown,
            "curve": self._curve,
            "record_start": lambda peer, request, ids: self._sample(peer, request, self._sampling.start_recording),
            "record_take": lambda peer, request, ids: self._sample(
                peer, request, self._sampling.take_samples, TAKE_SAMPLES * 8
            ),
            "record_stop": lambda peer, request, ids: self._sample(peer, request, self._sampling.stop_recording),
        }

    def dispatch(self, peer: Peer, frames: list[bytes]) -> None:
        """Serves one request; frames are those behind the envelope."""
        try:
            request = messages.parse_request(frames[0])
        except NoReply as reason:
            _LOG.debug("a control message is dropped: %s", reason)
            return
        context = {"request": str(request.id)[:64], "uid": peer.uid}
        try:
            messages.check_request(request)
            _LOG.debug("control request %s: %s", context["request"], request.verb[:60], extra=context)
            verb = self._verbs.get(request.verb)
            if verb is None:
                raise RequestError(
                    "EngramError", f"unknown verb {request.verb[:60]!r}; known: {', '.join(self._verbs)}"
                )
            takes_ids = request.verb in ("fetch", "prefetch")
            if takes_ids != (len(frames) == 2):
                expected = "a frame of ids behind the request" if takes_ids else "no frame behind the request"
                raise RequestError(
                    "EngramError", f"{request.verb}: {len(frames) - 1} further frames; it takes {expected}"
                )
            verb(peer, request, frames[1] if takes_ids else None)
        except RequestError as error:
            _LOG.debug("control request %s is refused: %s", context["request"], error, extra=context)
            peer.send([messages.reply_error(request, error)])
        except Exception:  # noqa: BLE001 - a mistake in here must not end the daemon
            peer.send([unexpected(request)])

    def _ping(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        peer.send([messages.reply_ok(request, version=__version__, pid=os.getpid())])

    def _tables(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        tables = [
            {
                "name": layer.table.name,
                "layer": layer.layer,
                "rows": layer.rows,
                "row_bytes": layer.table.manifest.row_bytes,
                "value_bytes": layer.table.manifest.value_bytes,
                "generation": layer.table.manifest.generation,
                "identity": layer.table.manifest.identity,
                "head_sizes": list(layer.head_sizes),
            }
            for layer in self._engine.layers
        ]
        widest = max(layer.table.manifest.row_bytes for layer in self._engine.layers)
        limit = MAX_BULK_BYTES // max(widest, 8)
        peer.send([messages.reply_ok(request, tables=tables, max_fetch_rows=limit)])

    def _stats(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        with_histograms = bool(request.integer("histograms", 0, 1, default=0))

        def work() -> list[Any]:
            return [messages.reply_ok(request, stats=self._statistics(with_histograms))]

        self._submit(peer, request, 0, work)

    def _set_budget(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        self._check_administrator(peer, request)
        self._administration.set_budget(request.integer("dram_bytes", 0, 1 << 62), self._answer(peer, request))

    def _reload(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        self._check_administrator(peer, request)
        self._administration.reload(request.text("table"), self._answer(peer, request))

    def _reload_config(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        self._check_administrator(peer, request)
        answer = self._answer(peer, request)

        def done(outcome: Outcome | str) -> None:
            if isinstance(outcome, str):
                answer(None, outcome)
            else:
                answer({"applied": outcome.applied, "not_applied": outcome.not_applied}, None)

        self._reconfigure(done)

    def _scrub(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        table = request.text("table")
        if request.integer("start", 0, 1, default=0):
            self._check_administrator(peer, request)
            self._scrubber.request(table)
        layers = self._scrubber.report(table)
        if not layers:
            served = ", ".join(sorted({layer.table.name for layer in self._engine.layers}))
            raise RequestError("UnknownTable", f"no table {table[:127]!r} is served; there is: {served}")
        peer.send([messages.reply_ok(request, layers=layers)])

    @staticmethod
    def _answer(peer: Peer, request: Request) -> Callable[[dict[str, object] | None, str | None], None]:
        def answer(fields: dict[str, object] | None, refusal: str | None) -> None:
            if fields is None:
                error = RequestError("EngramError", refusal or "refused")
                peer.send([messages.reply_error(request, error)])
            else:
                peer.send([messages.reply_ok(request, **fields)])

        return answer

    def _check_administrator(self, peer: Peer, request: Request) -> None:
        if not self._administrators.allow(peer.uid, peer.connection):
            who = "a client whose user is not known" if peer.uid is None else f"uid {peer.uid}"
            raise RequestError(
                "EngramError", f"{request.verb}: not permitted to {who}; only {self._administrators} may"
            )

    def _curve(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        self._submit(peer, request, 0, lambda: [messages.reply_ok(request, curve=self._sampling.curve())])

    def _sample(
        self, peer: Peer, request: Request, action: Callable[[Request], dict[str, Any]], reply_bytes: int = 0
    ) -> None:
        self._check_administrator(peer, request)
        self._submit(peer, request, reply_bytes, lambda: [messages.reply_ok(request, **action(request))])

    def _shutdown(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        self._check_administrator(peer, request)
        peer.send([messages.reply_ok(request, pid=os.getpid())])
        self._stop(f"shutdown asked for by uid {peer.uid}")

    def _fetch(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        assert ids is not None
        self.fetches.fetch(peer, request, ids)

    def _prefetch(self, peer: Peer, request: Request, ids: bytes | None) -> None:
        assert ids is not None
        self.fetches.prefetch(peer, request, ids)

    def _submit(self, peer: Peer, request: Request, reserved: int, work: Callable[[], list[Any]]) -> None:
        """Lets the pool do the work and sends the frames that it returns or the RequestError that it raises. `reserved`
        bytes count against the client until the reply has left. Raises RequestError Busy."""
        self.budget.take(peer.key, peer.connection, reserved)

        def task() -> Callable[[], None]:
            try:
                frames = work()
            except RequestError as error:
                frames = [messages.reply_error(request, error)]
            except Exception:  # noqa: BLE001 - whatever happens, the client gets an answer
                frames = [unexpected(request)]
            return lambda: self.budget.give_back_when_sent(peer.send(frames), peer.key, reserved)

        if not self._pool.submit(task):
            self.budget.give_back(peer.key, reserved)
            raise RequestError("Busy", "the daemon's queue of control requests is full")


def unexpected(request: Request) -> bytes:
    """The reply where the daemon itself is wrong; called while the exception is handled."""
    _LOG.exception("a control request cannot be handled", extra={"request": str(request.id)[:64]})
    return messages.reply_error(request, RequestError("EngramError", "internal error of the daemon (see its log)"))


class ControlEndpoint:
    """One ROUTER socket. `knows_peers`: the transport vouches for the client's uid (ipc)."""

    def __init__(self, context: Any, verbs: Verbs, knows_peers: bool) -> None:
        self._verbs = verbs
        self._knows_peers = knows_peers
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_BULK_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.descriptor = int(self.socket.getsockopt(zmq.FD))

    def bind_listener(self, path: str, descriptor: int) -> None:
        """Serves an AF_UNIX socket that listens already; libzmq owns the descriptor from here on."""
        self.socket.setsockopt(zmq.USE_FD, descriptor)
        self.socket.bind(f"ipc://{path}")

    def bind_tcp(self, endpoint: str) -> None:
        """Binds host:port. Raises OSError's relative zmq.ZMQError."""
        if endpoint.startswith("["):
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.bind(f"tcp://{endpoint}")

    def process(self) -> bool:
        """Serves what has arrived, at most MESSAGES_A_TURN messages; whether there is more.

        libzmq's descriptor fires on changes only, so this is called before every wait of the loop.
        """
        for _ in range(MESSAGES_A_TURN):
            if not self.socket.getsockopt(zmq.EVENTS) & _POLLIN:
                return False
            try:
                frames = [self.socket.recv(_NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(self.socket.recv(_NOBLOCK, copy=False))
            except zmq.Again:
                return False
            self._receive(frames)
        return True

    def _receive(self, frames: list[Any]) -> None:
        # A REQ client puts an empty frame between its address and the request; it goes back as it came.
        start = 2 if len(frames) > 2 and len(frames[1]) == 0 else 1
        body = frames[start:]
        if not 1 <= len(body) <= messages.MAX_FRAMES - 1:
            _LOG.debug("a control message of %d frames is dropped", len(frames))
            return
        envelope = tuple(frame.bytes for frame in frames[:start])
        uid, pid = self._credentials(frames[-1])
        try:
            connection = Connection.of(frames[-1].get(zmq.SRCFD), uid, pid)
        except (zmq.ZMQError, KeyError):
            connection = None
        peer = Peer(self, envelope, uid, connection)
        self._verbs.dispatch(peer, [frame.bytes for frame in body])

    def _credentials(self, frame: Any) -> tuple[int | None, int | None]:
        """(uid, pid) of a message's sender; None where they are not known."""
        if not self._knows_peers:
            return None, None
        try:
            address = frame.get("Peer-Address")
        except (zmq.ZMQError, KeyError):
            return None, None
        return _credentials_in(address)

    def send(self, peer: Peer, frames: Sequence[Any]) -> Any:
        """Queues a reply; a client that is gone or takes none loses it. Returns a tracker of the last frame's memory,
        or None where it is free already."""
        try:
            for frame in (*peer.envelope, *frames[:-1]):
                self.socket.send(frame, _MORE)
            return self.socket.send(frames[-1], _NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH, errno.ENOTSOCK):
                raise
            return None

    def close(self) -> None:
        """Closes the socket; replies that are queued get LINGER_MS to leave."""
        self.socket.close()


@functools.lru_cache(maxsize=256)
def _credentials_in(address: str) -> tuple[int | None, int | None]:
    """(uid, pid) in libzmq's name of a local peer."""
    match = _LOCAL_PEER.fullmatch(address)
    return (int(match[1]), int(match[3])) if match else (None, None)
