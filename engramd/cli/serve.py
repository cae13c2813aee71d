"""`engramd serve`: runs the daemon until it is told to stop."""

from __future__ import annotations

import argparse

from engramd import config


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon",
        description="Serves one or several packed tables until SIGTERM, SIGINT or `engramd shutdown`.",
    )
    parser.add_argument(
        "tables", nargs="*", metavar="[NAME=]TABLE", help="a packed table's directory; NAME defaults to its last part"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the keys below and [[table]] entries")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="control socket; PATH.ring is the ring socket (default: $ENGRAMD_SOCKET, /run/engramd/engramd.sock, "
        "$XDG_RUNTIME_DIR/engramd.sock)",
    )
    parser.add_argument("--tcp", metavar="HOST:PORT", help="control over TCP too; loopback only")
    parser.add_argument("--dram", metavar="SIZE", help="budget of the row cache and its index (default: 1GiB)")
    parser.add_argument("--arena", metavar="SIZE", help="reply arena of a session (default: 64MiB)")
    parser.add_argument("--arena-limit", metavar="SIZE", help="arenas and rings of all sessions (default: 4GiB)")
    parser.add_argument("--sessions", metavar="N", help="most sessions at once (default: 256)")
    parser.add_argument("--workers", metavar="N", help="worker threads (default: chosen by the engine)")
    parser.add_argument("--reader", metavar="KIND", help="auto, io_uring or pread (default: auto)")
    parser.add_argument(
        "--state", metavar="DIR", help="keep the cache's heat there over restarts (default: $STATE_DIRECTORY, else not)"
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    parser.add_argument("--check-config", action="store_true", help="check everything, serve nothing")


def run(args: argparse.Namespace) -> int:
    """Serves; returns when the daemon has drained and stopped. Raises EngramdError."""
    settings = config.settings_from(
        config.Flags(
            tables=args.tables,
            config=args.config,
            socket=args.socket,
            tcp=args.tcp,
            dram=args.dram,
            arena=args.arena,
            arena_limit=args.arena_limit,
            sessions=args.sessions,
            workers=args.workers,
            reader=args.reader,
            log_level=args.log_level,
            state=args.state,
        )
    )
    from engramd.daemon import service

    if args.check_config:
        print(service.check(settings))
        return 0
    return service.serve(settings)
