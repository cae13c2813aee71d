"""engramd bench: measurements for a user's own machine, table and text."""

from __future__ import annotations

import argparse
import json
import os
import sys
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


def run(args: argparse.Namespace) -> int:
    return run_cache(args)


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
