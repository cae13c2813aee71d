"""The memory that the daemon may have, its control group's or the machine's: a budget that does not fit is refused, not
left to the OOM killer.

Both versions of control groups are read. A limit of any group above ours counts as well.
"""

from __future__ import annotations

import logging
import os
import re

from engramd.errors import EngramdError
from engramd.sizes import format_size

# What the process needs beside rows and their index: the interpreter, libraries, page buffers, queues.
OWN_BYTES = 96 << 20
UNLIMITED_BYTES = 1 << 60  # version 1 says "none" as nearly 2^63
_LOG = logging.getLogger("engramd")


def memory_limit(groups: str = "/proc/self/cgroup", mounts: str = "/sys/fs/cgroup") -> tuple[int, str] | None:
    """(bytes, the file that says so) of the tightest limit on this process, or None. groups, mounts: for tests."""
    try:
        with open(groups, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers == "":
            limits += _limits_along([mounts, f"{mounts}/unified"], path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_along([f"{mounts}/memory", f"{mounts}/{controllers}"], path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_along(roots: list[str], path: str, name: str) -> list[tuple[int, str]]:
    """The limits of a group and of those above it. In a container the path may not be visible: the root's is read."""
    limits = []
    for root in dict.fromkeys(roots):
        folder = os.path.normpath(f"{root}/{path}")
        while folder.startswith(root):
            file = f"{folder}/{name}"
            try:
                with open(file, encoding="ascii") as opened:
                    text = opened.read(64).strip()
                if text.isdigit() and int(text) < UNLIMITED_BYTES:
                    limits.append((int(text), file))
            except (OSError, ValueError):
                pass  # not there, or no limit of ours to read
            if folder == root:
                break
            folder = os.path.dirname(folder)
    return limits


def machine_memory(meminfo: str = "/proc/meminfo") -> tuple[int, str] | None:
    """(bytes of RAM, the file that says so), or None. meminfo: for tests."""
    try:
        with open(meminfo, encoding="ascii") as file:
            found = re.search(r"^MemTotal: +(\d{1,15}) kB$", file.read(4096), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return (int(found[1]) << 10, meminfo) if found else None


def most_used_bytes(dram_bytes: int, table_bytes: int) -> int:
    """What a budget comes to at most, for tables of so many bytes of rows: above their size it takes no more."""
    return min(dram_bytes, table_bytes + table_bytes // 8)


def check_budget(
    dram_bytes: int, table_bytes: int, arena_limit_bytes: int, limit: tuple[int, str] | None = None
) -> None:
    """Raises EngramdError where budget and process cannot fit under the limit; a warning where arenas may not.

    limit: for tests; the tighter of the control group's and the machine's where it is left out.
    """
    group, machine = limit or memory_limit(), machine_memory()
    if limit is None and machine is not None and (group is None or machine[0] < group[0]):
        limit_bytes, file = machine
        owner, way_out = "this machine", "add memory"
    elif group is not None:
        limit_bytes, file = group
        owner, way_out = "its control group", "raise the group's limit (systemd: MemoryMax=)"
    else:
        return
    needed = most_used_bytes(dram_bytes, table_bytes) + OWN_BYTES
    if needed > limit_bytes:
        room = f"lower --dram to {format_size(limit_bytes - OWN_BYTES)} or less, or " if limit_bytes > OWN_BYTES else ""
        raise EngramdError(
            f"a DRAM budget of {format_size(dram_bytes)} needs {format_size(needed)} with the daemon's own memory, but "
            f"{owner} has {format_size(limit_bytes)} ({file}): {room}{way_out}"
        )
    if needed + arena_limit_bytes > limit_bytes:
        _LOG.warning(
            "arenas of up to %s (arena_limit) do not all fit into the %s that %s has beside the DRAM budget: %s",
            format_size(arena_limit_bytes),
            format_size(limit_bytes),
            owner,
            file,
        )
