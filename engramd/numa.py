"""NUMA: on a machine with several nodes, threads and memory of the daemon stay near the drives that hold its tables.

One policy holds for the whole process. It is set on the main thread before the engine makes its threads and touches its
memory: threads inherit it, and row cache, resident rows, page buffers and arenas are all touched first by them. So
nothing in the engine knows of nodes. On a machine with one node nothing is to be chosen, and nothing is done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from engramd.errors import EngramdError
from engramd.sizes import format_size

_NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class Node:
    """A node: its processors, and the bytes of memory it has (0 where the kernel does not say)."""

    number: int
    processors: frozenset[int]
    memory_bytes: int


@dataclass(frozen=True)
class Placement:
    """What to do: `policy` is an ENGRAM_NUMA_* name without its prefix, None for nothing; `processors` empty for all;
    `text` says it to people."""

    text: str
    policy: str | None = None
    nodes: tuple[int, ...] = ()
    processors: frozenset[int] = frozenset()


def nodes_of(root: str = "/") -> list[Node]:
    """The machine's nodes that have memory, by number; none where the kernel knows no NUMA. root: for tests."""
    found = []
    for name in _names(os.path.join(root, _NODES)):
        match = re.fullmatch(r"node([0-9]{1,3})", name)
        if match is None:
            continue
        folder = os.path.join(root, _NODES, name)
        memory = re.search(r"MemTotal: +([0-9]{1,15}) kB", _read(f"{folder}/meminfo"))
        if memory is None or int(memory[1]) > 0:
            processors = frozenset(_processors(_read(f"{folder}/cpulist")))
            found.append(Node(int(match[1]), processors, int(memory[1]) << 10 if memory else 0))
    return sorted(found, key=lambda node: node.number)


def drive_nodes(devices: Iterable[int], root: str = "/") -> set[int]:
    """The nodes that the drives of these devices (st_dev) hang on, as far as the kernel says."""
    found = set()
    for device in devices:
        block = os.path.join(root, "sys/dev/block", f"{os.major(device)}:{os.minor(device)}")
        # A partition's folder lies in its drive's; the device of an NVMe drive is its controller, which has one too.
        for inner in ("device", "device/device", "../device", "../device/device"):
            text = _read(f"{block}/{inner}/numa_node").strip()
            if re.fullmatch("[0-9]{1,3}", text):
                found.add(int(text))
                break
    return found


def place(setting: str, nodes: list[Node], drives: set[int], budget_bytes: int, allowed: Iterable[int]) -> Placement:
    """What the option `numa_node` means on a machine. allowed: processors that this process may run on.

    Raises EngramdError where one node is asked for that is not there, has no processor for us or too little memory.
    """
    by_number = {node.number: node for node in nodes}
    names = ", ".join(map(str, by_number)) or "none known"
    if setting == "off":
        return Placement("not looked at")
    if setting == "interleave":
        if len(nodes) < 2:
            return Placement(f"one node ({names}): nothing to interleave")
        return Placement(f"memory page by page round nodes {names}", "INTERLEAVE", tuple(by_number))
    if setting == "auto":
        if len(nodes) < 2:
            return Placement(f"one node ({names}): nothing to choose")
        if len(drives) != 1 or not drives <= set(by_number):
            where = (
                f"drives on nodes {', '.join(map(str, sorted(drives)))}" if drives else "the drives' node is unknown"
            )
            return Placement(f"{len(nodes)} nodes, {where}: threads and memory are left to the kernel")
        node = by_number[next(iter(drives))]
        processors = node.processors & frozenset(allowed)
        return Placement(
            f"threads and memory on node {node.number}, the tables' drives'; other nodes' memory where it is full",
            "PREFERRED",
            (node.number,),
            processors,
        )
    chosen = by_number.get(int(setting))
    if chosen is None:
        raise EngramdError(f"numa_node {setting}: this machine has no such node with memory; it has: {names}")
    processors = chosen.processors & frozenset(allowed)
    if not processors:
        raise EngramdError(
            f"numa_node {setting}: none of the node's processors may be used by this process (taskset, CPUAffinity=, "
            "cpuset); choose another node, or numa_node = interleave"
        )
    if chosen.memory_bytes and budget_bytes > chosen.memory_bytes:
        raise EngramdError(
            f"numa_node {setting}: the node has {format_size(chosen.memory_bytes)} of memory, and the DRAM budget is "
            f"{format_size(budget_bytes)}: lower dram, or choose numa_node = auto or interleave"
        )
    return Placement(f"threads and memory on node {setting} alone", "BIND", (int(setting),), processors)


def apply(placement: Placement) -> None:
    """Puts a placement into force for this thread and those it makes from now on. Raises EngramdError."""
    if placement.policy is None:
        return
    from engramd._engine import lib

    policy = getattr(lib, f"ENGRAM_NUMA_{placement.policy}")
    number = lib.engram_set_memory_policy(policy, sum(1 << node for node in placement.nodes))
    if number != 0:
        raise EngramdError(
            f"numa_node: {placement.text}: the kernel refuses: {os.strerror(number)} (a cpuset without the node's "
            'memory, or a filter on set_mempolicy); numa_node = "off" does without'
        )
    if placement.processors:
        os.sched_setaffinity(0, placement.processors)


def _processors(text: str) -> Iterable[int]:
    """The numbers of a list such as `0-3,8`."""
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match:
            yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read(1 << 16)
    except OSError:
        return ""
