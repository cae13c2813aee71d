"""What `engramd serve` needs to know, from flags and from a TOML file with the same keys (engramd.options).

    socket = "/run/engramd/engramd.sock"
    dram = "32GiB"
    [[table]]
    name = "flash"            # optional: the last part of the path
    path = "/data/flash-table"
    tier = "cached"           # optional: engramd.tier_policy

A flag beats the file; tables on the command line replace the file's. Every value is checked here, so that the rest of
the daemon sees a `Settings` that is right in itself; whether the tables exist is seen when they are opened.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engramd.bounded_file import read_at_most
from engramd.daemon.memory_limit import machine_memory, memory_limit
from engramd.errors import EngramdError
from engramd.options import BY_KEY, MIN_ARENA_BYTES, OPTIONS
from engramd.sizes import MAX_SIZE_BYTES, format_size
from engramd.tier_policy import KEYS as POLICY_KEYS
from engramd.tier_policy import TierPolicy, check_shares, read_policy

MAX_CONFIG_BYTES = 1 << 20
MAX_TABLES = 256
ARENA_SHARE = 4  # arenas take at most 1/4 of the daemon's memory where nothing is said
MAX_NAME_BYTES = 127  # engram_catalogue_record.name is 128 bytes with its zero


@dataclass(frozen=True)
class TablePath:
    """A table to serve: the name clients know it by, its directory, and which of its rows are to live in DRAM."""

    name: str
    path: str
    policy: TierPolicy = field(default_factory=TierPolicy)


@dataclass(frozen=True)
class Settings:
    """Checked settings of a daemon, with their defaults. What each means stands in engramd.options."""

    tables: tuple[TablePath, ...] = ()
    socket: str | None = None
    tcp: str | None = None
    tcp_key: str | None = None
    tcp_clients: str | None = None
    metrics: str | None = None
    dram_bytes: int = 1 << 30
    arena_bytes: int = 64 << 20
    arena_limit_bytes: int = 4 << 30  # where nothing is said, settings_from takes less on a small machine
    sessions: int = 256
    uid_share: int = 75
    admin_group: str | None = None
    prefetch_rows: int = 1 << 19
    workers: int = 0
    reader: str = "auto"
    numa_node: str = "auto"
    poll_budget: float = 0.1
    log_level: str = "info"
    state: str | None = None
    scrub_bytes: int = 8 << 20
    log_format: str = "text"
    miss_curve: str = "on"

    def as_json(self) -> dict[str, Any]:
        """The effective configuration by the file's keys; sizes in bytes."""
        values: dict[str, Any] = {option.key: getattr(self, option.attribute) for option in OPTIONS}
        tables = [{"name": table.name, "path": table.path, **table.policy.as_json()} for table in self.tables]
        return {**values, "table": tables}


class Flags:
    """What the command line said: values by the option's key, None (or missing) where it said nothing. Texts are as
    typed; tables are `[NAME=]PATH`."""

    def __init__(self, tables: Iterable[str] = (), config: str | None = None, **values: str | None) -> None:
        unknown = values.keys() - BY_KEY.keys()
        if unknown:
            raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
        self.tables = tuple(tables)
        self.config = config
        self.values = values


def default_of(key: str) -> str:
    """An option's default in words."""
    option = BY_KEY[key]
    return option.default_text or option.shown(getattr(Settings, option.attribute))


def settings_from(flags: Flags, *, needs_tables: bool = True) -> Settings:
    """Settings of the flags over the config file over the defaults. Raises EngramdError."""
    values: dict[str, Any] = {}
    if flags.config is not None:
        values = _read_file(flags.config)
    tables = values.pop("tables", ())
    if flags.tables:
        tables = tuple(parse_table(text) for text in flags.tables)
    for key, text in flags.values.items():
        if text is not None:
            option = BY_KEY[key]
            values[option.attribute] = option.check.convert(text, option.flag)
    settings = replace(Settings(tables=tables), **values)
    if "arena_limit_bytes" not in values:
        settings = replace(settings, arena_limit_bytes=_arena_limit(settings.arena_bytes))
    if needs_tables and not settings.tables:
        raise EngramdError("no table to serve: name one, as in `engramd serve /data/table`, or use --config FILE")
    _check_together(settings)
    return settings


def _arena_limit(arena_bytes: int) -> int:
    """The limit on arenas where nothing is said: never so low that no session could be opened."""
    limits = [found[0] for found in (memory_limit(), machine_memory()) if found is not None]
    share = min(limits, default=MAX_SIZE_BYTES) // ARENA_SHARE & ~(MIN_ARENA_BYTES - 1)
    return min(Settings.arena_limit_bytes, max(share, 2 * arena_bytes))


def parse_table(text: str) -> TablePath:
    """`[NAME=]PATH`; the name defaults to the last part of the path. Raises EngramdError."""
    name, separator, path = text.partition("=")
    if not separator or "/" in name:
        return table_path(None, text)
    return table_path(name, path)


def table_path(name: str | None, path: str) -> TablePath:
    """A checked TablePath; the path becomes absolute. Raises EngramdError."""
    if not path or "\0" in path:
        raise EngramdError(f"{path!r} is not the path of a table")
    absolute = os.path.abspath(path)
    if name is None:
        name = os.path.basename(absolute)
    if not name or not name.isprintable() or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise EngramdError(
            f"{name!r} cannot be a table's name: printable characters, 1 to {MAX_NAME_BYTES} bytes "
            f"(write NAME={path} to choose another)"
        )
    return TablePath(name, absolute)


