"""Whether a model's rows are mapped or staged: one decision for all its layers, at the start.

Layers that the daemon holds resident can be mapped: the engine's own look-up reads them where they lie, with no request
in a step. Whatever cannot be mapped is staged, step by step (step_stager.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from engram_client import Busy, EngramError, Table

from .settings import EngineSettings

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2


class Closable(Protocol):
    """Something that holds a layer mapped until it is closed."""

    def close(self) -> None: ...


Mapped = TypeVar("Mapped", bound=Closable)


def map_layers(
    tables: Sequence[Table], settings: EngineSettings, open_map: Callable[[Table], Mapped]
) -> list[Mapped] | None:
    """The layers mapped, or None where they are to be staged.

    settings.rows: "staged" maps nothing; "auto" maps where every layer can be mapped at this moment; "mapped" waits up
    to settings.wait_s for layers that are not resident yet. open_map: maps one table's layer; raises EngramError.
    Raises, for "mapped", what open_map raised last.
    """
    if settings.rows == "staged":
        return None
    deadline = time.monotonic() + settings.wait_s
    while True:
        try:
            return _open_all(tables, open_map)
        except EngramError as error:
            if settings.rows == "auto":
                logger.info("engramd: rows are staged for each step, since the layers cannot be mapped: %s", error)
                return None
            if not isinstance(error, Busy) or time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)


def _open_all(tables: Sequence[Table], open_map: Callable[[Table], Mapped]) -> list[Mapped]:
    opened: list[Mapped] = []
    try:
        for table in tables:
            opened.append(open_map(table))
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened
