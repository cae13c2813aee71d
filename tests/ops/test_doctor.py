"""`engramd doctor`: each check on machines as they may be (other /proc and /sys trees), and the command on this one.

Another machine's kernel files are written below a folder; drives that this machine lacks are a double of the measuring
function alone.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engramd.doctor import access, kernel, memory, storage
from engramd.doctor.finding import Finding, Grade, Machine

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """`machine({"proc/meminfo": "..."})` is a machine with these files."""

    def make(files: dict[str, str]) -> Machine:
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(str(root))

    return make


def check(finding: Finding, grade: Grade, *words: str) -> None:
    assert finding.grade is grade, finding
    for word in words:
        assert word in f"{finding.text} -> {finding.fix}"
    assert bool(finding.fix) == (grade is not Grade.OK)


@pytest.mark.parametrize(
    ("release", "architecture", "grade"),
    [
        ("6.1.0-18-amd64", "x86_64", Grade.OK),
        ("6.12", "aarch64", Grade.OK),
        ("5.15.0-91-generic", "x86_64", Grade.WARN),
        ("5.10.0", "x86_64", Grade.WARN),
        ("4.18.0-513.el8", "x86_64", Grade.FAIL),
        ("6.6.0", "ppc64", Grade.FAIL),
        ("strange", "x86_64", Grade.FAIL),
    ],
)
def test_kernels(release: str, architecture: str, grade: Grade) -> None:
    check(kernel.kernel(release, architecture), grade, release)


def test_io_uring_forbidden(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(kernel.io_uring(Machine()), Grade.OK)
    monkeypatch.setattr(kernel, "_setup_error", lambda: 1)
    check(kernel.io_uring(machine({})), Grade.WARN, "Operation not permitted", "seccomp-engramd.json")
    disabled = machine({"proc/sys/kernel/io_uring_disabled": "2\n"})
    check(kernel.io_uring(disabled), Grade.WARN, "io_uring_disabled is 2", "sysctl")


def test_the_probe_through_the_binding() -> None:
    liburing = pytest.importorskip("liburing")
    assert set(kernel.NEEDED_OPERATIONS) <= set(liburing.probe())
    assert all(kernel._operations()[name] for name in kernel.NEEDED_OPERATIONS)


def test_limits(machine: Any) -> None:
    # Root as a container runtime starts it, without CAP_IPC_LOCK, and with all capabilities.
    contained = machine({"proc/self/status": "CapEff:\t00000000a80425fb\n"})
    free = machine({"proc/self/status": "CapEff:\t000001ffffffffff\n"})
    for one in (contained, machine({})):
        check(kernel.locked_memory(one, 8 << 20), Grade.WARN, "8.0 MiB", "LimitMEMLOCK=infinity")
    check(kernel.locked_memory(free, 8 << 20), Grade.OK)
    check(kernel.locked_memory(contained, 1 << 30), Grade.OK)
    check(kernel.locked_memory(contained, resource.RLIM_INFINITY), Grade.OK)
    check(kernel.open_files(1024, 256), Grade.WARN, "2304", "LimitNOFILE=2304")
    check(kernel.open_files(4096, 256), Grade.OK)


def test_huge_pages(machine: Any) -> None:
    info, switch = "proc/meminfo", "sys/kernel/mm/transparent_hugepage/enabled"
    check(kernel.huge_pages(machine({switch: "always madvise [never]"})), Grade.WARN, "vm.nr_hugepages")
    check(kernel.huge_pages(machine({switch: "always [madvise] never"})), Grade.OK, "transparent")
    reserved = {info: "HugePages_Free:     512\nHugepagesize:       2048 kB\n", switch: "[never]"}
    check(kernel.huge_pages(machine(reserved)), Grade.OK, "1.0 GiB reserved")
    check(kernel.huge_pages(machine({})), Grade.WARN)


def test_numa(machine: Any) -> None:
    one = {"sys/devices/system/node/node0/cpulist": "0-1023"}
    two = {**one, "sys/devices/system/node/node1/cpulist": "1024-2047"}
    check(kernel.node_placement(machine(one), "auto", [], GIB), Grade.OK, "one node (0)")
    check(kernel.node_placement(machine(two), "auto", [], GIB), Grade.WARN, "2 nodes", "numa_node = N")
    check(kernel.node_placement(machine(two), "0", [], GIB), Grade.OK, "on node 0 alone")
    check(kernel.node_placement(machine(two), "1", [], GIB), Grade.FAIL, "none of the node's processors", '"auto"')


def test_memory(machine: Any) -> None:
    small = machine({"proc/meminfo": "MemAvailable: 2097152 kB\nSwapTotal: 1048576 kB\n"})
    check(memory.available(small, 4 * GIB), Grade.FAIL, "2.0 GiB available", "--dram")
    check(memory.available(small, GIB), Grade.OK)
    check(memory.available(machine({}), GIB), Grade.WARN)
    check(memory.swap(small), Grade.WARN, "1.0 GiB of swap")
    check(memory.swap(machine({"proc/meminfo": "SwapTotal: 0 kB"})), Grade.OK)
    check(memory.coverage(GIB, 2 * GIB), Grade.OK, "50.0 %")
    check(memory.coverage(2 * GIB, 2 * GIB), Grade.OK, "resident")


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/system.slice/engramd.service\n",
         "sys/fs/cgroup/system.slice/engramd.service/memory.max": "max\n",
         "sys/fs/cgroup/system.slice/memory.max": f"{2 * GIB}\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"},
        {"proc/self/cgroup": "4:memory:/box\n1:cpu:/\n",
         "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
         "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
)  # fmt: skip
def test_control_groups(machine: Any, files: dict[str, str]) -> None:
    here = machine(files)
    check(memory.control_group(here, 4 * GIB, 0), Grade.FAIL, "memory limit 2.0 GiB", "--dram to 1.9 GiB")
    check(memory.control_group(here, GIB, 4 * GIB), Grade.WARN, "--arena-limit")
    check(memory.control_group(here, GIB, GIB // 2), Grade.OK)


def test_no_control_group(machine: Any) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}
    check(memory.control_group(machine(files), 1 << 50, 0), Grade.OK)
    check(memory.control_group(machine({}), 1 << 50, 0), Grade.OK)


MOUNTS = """\
22 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw
23 22 0:21 / /data\\040sets rw - nfs4 server:/x rw
24 22 0:22 / /data rw shared:3 - xfs /dev/nvme1n1 rw
25 22 0:23 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("file", "kind", "grade"),
    [
        ("/data/t/x", "xfs", Grade.OK),
        ("/data", "xfs", Grade.OK),
        ("/database/x", "ext4", Grade.OK),
        ("/data sets/x", "nfs4", Grade.FAIL),
        ("/tmp/t/x", "tmpfs", Grade.FAIL),
    ],
)
def test_file_systems(machine: Any, file: str, kind: str, grade: Grade) -> None:
    mount = storage.mount_of(machine({"proc/self/mountinfo": MOUNTS}), file)
    assert mount.kind == kind
    check(storage.file_system(mount, file), grade, kind)


