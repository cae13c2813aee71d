"""The daemon's options in one table: name, unit, range, default, meaning, and the check of a value.

`engramd serve --help`, the configuration file's reader, the effective configuration in the statistics, `reload
--config` and docs/configuration.md all come from here. An option is added by a field of `engramd.config.Settings`,
which has its default, and an entry of OPTIONS.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engramd.errors import EngramdError
from engramd.sizes import MAX_SIZE_BYTES, format_size, parse_size

MAX_WORKERS = 64  # ENGRAM_MAX_WORKERS
MAX_SESSIONS = 1 << 16
MAX_PREFETCH_ROWS = 1 << 20  # PrefetchQuota::kAllRows of the engine
MIN_ARENA_BYTES = 1 << 20
MAX_ARENA_BYTES = 4 << 30  # kMaxArenaBytes of the engine
READERS = ("auto", "io_uring", "pread")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
NUMA_WORDS = ("auto", "interleave", "off")


@dataclass(frozen=True)
class Check:
    """`convert(value, where)` gives the checked value or raises EngramdError; `allowed` says in words what passes."""

    allowed: str
    convert: Callable[[Any, str], Any]


@dataclass(frozen=True)
class Option:
    """One option: `key` in the file and, with dashes, the flag; `attribute` of Settings."""

    key: str
    attribute: str
    metavar: str
    check: Check
    meaning: str
    default_text: str = ""  # where the value of Settings does not speak for itself
    at_run_time: bool = False  # `reload --config` and SIGHUP apply a change; else it takes a restart

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    def shown(self, value: Any) -> str:
        """A value as one would write it into the file."""
        if value is None:
            return "none"
        return exact_size(value) if self.attribute.endswith("_bytes") else str(value)


def exact_size(size_bytes: int) -> str:
    """A size in the largest binary unit that divides it: `1GiB`, `1000`."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)


