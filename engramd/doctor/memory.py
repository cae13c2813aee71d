"""Memory: what is free, what a control group leaves, what the budget and the tables ask for."""

from __future__ import annotations

from collections.abc import Iterator

from engramd.daemon.memory_limit import OWN_BYTES, memory_limit, most_used_bytes
from engramd.doctor.finding import Finding, Machine, fail, ok, warn
from engramd.sizes import format_size


def findings(machine: Machine, dram_bytes: int, arena_limit_bytes: int, table_bytes: int) -> Iterator[Finding]:
    """All of them. table_bytes: rows of the tables named, 0 for none."""
    used_bytes = most_used_bytes(dram_bytes, table_bytes) if table_bytes else dram_bytes
    yield available(machine, used_bytes + OWN_BYTES)
    yield control_group(machine, used_bytes, arena_limit_bytes)
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
            f"lower --dram to {format_size(max(0, free - OWN_BYTES) * 0.9)} or free memory",
        )
    return ok("memory", f"{format_size(free)} available")


def control_group(machine: Machine, dram_bytes: int, arena_limit_bytes: int) -> Finding:
    """Whether the budget fits under the control group's limit: above it, the kernel kills."""
    found = memory_limit(machine.path("proc/self/cgroup"), machine.path("sys/fs/cgroup"))
    if found is None:
        return ok("cgroup", "no memory limit")
    limit, file = found
    text = f"memory limit {format_size(limit)} ({file})"
    if limit < dram_bytes + OWN_BYTES:
        return fail(
            "cgroup",
            f"{text} is below the budget of {format_size(dram_bytes)} and {format_size(OWN_BYTES)} for the process",
            f"raise it (MemoryMax=, --memory, resources.limits.memory) or lower --dram to "
            f"{format_size(max(0, limit - OWN_BYTES))}",
        )
    if limit < dram_bytes + arena_limit_bytes + OWN_BYTES:
        return warn(
            "cgroup",
            f"{text} does not hold the budget of {format_size(dram_bytes)} and all arenas, "
            f"{format_size(arena_limit_bytes)}",
            f"raise it to {format_size(dram_bytes + arena_limit_bytes + OWN_BYTES)} or lower --arena-limit",
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
