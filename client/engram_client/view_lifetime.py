"""Keeps the rows of a dropped, unreleased ticket valid for as long as somebody looks at them."""

from __future__ import annotations

import weakref
from typing import Any

from ._native import lib
from .ring_session import RingSession

# The weak references must live somewhere until they fire; each also keeps its session, and so the arena, alive.
_waiting: dict[int, weakref.ref[Any]] = {}


def release_with_last_view(buffer: Any, session: RingSession, ticket: int) -> None:
    """Releases the ticket when `buffer`, the base of all its views, dies: at once where there is no view."""

    def release(reference: weakref.ref[Any]) -> None:
        _waiting.pop(id(reference), None)
        lib.engram_release(session.handle, ticket)

    reference = weakref.ref(buffer, release)
    _waiting[id(reference)] = reference
