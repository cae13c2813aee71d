"""`engramd plan`: how much DRAM a stream of look-ups needs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from engramd.bounded_file import read_at_most
from engramd.cli.arguments import add_socket_option
from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size

MAX_CONFIG_BYTES = 16 << 20


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Options that name a stream of look-ups; `heat` has them too."""
    parser.add_argument(
        "tokens",
        nargs="*",
        metavar="TOKENS",
        help="token files: .npz with `tokens` (and `doc_lengths`), .npy, or texts (need the tokenizers package)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="the model's tokenizer.json")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json")
    parser.add_argument("--table", metavar="TABLE", help="a packed table, instead of --config")
    parser.add_argument("--recorded", metavar="FILE", help="a file of `engramd record`, instead of token files")
    parser.add_argument("--live", action="store_true", help="record a running daemon now, instead of token files")
    add_socket_option(parser, "for --live: ")
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="how long for --live (default: 60)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "plan",
        help="how much DRAM a stream of look-ups needs",
        description="Simulates the row cache at many sizes on a sample of the look-ups of token files, of a recording "
        "or of a running daemon, and says what each size means for the drive, the decode step and the bill.",
    )
    add_source_options(parser)
    parser.add_argument("--sizes", metavar="SIZE,...", help="bytes of rows in DRAM (default: a curve up to the table)")
    parser.add_argument(
        "--samples", metavar="N", type=int, default=6_000_000, help="look-ups to simulate (default: 6e6)"
    )
    parser.add_argument("--assumptions", metavar="FILE", help="TOML: traffic, drive, host, prices, measured rates")
    parser.add_argument("--tokens-per-s", metavar="N", type=float, help="of all users; also the target")
    parser.add_argument("--concurrency", metavar="N", type=float, help="sequences in a decode step")
    parser.add_argument(
        "--loss", metavar="SHARE", type=float, default=0.1, help="of tokens/s to late rows (default: 0.1)"
    )
    parser.add_argument("--p99-us", metavar="N", type=float, help="target for any layer's rows (default: none)")
    parser.add_argument("--drive", metavar="FILE", help="JSON of `engramd doctor --json`, for the drive's figures")
    parser.add_argument("--drive-iops", metavar="N", type=float, help="random 4 KiB reads a second")
    parser.add_argument("--drive-read-us", metavar="N", type=float, help="latency of one read")
    parser.add_argument("--drive-p99-us", metavar="N", type=float, help="its 99th percentile")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--picture", metavar="FILE", help="draw the curve into a .png or .svg (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Plans and prints. Raises EngramdError."""
    from engramd.plan import assumptions as assumed
    from engramd.plan import cost, curve, picture, report
    from engramd.plan.needs import Planner, Target

    if args.picture:
        picture.check(args.picture)
    given = assumed.load(args.assumptions)
    if args.drive:
        given = given.with_values("drive", **drive_values(args.drive))
    given = given.with_values("traffic", tokens_per_s=args.tokens_per_s, concurrency=args.concurrency)
    given = given.with_values("drive", iops=args.drive_iops, read_us=args.drive_read_us, p99_us=args.drive_p99_us)
    if args.p99_us is not None and not args.p99_us > 0:
        raise EngramdError(f"--p99-us {args.p99_us:g}: must be more than 0")
    if not 0 <= args.loss < 1:
        raise EngramdError(f"--loss {args.loss:g}: a share, from 0 and below 1")
    if not 10_000 <= args.samples <= 1 << 31:
        raise EngramdError(f"--samples {args.samples}: must be 10000 to {1 << 31}")
    sizes = [parse_size(text) for text in args.sizes.split(",")] if args.sizes else None
    stream = open_stream(args, args.samples)
    found = curve.measure(stream, sizes or curve.default_sizes(stream.table_bytes))
    planner = Planner(found, given)
    target = Target(given.traffic.tokens_per_s, args.loss, args.p99_us)
    smallest, problems = planner.smallest(target)
    table = stream.table_bytes
    shown = {size for size in (2 << 30, 4 << 30, 8 << 30, 32 << 30) if found.points[0].bytes <= size < table}
    shown = {*sizes} if sizes else shown or {point.bytes for point in found.points[:-1:4]}
    needs = [planner.need("SSD only", 0)]
    needs += [planner.need(f"{format_size(size)} of rows", size) for size in sorted(shown) if size < table]
    needs.append(planner.need("all DRAM", table))
    arrangements = {"all_dram": needs[-1], "ssd_only": needs[0]}
    if smallest is not None and 0 < smallest.bytes < table:
        arrangements["tiered"] = smallest
    elif len(needs) > 2:
        arrangements["tiered"] = needs[-2]
    plan = report.Plan(
        curve=found,
        assumptions=given,
        target=target,
        needs=tuple(needs),
        smallest=smallest,
        problems=tuple(problems),
        costs=tuple(cost.costs(arrangements, given)),
    )
    if args.picture:
        picture.draw(plan, args.picture)
    print(json.dumps(report.as_json(plan)) if args.json else report.as_text(plan))
    return 0


def open_stream(args: argparse.Namespace, samples: int) -> Any:
    """The Stream that the options name. Raises EngramdError where they name none, or more than one."""
    from engramd.plan import recording, stream

    if (bool(args.tokens) + bool(args.recorded) + args.live) != 1:
        raise EngramdError("name token files, or --recorded FILE, or --live: one of them")
    if args.recorded:
        return recording.to_stream(recording.read(args.recorded), args.recorded)
    if args.live:
        return recording.to_stream(record_now(args, samples), "the running daemon")
    documents, hasher, row_bytes = open_tokens(args)
    progress = TokenProgress(documents.tokens.size)
    try:
        return stream.from_tokens(documents, hasher, row_bytes, samples, progress.advance)
    finally:
        progress.end()


def record_now(args: argparse.Namespace, samples: int) -> Any:
    """A Recording of a running daemon over --seconds."""
    from engramd.cli.control_client import ControlClient
    from engramd.plan.recorder import Recorder

    if not 0 < args.seconds <= 1e6:
        raise EngramdError(f"--seconds {args.seconds:g}: must be more than 0 and at most 1000000")
    with ControlClient(args.socket) as daemon:
        recorder = Recorder(daemon, samples)
        found = recorder.run(args.seconds, lambda: True, lambda recorder: None)
    return found


def open_tokens(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """(Documents, NgramHasher, bytes of a row) of the options. Raises EngramdError."""
    from engramd.plan import token_files

    if args.tokenizer is None:
        raise EngramdError("token files need the model's tokenizer: --tokenizer FILE (its tokenizer.json)")
    if (args.config is None) == (args.table is None):
        raise EngramdError("token files need the model's hash: --config FILE (its config.json) or --table TABLE")
    hasher, row_bytes = open_hasher(args)
    return token_files.load(args.tokens, args.tokenizer), hasher, row_bytes


def open_hasher(args: argparse.Namespace) -> tuple[Any, int]:
    """(NgramHasher, bytes of a row) of --tokenizer and --config or --table. Raises EngramdError."""
    from engram_client import NgramHasher

    row_bytes = None
    if args.table is not None:
        from engramd.table import manifest

        found = manifest.load(args.table, check_files=False)
        config: Any = found.hash
        row_bytes = found.row_bytes
        if config is None:
            raise EngramdError(f"{args.table}: its manifest holds no engram fields: use --config")
    else:
        config = _read_config(args.config)
    try:
        hasher = NgramHasher.from_config(config, args.tokenizer)
    except OSError as error:
        raise EngramdError(f"{args.tokenizer}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise EngramdError(f"{args.config or args.table}: {error}") from None
    return hasher, row_bytes or _row_bytes(config)


def _read_config(path: str) -> dict[str, Any]:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise EngramdError(f"{path}: not a JSON object")
    return config


def _read_json(path: str) -> Any:
    from engramd import strict_json

    return strict_json.loads(read_at_most(path, MAX_CONFIG_BYTES), path)


def _row_bytes(config: dict[str, Any]) -> int:
    """FP8 values with one scale byte for each 32 of them, as the published checkpoint has them."""
    text_config = config.get("text_config")
    fields = text_config if isinstance(text_config, dict) else config
    dimension = fields.get("engram_head_dim", 256)
    if type(dimension) is not int or not 1 <= dimension <= 32_768:
        raise EngramdError(f"engram_head_dim is {dimension!r}: must be an integer from 1 to 32768")
    return dimension + (dimension + 31) // 32


def drive_values(path: str) -> dict[str, Any]:
    """The drive's figures: iops, read_us, p99_us and name of a JSON object, or what `engramd doctor --json` measured.

    Of several drives under a table the reads add up, and the slowest latency counts.
    """
    found = _read_json(path)
    if isinstance(found, list):
        measured = [one["figures"] for one in found if isinstance(one, dict) and isinstance(one.get("figures"), dict)]
        drives = [[one.get(key) for key in ("iops", "read_us", "p99_us")] for one in measured]
        drives = [one for one in drives if all(isinstance(value, float) for value in one)]
        if not drives:
            raise EngramdError(f"{path}: no drive was measured: run `engramd doctor TABLE --json` without --no-measure")
        iops, read_us, p99_us = zip(*drives, strict=True)
        return {
            "name": f"the drive measured in {path}",
            "iops": sum(iops),
            "read_us": max(read_us),
            "p99_us": max(p99_us),
        }
    if not isinstance(found, dict):
        raise EngramdError(f"{path}: neither a JSON object nor what `engramd doctor --json` prints")
    values = {key: found[key] for key in ("name", "iops", "read_us", "p99_us") if key in found}
    if "iops" not in values:
        raise EngramdError(f"{path}: holds no iops: write {{'iops': N, 'read_us': N, 'p99_us': N}}")
    return values


class TokenProgress:
    """Counts hashed tokens on a terminal."""

    def __init__(self, total: int) -> None:
        import time

        self._clock = time.monotonic
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._terminal = sys.stderr.isatty()

    def advance(self, tokens: int) -> None:
        self._done += tokens
        if self._terminal:
            rate = self._done / max(1e-9, self._clock() - self._start)
            left = (self._total - self._done) / max(rate, 1.0)
            print(
                f"\r\x1b[K{self._done:,} of {self._total:,} tokens, {rate:,.0f} a second, {left:.0f} s left",
                end="",
                file=sys.stderr,
            )

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
