"""NUMA: what `numa_node` means on machines made of files, and that a real daemon binds itself to a node of this one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engramd import numa
from engramd.errors import EngramdError

GIB = 1 << 30
ALL = range(8)
TWO = [numa.Node(0, frozenset({0, 1, 2, 3}), 8 * GIB), numa.Node(1, frozenset({4, 5, 6, 7}), 8 * GIB)]


def machine(folder: Path, files: dict[str, str]) -> str:
    """A root folder with these files: a double, since few machines have several nodes."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1,4\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       4194304 kB\nNode 0 MemFree: 1 kB\n",
            "sys/devices/system/node/node10/cpulist": "2-3\n",
            "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:       1024 kB\n",
            "sys/devices/system/node/node2/cpulist": "5\n",  # processors without memory of their own
            "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:       0 kB\n",
            "sys/devices/system/node/online": "0,2,10\n",
        },
    )
    assert numa.nodes_of(root) == [
        numa.Node(0, frozenset({0, 1, 4}), 4 * GIB),
        numa.Node(10, frozenset({2, 3}), 1 << 20),
    ]
    assert numa.nodes_of(str(tmp_path / "none")) == []


def test_nodes_of_drives(tmp_path: Path) -> None:
    """A whole NVMe drive, a partition, one whose node nobody knows, and a file system without a drive."""
    root = machine(
        tmp_path,
        {
            "sys/devices/pci0/numa_node": "1",
            "sys/devices/pci0/nvme0/nvme0n1/size": "1",
            "sys/devices/pci0/nvme0/nvme0n1/nvme0n1p1/size": "1",
            "sys/devices/pci1/numa_node": "-1",
            "sys/devices/pci1/vdb/size": "1",
        },
    )
    block = tmp_path / "sys/dev/block"
    block.mkdir(parents=True)
    for number, folder in (
        ("259:0", "pci0/nvme0/nvme0n1"),
        ("259:1", "pci0/nvme0/nvme0n1/nvme0n1p1"),
        ("8:0", "pci1/vdb"),
    ):
        (block / number).symlink_to(f"../../devices/{folder}")
    devices = tmp_path / "sys/devices"
    (devices / "pci0/nvme0/nvme0n1/device").symlink_to("..")
    (devices / "pci0/nvme0/device").symlink_to("..")
    (devices / "pci1/vdb/device").symlink_to("..")
    assert numa.drive_nodes([os.makedev(259, 0)], root) == {1}
    assert numa.drive_nodes([os.makedev(259, 1)], root) == {1}
    assert numa.drive_nodes([os.makedev(8, 0), os.makedev(0, 40)], root) == set()


def test_auto_prefers_the_drives_node() -> None:
    found = numa.place("auto", TWO, {1}, 64 * GIB, ALL)
    assert (found.policy, found.nodes, found.processors) == ("PREFERRED", (1,), frozenset({4, 5, 6, 7}))
    assert numa.place("auto", TWO, {1}, GIB, [0, 5]).processors == {5}
    for drives in (set(), {0, 1}, {7}):
        assert numa.place("auto", TWO, drives, GIB, ALL).policy is None
    assert numa.place("auto", TWO[:1], {0}, GIB, ALL).policy is None
    assert numa.place("auto", [], set(), GIB, ALL).policy is None


def test_other_settings() -> None:
    assert numa.place("interleave", TWO, {1}, GIB, ALL) == numa.Placement(
        "memory page by page round nodes 0, 1", "INTERLEAVE", (0, 1)
    )
    assert numa.place("interleave", TWO[:1], set(), GIB, ALL).policy is None
    assert numa.place("off", TWO, {1}, GIB, ALL).policy is None
    found = numa.place("0", TWO, {1}, 8 * GIB, ALL)
    assert (found.policy, found.nodes, found.processors) == ("BIND", (0,), frozenset({0, 1, 2, 3}))
    for setting, allowed, budget_bytes, words in (
        ("7", ALL, GIB, "numa_node 7: this machine has no such node with memory; it has: 0, 1"),
        ("1", [0, 1], GIB, "numa_node 1: none of the node's processors"),
        ("1", ALL, 9 * GIB, r"has 8.0 GiB of memory, and the DRAM budget is 9.0 GiB: lower dram"),
    ):
        with pytest.raises(EngramdError, match=words):
            numa.place(setting, TWO, set(), budget_bytes, allowed)


needs_nodes = pytest.mark.skipif(not numa.nodes_of(), reason="this kernel knows no NUMA nodes")


@needs_nodes
def test_a_daemon_on_one_node(start_daemon: Any, load: Any) -> None:
    """The kernel's own account of the daemon's memory names the policy; its threads run on the node's processors."""
    node = numa.nodes_of()[0]
    daemon = start_daemon(numa_node=node.number)
    load(daemon).run(5)
    assert f"NUMA: threads and memory on node {node.number} alone" in daemon.log
    maps = Path(f"/proc/{daemon.pid}/numa_maps").read_text()
    assert f" bind:{node.number} " in maps
    touched = [line for line in maps.splitlines() if f" bind:{node.number} " in line and "anon=" in line]
    assert touched
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        status = (task / "status").read_text()
        (allowed,) = re.findall(r"Cpus_allowed_list:\s(\S+)", status)
        assert set(numa._processors(allowed)) <= node.processors


def test_a_node_that_is_not_there(engramd: Callable[..., Any], table: Path, socket_folder: str) -> None:
    if any(node.number == 63 for node in numa.nodes_of()):
        pytest.skip("this machine has a node 63")
    for extra in ((), ("--check-config",)):
        done = engramd("serve", table, "--socket", f"{socket_folder}/s", "--numa-node", "63", *extra)
        assert done.returncode == 1
        assert "numa_node 63: this machine has no such node" in done.stderr
    wrong = engramd("serve", table, "--socket", f"{socket_folder}/s", "--numa-node", "64")
    assert "--numa-node: '64' is none of auto, interleave, off and no node's number from 0 to 63" in wrong.stderr


@needs_nodes
def test_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that the kernel does not have: its answer becomes a sentence, and nothing is changed."""
    if any(node.number == 63 for node in numa.nodes_of()):
        pytest.skip("this machine has a node 63")
    with pytest.raises(EngramdError, match=r'the kernel refuses: Invalid argument.*numa_node = "off"'):
        numa.apply(numa.Placement("on node 63", "BIND", (63,), frozenset({0})))
