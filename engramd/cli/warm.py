"""`engramd warm`: loads the hottest rows into a running daemon's cache, from a heat file or from token files."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from engramd.cli.arguments import add_socket_option
from engramd.cli.sources import add_token_options, open_tokens, rank_rows
from engramd.errors import EngramdError
from engramd.progress import Progress

BLOCK_ROWS = 8_192
QUEUE_ROWS = 131_072  # rows that wait in the daemon at a time: an eighth of what it begins to drop at
POLL_S = 0.02
STALL_S = 60.0
FILL_SHARE = 0.95  # of the cache: the rest is for what the first requests bring


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "warm",
        help="load the hottest rows into a running daemon's cache",
        description="Prefetches the hottest rows, behind all demand and as many as the daemon's budget holds: those "
        "of a heat file, or those that the most documents of token files need.",
    )
    add_token_options(parser)
    parser.add_argument("--heat", metavar="FILE", help="a heat file, instead of token files")
    parser.add_argument("--name", metavar="NAME", help="the table's name in the daemon (default: the only one)")
    add_socket_option(parser)
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many rows (default: what the budget holds)")
    parser.add_argument(
        "--any-identity", action="store_true", help="use a heat file of other content with the same geometry"
    )


def run(args: argparse.Namespace) -> int:
    """Warms and says how many rows were read. Raises EngramdError."""
    import engram_client

    if bool(args.tokens) == bool(args.heat):
        raise EngramdError("name token files or --heat FILE, one of them")
    if args.limit is not None and args.limit < 1:
        raise EngramdError(f"--limit {args.limit}: must be at least 1")
    try:
        with engram_client.connect(args.socket) as client:
            return warm(client, args)
    except engram_client.EngramError as error:
        raise EngramdError(str(error)) from None


def warm(client: Any, args: argparse.Namespace) -> int:
    """The work, with a connected client."""
    stats = client.stats()
    table = find_table(stats, args.name)
    layers = {layer["layer"]: layer for layer in table["layers"]}
    if all(layer["tier"] != "cached" for layer in layers.values()):
        print(
            f"table {table['name']} is {table['layers'][0]['tier']}: the budget covers it, so nothing is to be warmed"
        )
        return 0
    limit = room(stats, table)
    if args.limit is not None:
        limit = min(limit, args.limit)
    if limit < 1:
        raise EngramdError("the daemon has no row cache (--dram 0, or full already): there is nothing to warm")
    resident = {number for number, layer in layers.items() if layer["tier"] != "cached"}
    rows = (
        read_heat(args.heat, None if args.any_identity else table["identity"], limit, resident)
        if args.heat
        else rank(args, limit, resident)
    )
    unknown = sorted(set(rows) - set(layers))
    if unknown:
        raise EngramdError(f"table {table['name']} has no layer {unknown[0]}: it serves {sorted(layers)}")
    for layer, ids in rows.items():
        if ids.size and int(ids.max()) >= layers[layer]["rows_total"]:
            raise EngramdError(
                f"row {int(ids.max())} is outside layer {layer} of table {table['name']}, which has "
                f"{layers[layer]['rows_total']} rows: the rows are for another geometry"
            )
    handles = {layer: client.table(name=table["name"], layer=layer) for layer in rows}
    sender = Sender(client, table["name"])
    sender.send(rows, handles)
    return sender.report()


def find_table(stats: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The table to warm, as the daemon's statistics describe it. Raises EngramdError."""
    found = [table for table in stats["tables"] if name in (None, table["name"])]
    names = ", ".join(table["name"] for table in stats["tables"])
    if not found:
        raise EngramdError(f"the daemon serves no table {name!r}; it serves {names}")
    if len(found) > 1:
        raise EngramdError(f"the daemon serves several tables: name one with --name ({names})")
    return dict(found[0])


def room(stats: dict[str, Any], table: dict[str, Any]) -> int:
    """Rows of the table that the cache has room for besides what is there already, with FILL_SHARE of it in use."""
    resident = sum(
        int(layer["rows_total"]) for one in stats["tables"] for layer in one["layers"] if layer["tier"] != "cached"
    )
    in_caches = max(0, int(stats["dram"]["rows_cached"]) - resident)
    return int(capacity_rows(stats, table) * FILL_SHARE) - in_caches