def test_layers_and_fuse() -> None:
    for kind in ("overlay", "fuse.mergerfs"):
        check(storage.file_system(storage.Mount(kind, "/", "x", "0:1"), "/x"), Grade.WARN, kind)


def test_block_devices(machine: Any) -> None:
    drive, partition = "sys/dev/block/259:0/queue", "sys/dev/block/259:1"
    mount = storage.Mount("ext4", "/", "/dev/nvme0n1", "259:0")
    good = {
        f"{drive}/logical_block_size": "512",
        f"{drive}/rotational": "0",
        f"{drive}/scheduler": "[none] mq-deadline",
    }
    for finding in storage.block_device(machine(good), mount):
        check(finding, Grade.OK)
    odd = {
        **good,
        f"{drive}/rotational": "1",
        f"{drive}/scheduler": "none [mq-deadline]",
        f"{drive}/logical_block_size": "65536",
    }
    findings = list(storage.block_device(machine(odd), mount))
    assert [finding.grade for finding in findings] == [Grade.WARN, Grade.FAIL, Grade.WARN]
    check(findings[2], Grade.WARN, "echo none >")
    loop = {**good, "sys/dev/block/259:0/loop/backing_file": "/disk.img"}
    check(next(iter(storage.block_device(machine(loop), mount))), Grade.WARN, "/disk.img")
    # A partition has no queue of its own; its parent folder is the drive.
    root = machine({f"sys/devices/x/{name.removeprefix('sys/dev/block/259:0/')}": text for name, text in good.items()})
    inside = Path(root.path("sys/devices/x/x1"))
    inside.mkdir()
    link = Path(root.path(partition))
    link.parent.mkdir(parents=True)
    link.symlink_to(inside)
    found = list(storage.block_device(root, storage.Mount("ext4", "/", "/dev/x1", "259:1")))
    assert [finding.grade for finding in found] == [Grade.OK, Grade.OK]
    assert [finding.grade for finding in storage.block_device(root, storage.Mount("btrfs", "/", "x", "0:40"))] == [
        Grade.OK
    ]


