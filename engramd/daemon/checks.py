"""What must be right before anything is served: memory, tiers, keys, places. `serve --check-config` asks for all of it;
a daemon that starts asks for each in its place.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from engramd import numa
from engramd.config import Settings
from engramd.daemon import log, sockets
from engramd.daemon.memory_limit import check_budget
from engramd.daemon.tables import ServedTable, open_tables
from engramd.sizes import format_size

if TYPE_CHECKING:
    from engramd.daemon.tcp_keys import ClientKeys


def check(settings: Settings) -> str:
    """Opens everything that serving would open, and closes it again. Returns a sentence; raises EngramdError."""
    from engramd.daemon.administrators import Administrators

    path = sockets.server_path(settings.socket)
    log.set_up(settings.log_level, settings.log_format)
    tables = open_tables(settings.tables)
    try:
        check_memory(settings, tables)
        numa_placement(settings, tables)
        check_state(settings)
        check_placement(settings, tables)
        tcp_keys(settings)
        Administrators(settings.admin_group)
        return f"the configuration is right: {describe_tables(tables)}; socket {path}"
    finally:
        for table in tables:
            table.close()


def check_memory(settings: Settings, tables: list[ServedTable]) -> None:
    """Raises EngramdError where the budget cannot fit into the memory that the daemon may have."""
    table_bytes = sum(table.manifest.logical_bytes for table in tables)
    check_budget(settings.dram_bytes, table_bytes, settings.arena_limit_bytes)


def numa_placement(settings: Settings, tables: list[ServedTable]) -> numa.Placement:
    """Where threads and memory go on a machine with several nodes. Raises EngramdError where they cannot."""
    files = [descriptor for table in tables for layer in table.descriptors for descriptor in layer]
    drives = numa.drive_nodes({os.fstat(descriptor).st_dev for descriptor in files})
    rows_bytes = min(settings.dram_bytes, sum(table.manifest.logical_bytes for table in tables))
    return numa.place(settings.numa_node, numa.nodes_of(), drives, rows_bytes, os.sched_getaffinity(0))


def check_placement(settings: Settings, tables: list[ServedTable]) -> None:
    """Raises EngramdError where the tiers that the configuration wants do not fit into the budget."""
    from engramd.daemon.engine import Engine

    engine = Engine(settings, tables, start=False)
    try:
        engine.check_place(settings.dram_bytes)
    finally:
        engine.destroy()


def tcp_keys(settings: Settings) -> tuple[bytes, ClientKeys] | None:
    """The keys of the TCP endpoint, where there is one. Raises EngramdError."""
    if settings.tcp is None or settings.tcp_key is None or settings.tcp_clients is None:
        return None  # `settings` has all three or no tcp
    from engramd.daemon.tcp_keys import ClientKeys, read_secret_key

    return read_secret_key(settings.tcp_key), ClientKeys(settings.tcp_clients)


def check_state(settings: Settings) -> None:
    """Raises EngramdError where no state can be kept in the directory; leaves none behind that was not there."""
    from engramd.daemon.heat_keeper import state_directory

    folder = os.path.abspath(settings.state) if settings.state else None
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        state_directory(settings.state)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def describe_tables(tables: list[ServedTable]) -> str:
    shown = [
        f"{table.name} (layers {', '.join(map(str, table.layers[:8]))}{', ...' if len(table.layers) > 8 else ''}: "
        f"{table.manifest.rows:,} rows of {table.manifest.row_bytes} B, {format_size(table.manifest.logical_bytes)})"
        for table in tables[:8]
    ]
    return ", ".join(shown) + (f" and {len(tables) - 8} more tables" if len(tables) > 8 else "")
