"""Keys for tcp:// targets: connections over TCP are encrypted, and both sides prove who they are (ZeroMQ's CURVE)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.auth

CURVE_VARIABLE = "ENGRAMD_CURVE"


@dataclass(frozen=True)
class CurveKeys:
    """Keys of 40 characters of Z85: the daemon's public key, and the client's own pair."""

    daemon_public: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_files(cls, daemon: str | os.PathLike[str], own: str | os.PathLike[str]) -> CurveKeys:
        """daemon: the daemon's public key file (NAME.key of `engramd keygen`); own: the client's secret one
        (NAME.key_secret). Raises OSError where a file cannot be read, ValueError where it holds no such key."""
        daemon_public, _ = zmq.auth.load_certificate(os.fspath(daemon))
        public, secret = zmq.auth.load_certificate(os.fspath(own))
        if secret is None:
            raise ValueError(f"{os.fspath(own)}: holds no secret key; name the file NAME.key_secret")
        return cls(daemon_public, public, secret)

    @classmethod
    def from_environment(cls) -> CurveKeys | None:
        """The keys of ENGRAMD_CURVE, two files as from_files takes them with a colon between; None where it is not set.
        Raises as from_files does."""
        value = os.environ.get(CURVE_VARIABLE)
        if not value:
            return None
        daemon, separator, own = value.partition(":")
        if not separator:
            raise ValueError(f"{CURVE_VARIABLE}: {value!r} is not DAEMON.key:OWN.key_secret")
        return cls.from_files(daemon, own)

    def apply(self, socket: Any) -> None:
        """Sets the keys of a zmq socket that is still to be connected. Raises ValueError where libzmq takes one for no
        key."""
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.daemon_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        except zmq.ZMQError as error:
            raise ValueError(f"a CURVE key is not 40 characters of Z85: {error}") from None
