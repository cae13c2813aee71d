"""`engramd stats`: a running daemon's counters, as a report for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engramd.cli.arguments import add_socket_option, count_argument, interval_argument
from engramd.errors import EngramdError
from engramd.sizes import format_size
from engramd.views.turns import turns

if TYPE_CHECKING:
    from engramd.cli.control_client import ControlClient


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "stats",
        help="show a running daemon's counters",
        description="Shows all counters once. With --interval, one line an interval: rows and requests a second, DRAM "
        "hits of the rows looked up, reads of the NVMe tier (4 KiB each) and reads in flight, DRAM in use, sessions, "
        "requests waiting, and p50 and p99 of the interval's requests by their number of rows.",
    )
    add_socket_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object; with --interval one a line")
    parser.add_argument(
        "--interval", metavar="S", type=interval_argument, help="a line every S seconds until interrupted"
    )
    parser.add_argument(
        "--mrc", action="store_true", help="show instead what caches of other sizes would have hit since the start"
    )
    parser.add_argument("--count", metavar="N", type=count_argument, help="with --interval: end after N lines")
    parser.add_argument(
        "--timeout", metavar="S", type=interval_argument, default=5.0, help="seconds to wait for an answer (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints once, or until interrupted. Raises EngramdError where nobody answers."""
    if args.count is not None and args.interval is None:
        raise EngramdError(f"--count {args.count} counts the lines of --interval: say --interval S too")
    if args.mrc:
        show_miss_curve(args)
        return 0
    with sampler(args.socket, args.timeout, histograms=args.interval is not None and not args.json) as sample:
        if args.json:
            for _ in turns(args.interval, args.count):
                print(json.dumps(sample()), flush=True)
        elif args.interval is None:
            print(report(sample()))
        else:
            from engramd.views import monitor

            monitor.run(sample, args.interval, args.count)
    return 0


def show_miss_curve(args: argparse.Namespace) -> None:
    """`stats --mrc`: the daemon's miss-ratio curve, as text or (with all statistics) as JSON."""
    from engramd.cli.control_client import ControlClient
    from engramd.plan import live_curve

    earlier: dict[str, Any] | None = None
    with ControlClient(args.socket, args.timeout) as client:
        for _ in turns(args.interval, args.count):
            stats = ask_statistics(client)
            curve = live_curve.checked(client.ask("curve").get("curve"), client.path)
            stats["mrc"] = live_curve.as_json(curve, earlier)
            earlier = curve
            text = live_curve.report(stats["mrc"], stats["dram"]["budget_bytes"])
            print(json.dumps(stats) if args.json else text, flush=True)


@contextmanager
def sampler(socket: str | None, timeout_s: float, histograms: bool = True) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that asks the daemon for its statistics. Raises EngramdError where nobody answers."""
    from engramd.cli.control_client import ControlClient

    with ControlClient(socket, timeout_s) as client:
        yield lambda: ask_statistics(client, histograms)


def ask_statistics(client: ControlClient, histograms: bool = False) -> dict[str, Any]:
    """A daemon's statistics. Raises EngramdError."""
    stats = client.ask("stats", histograms=int(histograms)).get("stats")
    if not isinstance(stats, dict):
        raise EngramdError(f"the daemon at {client.path} answers without statistics")
    return stats


def report(stats: dict[str, Any]) -> str:
    """The statistics as aligned text."""
    dram, arenas, reader, scrub = stats["dram"], stats["arenas"], stats["reader"], stats["scrub"]
    dropped = f"; {reader['prefetch_dropped_rows']:,} rows' prefetch dropped" if reader["prefetch_dropped_rows"] else ""
    lines = [
        f"engramd {stats['version']}, pid {stats['pid']}, up {_duration(stats['uptime_s'])}",
        "",
        f"DRAM      {format_size(dram['used_bytes'])} of {format_size(dram['budget_bytes'])} used, "
        f"{format_size(dram['metadata_bytes'])} of it index; {format_size(dram['huge_bytes'])} in huge pages; "
        f"{dram['rows_cached']:,} rows",
        f"arenas    {arenas['count']} with {format_size(arenas['bytes'])} of {format_size(arenas['limit_bytes'])}",
        f"reader    {reader['kind']}, {reader['in_flight']} of {reader['in_flight_cap']} reads in flight{dropped}",
        f"scrub     {scrub['passes']} passes over a layer, {scrub['bad_pages']} bad pages",
    ]
    for table in stats["tables"]:
        lines += [
            "",
            f"table {table['name']}, generation {table['generation']}, {table['row_bytes']} B a row, {table['path']}",
            f"  identity {table['identity']}",
        ]
        lines += _indented(_layer_table(table["layers"]))
        for layer in table["layers"]:
            if layer["errors"]:
                failed = ", ".join(f"{kind} {count:,}" for kind, count in sorted(layer["errors"].items()))
                lines.append(f"  layer {layer['layer']} failed requests: {failed}")
    lines += ["", "request latency"]
    lines += _indented(
        _aligned(
            ["rows", "requests", "p50 us", "p99 us", "p99.9 us"],
            [
                [
                    name,
                    f"{one['count']:,}",
                    *(f"{one[p]:,.1f}" if one["count"] else "-" for p in ("p50", "p99", "p999")),
                ]
                for name, one in stats["latency_us"].items()
            ],
        )
    )
    lines += ["", f"sessions: {len(stats['sessions'])}"]
    if stats["sessions"]:
        rows = [
            [
                str(one["pid"]),
                str(one["uid"]),
                _duration(one["since_s"]),
                f"{one['requests']:,}",
                f"{one['rows']:,}",
                str(one["waiting"]),
            ]
            for one in stats["sessions"]
        ]
        lines += _indented(_aligned(["pid", "uid", "for", "requests", "rows", "waiting"], rows))
    return "\n".join(lines)


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    header = ["layer", "tier", "rows", "requests", "rows asked", "zero", "DRAM hits", "misses", "failed", "NVMe reads"]
    rows = []
    for layer in layers:
        looked_up = layer["dram_hits"] + layer["dram_misses"]
        share = f" ({100 * layer['dram_hits'] / looked_up:.1f} %)" if looked_up else ""
        rows.append(
            [
                str(layer["layer"]),
                layer["tier"],
                f"{layer['rows_total']:,}",
                f"{layer['requests']:,}",
                f"{layer['rows']:,}",
                f"{layer['rows_zero']:,}",
                f"{layer['dram_hits']:,}{share}",
                f"{layer['dram_misses']:,}",
                f"{layer['rows_failed']:,}",
                f"{layer['nvme_reads']:,}",
            ]
        )
    return _aligned(header, rows)


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
