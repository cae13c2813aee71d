"""engramd synth: a synthetic checkpoint, or a sparse packed table at full geometry."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from engramd.sizes import format_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "synth",
        help="make a synthetic checkpoint whose rows anybody can compute",
        description="Writes a checkpoint with the real tensor names, dtypes, config fields and shard names to DIR; "
        "with --packed, a sparse packed table with only the pages of each head's first and last row.",
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", help="directory of the checkpoint; made if need be")
    parser.add_argument("--packed", metavar="TABLE", help="make a sparse packed table there instead")
    parser.add_argument("--rows", choices=["heads"], help="with --packed: which rows exist")
    parser.add_argument(
        "--vocab-size", metavar="N", type=int, help="engram_vocab_size [100000]; the real one is 16000000"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="0 .. 2^64 - 1 [0]")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    from engramd.synth import checkpoint, packed
    from engramd.table.files import Files

    if (args.directory is None) == (args.packed is None):
        args.usage_error("give either DIR or --packed TABLE")
    if (args.rows is None) != (args.packed is None):
        args.usage_error("--packed TABLE goes with --rows heads")
    vocab_size = 100_000 if args.vocab_size is None else args.vocab_size
    files = Files(lambda text: print(text, file=sys.stderr))
    begin = time.monotonic()
    if args.packed is not None:
        manifest = packed.write_real_geometry(args.packed, vocab_size, args.seed, files)
        print(
            f"made {manifest.directory} generation {manifest.generation}: {manifest.rows} rows, "
            f"{format_size(manifest.file_bytes)} of which only the heads' first and last pages exist"
        )
        print(f"identity {manifest.identity}")
        return 0
    total = checkpoint.write_checkpoint(args.directory, vocab_size, args.seed, files)
    took = time.monotonic() - begin
    print(f"made {args.directory}: {format_size(total)} of tensors in {took:.1f} s ({total / took / 1e6:.0f} MB/s)")
    return 0