def capacity_rows(stats: dict[str, Any], table: dict[str, Any]) -> int:
    """Rows that the cache of the table's cached layers has room for (where layers have caches of their own: the
    largest of them)."""
    from engramd._engine import lib

    cached = [int(layer["dram_bytes"]) for layer in table["layers"] if layer["tier"] == "cached"]
    return int(lib.engram_cache_rows(max(cached, default=0), table["row_bytes"]))


def read_heat(path: str, identity: str | None, limit: int, left_out: set[int]) -> dict[int, Any]:
    """Rows of a heat file by layer, at most `limit` in all. Raises EngramdError."""
    from engramd.heat import heat_file

    found: dict[int, list[Any]] = {}
    count = 0
    try:
        for block in heat_file.read(path, identity):
            if block.layer in left_out:
                continue
            piece = np.frombuffer(block.rows, dtype=np.uint64)[: limit - count]
            found.setdefault(block.layer, []).append(piece)
            count += piece.size
            if count >= limit:
                break
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    return {layer: np.concatenate(pieces) for layer, pieces in found.items()}


def rank(args: argparse.Namespace, limit: int, left_out: set[int]) -> dict[int, Any]:
    """Rows that the most documents of token files need, by layer, at most `limit` in all."""
    documents, hasher, _ = open_tokens(args)
    wanted = [layer for layer in hasher.layer_ids if layer not in left_out]
    if not wanted:
        return {}
    # All layers are about equally hot: so many rows of all of them hold `limit` of those wanted.
    found = rank_rows(documents, hasher, limit * len(hasher.layer_ids) // len(wanted))
    share = min(1.0, limit / max(1, sum(found[layer].size for layer in wanted)))
    return {layer: found[layer][: int(found[layer].size * share)] for layer in wanted}


class Sender:
    """Prefetches rows no faster than the daemon reads them."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table
        self._started = time.monotonic()
        self._before = self._counters()
        self._sent = 0

    def send(self, rows: dict[int, Any], handles: dict[int, Any]) -> None:
        """Sends all of them, the layers in turn, and waits until they are read. Raises EngramdError.

        rows are hottest first and go out hottest last: a full cache evicts in the order of arrival, so that the first
        requests push out the coldest of them.
        """
        longest = max((ids.size for ids in rows.values()), default=0)
        with Progress("warming", sum(ids.size for ids in rows.values()), unit="rows") as progress:
            for begin in reversed(range(0, longest, BLOCK_ROWS)):
                for layer, ids in rows.items():
                    piece = ids[begin : begin + BLOCK_ROWS][::-1].astype(np.int64)
                    if piece.size:
                        handles[layer].prefetch(piece)
                        self._sent += piece.size
                        progress.advance(piece.size)
                if self._sent >= QUEUE_ROWS // 2:
                    self._wait(QUEUE_ROWS // 2)
            self._wait(0)

    def report(self) -> int:
        """Says what was done; returns the exit status."""
        now = self._counters()
        dropped = now["dropped"] - self._before["dropped"]
        seconds = time.monotonic() - self._started
        read = now["reads"] - self._before["reads"]
        print(
            f"table {self._table}: {self._sent:,} rows asked for in {seconds:.1f} s ({self._sent / seconds:,.0f} a "
            f"second), {read:,} pages read, {now['cached']:,} rows are cached"
            + (f"; {dropped:,} were dropped" if dropped else "")
        )
        return 0

    def _counters(self) -> dict[str, int]:
        stats = self._client.stats()
        table = next(one for one in stats["tables"] if one["name"] == self._table)
        return {
            "queued": stats["reader"]["prefetch_queued_rows"],
            "dropped": stats["reader"]["prefetch_dropped_rows"],
            "cached": stats["dram"]["rows_cached"],
            "reads": sum(layer["prefetch_reads"] for layer in table["layers"]),
        }

    def _wait(self, most: int) -> None:
        """Returns once at most so many rows wait in the daemon. Raises EngramdError where it does not get on."""
        queued, since = -1, time.monotonic()
        while True:
            now = self._counters()["queued"]
            if now <= most:
                break
            if now != queued:
                queued, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                raise EngramdError(
                    f"the daemon has read no row ahead for {STALL_S:.0f} s: demand takes the whole drive"
                )
            time.sleep(POLL_S)
