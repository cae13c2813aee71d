"""Keeps the rows of a dropped, unreleased ticket valid for as long as somebody looks at them."""

from __future__ import annotations

import weakref
from typing import Any

from ._native import lib

# The weak references must live somewhere until they fire.
_waiting: dict[int, weakref.ref[Any]] = {}


def release_with_last_view(buffer: Any, handle: Any, ticket: int) -> None:
    """Releases the ticket when `buffer`, the base of all its views, dies: at once where there is no view.

    handle: the native session, whose memory stays as long as it has unreleased tickets.
    """

    def release(reference: weakref.ref[Any]) -> None:
        _waiting.pop(id(reference), None)
        lib.engram_release(handle, ticket)

    reference = weakref.ref(buffer, release)
    _waiting[id(reference)] = reference
