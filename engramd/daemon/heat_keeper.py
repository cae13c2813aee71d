"""Keeps the row cache's heat over restarts: reads the saved lists back after start, saves them now and then.

One thread of its own, behind everything else: reading back goes through the engine's lowest priority, and saving walks
the cache in small steps. What goes wrong here is a line in the log, never an error for anybody.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Iterator

from engramd.daemon.engine import Engine, ServedLayer
from engramd.daemon.tables import ServedTable
from engramd.errors import EngramdError
from engramd.heat import heat_file
from engramd.heat.heat_file import MAX_BLOCK_ROWS, Block

SAVE_INTERVAL_S = 300.0
WARM_BLOCK_ROWS = 8_192  # small enough to stop soon
WARM_TIMEOUT_MS = 60_000
FULL_SHARE = 0.98  # of the budget in use: colder rows would push hotter ones out
FINAL_SAVE_LIMIT_S = 5.0
_LOG = logging.getLogger("engramd")


class HeatKeeper:
    """Saves to and reads from `directory` (made if need be); None: keeps nothing, but can still warm after a reload."""

    def __init__(self, engine: Engine, directory: str | None) -> None:
        self._engine = engine
        self._directory = directory
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to read back what was saved; afterwards saves every SAVE_INTERVAL_S."""
        if self._directory is None:
            return
        self._thread = threading.Thread(target=self._run, name="heat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and saves once more, within FINAL_SAVE_LIMIT_S. The engine must still be there."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self.save(time.monotonic() + FINAL_SAVE_LIMIT_S)

    def save(self, deadline: float | None = None) -> None:
        """Saves each table's heat. Past the deadline (time.monotonic) the older file stays."""
        if self._directory is None:
            return
        for table in {id(layer.table): layer.table for layer in self._engine.layers}.values():
            layers = [layer for layer in self._engine.layers if layer.table is table]
            path = self._path(table)
            try:
                heat_file.write(path, table.manifest.identity, self._until(self.hot_blocks(layers), deadline))
            except _TooLate:
                _LOG.info("heat of table %s is not saved: it would take longer than the stop may", table.name)
            except OSError as error:
                _LOG.warning("%s: heat cannot be saved: %s", path, error.strerror)

    def hot_blocks(self, layers: list[ServedLayer]) -> Iterator[Block]:
        """Cached rows of the layers, hottest first, their blocks in turn."""
        cursors = {layer.handle: self._engine.hot_rows(layer.handle, MAX_BLOCK_ROWS) for layer in layers}
        while cursors:
            for layer in layers:
                if layer.handle not in cursors:
                    continue
                rows = next(cursors[layer.handle], None)
                if rows is None:
                    del cursors[layer.handle]
                else:
                    yield Block(layer.layer, rows)

    def warm(self, layers: list[ServedLayer], blocks: Iterator[Block]) -> int:
        """Reads the blocks' rows into the cache until it is full or the daemon stops. Returns the rows read."""
        handles = {layer.layer: layer for layer in layers}
        count = 0
        for block in blocks:
            layer = handles.get(block.layer)
            if layer is None:
                continue
            rows = array("Q", (row for row in block.rows if row < layer.rows))
            for begin in range(0, len(rows), WARM_BLOCK_ROWS):
                if self._stop.is_set() or self._is_full():
                    return count
                piece = rows[begin : begin + WARM_BLOCK_ROWS]
                if not self._engine.warm(layer.handle, piece, WARM_TIMEOUT_MS):
                    return count
                count += len(piece)
        return count

    def _run(self) -> None:
        for table in {id(layer.table): layer.table for layer in self._engine.layers}.values():
            self._read_back(table)
        while not self._stop.wait(SAVE_INTERVAL_S):
            self.save()

    def _read_back(self, table: ServedTable) -> None:
        path = self._path(table)
        layers = [layer for layer in self._engine.layers if layer.table is table]
        began = time.monotonic()
        try:
            count = self.warm(layers, heat_file.read(path, table.manifest.identity))
        except FileNotFoundError:
            return
        except OSError as error:
            _LOG.warning("%s: saved heat cannot be read: %s", path, error.strerror)
            return
        except EngramdError as error:
            _LOG.warning("%s; it is left as it is until the next save", error)
            return
        _LOG.info("table %s: %d saved hot rows are back after %.1f s", table.name, count, time.monotonic() - began)

    def _is_full(self) -> bool:
        counters = self._engine.counters()
        return int(counters["used_bytes"]) >= FULL_SHARE * int(counters["budget_bytes"])

    def _path(self, table: ServedTable) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, f"{table.name}.heat")

    @staticmethod
    def _until(blocks: Iterator[Block], deadline: float | None) -> Iterator[Block]:
        for block in blocks:
            if deadline is not None and time.monotonic() > deadline:
                raise _TooLate
            yield block


class _TooLate(Exception):
    """The deadline of a save has passed."""


def state_directory(configured: str | None) -> str | None:
    """Where state is kept: the setting, else systemd's $STATE_DIRECTORY, else nowhere. Raises EngramdError."""
    path = configured or os.environ.get("STATE_DIRECTORY", "").split(":")[0] or None
    if path is not None:
        try:
            os.makedirs(path, mode=0o750, exist_ok=True)
        except FileExistsError:
            raise EngramdError(f"state {path}: this is not a directory; name one with --state DIR") from None
        except OSError as error:
            raise EngramdError(
                f"state {path}: this directory cannot be made: {error.strerror}; name another with --state DIR"
            ) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise EngramdError(
                f"state {path}: not writable by uid {os.geteuid()}: change its owner, or name another with --state DIR"
            )
    return path