def size(minimum_bytes: int, maximum_bytes: int = MAX_SIZE_BYTES) -> Check:
    """A size in bytes, as an integer or a text such as '512MiB'."""

    def convert(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise EngramdError(f"{where}: {value!r} is not a size (a number of bytes, or for example '512MiB')")
        try:
            parsed = parse_size(str(value))
        except EngramdError as error:
            raise EngramdError(f"{where}: {error}") from None
        if parsed < minimum_bytes:
            raise EngramdError(f"{where}: {value} is below the minimum of {format_size(minimum_bytes)}")
        if parsed > maximum_bytes:
            raise EngramdError(f"{where}: {value} is above the maximum of {format_size(maximum_bytes)}")
        return parsed

    assert MAX_SIZE_BYTES == (1 << 63) - 1
    maximum = "8 EiB" if maximum_bytes == MAX_SIZE_BYTES else exact_size(maximum_bytes)
    return Check(f"bytes: {exact_size(minimum_bytes)} to {maximum}", convert)


def integer(minimum: int, maximum: int, unit: str) -> Check:
    """An integer of a range, as a number or a text of digits."""

    def convert(value: Any, where: str) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
            number = int(value)
        if number is None or not minimum <= number <= maximum:
            raise EngramdError(f"{where}: {value!r} is not an integer from {minimum} to {maximum}")
        return number

    return Check(f"{unit}: {minimum} to {maximum}", convert)


def share(minimum: float) -> Check:
    """A share of one, as a number or a text."""

    def convert(value: Any, where: str) -> float:
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = float("nan")
        if not minimum <= number <= 1:
            raise EngramdError(f"{where}: {value!r} is not a number from {minimum} to 1")
        return number

    return Check(f"{minimum} to 1", convert)


def choice(*choices: str) -> Check:
    """One of some words."""

    def convert(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise EngramdError(f"{where}: {value!r} is none of {', '.join(choices)}")
        return value

    return Check(", ".join(choices), convert)


def _path(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise EngramdError(f"{where}: {value!r} is not a path")
    return value


def loopback_endpoint(value: Any, where: str) -> str:
    """Checks `host:port` of an endpoint without encryption: numeric loopback addresses and `localhost` alone."""
    host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not separator or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise EngramdError(f"{where}: {value!r} is not host:port with a port from 1 to 65535")
    octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    if not re.fullmatch(rf"127(\.{octet}){{3}}|localhost|\[::1\]", host):
        raise EngramdError(
            f"{where}: {host!r} is not a loopback address: this endpoint is neither encrypted nor authenticated, so it "
            "is bound to 127.0.0.1, [::1] or localhost only; reach it from elsewhere through a tunnel"
        )
    return f"127.0.0.1:{port}" if host == "localhost" else str(value)


def _numa_node(value: Any, where: str) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and (text in NUMA_WORDS or re.fullmatch("[0-9]|[1-5][0-9]|6[0-3]", text)):
        return text
    raise EngramdError(f"{where}: {value!r} is none of {', '.join(NUMA_WORDS)} and no node's number from 0 to 63")


NUMA_NODE = Check(f"{', '.join(NUMA_WORDS)}, or a node's number: 0 to 63", _numa_node)


def tcp_endpoint(value: Any, where: str) -> str:
    """Checks `host:port` with a numeric address (a name may mean another machine tomorrow), `localhost:port`, or a port
    alone, which is bound to 127.0.0.1."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not separator:
        host = "localhost"
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise EngramdError(f"{where}: {value!r} is neither host:port nor a port, from 1 to 65535")
    host = "127.0.0.1" if host == "localhost" else host
    bare, family = (host[1:-1], socket.AF_INET6) if re.fullmatch(r"\[.*\]", host) else (host, socket.AF_INET)
    try:
        socket.inet_pton(family, bare)
    except (OSError, ValueError):
        raise EngramdError(
            f"{where}: {host!r} is not a numeric address: write for example 127.0.0.1, 10.0.0.5 or [::1]"
        ) from None
    return f"{host}:{port}"


PATH = Check("a path", _path)
TCP = Check("host:port with a numeric address, or a port of 127.0.0.1", tcp_endpoint)
LOOPBACK = Check("host:port, loopback addresses only", loopback_endpoint)

OPTIONS: tuple[Option, ...] = (
    Option(
        "socket",
        "socket",
        "PATH",
        PATH,
        "control socket; PATH.ring beside it is the ring socket",
        default_text="$ENGRAMD_SOCKET, /run/engramd/engramd.sock, $XDG_RUNTIME_DIR/engramd.sock",
    ),
    Option("tcp", "tcp", "HOST:PORT", TCP, "control over TCP too, for clients without shared memory; CURVE only"),
    Option("tcp_key", "tcp_key", "PATH", PATH, "secret key of the daemon for tcp, a file that only it can read"),
    Option(
        "tcp_clients", "tcp_clients", "DIR", PATH, "folder with the public keys (*.key) of clients that tcp lets in"
    ),
    Option(
        "metrics",
        "metrics",
        "HOST:PORT",
        LOOPBACK,
        "HTTP endpoint with /metrics for Prometheus, /livez and /readyz",
    ),
    Option(
        "dram",
        "dram_bytes",
        "SIZE",
        size(0),
        "budget of rows in DRAM and their index; at the tables' size and above they become resident, 0 caches nothing",
        at_run_time=True,
    ),
    Option("arena", "arena_bytes", "SIZE", size(MIN_ARENA_BYTES, MAX_ARENA_BYTES), "reply arena of a session"),
    Option(
        "arena_limit",
        "arena_limit_bytes",
        "SIZE",
        size(MIN_ARENA_BYTES),
        "arenas and rings of all sessions together, outside the DRAM budget",
        default_text="4GiB, but no more than a quarter of the memory that the daemon may have",
    ),
    Option("sessions", "sessions", "N", integer(1, MAX_SESSIONS, "sessions"), "most sessions at once"),
    Option(
        "uid_share",
        "uid_share",
        "PERCENT",
        integer(1, 100, "percent"),
        "share of sessions and of arena_limit that one user may hold",
        at_run_time=True,
    ),
    Option(
        "admin_group",
        "admin_group",
        "GROUP",
        Check("a group's name or number", _path),
        "group whose members may administer beside root and the daemon's own user",
    ),
    Option(
        "prefetch_rows",
        "prefetch_rows",
        "N",
        integer(1, MAX_PREFETCH_ROWS, "rows"),
        "most rows that one session may have queued for prefetch in each worker; what exceeds them is dropped",
    ),
    Option(
        "workers",
        "workers",
        "N",
        integer(0, MAX_WORKERS, "threads"),
        "worker threads",
        default_text="0: chosen by the engine",
    ),
    Option(
        "reader",
        "reader",
        "KIND",
        choice(*READERS),
        "how pages are read; auto takes io_uring and falls back to pread",
    ),
    Option(
        "numa_node",
        "numa_node",
        "NODE",
        NUMA_NODE,
        "where threads run and memory lies on a machine of several NUMA nodes: near the tables' drives, page by page "
        "round all nodes, where the kernel likes, or on that node alone",
    ),
    Option(
        "poll_budget",
        "poll_budget",
        "SHARE",
        share(0.001),
        "share of one CPU that a worker may spend looking at idle GPU streams",
    ),
    Option(
        "state",
        "state",
        "DIR",
        PATH,
        "directory that keeps the cache's heat and the place of background verification over restarts",
        default_text="$STATE_DIRECTORY, else neither is kept",
    ),
    Option(
        "scrub",
        "scrub_bytes",
        "SIZE",
        size(0),
        "bytes a second that background verification reads, behind all requests; 0: only when it is asked for",
    ),
    Option(
        "log_level",
        "log_level",
        "LEVEL",
        choice(*LOG_LEVELS),
        "least severity that is logged",
        at_run_time=True,
    ),
    Option(
        "log_format",
        "log_format",
        "FORMAT",
        choice(*LOG_FORMATS),
        "text, or one JSON object a line",
        at_run_time=True,
    ),
    Option(
        "miss_curve",
        "miss_curve",
        "SWITCH",
        choice("on", "off"),
        "whether the daemon follows what caches of other sizes would have hit, for `engramd stats --mrc`",
    ),
)
BY_KEY = {option.key: option for option in OPTIONS}
