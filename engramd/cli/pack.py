"""engramd pack: a checkpoint's tables into one packed table."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from engramd.errors import EngramdError
from engramd.sizes import format_size

MAX_SYNC_INTERVAL_S = 3600

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "pack",
        help="pack a checkpoint's embedding tables",
        description="Writes the next generation of the table at TABLE. Interrupted at any moment, the same command "
        "goes on; the table changes only when the new generation is complete.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a directory, an index file, or ORG/NAME in the local Hugging Face cache (nothing is downloaded)",
    )
    parser.add_argument("table", metavar="TABLE", help="directory of the packed table; made if need be")
    parser.add_argument("--restart", action="store_true", help="give up an interrupted pack and begin anew")
    parser.add_argument("--tensors", metavar="FILE.toml", help="names the tensors of other models (docs/tensors.md)")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of the repo in the cache [main]")
    parser.add_argument(
        "--stripe",
        metavar="DIR,DIR",
        type=_directories,
        help="deal the pages to data files in these directories, one a drive",
    )
    parser.add_argument(
        "--sync-interval",
        metavar="SECONDS",
        type=_seconds,
        default=2.0,
        help="how often finished work is made durable [2]: what a crash costs at most",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_SYNC_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_SYNC_INTERVAL_S}")
    return value


def _directories(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an empty directory: write DIR or DIR,DIR,...")
    return names


def run(args: argparse.Namespace) -> int:
    from engramd.checkpoint.index import open_checkpoint
    from engramd.checkpoint.mapping import table_source
    from engramd.table.files import Files
    from engramd.table.packer import pack

    begin = time.monotonic()
    source = table_source(open_checkpoint(args.checkpoint, args.revision), args.tensors)
    try:
        manifest = pack(
            source,
            args.table,
            restart=args.restart,
            stripes=args.stripe,
            files=Files(lambda text: print(text, file=sys.stderr)),
            sync_interval_s=args.sync_interval,
        )
    except KeyboardInterrupt:
        raise EngramdError("interrupted; the same command goes on where it stopped") from None
    took = time.monotonic() - begin
    layers = ", ".join(f"layer {layer.layer}: {layer.rows} rows" for layer in manifest.layers)
    print(
        f"packed {manifest.directory} generation {manifest.generation}: {layers}; "
        f"{format_size(manifest.file_bytes)} in {took:.1f} s ({manifest.logical_bytes / took / 1e6:.0f} MB/s)"
    )
    print(f"identity {manifest.identity}")
    return 0
