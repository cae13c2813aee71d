"""CURVE for the TCP endpoint: the daemon's own key, and which clients' keys are let in.

Key files are ZeroMQ certificates, as `engramd keygen` and `zmq.auth.create_certificates` write them. libzmq does the
cryptography and asks over ZAP (RFC 27) about each key that a client proves to hold; the answer is whether a file
`*.key` of the clients' folder has it. The folder is read again when it changes, so that a client is added without a
restart; connections that are open stay open when a key goes. Event loop's thread only.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import Any

import zmq
import zmq.auth
from zmq.utils import z85

from engramd.errors import EngramdError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 6  # before the credentials
DOMAIN = b"engramd"
HANDSHAKE_MS = 5000
ANSWERS_A_TURN = 64
_LOG = logging.getLogger("engramd")


def read_secret_key(path: str) -> bytes:
    """The Z85 secret key of a file that nobody else can read. Raises EngramdError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise EngramdError(f"tcp_key {path}: cannot be read: {error.strerror}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid not in (0, os.geteuid()):
        raise EngramdError(
            f"tcp_key {path}: mode {stat.S_IMODE(status.st_mode):04o}, owner uid {status.st_uid}: a secret key must be "
            f"readable to uid {os.geteuid()} (the daemon's) or root alone; `chmod 0600 {path}`"
        )
    secret = _read_certificate(path)[1]
    if secret is None:
        raise EngramdError(f"tcp_key {path}: holds no secret key; name the file NAME.key_secret of `engramd keygen`")
    return secret


class ClientKeys:
    """The public keys of a folder's `*.key` files. Raises EngramdError where the folder cannot be read at first."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._mark: int | None = None
        self._keys: frozenset[bytes] = frozenset()
        try:
            self._read()
        except OSError as error:
            raise EngramdError(f"tcp_clients {folder}: cannot be read: {error.strerror}") from None

    def __contains__(self, key: bytes) -> bool:
        """key: Z85. A folder that has become unreadable lets nobody in."""
        try:
            self._read()
        except OSError as error:
            _LOG.warning("tcp_clients %s: cannot be read: %s; no client is let in", self._folder, error.strerror)
            return False
        return key in self._keys

    def _read(self) -> None:
        mark = os.stat(self._folder).st_mtime_ns
        if mark == self._mark:
            return
        keys = set()
        for name in sorted(os.listdir(self._folder)):
            if not name.endswith(".key"):
                continue
            path = os.path.join(self._folder, name)
            try:
                keys.add(_read_certificate(path)[0])
            except EngramdError as error:
                _LOG.warning("tcp_clients: %s; this key is not let in", error)
        self._mark, self._keys = mark, frozenset(keys)


class CurveGate:
    """Answers libzmq's questions about clients of the context's CURVE sockets. Made before such a socket is bound."""

    def __init__(self, context: Any, secret_key: bytes, clients: ClientKeys) -> None:
        self._secret_key = secret_key
        self._clients = clients
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))

    def secure(self, server: Any) -> None:
        """Lets nobody connect to a socket, which is still to be bound, but clients that are let in."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key)
        server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)

    def process(self) -> bool:
        """Answers what is asked, at most ANSWERS_A_TURN questions; whether there is more. As ControlEndpoint.process,
        called before every wait of the loop."""
        for _ in range(ANSWERS_A_TURN):
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return False
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        return True

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """question: version, request id, domain, address, identity, mechanism, credentials."""
        question = [*question, *[b""] * (ZAP_FRAMES - len(question))]
        request_id, address, mechanism, credentials = question[1], question[3], question[5], question[ZAP_FRAMES:]
        name = ""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0])
            name = key.decode("ascii")
            if key in self._clients:
                return [ZAP_VERSION, request_id, b"200", b"OK", key, b""]
        where = address.decode("ascii", "replace")
        _LOG.warning("tcp: a client at %s is refused: key %s is not in tcp_clients", where, name or "(none)")
        return [ZAP_VERSION, request_id, b"400", b"unknown key", b"", b""]

    def close(self) -> None:
        """Nobody is let in any more."""
        self._socket.close()


def _read_certificate(path: str) -> tuple[bytes, bytes | None]:
    """The Z85 public key of a certificate and the secret one, where there is one. Raises EngramdError."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise EngramdError(f"{path}: holds no public key; it is no file of `engramd keygen`") from None
    for key in (public, secret):
        try:
            good = key is None or len(z85.decode(key)) == 32
        except (KeyError, ValueError):
            good = False
        if not good:
            raise EngramdError(f"{path}: a key of it is not 40 characters of Z85")
    return public, secret