def test_the_knee_of_a_drive() -> None:
    curve = {1: 12e3, 8: 90e3, 32: 300e3, 64: 470e3, 128: 500e3, 256: 505e3}
    found = storage.measured("/x", lambda file, depth: storage.ReadRate(curve[depth], 80.0, 130.0))
    check(found, Grade.OK, "505 k pages/s", "one alone 80 us (p99 130)", "knee at depth 64")
    assert found.figures == {"iops": 505e3, "read_us": 80.0, "p99_us": 130.0, "knee_depth": 64.0}
    slow = storage.measured("/x", lambda file, depth: storage.ReadRate(900.0, 1100.0, 9000.0))
    check(slow, Grade.WARN, "--dram")
    assert slow.figures["iops"] == 900.0
    check(storage.measured("/x", lambda file, depth: "Operation not permitted"), Grade.WARN, "not measured")


def test_measuring_a_real_file(table: Path) -> None:
    file = next(table.glob("*.pages"))
    found = storage.measure(str(file), 8)
    if isinstance(found, str):
        assert found == "Function not implemented" or "permitted" in found  # no io_uring here
        return
    assert found.reads_per_s > 0
    # With eight reads in flight all the time, each one's share of the time is an eighth of its latency.
    assert found.mean_us == pytest.approx(8e6 / found.reads_per_s)
    assert found.p99_us > found.mean_us / 2
    missing = storage.measure(str(table / "none"), 1)
    assert missing == "No such file or directory"
    check(storage.direct_reads(str(file)), Grade.OK)


def test_a_short_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.pages"
    path.write_bytes(b"x" * 100)
    finding = storage.direct_reads(str(path))
    assert finding.grade is not Grade.OK


def test_sockets(socket_folder: str, start_daemon: Any, as_nobody: Callable[[Callable[[], str]], str]) -> None:
    path = os.path.join(socket_folder, "none.sock")
    check(access.daemon_socket(path), Grade.OK, "no daemon at")
    check(access.daemon_socket("/nowhere/x.sock"), Grade.OK, "does not exist yet")
    Path(path).write_text("")
    check(access.daemon_socket(path), Grade.WARN, "is no socket")
    daemon = start_daemon()
    check(access.daemon_socket(daemon.socket), Grade.OK, "a daemon answers")
    os.chmod(socket_folder, 0o755)
    assert "does not let this user in" in as_nobody(lambda: access.daemon_socket(daemon.socket).text)
    daemon.kill()
    check(access.daemon_socket(daemon.socket), Grade.WARN, "nobody answers")


def test_the_command(engramd: Callable[..., Any], table: Path) -> None:
    done = engramd("doctor", table, "--no-measure", "--dram", "1MiB", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == int(any(one["grade"] == "FAIL" for one in found))
    subjects = {one["subject"] for one in found}
    assert subjects >= {
        "kernel",
        "io_uring",
        "memlock",
        "huge pages",
        "cgroup",
        "table",
        "file system",
        "direct reads",
        "GPU",
    }


def test_a_budget_that_no_machine_holds(engramd: Callable[..., Any], table: Path, tmp_path: Path) -> None:
    """A failure, and the status says so; but not where the tables that are to be served are small."""
    config = tmp_path / "engramd.toml"
    config.write_text('dram = "1000TiB"\n')
    done = engramd("doctor", "--config", config, "--no-measure")
    assert done.returncode == 1
    assert "FAIL  memory: " in done.stdout
    assert "      -> lower --dram" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("FAIL")
    config.write_text(f'dram = "1000TiB"\n[[table]]\npath = "{table}"\n')
    assert "OK    memory: " in engramd("doctor", "--config", config, "--no-measure").stdout


def test_a_damaged_table(engramd: Callable[..., Any], copy: Path) -> None:
    file = next(copy.glob("*.pages"))
    os.truncate(file, file.stat().st_size - 4096)
    done = engramd("doctor", copy, "--no-measure")
    assert done.returncode == 1
    assert "FAIL  table: " in done.stdout
