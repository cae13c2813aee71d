"""Memory: what is free, what a control group leaves, what the budget and the tables ask for."""

from __future__ import annotations

from collections.abc import Iterator

from engramd.doctor.finding import Finding, Machine, fail, ok, warn
from engramd.sizes import format_size

SLACK_BYTES = 200 << 20  # the process itself: Python, page buffers, thread stacks
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2^63


def findings(machine: Machine, dram_bytes: int, arena_limit_bytes: int, table_bytes: int) -> Iterator[Finding]:
    """All of them. table_bytes: rows of the tables named, 0 for none."""
    yield available(machine, dram_bytes + SLACK_BYTES)
    yield control_group(machine, dram_bytes, arena_limit_bytes)
    yield swap(machine)
    if table_bytes:
        yield coverage(dram_bytes, table_bytes)


def available(machine: Machine, needed_bytes: int) -> Finding:
    """Whether the machine has the memory now."""
    free = machine.kib("proc/meminfo", "MemAvailable")
    if free is None:
        return warn("memory", "/proc/meminfo cannot be read", "mount /proc (ProcSubset=all in a unit)")
    if free < needed_bytes:
        return fail(
            "memory",
            f"{format_size(free)} available, but the budget needs {format_size(needed_bytes)}",
            f"lower --dram to {format_size(max(0, free - SLACK_BYTES) * 0.9)} or free memory",
        )
    return ok("memory", f"{format_size(free)} available")


def limit_of_group(machine: Machine) -> tuple[int, str] | None:
    """(bytes, file) of the tightest memory limit over this process, in cgroup v2 or v1; None without one."""
    tightest: tuple[int, str] | None = None
    for line in (machine.read("proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):  # a parent's limit holds too
            file = "/".join([base, *parts[:depth], name])
            text = machine.read(file) or ""
            if text.isdigit() and int(text) < _UNLIMITED and (tightest is None or int(text) < tightest[0]):
                tightest = int(text), f"/{file}"
    return tightest


def control_group(machine: Machine, dram_bytes: int, arena_limit_bytes: int) -> Finding:
    """Whether the budget fits under the control group's limit: above it, the kernel kills."""
    found = limit_of_group(machine)
    if found is None:
        return ok("cgroup", "no memory limit")
    limit, file = found
    text = f"memory limit {format_size(limit)} ({file})"
    if limit < dram_bytes + SLACK_BYTES:
        return fail(
            "cgroup",
            f"{text} is below the budget of {format_size(dram_bytes)} and {format_size(SLACK_BYTES)} for the process",
            f"raise it (MemoryMax=, --memory, resources.limits.memory) or lower --dram to "
            f"{format_size(max(0, limit - SLACK_BYTES))}",
        )
    if limit < dram_bytes + arena_limit_bytes + SLACK_BYTES:
        return warn(
            "cgroup",
            f"{text} does not hold the budget of {format_size(dram_bytes)} and all arenas, "
            f"{format_size(arena_limit_bytes)}",
            f"raise it to {format_size(dram_bytes + arena_limit_bytes + SLACK_BYTES)} or lower --arena-limit",
        )
    return ok("cgroup", text)


def swap(machine: Machine) -> Finding:
    """Rows in swap are slower than rows on NVMe."""
    total = machine.kib("proc/meminfo", "SwapTotal") or 0
    if total:
        return warn(
            "swap", f"{format_size(total)} of swap: cached rows may go there", "MemorySwapMax=0 in the unit, or swapoff"
        )
    return ok("swap", "none")


def coverage(dram_bytes: int, table_bytes: int) -> Finding:
    """Which tier serves."""
    if dram_bytes >= table_bytes:
        return ok("budget", f"{format_size(dram_bytes)} covers all {format_size(table_bytes)}: rows become resident")
    share = 100 * dram_bytes / table_bytes
    return ok("budget", f"{format_size(dram_bytes)} for {format_size(table_bytes)} of rows ({share:.1f} %): cached")
