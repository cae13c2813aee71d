"""A table's files and the drives under them: file system, direct reads, block size, scheduler, measured rates."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engramd.doctor.finding import Finding, Grade, Machine, fail, ok, warn
from engramd.errors import EngramdError
from engramd.sizes import format_size
from engramd.table import manifest as manifests
from engramd.table.manifest import Manifest

NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.ceph", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs",
    "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs",
    "virtiofs", "wekafs",
}  # fmt: skip
MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"}
LAYERED = {"aufs", "overlay", "ecryptfs"}
PAGE_BYTES = 4096
DEPTHS = (1, 8, 32, 64, 128, 256)
KNEE_SHARE = 0.9
SLOW_READS_A_SECOND = 20_000
MEASURE_MS = 250


@dataclass(frozen=True)
class Mount:
    """The file system that a file lies on: `device` is its MAJOR:MINOR."""

    kind: str
    point: str
    source: str
    device: str


def findings(machine: Machine, directory: str, measures: bool) -> Iterator[Finding]:
    """Everything about one table. measures: read from it, for about MEASURE_MS a queue depth."""
    try:
        table = manifests.load(directory)
    except EngramdError as error:
        yield fail("table", str(error), "pack or copy the table again")
        return
    rows = sum(layer.rows for layer in table.layers) * table.row_bytes
    layers = ", ".join(str(layer.layer) for layer in table.layers)
    text = f"{directory}: generation {table.generation}, layers {layers}, {format_size(rows)} of rows"
    yield ok("table", text)
    files = [file.path for layer in table.layers for file in layer.files]
    mounts = {mount_of(machine, file): file for file in reversed(files)}
    for mount, file in sorted(mounts.items(), key=lambda one: one[1]):
        yield file_system(mount, file)
        yield direct_reads(file)
        yield from block_device(machine, mount)
        if measures:
            yield measured(file)


def row_bytes_of(directory: str) -> int:
    """Bytes of a table's rows; 0 where it cannot be read."""
    try:
        table: Manifest = manifests.load(directory, check_files=False)
    except EngramdError:
        return 0
    return sum(layer.rows for layer in table.layers) * table.row_bytes


def mount_of(machine: Machine, file: str) -> Mount:
    """Where the file lies, by the longest mount point above it."""
    path = os.path.realpath(file)
    best = Mount("unknown", "/", "", "")
    for line in (machine.read("proc/self/mountinfo") or "").splitlines():
        words = line.split(" ")
        if "-" not in words or len(words) < 10:
            continue
        tail = words[words.index("-") + 1 :]
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(tail[0], point, tail[1], words[2])
    return best


def file_system(mount: Mount, file: str) -> Finding:
    """NVMe rows belong on a local file system over a drive."""
    text = f"{file} on {mount.kind} at {mount.point}"
    if mount.kind in NETWORK:
        return fail("file system", f"{text}: a network away", "copy the table to a local NVMe drive")
    if mount.kind in MEMORY:
        return fail(
            "file system",
            f"{text}: pages in memory, outside the DRAM budget, and without direct reads",
            "put the table on a drive; to have all rows in DRAM raise --dram to the table's size",
        )
    if mount.kind in LAYERED:
        return warn("file system", f"{text}: a layer between", "mount a volume of the host's own file system there")
    if mount.kind.startswith("fuse"):
        return warn("file system", f"{text}: each read passes a process", "put the table on ext4 or xfs")
    return ok("file system", text)


