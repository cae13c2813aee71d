"""The daemon's statistics as one JSON object: what `engramd stats --json` and `client.stats()` give."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from engramd import __version__
from engramd._engine import lib
from engramd.daemon.engine import ERROR_CLASSES, READER_NAMES, TIER_NAMES, Engine, ServedLayer, injected_faults
from engramd.daemon.reconfigure import Reconfigure
from engramd.daemon.scrub import Scrubber

LATENCY_CLASSES = ("1-256", "257-4096", "4097-65536", "65537-")
SMAPS_SHARE = 0.005
_LAYER_COUNTERS = (
    "rows_total",
    "requests",
    "rows",
    "rows_zero",
    "dram_hits",
    "dram_misses",
    "rows_failed",
    "rows_unique",
    "nvme_reads",
    "prefetch_reads",
    "background_reads",
    "rereads",
)


class Statistics:
    """Assembles the object from the engine's counters. Any thread; reading smaps takes a while in a large process."""

    def __init__(
        self, engine: Engine, scrubber: Scrubber, configuration: Reconfigure, session_name: Callable[[int], str]
    ) -> None:
        """session_name: what the client of a session calls itself; "" where it is gone."""
        self._engine = engine
        self._scrubber = scrubber
        self._configuration = configuration
        self._session_name = session_name
        self._huge_due_at = 0.0
        self._huge_bytes = 0
        self._started_at = time.monotonic()
        self._is_fault_build = injected_faults() is not None

    def __call__(self, histograms: bool = False) -> dict[str, Any]:
        """The object; with histograms also every latency since the start, in buckets."""
        stats = self._counters()
        if histograms:
            stats["latency_histogram_ns"] = {
                name: dict(zip(("sum", "buckets"), self._engine.latency_histogram(index), strict=True))
                for index, name in enumerate(LATENCY_CLASSES)
            }
        return stats

    def _transparent_huge_bytes(self) -> int:
        """Read anew at most SMAPS_SHARE of the time: the kernel walks all page tables for it, which takes long in a
        large process of small pages."""
        began = time.monotonic()
        if began >= self._huge_due_at:
            self._huge_bytes = transparent_huge_bytes()
            now = time.monotonic()
            self._huge_due_at = now + (now - began) / SMAPS_SHARE
        return self._huge_bytes

    def _counters(self) -> dict[str, Any]:
        counters = self._engine.counters()
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "pid": os.getpid(),
            "fault_build": self._is_fault_build,
            "faults": injected_faults() or {},
            "config_file": self._configuration.file,
            "config": self._configuration.settings.as_json(),
            "tables": self._tables(),
            "dram": {
                "budget_bytes": counters["budget_bytes"],
                "used_bytes": counters["used_bytes"],
                "metadata_bytes": counters["metadata_bytes"],
                "huge_bytes": counters["hugetlb_bytes"] + self._transparent_huge_bytes(),
                "rows_cached": counters["rows_cached"],
            },
            "arenas": {
                "count": counters["arena_count"],
                "bytes": counters["arena_bytes"],
                "limit_bytes": counters["arena_limit_bytes"],
            },
            "reader": {
                "kind": READER_NAMES.get(counters["reader"], "none"),
                "workers": counters["workers"],
                "in_flight_cap": counters["in_flight_cap"],
                "in_flight": counters["in_flight"],
                "prefetch_dropped_rows": counters["prefetch_dropped_rows"],
                "prefetch_queued_rows": counters["prefetch_queued_rows"],
            },
            "scrub": self._scrubber.statistics(),
            "latency_us": {
                name: {
                    "count": latency["count"],
                    "p50": latency["p50_us"],
                    "p99": latency["p99_us"],
                    "p999": latency["p999_us"],
                }
                for name, latency in zip(LATENCY_CLASSES, counters["latency"], strict=True)
            },
            "sessions": [
                {
                    "session": session["session"],
                    "name": self._session_name(session["session"]),
                    "pid": session["pid"],
                    "uid": session["uid"],
                    "since_s": round(session["since_s"], 3),
                    "requests": session["requests"],
                    "rows": session["rows"],
                    "waiting": session["waiting"],
                }
                for session in self._engine.session_counters()
            ],
        }

    def _tables(self) -> list[dict[str, Any]]:
        counters = self._engine.layer_counters()
        tables: dict[str, dict[str, Any]] = {}
        for layer in self._engine.layers:
            manifest = layer.table.manifest
            table = tables.setdefault(
                layer.table.name,
                {
                    "name": layer.table.name,
                    "identity": manifest.identity,
                    "generation": manifest.generation,
                    "path": os.fsencode(manifest.directory).decode("utf-8", "replace"),
                    "row_bytes": manifest.row_bytes,
                    "revision": manifest.source.revision,
                    "hash": manifest.hash,
                    "layers": [],
                },
            )
            found = counters.get(layer.handle)
            if found is None:
                continue  # replaced by a reload since the list was taken
            table["layers"].append(
                {
                    "layer": layer.layer,
                    "tier": TIER_NAMES[found["tier"]],
                    **_policy(layer),
                    "dram_bytes": found["dram_bytes"],
                    "maps": found["maps"],
                    **{name: found[name] for name in _LAYER_COUNTERS},
                    "background_reads": found["background_reads"] + self._scrubber.pages_read(layer.handle),
                    "errors": _errors(found["errors"]),
                }
            )
        return list(tables.values())


def _policy(layer: ServedLayer) -> dict[str, Any]:
    policy = layer.table.policy.of(layer.layer)
    return {"tier_policy": policy.tier, "dram_share": policy.dram_share, "resident_layout": policy.resident_layout}


def _errors(by_status: list[int]) -> dict[str, int]:
    """Failed requests by error class; classes without any are left out."""
    errors: dict[str, int] = {}
    for status, count in enumerate(by_status):
        if count and status not in (lib.ENGRAM_STATUS_EMPTY, lib.ENGRAM_STATUS_OK):
            name = ERROR_CLASSES.get(status, "EngramError")
            errors[name] = errors.get(name, 0) + count
    return errors


def transparent_huge_bytes() -> int:
    """This process's memory in transparent huge pages, its own and what it shares; 0 where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            huge = [line.split() for line in file if line.startswith((b"AnonHugePages:", b"ShmemPmdMapped:"))]
    except OSError:
        return 0
    return sum(int(words[1]) * 1024 for words in huge)
