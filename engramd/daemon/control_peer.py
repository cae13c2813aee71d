"""Whoever sent a control request, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engramd.daemon.control_memory import Connection


class Endpoint(Protocol):
    """What requests come in by; see engramd.daemon.control.ControlEndpoint."""

    def send(self, peer: Peer, frames: Sequence[Any]) -> Any: ...


@dataclass(slots=True)
class Peer:
    """Where a request came from and how to answer: the envelope's frames up to the request."""

    endpoint: Endpoint
    envelope: tuple[bytes, ...]
    uid: int | None  # None: not a local peer, or the transport does not say
    connection: Connection | None = None

    @property
    def key(self) -> tuple[int, bytes]:
        """The same for all requests of one client."""
        return id(self.endpoint), self.envelope[0]

    def send(self, frames: Sequence[Any]) -> Any:
        """Answers; see ControlEndpoint.send."""
        return self.endpoint.send(self, frames)