def direct_reads(file: str) -> Finding:
    """Whether O_DIRECT works, at the alignment that pages have."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return warn("direct reads", "refused: pages pass the page cache, outside the budget", "use ext4 or xfs")
        return fail("direct reads", f"{file}: {error.strerror}", "make it readable for the daemon's user")
    try:
        with mmap.mmap(-1, 2 * PAGE_BYTES) as memory:
            count = os.preadv(descriptor, [memoryview(memory)[:PAGE_BYTES]], 0)
    except OSError as error:
        return fail(
            "direct reads", f"{file}: a page of {PAGE_BYTES} bytes: {error.strerror}", "use a 4 KiB block device"
        )
    finally:
        os.close(descriptor)
    if count != PAGE_BYTES:
        return fail("direct reads", f"{file}: {count} of {PAGE_BYTES} bytes", "the file is damaged: copy it again")
    return ok("direct reads", f"pages of {PAGE_BYTES} bytes")


def block_device(machine: Machine, mount: Mount) -> Iterator[Finding]:
    """The drive's own properties, where the file system has one."""
    folder = f"sys/dev/block/{mount.device}"
    if machine.read(f"{folder}/queue/logical_block_size") is None:
        folder += "/.."  # a partition: the drive has the queue
    block = machine.read(f"{folder}/queue/logical_block_size")
    if block is None:
        yield ok("drive", f"{mount.source or mount.kind}: the kernel shows no block device")
        return
    name = os.path.basename(os.path.realpath(machine.path(folder)))
    backing = machine.read(f"{folder}/loop/backing_file")
    if backing is not None:
        yield warn("drive", f"{name} is a loop device over {backing}", "put the table on the drive itself")
    elif machine.read(f"{folder}/queue/rotational") == "1" and not name.startswith("vd"):
        yield warn("drive", f"{name} rotates: some hundred rows a second", "use an NVMe drive")
    else:
        yield ok("drive", f"{name}, blocks of {block} bytes")
    if int(block) > PAGE_BYTES:
        yield fail("block size", f"{name}: {block} bytes, but pages have {PAGE_BYTES}", "format it with 4 KiB blocks")
    scheduler = machine.read(f"{folder}/queue/scheduler") or "none"
    chosen = re.search(r"\[([a-z-]+)\]", scheduler)
    if chosen and chosen[1] != "none":
        yield warn(
            "scheduler",
            f"{name}: {chosen[1]} sorts reads that an NVMe drive does not need sorted",
            f"echo none > /sys/block/{name}/queue/scheduler (a udev rule makes it last)",
        )
    else:
        yield ok("scheduler", f"{name}: none")


@dataclass(frozen=True)
class ReadRate:
    """Random 4 KiB reads at one queue depth."""

    reads_per_s: float
    mean_us: float
    p99_us: float


Measure = Callable[[str, int], "ReadRate | str"]


def measure(file: str, depth: int, duration_ms: int = MEASURE_MS) -> ReadRate | str:
    """Direct reads at random places of a file at a queue depth; a text where they cannot be measured."""
    from engramd._engine import ffi, lib

    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
    try:
        descriptor = os.open(file, flags)
    except OSError as error:
        return error.strerror or "cannot be opened"
    try:
        rate = ffi.new("engram_read_rate *")
        size = os.fstat(descriptor).st_size
        number = lib.engram_measure_reads(descriptor, size, depth, duration_ms, depth, rate)
    finally:
        os.close(descriptor)
    if number:
        return os.strerror(number)
    return ReadRate(rate.reads / max(rate.seconds, 1e-9), rate.mean_latency_us, rate.p99_latency_us)


def measured(file: str, measure: Measure = measure) -> Finding:
    """Reads a second by queue depth, and the knee: the least depth that gives KNEE_SHARE of the most."""
    rates: dict[int, ReadRate] = {}
    for depth in DEPTHS:
        found = measure(file, depth)
        if isinstance(found, str):
            return warn("reads", f"{file}: not measured at queue depth {depth}: {found}", "see the line on io_uring")
        rates[depth] = found
    most = max(rate.reads_per_s for rate in rates.values())
    alone = rates[DEPTHS[0]]
    knee = next(depth for depth, rate in rates.items() if rate.reads_per_s >= KNEE_SHARE * most)
    curve = ", ".join(f"{depth}: {rate.reads_per_s / 1000:,.1f} k" for depth, rate in rates.items())
    text = (
        f"{most / 1000:,.0f} k pages/s, one alone {alone.mean_us:.0f} us (p99 {alone.p99_us:.0f}), "
        f"knee at depth {knee} ({curve})"
    )
    figures = {"iops": most, "read_us": alone.mean_us, "p99_us": alone.p99_us, "knee_depth": float(knee)}
    if most < SLOW_READS_A_SECOND:
        fix = "cold rows will be slow: use an NVMe drive of its own, or a larger --dram"
        return Finding(Grade.WARN, "reads", text, fix, figures)
    return Finding(Grade.OK, "reads", text, figures=figures)
