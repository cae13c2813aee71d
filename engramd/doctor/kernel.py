"""Kernel, io_uring, limits, huge pages, NUMA."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
from collections.abc import Iterator

from engramd import numa
from engramd.doctor.finding import Finding, Machine, fail, ok, warn
from engramd.errors import EngramdError
from engramd.sizes import format_size

OLDEST_KERNEL = (5, 1)  # F_SEAL_FUTURE_WRITE, without which no session is opened
RING_KERNEL = (5, 13)  # multishot polls
GOOD_KERNEL = (6, 1)  # DEFER_TASKRUN, SINGLE_ISSUER
NEEDED_OPERATIONS = ("IORING_OP_READ", "IORING_OP_READ_FIXED", "IORING_OP_POLL_ADD", "IORING_OP_ASYNC_CANCEL")
SETUP_CALL = 425  # io_uring_setup, the same number on every architecture
CAP_IPC_LOCK = 14
SESSION_DESCRIPTORS = 8  # at most, of one session
_SECCOMP_FIX = (
    "allow io_uring_setup, io_uring_enter, io_uring_register (containers: deploy/seccomp-engramd.json), or live with "
    'reader = "pread"'
)


def findings(machine: Machine, sessions: int) -> Iterator[Finding]:
    """All of them but NUMA, which asks where the tables lie. sessions: how many shall be open at once."""
    yield kernel(platform.release(), platform.machine())
    yield io_uring(machine)
    yield seccomp(machine)
    yield locked_memory(machine, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1], sessions)
    yield huge_pages(machine)


def kernel(release: str, architecture: str) -> Finding:
    """The kernel's version, and whether this is a 64-bit little-endian machine."""
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    text = f"Linux {release} on {architecture}"
    if architecture not in ("x86_64", "aarch64"):
        return fail(
            "kernel", text, "run on x86-64 or 64-bit ARM: layouts in shared memory are little-endian, 64 bits wide"
        )
    if version < OLDEST_KERNEL:
        return fail("kernel", f"{text}: reply arenas cannot be sealed", "take Linux 6.1 or later")
    if version < RING_KERNEL:
        return warn(
            "kernel", f"{text}: too old for io_uring as used here", "take Linux 6.1 or later; pread serves till then"
        )
    if version < GOOD_KERNEL:
        return warn("kernel", f"{text}: io_uring without DEFER_TASKRUN", "take Linux 6.1 or later for fewer interrupts")
    return ok("kernel", text)


def io_uring(machine: Machine) -> Finding:
    """Whether a ring can be had here and now, by this user; which operations it has, where the binding is installed."""
    switch = machine.read("proc/sys/kernel/io_uring_disabled")
    error = _setup_error()
    if error == 0:
        missing = [name for name, there in _operations().items() if name in NEEDED_OPERATIONS and not there]
        if missing:
            return warn("io_uring", f"without {', '.join(missing)}", "take Linux 6.1 or later; pread serves till then")
        return ok("io_uring", "a ring can be made")
    text = f"io_uring_setup: {os.strerror(error)}"
    if switch in ("1", "2"):
        return warn(
            "io_uring",
            f"{text}; kernel.io_uring_disabled is {switch}",
            "sysctl kernel.io_uring_disabled=0 (1: kernel.io_uring_group alone); pread serves till then, with more CPU",
        )
    return warn(
        "io_uring", text, _SECCOMP_FIX if error in (errno.EPERM, errno.EACCES) else "pread serves, with more CPU"
    )


def _setup_error() -> int:
    """The errno of io_uring_setup(2 entries), 0 where it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    descriptor = libc.syscall(SETUP_CALL, 2, parameters)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def _operations() -> dict[str, bool]:
    """The kernel's io_uring operations, by the Python binding; {} where it is not installed (extra `doctor`)."""
    try:
        import liburing
    except ImportError:
        return {}
    return dict(liburing.probe())


def seccomp(machine: Machine) -> Finding:
    """Whether a filter stands between this process and the kernel."""
    mode = machine.fields("proc/self/status").get("Seccomp", "0")
    if mode == "0":
        return ok("seccomp", "no filter")
    return ok("seccomp", "a filter is in place; what it forbids shows in the other lines")


def locked_memory(machine: Machine, limit_bytes: int) -> Finding:
    """RLIMIT_MEMLOCK: io_uring registers the page buffers, which counts as locking them. A capability lifts the limit,
    and root in a container often lacks it."""
    capabilities = int(machine.fields("proc/self/status").get("CapEff", "0"), 16)
    if limit_bytes == resource.RLIM_INFINITY or capabilities >> CAP_IPC_LOCK & 1:
        return ok("memlock", "unlimited")
    text = f"limit {format_size(limit_bytes)}"
    if limit_bytes < 64 << 20:
        return warn(
            "memlock",
            f"{text}: page buffers cannot be registered, and reads cost more CPU",
            "LimitMEMLOCK=infinity in the unit, `ulimits: memlock` in compose, or /etc/security/limits.conf",
        )
    return ok("memlock", text)


def open_files(limit: int, sessions: int) -> Finding:
    """RLIMIT_NOFILE: sessions have descriptors."""
    needed = sessions * SESSION_DESCRIPTORS + 256
    if limit != resource.RLIM_INFINITY and limit < needed:
        return warn(
            "open files",
            f"limit {limit}, but {sessions} sessions may need {needed}",
            f"LimitNOFILE={needed} in the unit (ulimit -n), or fewer `sessions`",
        )
    return ok("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit}")


def huge_pages(machine: Machine) -> Finding:
    """Without huge pages a row in DRAM costs several times as much."""
    reserved, page = (
        machine.fields("proc/meminfo").get("HugePages_Free", "0"),
        machine.kib("proc/meminfo", "Hugepagesize"),
    )
    transparent = machine.read("sys/kernel/mm/transparent_hugepage/enabled") or ""
    if reserved.isdigit() and int(reserved) and page:
        return ok("huge pages", f"{format_size(int(reserved) * page)} reserved and free")
    if "[never]" in transparent or not transparent:
        return warn(
            "huge pages",
            "none reserved, transparent ones off: each row in DRAM costs about three times as much",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve some: sysctl vm.nr_hugepages=N",
        )
    return ok("huge pages", "transparent, on request")


def node_placement(machine: Machine, setting: str, directories: list[str], budget_bytes: int) -> Finding:
    """What `numa_node` would do here for tables in these directories: memory of another node is slower."""
    devices = {os.stat(directory).st_dev for directory in directories if os.path.isdir(directory)}
    nodes, root = numa.nodes_of(machine.path("")), machine.path("")
    try:
        placement = numa.place(setting, nodes, numa.drive_nodes(devices, root), budget_bytes, os.sched_getaffinity(0))
    except EngramdError as error:
        return fail("NUMA", str(error), 'correct numa_node in the configuration, or leave it at "auto"')
    if len(nodes) > 1 and placement.policy is None:
        return warn(
            "NUMA",
            placement.text,
            "numa_node = N for the node of the drive (/sys/block/DRIVE/device/numa_node), or all tables on one node",
        )
    return ok("NUMA", placement.text)
