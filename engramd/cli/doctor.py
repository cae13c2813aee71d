"""`engramd doctor [TABLE ...]`: checks the machine, one line a thing; the exit status follows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from engramd import config
from engramd.doctor.finding import Finding, Grade, Machine
from engramd.options import OPTIONS

SHARED_OPTIONS = ("socket", "dram", "arena_limit", "sessions", "numa_node")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what of this machine stands in the way",
        description="Checks kernel, io_uring, limits, memory and, for each TABLE, its files, drive and measured reads. "
        "Each line is OK, WARN (works, but worse than it could) or FAIL (will not serve), with the fix. Status 1 where "
        "anything fails. Run it as the daemon's user, under the same limits.",
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="a packed table's directory; with --config, its tables too"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the daemon's configuration file: its budget, sessions and tables"
    )
    for option in OPTIONS:
        if option.key in SHARED_OPTIONS:
            text = f"{option.meaning} (default: {config.default_of(option.key)})"
            parser.add_argument(option.flag, metavar=option.metavar, help=text.replace("%", "%%"))
    parser.add_argument("--no-measure", action="store_true", help="do not read from the drives")
    parser.add_argument(
        "--json",
        action="store_true",
        help="a list of objects: grade, subject, text, fix, and figures of a measured drive",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 1 where anything fails. Raises EngramdError where the configuration is wrong."""
    values = {key: getattr(args, key) for key in SHARED_OPTIONS}
    settings = config.settings_from(config.Flags((), args.config, **values), needs_tables=False)
    directories = [*args.tables, *(table.path for table in settings.tables)]
    found: list[Finding] = []
    for finding in examine(settings, directories, not args.no_measure):
        found.append(finding)
        if not args.json:
            print(f"{finding.grade.value:<4}  {finding.subject}: {finding.text}", flush=True)
            if finding.fix:
                print(f"      -> {finding.fix}")
    if args.json:
        print(json.dumps([{**vars(finding), "grade": finding.grade.value} for finding in found]))
    else:
        counts = {grade: sum(finding.grade is grade for finding in found) for grade in Grade}
        print(", ".join(f"{counts[grade]} {grade.value}" for grade in Grade))
    return int(any(finding.grade is Grade.FAIL for finding in found))


def examine(settings: config.Settings, directories: list[str], measures: bool) -> Iterator[Finding]:
    """Every finding, in the order of the report."""
    from engramd.doctor import access, kernel, memory, storage

    machine = Machine()
    yield from kernel.findings(machine, settings.sessions)
    yield kernel.node_placement(machine, settings.numa_node, directories, settings.dram_bytes)
    table_bytes = sum(storage.row_bytes_of(directory) for directory in directories)
    yield from memory.findings(machine, settings.dram_bytes, settings.arena_limit_bytes, table_bytes)
    for directory in directories:
        yield from storage.findings(machine, directory, measures)
    yield from access.findings(settings.socket)
