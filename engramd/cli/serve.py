"""`engramd serve`: runs the daemon until it is told to stop."""

from __future__ import annotations

import argparse

from engramd import config
from engramd.options import OPTIONS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb's options."""
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon",
        description="Serves one or several packed tables (`engramd pack` makes them) until SIGTERM, SIGINT or `engramd "
        "shutdown`. Every option can stand in the --config FILE instead, with underscores for dashes; a flag beats the "
        "file. SIGHUP reads the file again. The log goes to stderr.",
    )
    parser.add_argument(
        "tables", nargs="*", metavar="[NAME=]TABLE", help="a packed table's directory; NAME defaults to its last part"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the keys below and [[table]] entries")
    for option in OPTIONS:
        text = f"{option.meaning} ({option.check.allowed}; default: {config.default_of(option.key)})"
        parser.add_argument(option.flag, metavar=option.metavar, help=text.replace("%", "%%"))
    parser.add_argument("--check-config", action="store_true", help="check everything, serve nothing")


def run(args: argparse.Namespace) -> int:
    """Serves; returns when the daemon has drained and stopped. Raises EngramdError."""
    values = {option.key: getattr(args, option.key) for option in OPTIONS}
    flags = config.Flags(args.tables, args.config, **values)
    settings = config.settings_from(flags)
    if args.check_config:
        from engramd.daemon import checks

        print(checks.check(settings))
        return 0
    from engramd.daemon import service

    return service.serve(settings, flags)