def _check_together(settings: Settings) -> None:
    if len(settings.tables) > MAX_TABLES:
        raise EngramdError(f"{len(settings.tables)} tables, but a daemon serves at most {MAX_TABLES}")
    seen: dict[str, str] = {}
    for table in settings.tables:
        if table.name in seen:
            raise EngramdError(
                f"two tables are named {table.name!r}: {seen[table.name]} and {table.path} "
                "(write NAME=PATH to give one another name)"
            )
        seen[table.name] = table.path
    check_shares([table.policy for table in settings.tables])
    if settings.tcp is not None and (settings.tcp_key is None or settings.tcp_clients is None):
        raise EngramdError(
            f"tcp {settings.tcp} needs tcp_key, the daemon's secret key (`engramd keygen PATH` makes one), and "
            "tcp_clients, a folder with the public keys of the clients that may connect"
        )
    if settings.arena_limit_bytes < settings.arena_bytes:
        raise EngramdError(
            f"arena-limit {format_size(settings.arena_limit_bytes)} is smaller than one arena of "
            f"{format_size(settings.arena_bytes)}: no client could connect"
        )


_TABLE_KEYS = ("name", "path", "layer", *POLICY_KEYS)
_LAYER_KEYS = ("layer", *POLICY_KEYS)


def _read_file(path: str) -> dict[str, Any]:
    """Settings attributes of a config file, its `[[table]]` entries as `tables`."""
    import tomllib  # here: a daemon without a config file need not load it

    data = read_at_most(path, MAX_CONFIG_BYTES)
    try:
        text = data.decode("utf-8")
        document = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngramdError(f"{path}: not a TOML file: {error or 'nested too deeply'}") from None
    values: dict[str, Any] = {}
    for key, value in document.items():
        where = f"{path}{_line_of(text, key)}: {key}"
        if key == "table":
            values["tables"] = _tables(value, text, path)
        elif key in BY_KEY:
            values[BY_KEY[key].attribute] = BY_KEY[key].check.convert(value, where)
        else:
            raise EngramdError(f"{where}: {_unknown(key, ('table', *BY_KEY))}")
    return values


def _tables(entries: Any, text: str, path: str) -> tuple[TablePath, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise EngramdError(f"{path}{_line_of(text, 'table')}: table: write each table under a heading [[table]]")
    tables = []
    for number, entry in enumerate(entries, start=1):
        where = partial(_where, path, text, number)
        for key, value in entry.items():
            if key not in _TABLE_KEYS:
                raise EngramdError(f"{where(key)}: {_unknown(key, _TABLE_KEYS)}")
            if key in ("name", "path") and not isinstance(value, str):
                raise EngramdError(f"{where(key)}: {value!r} is not a text")
        if "path" not in entry:
            raise EngramdError(f"{path}: table {number} has no path")
        # Relative to the file, so that a daemon's working directory does not matter.
        directory = os.path.join(os.path.dirname(os.path.abspath(path)), entry["path"])
        table = table_path(entry.get("name"), directory)
        policy = read_policy(table.name, entry, where, _layers(entry.get("layer", []), where))
        tables.append(replace(table, policy=policy))
    return tuple(tables)


def _layers(entries: Any, where: Callable[..., str]) -> list[tuple[int, dict[str, Any]]]:
    """(layer, entry) of a table's [[table.layer]] entries."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise EngramdError(f"{where('layer')}: write each layer under a heading [[table.layer]]")
    layers = []
    for number, entry in enumerate(entries, start=1):
        for key in entry:
            if key not in _LAYER_KEYS:
                raise EngramdError(f"{where(key, number)}: {_unknown(key, _LAYER_KEYS)}")
        layer = entry.get("layer")
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < 1 << 32:
            raise EngramdError(f"{where('layer', number)}: {layer!r} is not the number of a layer")
        layers.append((layer, entry))
    return layers


def _where(path: str, text: str, table: int, key: str, layer: int = 0) -> str:
    """The place of a key of a table, or of one of its layers, for the beginning of a sentence."""
    return f"{path}{_line_of(text, key, table, layer)}: {key} of table {table}{f', layer entry {layer}' * (layer > 0)}"


def _unknown(key: str, known: Iterable[str]) -> str:
    """What is wrong with a key that is not known, and which one was perhaps meant."""
    known = tuple(known)
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    return f"unknown key{f'; did you mean {near[0]}?' if near else ''} (known: {', '.join(known)})"


def _line_of(text: str, key: str, table: int = 0, layer: int = 0) -> str:
    """`:LINE` of the first place that looks like the key, or nothing; inside the table of that number, and the entry of
    that number among its layers, if not 0."""
    start = 0
    for name, wanted in (("table", table), (r"table[ \t]*\.[ \t]*layer", layer)):
        headings = re.compile(rf"^[ \t]*\[\[[ \t]*[\"']?{name}[\"']?[ \t]*\]\]", re.MULTILINE).finditer(text, start)
        for number, heading in enumerate(headings, start=1):
            if number == wanted:
                start = heading.end()
                break
    found = re.compile(rf"^[ \t]*(?:\[+[ \t]*)?[\"']?{re.escape(key)}[\"']?[ \t]*[\]=.]", re.MULTILINE).search(
        text, start
    )
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""
