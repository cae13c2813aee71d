"""`engramd plan`: how much DRAM a stream of look-ups needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engramd.cli.sources import add_source_options, open_stream, read_json
from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size


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


def drive_values(path: str) -> dict[str, Any]:
    """The drive's figures: iops, read_us, p99_us and name of a JSON object, or what `engramd doctor --json` measured.

    Of several drives under a table the reads add up, and the slowest latency counts.
    """
    found = read_json(path)
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
