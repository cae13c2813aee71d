"""The statistics: the shape that the contract promises, the sums that must hold, the report for people."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

LAYER_COUNTERS = {
    "rows_total", "requests", "rows", "rows_zero", "dram_hits", "dram_misses", "rows_failed", "rows_unique",
    "nvme_reads", "prefetch_reads", "background_reads",
}  # fmt: skip


def fetch(client: Any, layer: int, ids: list[int]) -> dict[str, Any]:
    packed = struct.pack(f"={len(ids)}q", *ids)
    return dict(client.request("fetch", packed, table="demo", layer=layer, width=8)[0])


def test_shape(start_daemon: Any, engramd: Callable[..., Any], raw_client: Any) -> None:
    daemon = start_daemon(dram="3MiB", arena="2MiB", arena_limit="100MiB")
    raw_client(daemon.socket).open()
    daemon.wait_for_log("session 1")
    done = engramd("stats", "--socket", daemon.socket, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    stats = json.loads(done.stdout)
    assert stats["pid"] == daemon.pid
    assert stats["uptime_s"] > 0
    (table,) = stats["tables"]
    assert {"name", "identity", "generation", "path", "row_bytes", "revision", "hash", "layers"} <= set(table)
    assert table["revision"] is None
    assert table["hash"]["engram_layer_ids"] == [1, 14]
    for layer in table["layers"]:
        assert {"layer", "tier", "errors"} | LAYER_COUNTERS <= set(layer)
        assert layer["tier"] in ("cached", "loading", "resident")
        assert all(type(layer[name]) is int for name in LAYER_COUNTERS)
    assert set(stats["dram"]) >= {"budget_bytes", "used_bytes", "metadata_bytes", "huge_bytes", "rows_cached"}
    assert stats["dram"]["budget_bytes"] == 3 << 20
    assert stats["dram"]["metadata_bytes"] <= stats["dram"]["used_bytes"] <= 3 << 20
    assert stats["arenas"]["count"] == 1
    assert 2 << 20 <= stats["arenas"]["bytes"] <= stats["arenas"]["limit_bytes"] == 100 << 20
    assert stats["reader"]["kind"] in ("io_uring", "pread")
    assert stats["reader"]["in_flight"] <= stats["reader"]["in_flight_cap"]
    assert list(stats["latency_us"]) == ["1-256", "257-4096", "4097-65536", "65537-"]
    assert all(set(one) == {"count", "p50", "p99", "p999"} for one in stats["latency_us"].values())
    (session,) = stats["sessions"]
    assert set(session) >= {"pid", "uid", "since_s", "requests", "rows", "waiting"}


def test_counters_add_up_after_any_workload(start_daemon: Any, control: Any) -> None:
    """For each requested row one of zero, hit, miss, failed; a refused batch counts as an error and has no rows."""
    daemon = start_daemon(dram="256KiB")
    client = control(daemon.socket)
    totals = {one["layer"]: one["rows"] for one in client.request("tables")[0]["tables"]}
    asked = {layer: {"requests": 0, "rows": 0, "zero": 0, "unique": 0, "refused": 0} for layer in totals}

    @given(
        st.sampled_from(sorted(totals)),
        st.lists(st.integers(-1, min(totals.values()) - 1) | st.integers(-1, 40), min_size=1, max_size=300),
        st.integers(0, 9),
    )
    @settings(max_examples=60)
    def work(layer: int, ids: list[int], spoil: int) -> None:
        expected = asked[layer]
        if spoil == 0:
            assert fetch(client, layer, [*ids, totals[layer]])["error"] == "RowIdError"
            expected["refused"] += 1
        else:
            assert fetch(client, layer, ids)["ok"]
            expected["requests"] += 1
            expected["rows"] += len(ids)
            expected["zero"] += ids.count(-1)
            expected["unique"] += len(set(ids) - {-1})
        stats = client.request("stats")[0]["stats"]
        found = next(one for one in stats["tables"][0]["layers"] if one["layer"] == layer)
        assert found["rows"] == found["rows_zero"] + found["dram_hits"] + found["dram_misses"] + found["rows_failed"]
        assert found["rows"] == expected["rows"]
        assert found["rows_zero"] == expected["zero"]
        assert found["rows_unique"] == expected["unique"]
        assert found["errors"] == ({"RowIdError": expected["refused"]} if expected["refused"] else {})
        assert found["nvme_reads"] <= found["dram_misses"]
        assert found["rows_total"] == totals[layer]

    work()
    stats = client.request("stats")[0]["stats"]
    served = sum(one["requests"] for one in asked.values())
    refused = sum(one["refused"] for one in asked.values())
    assert sum(layer["requests"] for layer in stats["tables"][0]["layers"]) in (served, served + refused)
    assert (
        served <= stats["latency_us"]["1-256"]["count"] + stats["latency_us"]["257-4096"]["count"] <= served + refused
    )


def test_report_for_people(start_daemon: Any, control: Any, engramd: Callable[..., Any], raw_client: Any) -> None:
    daemon = start_daemon()
    raw_client(daemon.socket).open()
    client = control(daemon.socket)
    fetch(client, 1, list(range(100)))
    fetch(client, 14, [-5])
    daemon.wait_for_log("session 1")
    done = engramd("stats", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    for words in ("table demo, generation 1", "RowIdError 1", "sessions: 1", "DRAM", "64.0 MiB", "request latency"):
        assert words in done.stdout
    assert all(len(line) <= 160 for line in done.stdout.splitlines())
