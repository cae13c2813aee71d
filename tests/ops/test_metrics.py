"""The HTTP endpoint: read by Prometheus' own parser, added up against the statistics, probed by odd clients; and what
else tells machines about the daemon: the log as JSON, the service manager's socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engramd.metrics.exposition import METRICS, exposition
from tests.damage import flip_bit

from .scraping import get, scrape, total


def test_counters_add_up_in_stats_and_metrics(
    start_daemon: Any, load: Any, engramd: Callable[..., Any], reserve_port: Any
) -> None:
    port = reserve_port()
    daemon = start_daemon(dram="256KiB", metrics=f"127.0.0.1:{port}")
    work = load(daemon)
    work.run(60)
    samples = scrape(port)
    stats = json.loads(engramd("stats", "--socket", daemon.socket, "--json").stdout)
    assert total(samples, "engramd_rows_total") == work.rows
    assert total(samples, "engramd_rows_total", source="zero") == work.zero
    assert total(samples, "engramd_request_errors_total", error="RowIdError") == work.refused
    own = work.client.counters()
    assert (own["requests"], own["failed_requests"], own["rows"]) == (work.requests, work.refused, work.rows)
    assert own["reply_bytes"] == 264 * work.rows
    assert own["wait_ns"] > 0
    assert own["copy_ns"] > 0
    layers = [layer for table in stats["tables"] for layer in table["layers"]]
    assert sum(layer["rows"] for layer in layers) == work.rows
    for layer in layers:
        where = {"table": "demo", "layer": str(layer["layer"])}
        assert total(samples, "engramd_rows_total", **where) == layer["rows"]
        assert total(samples, "engramd_rows_total", source="dram", **where) == layer["dram_hits"]
        assert total(samples, "engramd_rows_total", source="nvme", **where) == layer["dram_misses"]
        assert total(samples, "engramd_page_reads_total", cause="demand", **where) == layer["nvme_reads"]
        assert total(samples, "engramd_requests_total", **where) == layer["requests"]
    histogram = "engramd_request_duration_seconds"
    for name, latency in stats["latency_us"].items():
        assert total(samples, f"{histogram}_count", rows=name) == latency["count"]
        assert total(samples, f"{histogram}_bucket", rows=name, le="+Inf") == latency["count"]
        bounds = sorted(
            (float(dict(labels)["le"]), value)
            for (one, labels), value in samples.items()
            if one == f"{histogram}_bucket" and dict(labels)["rows"] == name
        )
        counts = [value for _, value in bounds]
        assert counts == sorted(counts)
        if latency["count"]:
            mean_s = total(samples, f"{histogram}_sum", rows=name) / latency["count"]
            assert 0 < mean_s < 60
            # At least half took no longer than the median of the statistics, give or take its 6 %.
            assert next(2 * count for bound, count in bounds if bound >= latency["p50"] * 1.07e-6) >= latency["count"]
    assert total(samples, "engramd_sessions") == len(stats["sessions"]) == 1
    assert stats["sessions"][0]["rows"] == work.rows


@pytest.mark.parametrize("way", ["ring", "control"])
def test_the_clients_own_counters(start_daemon: Any, way: str) -> None:
    """Fetches in parts, tickets (waited for twice, or never), prefetches, refusals, and a daemon that comes back."""
    import engram_client

    daemon = start_daemon()
    with engram_client.connect(daemon.socket if way == "ring" else f"ipc-control:{daemon.socket}") as client:
        table = client.table(layer=1)
        many = client.max_ticket_rows + 1000
        assert len(table.fetch(np.arange(many) % table.num_rows)) == many
        with table.submit([1, -1, 2]) as ticket:
            ticket.wait()
            ticket.wait()
        table.submit([1]).release()
        table.prefetch([5, 6])
        with pytest.raises(engram_client.RowIdError):
            table.fetch([table.num_rows])
        own = client.counters()
        assert own["failed_requests"] == 1
        assert (own["requests"], own["rows"], own["reply_bytes"]) == (2, many + 3, 264 * (many + 3))
        daemon.kill()
        with pytest.raises(engram_client.DaemonLost):
            table.fetch([1])
        start_daemon(socket=daemon.socket)
        table.fetch([1])
        after = client.counters()
        assert (after["requests"], after["rows"]) == (3, many + 4)
        assert after["wait_ns"] >= own["wait_ns"]


def test_names_and_types_follow_the_conventions() -> None:
    for name, (kind, text) in METRICS.items():
        assert re.fullmatch("engramd_[a-z_]+[a-z]", name)
        assert text.endswith(".")
        assert (kind == "counter") == name.endswith("_total")


def test_labels_are_escaped() -> None:
    layer = dict.fromkeys(
        ("rows_total", "requests", "rows", "rows_zero", "dram_hits", "dram_misses", "rows_failed", "rows_unique",
         "nvme_reads", "prefetch_reads", "background_reads", "maps", "rereads"), 1)  # fmt: skip
    name = 'a"b\\c d'
    stats = {
        "version": "1", "uptime_s": 1.5, "sessions": [],
        "tables": [{"name": name, "generation": 1, "layers": [{**layer, "layer": 1, "tier": "cached", "errors": {}}]}],
        "dram": dict.fromkeys(("budget_bytes", "used_bytes", "metadata_bytes", "huge_bytes", "rows_cached"), 0),
        "arenas": {"count": 0, "bytes": 0, "limit_bytes": 1 << 60},
        "reader": {
            "kind": "pread", "in_flight": 0, "in_flight_cap": 1, "prefetch_dropped_rows": 0, "prefetch_queued_rows": 7,
        },
        "scrub": {"passes": 3, "bad_pages": 2},
        "latency_histogram_ns": {"1-256": {"sum": 5000, "buckets": [[1025, 2], [3000, 1], [1 << 62, 1]]}},
    }  # fmt: skip
    families = {family.name: family for family in text_string_to_metric_families(exposition(stats))}
    assert families["engramd_table_generation"].samples[0].labels == {"table": name}
    for gauge, value in (("engramd_scrub_bad_pages", 2), ("engramd_prefetch_queued_rows", 7)):
        assert families[gauge].samples[0].value == value
    buckets = {
        sample.labels["le"]: sample.value
        for sample in families["engramd_request_duration_seconds"].samples
        if sample.name.endswith("_bucket")
    }
    assert (buckets["1.024e-06"], buckets["2.048e-06"], buckets["4.096e-06"], buckets["+Inf"]) == (0, 2, 3, 4)


def test_health_and_odd_requests(start_daemon: Any, reserve_port: Any) -> None:
    port = reserve_port()
    daemon = start_daemon(metrics=f"127.0.0.1:{port}")
    assert get(port, "/livez") == (200, "text/plain; charset=utf-8", "ok\n")
    assert get(port, "/readyz?verbose")[0] == 200
    assert get(port, "/metrics", "HEAD")[2] == ""
    assert get(port, "/../etc/passwd")[0] == 404
    assert get(port, "/metrics", "POST")[0] == 501
    # Clients that say nothing, and one that sends rubbish: the next one is served all the same.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    with socket.create_connection(("127.0.0.1", port)) as rubbish:
        rubbish.settimeout(30)
        rubbish.sendall(os.urandom(4096) + b"\r\n\r\n")
        rubbish.recv(100)
    assert get(port, "/metrics")[0] == 200
    for one in silent:
        one.close()
    assert daemon.stop() == 0
    with pytest.raises(OSError, match="refused"):
        get(port, "/livez")


def test_a_stuck_loop_is_not_alive() -> None:
    from engramd.daemon.http_endpoint import STUCK_AFTER_S, Health

    health = Health()
    assert health.problem() is None
    health.turned_at = time.monotonic() - STUCK_AFTER_S - 1
    assert "not turned for 31 s" in (health.problem() or "")


def test_the_port_is_taken(table: Path, engramd: Callable[..., Any], socket_folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = engramd("serve", table, "--socket", f"{socket_folder}/s", "--metrics", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"metrics 127.0.0.1:{port}: cannot be bound: Address already in use" in done.stderr


def test_json_log_and_watchdog(start_daemon: Any, load: Any, socket_folder: str) -> None:
    """Each line is an object; sign of life comes from the event loop, so a stopped process gives none."""
    daemon = start_daemon(log_format="json", environment={"WATCHDOG_USEC": "400000"})
    work = load(daemon)
    work.run(2)
    work.close()
    daemon.wait_for_log("session 1 ended")
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert {"time", "level", "message"} <= set(lines[0])
    assert [line["session"] for line in lines if "session 1" in line["message"]] == [1, 1]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)


def test_log_lines_name_the_request(start_daemon: Any, copy: Path) -> None:
    """Two requests of one session that meet bad pages; and, at level debug, each control request with its id."""
    import engram_client

    for page in (2, 5):
        flip_bit(copy / "layer-1.g000001.pages", page * 4096 + 100)
    daemon = start_daemon(copy, dram="0", log_format="json", log_level="debug")
    with engram_client.connect(daemon.socket) as client:
        for row in (2 * 15, 5 * 15):
            with pytest.raises(engram_client.PageCorrupt):
                client.table(layer=1).fetch([row])
        client.stats()
    daemon.wait_for_log("page 5 cannot be served")
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    bad = [line for line in lines if "cannot be served" in line["message"]]
    assert [line["session"] for line in bad] == [1, 1]
    assert 0 < bad[0]["request"] < bad[1]["request"]
    assert f"session 1, request {bad[1]['request']}" in bad[1]["message"]
    asked = [line for line in lines if line["message"].endswith(": stats")]
    assert asked
    assert all(line["uid"] == os.getuid() and line["request"] in line["message"] for line in asked)


def next_but_watchdog(listener: socket.socket) -> str:
    """The next message that is no sign of life."""
    while (text := listener.recv(4096).decode()) == "WATCHDOG=1":
        pass
    return text


def test_watchdog_messages(tmp_path: Path, table: Path, socket_folder: str) -> None:
    import subprocess
    import sys

    path = f"{socket_folder}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(30)
        config = tmp_path / "engramd.toml"
        config.write_text(f'dram = "1MiB"\n[[table]]\npath = "{table}"\n')
        process = subprocess.Popen(
            [sys.executable, "-m", "engramd.cli.main", "serve", "--config", config, "--socket", f"{socket_folder}/s"],
            env={**os.environ, "NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"},
            stderr=subprocess.DEVNULL,
        )
        try:
            messages = [listener.recv(4096).decode()]
            assert messages[0].startswith("EXTEND_TIMEOUT_USEC=")
            while "READY=1" not in messages[-1]:
                messages.append(listener.recv(4096).decode())
            for _ in range(3):
                assert listener.recv(4096) == b"WATCHDOG=1"
            config.write_text(f'dram = "2MiB"\n[[table]]\npath = "{table}"\n')
            process.send_signal(signal.SIGHUP)
            told = [next_but_watchdog(listener), next_but_watchdog(listener)]
            assert told[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert told[1] == "READY=1"
            process.send_signal(signal.SIGSTOP)
            listener.settimeout(0.5)
            with pytest.raises(TimeoutError):  # noqa: PT012
                while listener.recv(4096):
                    pass
            process.send_signal(signal.SIGCONT)
            process.terminate()
            listener.settimeout(30)
            assert next_but_watchdog(listener) == "STOPPING=1"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait(30)
