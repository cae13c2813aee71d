"""engramd verify: checks every byte of a packed table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from engramd.cli.arguments import add_socket_option
from engramd.errors import EngramdError
from engramd.sizes import format_size

POLL_S = 0.2

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every page of a packed table",
        description="Reads the table through and checks every row, trailer and padding byte. Exit status 1 where "
        "anything is bad.",
    )
    parser.add_argument("table", metavar="TABLE", help="directory of the packed table")
    parser.add_argument("--against", metavar="CHECKPOINT", help="also compare every row with the checkpoint")
    parser.add_argument("--tensors", metavar="FILE.toml", help="as for pack, with --against")
    parser.add_argument("--revision", metavar="R", help="as for pack, with --against")
    parser.add_argument(
        "--online", action="store_true", help="let the daemon that serves the table check it, behind its requests"
    )
    parser.add_argument(
        "--report", action="store_true", help="with --online: only say what the daemon knows, start nothing"
    )
    add_socket_option(parser, "with --online: ")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engramd.checkpoint.index import open_checkpoint
    from engramd.checkpoint.mapping import table_source
    from engramd.table import manifest as manifests
    from engramd.table.files import Files
    from engramd.table.verify import verify

    if args.online:
        if args.against:
            raise EngramdError("--online checks what the daemon serves; --against needs a run of its own")
        return _online(args)
    if args.report or args.socket:
        raise EngramdError("--report and --socket go with --online")
    begin = time.monotonic()
    if args.against is None and (args.tensors or args.revision):
        raise EngramdError("--tensors and --revision go with --against CHECKPOINT")
    manifest = manifests.load(args.table)
    source = None
    if args.against is not None:
        source = table_source(open_checkpoint(args.against, args.revision), args.tensors)
    try:
        report = verify(manifest, source, Files(lambda text: print(text, file=sys.stderr)))
    except KeyboardInterrupt:
        raise EngramdError("interrupted") from None
    took = max(time.monotonic() - begin, 1e-9)
    for line in report.lines():
        print(f"{manifest.directory}: {line}", file=sys.stderr)
    if report.bad_pages > len(report.faults):
        print(f"{manifest.directory}: ... and {report.bad_pages - len(report.faults)} more", file=sys.stderr)
    only = " (a sparse table: only these exist)" if manifest.sparse else ""
    compared = " and compared with the checkpoint" if source else ""
    print(
        f"verified {manifest.directory} generation {manifest.generation}: {report.pages} pages{only}, "
        f"{report.rows} rows{compared}, {format_size(report.bytes)} in {took:.1f} s "
        f"({report.bytes / took / 1e6:.0f} MB/s): {report.bad_pages} bad"
    )
    if report.bad_pages:
        raise EngramdError(f"{manifest.directory}: {report.bad_pages} of {report.pages} pages are bad; pack it again")
    return 0


def _online(args: argparse.Namespace) -> int:
    """Asks the daemon for a pass and waits for its end; with --report, only for what it knows."""
    from engramd.cli.control_client import ControlClient
    from engramd.progress import Progress

    table = os.path.abspath(args.table) if os.path.isdir(args.table) else args.table
    with ControlClient(args.socket) as client:
        before = client.ask("scrub", table=table, start=0)["layers"]
        layers = before
        page_bytes = 4096
        if not args.report:
            passes = {(layer["layer"], layer["generation"]): layer["passes"] for layer in before}
            layers = client.ask("scrub", table=table, start=1)["layers"]
            total = sum(layer["pages"] for layer in layers)
            with Progress("verifying", total * page_bytes) as progress:
                seen = 0
                while any(layer["waiting"] for layer in layers):
                    time.sleep(POLL_S)
                    layers = client.ask("scrub", table=table, start=0)["layers"]
                    done = sum(layer["position"] if layer["waiting"] else layer["pages"] for layer in layers)
                    progress.advance(max(0, done - seen) * page_bytes)
                    seen = max(done, seen)
            for layer in layers:
                if layer["passes"] <= passes.get((layer["layer"], layer["generation"]), 0):
                    raise EngramdError(
                        f"layer {layer['layer']}: the daemon did not finish its pass (see its log): run it again"
                    )
    bad = 0
    for layer in layers:
        bad += layer["bad_pages"]
        for page, row in layer["bad"]:
            where = f"layer {layer['layer']} page {page}"
            what = "cannot be read, or its trailer or padding is damaged" if row is None else f"row {row} is damaged"
            print(f"{args.table}: {where}: {what}", file=sys.stderr)
        last = "never"
        if layer["finished_at"]:
            last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(layer["finished_at"]))
        print(
            f"{args.table} layer {layer['layer']} generation {layer['generation']}: {layer['pages']} pages, "
            f"{layer['bad_pages']} bad; last checked through: {last}"
            + (f"; now at page {layer['position']}" if layer["position"] else "")
        )
    if bad:
        raise EngramdError(f"{args.table}: {bad} pages are bad; `engramd repair {args.table} --from CHECKPOINT` mends")
    return 0
