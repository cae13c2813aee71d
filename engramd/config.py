"""What `engramd serve` needs to know, from flags and from a TOML file with the same keys.

    socket = "/run/engramd/engramd.sock"
    dram = "32GiB"
    [[table]]
    name = "flash"            # optional: the last part of the path
    path = "/data/flash-table"

A flag beats the file; tables on the command line replace the file's. Every value is checked here, so that the rest of
the daemon sees a `Settings` that is right in itself; whether the tables exist is seen when they are opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engramd.errors import EngramdError
from engramd.sizes import format_size, parse_size

MAX_CONFIG_BYTES = 1 << 20
MAX_TABLES = 256
MAX_NAME_BYTES = 127  # engram_catalogue_record.name is 128 bytes with its zero
MAX_WORKERS = 64  # ENGRAM_MAX_WORKERS
MAX_SESSIONS = 1 << 16
MIN_ARENA_BYTES = 1 << 20
READERS = ("auto", "io_uring", "pread")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class TablePath:
    """A table to serve: the name clients know it by, and its directory."""

    name: str
    path: str


@dataclass(frozen=True)
class Settings:
    """Checked settings of a daemon. `socket` None: the first of the usual places (engramd.daemon.sockets)."""

    tables: tuple[TablePath, ...] = ()
    socket: str | None = None
    tcp: str | None = None  # host:port, loopback only
    dram_bytes: int = 1 << 30
    arena_bytes: int = 64 << 20
    arena_limit_bytes: int = 4 << 30
    sessions: int = 256
    workers: int = 0  # 0: the engine chooses
    reader: str = "auto"
    log_level: str = "info"
    state: str | None = None  # directory of heat files; None: $STATE_DIRECTORY, else nowhere


@dataclass
class Flags:
    """What the command line said; None where it said nothing. Texts are as typed."""

    tables: list[str] = field(default_factory=list)
    config: str | None = None
    socket: str | None = None
    tcp: str | None = None
    dram: str | None = None
    arena: str | None = None
    arena_limit: str | None = None
    sessions: str | None = None
    workers: str | None = None
    reader: str | None = None
    log_level: str | None = None
    state: str | None = None


def settings_from(flags: Flags) -> Settings:
    """Settings of the flags over the config file over the defaults. Raises EngramdError."""
    values: dict[str, Any] = {}
    if flags.config is not None:
        values = _read_file(flags.config)
    tables = values.pop("tables", ())
    if flags.tables:
        tables = tuple(parse_table(text) for text in flags.tables)
    for key in _KEYS:
        text = getattr(flags, key)
        if text is not None:
            attribute, convert = _KEYS[key]
            values[attribute] = convert(text, f"--{key.replace('_', '-')}")
    settings = replace(Settings(tables=tables), **values)
    _check_together(settings)
    return settings


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
    if not settings.tables:
        raise EngramdError("no table to serve: name one, as in `engramd serve /data/table`, or use --config FILE")
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
    if settings.arena_limit_bytes < settings.arena_bytes:
        raise EngramdError(
            f"arena-limit {format_size(settings.arena_limit_bytes)} is smaller than one arena of "
            f"{format_size(settings.arena_bytes)}: no client could connect"
        )


def _size(minimum_bytes: int) -> Callable[[Any, str], int]:
    def convert(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise EngramdError(f"{where}: {value!r} is not a size (a number of bytes, or for example '512MiB')")
        try:
            size = parse_size(str(value))
        except EngramdError as error:
            raise EngramdError(f"{where}: {error}") from None
        if size < minimum_bytes:
            raise EngramdError(f"{where}: {value} is below the minimum of {format_size(minimum_bytes)}")
        return size

    return convert


def _integer(minimum: int, maximum: int) -> Callable[[Any, str], int]:
    def convert(value: Any, where: str) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
            number = int(value)
        if number is None or not minimum <= number <= maximum:
            raise EngramdError(f"{where}: {value!r} is not an integer from {minimum} to {maximum}")
        return number

    return convert


def _choice(choices: tuple[str, ...]) -> Callable[[Any, str], str]:
    def convert(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise EngramdError(f"{where}: {value!r} is none of {', '.join(choices)}")
        return value

    return convert


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise EngramdError(f"{where}: {value!r} is not a path")
    return value


def loopback_endpoint(value: Any, where: str) -> str:
    """Checks `host:port` of an endpoint without encryption: numeric loopback addresses and `localhost` alone."""
    host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not separator or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise EngramdError(f"{where}: {value!r} is not host:port with a port from 1 to 65535")
    if not re.fullmatch(r"127(\.[0-9]{1,3}){3}|localhost|\[::1\]", host):
        raise EngramdError(
            f"{where}: {host!r} is not a loopback address: this endpoint is neither encrypted nor authenticated, so it "
            "is bound to 127.0.0.1, [::1] or localhost only; reach it from elsewhere through a tunnel"
        )
    return f"127.0.0.1:{port}" if host == "localhost" else value


# Key of the file (and, with dashes, the flag): attribute of Settings and the check of its value.
_KEYS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "socket": ("socket", _text),
    "tcp": ("tcp", loopback_endpoint),
    "dram": ("dram_bytes", _size(0)),
    "arena": ("arena_bytes", _size(MIN_ARENA_BYTES)),
    "arena_limit": ("arena_limit_bytes", _size(MIN_ARENA_BYTES)),
    "sessions": ("sessions", _integer(1, MAX_SESSIONS)),
    "workers": ("workers", _integer(0, MAX_WORKERS)),
    "reader": ("reader", _choice(READERS)),
    "log_level": ("log_level", _choice(LOG_LEVELS)),
    "state": ("state", _text),
}
_TABLE_KEYS = ("name", "path")


def _read_file(path: str) -> dict[str, Any]:
    """Settings attributes of a config file, its `[[table]]` entries as `tables`."""
    import tomllib  # here: a daemon without a config file need not load it

    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise EngramdError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise EngramdError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
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
        elif key in _KEYS:
            attribute, convert = _KEYS[key]
            values[attribute] = convert(value, where)
        else:
            raise EngramdError(f"{where}: unknown key (known: table, {', '.join(_KEYS)})")
    return values


def _tables(entries: Any, text: str, path: str) -> tuple[TablePath, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise EngramdError(f"{path}{_line_of(text, 'table')}: table: write each table under a heading [[table]]")
    tables = []
    for number, entry in enumerate(entries, start=1):
        for key, value in entry.items():
            where = f"{path}{_line_of(text, key)}: {key} of table {number}"
            if key not in _TABLE_KEYS:
                raise EngramdError(f"{where}: unknown key (known: {', '.join(_TABLE_KEYS)})")
            if not isinstance(value, str):
                raise EngramdError(f"{where}: {value!r} is not a text")
        if "path" not in entry:
            raise EngramdError(f"{path}: table {number} has no path")
        # Relative to the file, so that a daemon's working directory does not matter.
        table = os.path.join(os.path.dirname(os.path.abspath(path)), entry["path"])
        tables.append(table_path(entry.get("name"), table))
    return tuple(tables)


def _line_of(text: str, key: str) -> str:
    """`:LINE` of the first place that looks like the key, or nothing."""
    found = re.search(rf"^[ \t]*(?:\[+[ \t]*)?[\"']?{re.escape(key)}[\"']?[ \t]*[\]=.]", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""
