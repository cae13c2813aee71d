"""What happened between two samples of a daemon's statistics: rates, hit share, percentiles of the interval alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAGE_BYTES = 4096
READ_COUNTERS = ("nvme_reads", "prefetch_reads", "background_reads")
Histogram = list[list[int]]  # [[end in ns, requests], ...], shortest first


@dataclass(frozen=True)
class Latency:
    """Requests of one size class that completed in the interval; percentiles in microseconds, None without requests."""

    count: int
    p50_us: float | None
    p99_us: float | None


@dataclass(frozen=True)
class Rates:
    """One interval. Rates are per second; hit_share is None where no row was looked up."""

    seconds: float
    rows: float
    requests: float
    failed_requests: float
    hit_share: float | None
    reads: float
    read_bytes: float
    latency: dict[str, Latency]


def rates(before: dict[str, Any], after: dict[str, Any]) -> Rates:
    """The interval between two samples with histograms. Counters of a layer that one of them lacks (a reload) and of a
    daemon that was restarted count from zero."""
    seconds = after["uptime_s"] - before["uptime_s"]
    if before["pid"] != after["pid"] or seconds <= 0:
        before = {"tables": [], "latency_histogram_ns": {}}
        seconds = after["uptime_s"]
    seconds = max(seconds, 1e-3)
    earlier, later = _totals(before), _totals(after)
    total = dict.fromkeys(("rows", "requests", "dram_hits", "dram_misses", "failed", *READ_COUNTERS), 0)
    for key, counters in later.items():
        old = earlier.get(key, {})
        for name in total:
            total[name] += max(0, counters[name] - old.get(name, 0))
    looked_up = total["dram_hits"] + total["dram_misses"]
    reads = sum(total[name] for name in READ_COUNTERS)
    return Rates(
        seconds=seconds,
        rows=total["rows"] / seconds,
        requests=total["requests"] / seconds,
        failed_requests=total["failed"] / seconds,
        hit_share=total["dram_hits"] / looked_up if looked_up else None,
        reads=reads / seconds,
        read_bytes=reads * PAGE_BYTES / seconds,
        latency={
            name: _latency(before["latency_histogram_ns"].get(name, {"buckets": []})["buckets"], histogram["buckets"])
            for name, histogram in after["latency_histogram_ns"].items()
        },
    )


def _totals(stats: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, int]]:
    totals: dict[tuple[str, int, int], dict[str, int]] = {}
    for table in stats["tables"]:
        for layer in table["layers"]:
            totals[table["name"], table["generation"], layer["layer"]] = {
                **{name: layer[name] for name in ("rows", "requests", "dram_hits", "dram_misses", *READ_COUNTERS)},
                "failed": sum(layer["errors"].values()),
            }
    return totals


def _latency(before: Histogram, after: Histogram) -> Latency:
    earlier = {bucket[0]: bucket[1] for bucket in before}
    buckets = [(end, count - earlier.get(end, 0)) for end, count in after]
    count = sum(one for _, one in buckets)
    if count <= 0:
        return Latency(0, None, None)
    return Latency(count, _percentile(buckets, count, 0.50), _percentile(buckets, count, 0.99))


def _percentile(buckets: list[tuple[int, int]], count: int, share: float) -> float:
    """The end of the bucket that holds the request at this share, in microseconds: right to 6 %, from above."""
    seen = 0
    for end, one in buckets:
        seen += one
        if seen > share * (count - 1):
            return end / 1000
    return buckets[-1][0] / 1000
