"""Scrubbing: reads the served tables through in the background and checks every page, so that damage is found before
a request meets it.

One thread of its own with its own descriptors, behind all demand: it reads at a set rate, waits while workers have
many reads in flight (but for a tenth of the rate, so that it always ends), and keeps its place in a small file over
restarts. What it finds is logged once for each page and reported by `engramd verify --online` and the statistics.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from engramd.daemon.engine import Engine, ServedLayer
from engramd.errors import EngramdError
from engramd.private_file import replacing
from engramd.table.codec import PageFormat, format_of
from engramd.table.files import Files, aligned_buffer
from engramd.table.verify import sparse_pages

FIRST_PASS_DELAY_S = 30.0  # after the start, which has its own reads to do
PASS_INTERVAL_S = 7 * 86400.0  # between the end of a pass and the beginning of the next
RUN_BYTES = 256 << 10
WANTED_RATE_BYTES_S = 256 << 20  # of a pass that somebody waits for
BUSY_SHARE = 4  # a quarter of the cap in flight: the workers need the drive
MAX_REPORTED = 100  # bad pages of a layer that are listed; all are counted
SAVE_INTERVAL_S = 10.0
STATE_NAME = "scrub.json"
MAX_STATE_BYTES = 4 << 20
_LOG = logging.getLogger("engramd")


@dataclass
class LayerScrub:
    """How far one layer of one generation has been checked. A pass's findings replace the last one's at its end."""

    position: int = 0  # pages checked in this pass (of a sparse table: of those that exist)
    passes: int = 0
    finished_at: float = 0.0  # time.time() of the last pass's end; 0: none yet
    bad_pages: int = 0
    bad: list[tuple[int, int | None]] = field(default_factory=list)  # (page, row) found by the last pass
    found_pages: int = 0
    found: list[tuple[int, int | None]] = field(default_factory=list)  # in this pass


class Scrubber:
    """Checks what `engine` serves. `rate_bytes_s` 0: only passes that are asked for."""

    def __init__(self, engine: Engine, rate_bytes_s: int, directory: str | None) -> None:
        self._engine = engine
        self._rate_bytes_s = rate_bytes_s
        self._path = os.path.join(directory, STATE_NAME) if directory else None
        self._lock = threading.Lock()
        self._states: dict[str, LayerScrub] = {}  # under _lock, as all below
        self._wanted: set[str] = set()  # keys of layers to check at once
        self._pages_read: dict[int, int] = {}  # by the layer's handle, since the start
        self._logged: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved_at = 0.0
        self._read_state()

    def start(self) -> None:
        """Begins in the background. Any thread may call what follows."""
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and saves its place."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._save()

    def request(self, table: str) -> None:
        """Asks for a new pass over a table (its name or directory) at once. One that runs begins again."""
        with self._lock:
            for layer in self._engine.layers:
                if table in (layer.table.name, layer.table.manifest.directory):
                    state = self._states.setdefault(key_of(layer), LayerScrub())
                    state.position, state.found, state.found_pages = 0, [], 0
                    self._wanted.add(key_of(layer))
        self._wake.set()

    def report(self, table: str) -> list[dict[str, Any]]:
        """What is known of each layer of a table, for the control protocol."""
        report = []
        with self._lock:
            for layer in self._engine.layers:
                if table not in (layer.table.name, layer.table.manifest.directory):
                    continue
                state = self._states.get(key_of(layer), LayerScrub())
                pages = len(_pages(layer))
                report.append(
                    {
                        "layer": layer.layer,
                        "generation": layer.table.manifest.generation,
                        "pages": pages,
                        "position": state.position,
                        "waiting": key_of(layer) in self._wanted,
                        "passes": state.passes,
                        "finished_at": state.finished_at,
                        "bad_pages": max(state.bad_pages, state.found_pages),
                        "bad": [list(one) for one in (state.found or state.bad)[:32]],
                    }
                )
        return report

    def pages_read(self, handle: int) -> int:
        """Pages of a layer that scrubbing has read since the start: reads behind all demand, as warming up is."""
        with self._lock:
            return self._pages_read.get(handle, 0)

    def statistics(self) -> dict[str, int]:
        """Sums over all layers."""
        with self._lock:
            states = [self._states.get(key_of(layer), LayerScrub()) for layer in self._engine.layers]
        return {
            "rate_bytes_s": self._rate_bytes_s,
            "passes": sum(state.passes for state in states),
            "position_pages": sum(state.position for state in states),
            "bad_pages": sum(max(state.bad_pages, state.found_pages) for state in states),
        }

    # The thread.

    def _run(self) -> None:
        self._lower_priority()
        self._wake.wait(FIRST_PASS_DELAY_S)
        while not self._stop.is_set():
            layer = self._next_layer()
            if layer is None:
                self._wake.wait(60.0)
                self._wake.clear()
                continue
            try:
                self._check(layer)
            except (OSError, EngramdError) as error:
                _LOG.warning("%s: scrubbing stops: %s", _name(layer), error)
                with self._lock:
                    self._wanted.discard(key_of(layer))
                self._stop.wait(60.0)

    @staticmethod
    def _lower_priority() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        except OSError:
            _LOG.debug("scrubbing keeps its priority", exc_info=True)

    def _next_layer(self) -> ServedLayer | None:
        with self._lock:
            served = {key_of(layer): layer for layer in self._engine.layers}
            self._wanted &= set(served)
            for key, layer in served.items():
                if key in self._wanted:
                    return layer
            if not self._rate_bytes_s:
                return None
            now = time.time()
            for key, layer in served.items():
                state = self._states.setdefault(key, LayerScrub())
                if state.position or not 0 <= now - state.finished_at < PASS_INTERVAL_S:
                    return layer
        return None

    def _check(self, layer: ServedLayer) -> None:
        """Goes on with a layer's pass to its end, or until something else is to be done first."""
        key, manifest = key_of(layer), layer.table.manifest
        with self._lock:
            state = self._states.setdefault(key, LayerScrub())
        described = manifest.layer(layer.layer)
        striping = manifest.striping(described)
        page_format = format_of(manifest, described)
        pages = _pages(layer)
        run_pages = max(1, RUN_BYTES // manifest.page_bytes)
        buffer = aligned_buffer(run_pages * manifest.page_bytes)
        files = Files()
        opened = {file.path: files.open_direct(file.path, os.O_RDONLY) for file in described.files}
        try:
            while state.position < len(pages):
                if self._stop.is_set() or not self._goes_on(key):
                    return
                begin = state.position
                first = pages[begin]
                extent = next(striping.extents(first, min(run_pages, described.pages - first)))
                count = 1
                while count < extent.pages and begin + count < len(pages) and pages[begin + count] == first + count:
                    count += 1
                began = time.monotonic()
                path = described.files[extent.file_index].path
                target = buffer[: count * manifest.page_bytes]
                with self._lock:
                    self._pages_read[layer.handle] = self._pages_read.get(layer.handle, 0) + count
                bad = self._check_run(page_format, first, count, target, opened[path], extent.offset, files, path)
                self._advance(layer, state, begin, count, bad)
                self._pace(key, len(target), began)
        finally:
            for descriptor in opened.values():
                files.close(descriptor)
        self._finish(layer, state)

    @staticmethod
    def _check_run(
        page_format: PageFormat,
        first: int,
        count: int,
        target: memoryview,
        fd: int,
        offset: int,
        files: Files,
        path: str,
    ) -> list[tuple[int, int | None]]:
        """The bad pages among `count` pages. What cannot be read, or is wrong, is read once more, page by page: what
        went wrong on the way is right then."""
        page_bytes = page_format.page_bytes
        try:
            if files.read_at(fd, target, offset, path) == len(target):
                _, faults = page_format.verify(first, count, target)
                if not faults:
                    return []
        except OSError:
            _LOG.debug("a read fails", exc_info=True)
        bad: list[tuple[int, int | None]] = []
        for index in range(count):
            page = target[:page_bytes]
            try:
                whole = files.read_at(fd, page, offset + index * page_bytes, path) == page_bytes
            except OSError:
                whole = False
            if not whole:
                bad.append((first + index, None))
                continue
            _, faults = page_format.verify(first + index, 1, page)
            bad += [(fault.page, fault.row) for fault in faults]
        return bad

    def _advance(
        self, layer: ServedLayer, state: LayerScrub, begin: int, count: int, bad: list[tuple[int, int | None]]
    ) -> None:
        fresh = []
        with self._lock:
            if state.position != begin:
                return  # the pass was begun again meanwhile
            state.position += count
            state.found_pages += len(bad)
            state.found += bad[: MAX_REPORTED - len(state.found)]
            for page, row in bad:
                if (key_of(layer), page) not in self._logged and len(self._logged) < 4096:
                    self._logged.add((key_of(layer), page))
                    fresh.append((page, row))
        for page, row in fresh:
            what = "cannot be read or is damaged" if row is None else f"is damaged (row {row})"
            _LOG.error("%s: scrubbing finds that page %d %s; `engramd repair` rewrites it", _name(layer), page, what)
        if time.monotonic() - self._saved_at >= SAVE_INTERVAL_S:
            self._save()

    def _finish(self, layer: ServedLayer, state: LayerScrub) -> None:
        with self._lock:
            self._wanted.discard(key_of(layer))
            state.bad, state.bad_pages = state.found, state.found_pages
            mended = {page for page, _ in state.bad}
            self._logged = {one for one in self._logged if one[0] != key_of(layer) or one[1] in mended}
            state.position, state.found, state.found_pages = 0, [], 0
            state.passes += 1
            state.finished_at = time.time()
        _LOG.info("%s: scrubbed, %d bad pages", _name(layer), state.bad_pages)
        self._save()

    def _goes_on(self, key: str) -> bool:
        """Whether this layer is still served and nothing more urgent is wanted."""
        with self._lock:
            served = {key_of(layer) for layer in self._engine.layers}
            return key in served and (key in self._wanted or not self._wanted & served)

    def _pace(self, key: str, size: int, began: float) -> None:
        """Waits so that the rate is kept; longer while demand needs the drive."""
        with self._lock:
            rate = WANTED_RATE_BYTES_S if key in self._wanted else self._rate_bytes_s
        due = began + size / max(rate, 1)
        latest = began + 10 * size / max(rate, 1)
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= due:
                counters = self._engine.counters()
                if now >= latest or counters["in_flight"] * BUSY_SHARE <= counters["in_flight_cap"]:
                    return
                due = min(now + 0.02, latest)
            self._stop.wait(max(0.0, due - now))

    # The state file.

    def _read_state(self) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "rb") as file:
                data = json.loads(file.read(MAX_STATE_BYTES))
            for key, one in data["layers"].items():
                bad = [(int(page), None if row is None else int(row)) for page, row in one["bad"]]
                found = [(int(page), None if row is None else int(row)) for page, row in one["found"]]
                self._states[str(key)] = LayerScrub(
                    position=max(0, int(one["position"])),
                    passes=int(one["passes"]),
                    finished_at=float(one["finished_at"]),
                    bad_pages=int(one["bad_pages"]),
                    bad=bad,
                    found_pages=int(one["found_pages"]),
                    found=found,
                )
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("%s: scrubbing begins anew: %s", self._path, error)
            self._states = {}

    def _save(self) -> None:
        """Replaces the state file; what goes wrong is a line in the log."""
        self._saved_at = time.monotonic()
        if self._path is None:
            return
        with self._lock:
            served = {key_of(layer) for layer in self._engine.layers}
            layers = {key: vars(state) for key, state in self._states.items() if key in served}
            text = json.dumps({"version": 1, "layers": layers})
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with replacing(self._path) as file:
                file.write(text.encode("ascii"))
        except OSError as error:
            _LOG.warning("%s: the place of scrubbing cannot be saved: %s", self._path, error.strerror)


def key_of(layer: ServedLayer) -> str:
    """A layer of one generation of one table, whatever the daemon calls it."""
    manifest = layer.table.manifest
    return f"{manifest.table_id.hex()}:{manifest.generation}:{layer.layer}"


def _name(layer: ServedLayer) -> str:
    return f"table {layer.table.name} layer {layer.layer}"


def _pages(layer: ServedLayer) -> range | list[int]:
    """The pages that exist, in order."""
    manifest = layer.table.manifest
    described = manifest.layer(layer.layer)
    if manifest.sparse is None:
        return range(described.pages)
    return sparse_pages(described, manifest.rows_per_page)
