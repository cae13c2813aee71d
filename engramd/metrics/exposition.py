"""Statistics as Prometheus metrics (text format 0.0.4): a pure function of the object that `engramd stats` shows.

Names follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters, a histogram of latencies.
METRICS lists every name; the dashboard's queries are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_BYTES = 4096
# Upper bounds of the latency histogram: powers of two of nanoseconds, from a microsecond to 17 seconds, so that the
# engine's finer buckets add up exactly. A latency of just a bound counts above it.
LATENCY_BOUNDS_NS = tuple(1 << power for power in range(10, 35))

# Name: (type, help).
METRICS: dict[str, tuple[str, str]] = {
    "engramd_build_info": ("gauge", "Version and reader of the daemon; always 1."),
    "engramd_uptime_seconds": ("gauge", "Time since the daemon was ready."),
    "engramd_table_generation": ("gauge", "Generation of a table that is served."),
    "engramd_layer_rows": ("gauge", "Rows of a layer."),
    "engramd_layer_resident": ("gauge", "1 where all rows of a layer are in DRAM."),
    "engramd_layer_maps": ("gauge", "Maps of the layer's resident rows that clients hold."),
    "engramd_requests_total": ("counter", "Requests taken, prefetches and failed ones too; a split one counts once."),
    "engramd_request_errors_total": ("counter", "Requests that failed as a whole, by error class."),
    "engramd_rows_total": ("counter", "Rows of served requests: zero (padding), dram (hit), nvme (miss), failed."),
    "engramd_distinct_rows_total": ("counter", "Distinct rows of each request."),
    "engramd_page_reads_total": ("counter", "Pages read from NVMe: on demand, by prefetch, in the background."),
    "engramd_read_bytes_total": ("counter", "Bytes read from NVMe."),
    "engramd_page_rereads_total": ("counter", "Pages read a second time because a row's checksum failed."),
    "engramd_reads_in_flight": ("gauge", "Reads that the drive has been given and has not answered."),
    "engramd_reads_in_flight_limit": ("gauge", "Most reads in flight at once."),
    "engramd_prefetch_dropped_rows_total": ("counter", "Rows whose prefetch was dropped because the queue was full."),
    "engramd_prefetch_queued_rows": ("gauge", "Rows that wait to be prefetched."),
    "engramd_scrub_passes_total": ("counter", "Layers that background verification has read to their end."),
    "engramd_scrub_bad_pages": ("gauge", "Bad pages that background verification found in its last pass or this one."),
    "engramd_dram_budget_bytes": ("gauge", "DRAM budget."),
    "engramd_dram_used_bytes": ("gauge", "DRAM used by rows and their index."),
    "engramd_dram_index_bytes": ("gauge", "DRAM used by the index alone."),
    "engramd_dram_huge_page_bytes": ("gauge", "Memory in huge pages, reserved or transparent."),
    "engramd_dram_rows": ("gauge", "Rows in DRAM."),
    "engramd_arenas": ("gauge", "Reply arenas."),
    "engramd_arena_bytes": ("gauge", "Memory of arenas and rings."),
    "engramd_arena_limit_bytes": ("gauge", "Most memory of arenas and rings."),
    "engramd_sessions": ("gauge", "Open sessions."),
    "engramd_requests_waiting": ("gauge", "Requests taken and not completed."),
    "engramd_request_duration_seconds": ("histogram", "From a request's taking to its completion, by its rows."),
}
_ROW_SOURCES = {"zero": "rows_zero", "dram": "dram_hits", "nvme": "dram_misses", "failed": "rows_failed"}
_READ_CAUSES = {"demand": "nvme_reads", "prefetch": "prefetch_reads", "background": "background_reads"}


def exposition(stats: dict[str, Any]) -> str:
    """The text of one scrape. stats: engramd.daemon.stats.Statistics with histograms."""
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, labels, value in _samples(stats):
        samples[name].append(f"{name}{_labels(labels)} {_number(value)}")
    for rows, histogram in stats["latency_histogram_ns"].items():
        samples["engramd_request_duration_seconds"] += _histogram(
            "engramd_request_duration_seconds", {"rows": rows}, histogram
        )
    lines: list[str] = []
    for name, (kind, text) in METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples[name]]
    return "\n".join(lines) + "\n"


def _samples(stats: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    dram, arenas, reader, sessions = stats["dram"], stats["arenas"], stats["reader"], stats["sessions"]
    yield "engramd_build_info", {"version": stats["version"], "reader": reader["kind"]}, 1
    yield "engramd_uptime_seconds", {}, stats["uptime_s"]
    for table in stats["tables"]:
        yield "engramd_table_generation", {"table": table["name"]}, table["generation"]
        for layer in table["layers"]:
            yield from _layer_samples({"table": table["name"], "layer": str(layer["layer"])}, layer)
    yield "engramd_reads_in_flight", {}, reader["in_flight"]
    yield "engramd_reads_in_flight_limit", {}, reader["in_flight_cap"]
    yield "engramd_prefetch_dropped_rows_total", {}, reader["prefetch_dropped_rows"]
    yield "engramd_prefetch_queued_rows", {}, reader["prefetch_queued_rows"]
    yield "engramd_scrub_passes_total", {}, stats["scrub"]["passes"]
    yield "engramd_scrub_bad_pages", {}, stats["scrub"]["bad_pages"]
    yield "engramd_dram_budget_bytes", {}, dram["budget_bytes"]
    yield "engramd_dram_used_bytes", {}, dram["used_bytes"]
    yield "engramd_dram_index_bytes", {}, dram["metadata_bytes"]
    yield "engramd_dram_huge_page_bytes", {}, dram["huge_bytes"]
    yield "engramd_dram_rows", {}, dram["rows_cached"]
    yield "engramd_arenas", {}, arenas["count"]
    yield "engramd_arena_bytes", {}, arenas["bytes"]
    yield "engramd_arena_limit_bytes", {}, arenas["limit_bytes"]
    yield "engramd_sessions", {}, len(sessions)
    yield "engramd_requests_waiting", {}, sum(session["waiting"] for session in sessions)


def _layer_samples(where: dict[str, str], layer: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    yield "engramd_layer_rows", where, layer["rows_total"]
    yield "engramd_layer_resident", where, layer["tier"] == "resident"
    yield "engramd_layer_maps", where, layer["maps"]
    yield "engramd_requests_total", where, layer["requests"]
    for error, count in sorted(layer["errors"].items()):
        yield "engramd_request_errors_total", {**where, "error": error}, count
    for source, counter in _ROW_SOURCES.items():
        yield "engramd_rows_total", {**where, "source": source}, layer[counter]
    yield "engramd_distinct_rows_total", where, layer["rows_unique"]
    yield "engramd_page_rereads_total", where, layer["rereads"]
    for cause, counter in _READ_CAUSES.items():
        yield "engramd_page_reads_total", {**where, "cause": cause}, layer[counter]
        yield "engramd_read_bytes_total", {**where, "cause": cause}, layer[counter] * PAGE_BYTES


def _histogram(name: str, labels: dict[str, str], histogram: dict[str, Any]) -> Iterable[str]:
    buckets = histogram["buckets"]
    position = count = 0
    for bound in LATENCY_BOUNDS_NS:
        while position < len(buckets) and buckets[position][0] <= bound:
            count += buckets[position][1]
            position += 1
        yield f"{name}_bucket{_labels({**labels, 'le': repr(bound / 1e9)})} {count}"
    count += sum(one for _, one in buckets[position:])
    yield f"{name}_bucket{_labels({**labels, 'le': '+Inf'})} {count}"
    yield f"{name}_sum{_labels(labels)} {_number(histogram['sum'] / 1e9)}"
    yield f"{name}_count{_labels(labels)} {count}"


def _labels(labels: dict[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
