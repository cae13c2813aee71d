"""`engramd bench`: measurements for a user's own machine, table and text."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_ROW_BYTES = 264


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine",
        description="Measurements for your own machine, table and text.",
    )
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    cache = questions.add_parser(
        "cache",
        help="hits of the row cache for given row ids, without a table and without I/O",
        description="Runs row ids through the row cache's own policy code, which keeps keys only, and prints the hits. "
        "Look-ups and admissions happen in the order of the file.",
    )
    cache.add_argument(
        "--ids",
        required=True,
        metavar="FILE.npy",
        help="integers [tokens, layers, columns], or [tokens, columns] or [tokens] of one layer; negative ones are "
        "rows of zeros and do not count",
    )
    cache.add_argument("--dram", required=True, metavar="SIZE", help="room for SIZE / row bytes rows")
    cache.add_argument(
        "--row-bytes", type=int, default=DEFAULT_ROW_BYTES, metavar="N", help="bytes of a row (default: %(default)s)"
    )
    cache.add_argument("--json", action="store_true", help="print JSON")
    drive = questions.add_parser(
        "drive",
        help="rows that are nowhere in DRAM, beside bare direct reads of the same file",
        description="Starts a daemon of its own without DRAM and asks it for rows at random places.",
    )
    dram = questions.add_parser(
        "dram",
        help="rows in DRAM and round trips, beside the same copy in one process, numpy.take and ZeroMQ",
        description="Starts a daemon of its own and asks it for rows that it has in DRAM.",
    )
    serve = questions.add_parser(
        "serve",
        help="both, with a running daemon",
        description="Asks a running daemon for rows that it has in DRAM, then for rows at random places. Its other "
        "clients wait meanwhile as they would for any busy one, and part of its row cache is replaced.",
    )
    for parser in (drive, dram):
        parser.add_argument("table", metavar="TABLE", help="a packed table's directory")
    dram.add_argument("--dram", default="1GiB", metavar="SIZE", help="the daemon's budget (default: %(default)s)")
    serve.add_argument("--name", metavar="NAME", help="the table's name in the daemon (default: the only one)")
    serve.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: the usual places)")
    for parser in (drive, dram, serve):
        parser.add_argument("--layer", type=int, metavar="N", help="the layer (default: the table's first)")
        parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="interleaved (default: 5)")
        parser.add_argument("--json", action="store_true", help="print JSON")
    for parser in (drive, serve):
        parser.add_argument(
            "--seconds", type=float, default=1.0, metavar="S", help="of each reading from the drive (default: 1)"
        )


def run(args: argparse.Namespace) -> int:
    if args.question == "cache":
        return run_cache(args)
    if not 1 <= args.repetitions <= 1000:
        raise EngramdError(f"--repetitions {args.repetitions}: must be 1 to 1000")
    if not 0.05 <= getattr(args, "seconds", 1.0) <= 60:
        raise EngramdError(f"--seconds {args.seconds:g}: must be 0.05 to 60")
    # As Ctrl-C: a daemon that was started for it is stopped, and its files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.question == "serve":
        return run_serve(args)
    return run_private(args)


def run_private(args: argparse.Namespace) -> int:
    """`bench drive` and `bench dram`, with a daemon that nobody else uses."""
    from engramd._engine import lib
    from engramd.measure import own_table
    from engramd.measure.daemon import Daemon
    from engramd.table import manifest

    found = manifest.load(args.table)
    layer = chosen_layer(args.layer, [one.layer for one in found.layers], args.table)
    dram_bytes = parse_size(args.dram) if args.question == "dram" else 0
    # Without the miss curve and saved heat: nothing but the rows.
    with Daemon(Path(args.table).absolute(), dram_bytes, "--miss-curve", "off") as daemon:
        all_rows = sum(one.rows for one in found.layers)
        is_resident = dram_bytes >= all_rows * found.row_bytes
        if is_resident:
            daemon.wait_until_resident()
        with subject(args, daemon.socket, "bench", layer) as measured:
            if args.question == "drive":
                question = own_table.rows_from_the_drive(measured, found, layer)
            else:
                room = all_rows if is_resident else int(lib.engram_cache_rows(dram_bytes, found.row_bytes))
                question = own_table.rows_in_dram(measured, room)
    show(args, [question])
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """`bench serve`: a running daemon, as it is."""
    from engramd.cli.control_client import ControlClient
    from engramd.cli.warm import capacity_rows, find_table
    from engramd.measure import own_table
    from engramd.table import manifest

    with ControlClient(args.socket) as control:
        stats = control.ask("stats")["stats"]
    table = find_table(stats, args.name)
    layers = {one["layer"]: one for one in table["layers"]}
    layer = chosen_layer(args.layer, list(layers), table["name"])
    tier = layers[layer]["tier"]
    with subject(args, control.path, table["name"], layer) as measured:
        questions = []
        room = layers[layer]["rows_total"] if tier == "resident" else capacity_rows(stats, table)
        if room >= own_table.LEAST_ROOM_ROWS:
            questions.append(own_table.rows_in_dram(measured, room))
        if tier != "resident":
            questions.append(own_table.rows_from_the_drive(measured, manifest.load(table["path"]), layer))
    show(args, questions)
    return 0


@contextmanager
def subject(args: argparse.Namespace, socket: str, name: str, layer: int) -> Iterator[Any]:
    """What engramd.measure.own_table measures, over connections of its own. Raises EngramdError for what the daemon
    refuses."""
    import engram_client
    import numpy as np

    from engramd.measure.own_table import Subject

    try:
        with engram_client.connect(socket) as client, engram_client.connect(f"ipc-control:{socket}") as control:
            yield Subject(
                client=client,
                control=control.table(name=name, layer=layer),
                table=client.table(name=name, layer=layer),
                repetitions=args.repetitions,
                seconds=getattr(args, "seconds", 1.0),
                rng=np.random.default_rng(),
            )
    except engram_client.EngramError as error:
        raise EngramdError(str(error)) from None


def chosen_layer(wanted: int | None, layers: list[int], table: str) -> int:
    """The layer to measure. Raises EngramdError where the table has none of that number."""
    if wanted is not None and wanted not in layers:
        raise EngramdError(f"--layer {wanted}: table {table} has the layers {', '.join(map(str, sorted(layers)))}")
    return min(layers) if wanted is None else wanted


def show(args: argparse.Namespace, questions: list[Any]) -> None:
    """Prints what was found."""
    from engramd.measure.own_table import machine

    if args.json:
        print(json.dumps({"machine": machine(), "questions": [one.as_json() for one in questions]}))
        return
    for question in questions:
        print(question.text())
    load = machine()["load_average"]
    print(f"load average {load:.1f}: of what else ran, the ratios suffer less than the figures")


def run_cache(args: argparse.Namespace) -> int:
    """Prints hits over the whole file and over its second half."""
    import numpy as np

    from engramd.cache_simulation import simulate

    dram_bytes = parse_size(args.dram)
    if args.row_bytes < 1:
        raise EngramdError(f"--row-bytes {args.row_bytes}: a row has at least one byte")
    try:
        ids = np.load(args.ids, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise EngramdError(f"{args.ids}: cannot be read: {error.strerror}") from None
    except (ValueError, EOFError):
        raise EngramdError(
            f"{args.ids} is not a whole .npy file of integers: save the row ids with numpy.save"
        ) from None
    if not isinstance(ids, np.ndarray):
        raise EngramdError(f"{args.ids} is an archive of several arrays: save the row ids alone with numpy.save")
    result = simulate(ids, dram_bytes // args.row_bytes)
    fields: dict[str, Any] = {
        "ids": os.fspath(args.ids),
        "dram_bytes": dram_bytes,
        "row_bytes": args.row_bytes,
        "capacity_rows": result.capacity_rows,
        "requests": result.requests,
        "hits": result.hits,
        "hit_ratio": ratio(result.hits, result.requests),
        "second_half_requests": result.second_half_requests,
        "second_half_hits": result.second_half_hits,
        "second_half_hit_ratio": ratio(result.second_half_hits, result.second_half_requests),
        "elapsed_s": round(result.elapsed_s, 3),
    }
    if args.json:
        json.dump(fields, sys.stdout)
        print()
    else:
        print(f"{result.requests:,} rows asked for, room for {result.capacity_rows:,} ({format_size(dram_bytes)})")
        print(f"hits: {result.hits:,} ({fields['hit_ratio']:.4f})")
        print(f"hits of the second half: {result.second_half_hits:,} ({fields['second_half_hit_ratio']:.4f})")
    return 0


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
