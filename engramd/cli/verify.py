"""engramd verify: checks every byte of a packed table."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from engramd.errors import EngramdError
from engramd.sizes import format_size

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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engramd.checkpoint.index import open_checkpoint
    from engramd.checkpoint.mapping import table_source
    from engramd.table import manifest as manifests
    from engramd.table.files import Files
    from engramd.table.verify import verify

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
