"""Packs that end early: killed, out of space, out of source. What is there stays good; the next try ends the same."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engramd.checkpoint.index import open_checkpoint
from engramd.checkpoint.mapping import table_source
from engramd.errors import EngramdError
from engramd.table import manifest as manifests
from engramd.table.files import Files
from engramd.table.packer import pack

Engramd = Callable[..., CompletedProcess[str]]
PACK = [sys.executable, "-m", "engramd.cli.main", "pack"]
KILLS = int(os.environ.get("ENGRAM_N", "30"))
RECORD_BYTES = 36
PEAK_OF_CHILD = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def source(engramd: Engramd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 chunks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    assert engramd("synth", path, "--vocab-size", "9000", "--seed", "5").returncode == 0
    return path


@pytest.fixture(scope="module")
def packed(engramd: Engramd, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "t"
    assert engramd("pack", source, path).returncode == 0
    return path


def run_and_kill(command: list[str], condition: Callable[[], bool]) -> bool:
    """Starts a command and kills it (-9) once the condition holds; whether it was still alive then."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and not condition():
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(60)
    return alive


def durable_chunks(table: Path) -> int:
    """Chunks with a record in digests.bin, whose unused rest is zeros."""
    try:
        raw = (table / ".partial" / "digests.bin").read_bytes()
    except FileNotFoundError:
        return 0
    return len(raw.rstrip(b"\0")) // RECORD_BYTES + (len(raw.rstrip(b"\0")) % RECORD_BYTES > 0)


def after(delay_s: float) -> Callable[[], bool]:
    end = time.monotonic() + delay_s
    return lambda: time.monotonic() >= end


def having(table: Path, chunks: int) -> Callable[[], bool]:
    return lambda: durable_chunks(table) >= chunks


@pytest.mark.slow
def test_killed_at_any_moment(engramd: Engramd, source: Path, packed: Path, tmp_path: Path) -> None:
    """The real process killed again and again at random moments. After each kill the table is the old generation, none,
    or the whole new one; in the end it is the same content as of a pack that was left alone."""
    expected = manifests.load(packed)
    chosen = random.Random(int(os.environ.get("ENGRAM_SEED", "20")))
    table = tmp_path / "t"
    command = [*PACK, str(source), str(table), "--sync-interval", "0"]
    begin = time.monotonic()
    subprocess.run([*command[:-3], str(tmp_path / "timed"), *command[-2:]], check=True, stdout=subprocess.DEVNULL)
    whole_s = time.monotonic() - begin
    shutil.rmtree(tmp_path / "timed")
    published, killed, going_on, furthest = 0, 0, 0, 0
    while killed < KILLS:
        if durable_chunks(table):
            going_on += 1
        # Half of them at some time, half of them just behind some chunk's record.
        condition = (
            after(chosen.uniform(0, whole_s * 1.1)) if killed % 2 else having(table, furthest + chosen.randint(1, 4))
        )
        killed += run_and_kill(command, condition)
        furthest = durable_chunks(table)
        if (table / "manifest.json").exists():
            manifest = manifests.load(table)
            assert manifest.identity == expected.identity
            assert manifest.generation >= published
            if manifest.generation > published:
                furthest = 0
                assert engramd("verify", table).returncode == 0
            published = manifest.generation
        else:
            assert published == 0
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    manifest = manifests.load(table)
    assert manifest.generation == published + 1
    assert manifest.identity == expected.identity
    assert engramd("verify", table, "--against", source).returncode == 0
    names = {f"layer-{layer}.g{manifest.generation:06}.pages" for layer in (1, 14)}
    assert set(os.listdir(table)) == names | {"manifest.json"}
    assert going_on >= KILLS // 4, "the kills hardly ever left anything to go on with"


def interrupted(source: Path, table: Path, chunks: int = 2) -> int:
    """Leaves a pack of at least `chunks` durable chunks behind; returns how many."""
    command = [*PACK, str(source), str(table), "--sync-interval", "0"]
    for _ in range(50):
        if run_and_kill(command, having(table, chunks)) and durable_chunks(table) >= chunks:
            return durable_chunks(table)
        shutil.rmtree(table)
    raise AssertionError("the pack always ends before it can be killed")


def test_going_on_reads_only_what_is_left(engramd: Engramd, source: Path, packed: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    chunks = interrupted(source, table)
    # Damage in a chunk that is already there would be packed again if it were read again.
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert f"going on with an interrupted pack: {chunks} of 8 chunks are there" in done.stderr
    assert manifests.load(table).identity == manifests.load(packed).identity
    assert engramd("verify", table, "--against", source).returncode == 0


def test_records_that_do_not_check_are_not_believed(
    engramd: Engramd, source: Path, packed: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t"
    chunks = interrupted(source, table)
    digests = table / ".partial" / "digests.bin"
    raw = bytearray(digests.read_bytes())
    raw[RECORD_BYTES] ^= 1  # the second record
    digests.write_bytes(raw)
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert chunks >= 2
    assert "1 of 8 chunks are there" in done.stderr
    assert manifests.load(table).identity == manifests.load(packed).identity


def test_records_of_an_earlier_try_are_not_believed(engramd: Engramd, source: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    interrupted(source, table)
    old = (table / ".partial" / "digests.bin").read_bytes()
    shutil.rmtree(table)
    interrupted(source, table, 1)
    (table / ".partial" / "digests.bin").write_bytes(old)
    done = engramd("pack", source, table)
    assert "0 of 8 chunks are there" in done.stderr
    assert engramd("verify", table, "--against", source).returncode == 0


def test_a_changed_source_is_refused_unless_restarted(engramd: Engramd, source: Path, tmp_path: Path) -> None:
    copy, table = tmp_path / "copy", tmp_path / "t"
    shutil.copytree(source, copy)
    interrupted(copy, table)
    shard = copy / "model-00048-of-000048.safetensors"
    with open(shard, "r+b") as file:
        file.seek(5000)
        file.write(b"\x01")
    before = durable_chunks(table)
    done = engramd("pack", copy, table)
    assert done.returncode == 1
    assert "model-00048-of-000048.safetensors has another mtime" in done.stderr
    assert "--restart" in done.stderr
    assert durable_chunks(table) == before
    assert not (table / "manifest.json").exists()
    done = engramd("pack", copy, table, "--restart")
    assert done.returncode == 0, done.stderr
    assert "going on" not in done.stderr
    assert engramd("verify", table, "--against", copy).returncode == 0
    assert engramd("verify", table, "--against", source).returncode == 1


def test_another_source_and_other_stripes_are_refused(
    engramd: Engramd, source: Path, tiny: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t"
    interrupted(source, table)
    assert "pack in progress of another source" in engramd("pack", tiny, table).stderr
    (tmp_path / "drive").mkdir()
    done = engramd("pack", source, table, "--stripe", tmp_path / "drive")
    assert done.returncode == 1
    assert "--stripe (none)" in done.stderr
    assert engramd("pack", tiny, table, "--restart").returncode == 0
    assert engramd("verify", table, "--against", tiny).returncode == 0


def test_stripes_go_on_and_are_given_up(engramd: Engramd, source: Path, packed: Path, tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    table = tmp_path / "t"
    command = [*PACK, str(source), str(table), "--sync-interval", "0", "--stripe", ",".join(map(str, drives))]
    while not (run_and_kill(command, having(table, 3)) and durable_chunks(table) >= 3):
        shutil.rmtree(table)
    assert all(name.endswith(".unfinished") for drive in drives for name in os.listdir(drive))
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stderr
    manifest = manifests.load(table)
    assert manifest.identity == manifests.load(packed).identity
    assert {len(layer.files) for layer in manifest.layers} == {2}
    while not (run_and_kill(command, having(table, 1)) and durable_chunks(table)):
        pass
    assert engramd("pack", source, table, "--restart").returncode == 0
    assert [os.listdir(drive) for drive in drives] == [[], []]


def test_a_damaged_journal(engramd: Engramd, source: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    interrupted(source, table)
    (table / ".partial" / "journal.json").write_text('{"pack_id": 5}')
    done = engramd("pack", source, table)
    assert done.returncode == 1
    assert "journal.json: damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert engramd("pack", source, table, "--restart").returncode == 0


def test_a_source_that_changes_while_it_is_packed(tiny: Path, tmp_path: Path) -> None:
    shard = tiny / "model-00047-of-000048.safetensors"

    class Touching(Files):
        def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            os.utime(shard)
            return super().pwrite(fd, data, offset)

    with pytest.raises(EngramdError, match="changed while it was being read"):
        pack(table_source(open_checkpoint(str(tiny))), str(tmp_path / "t"), files=Touching())
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_a_source_that_shrinks_while_it_is_packed(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    shard = copy / "model-00048-of-000048.safetensors"
    plan = table_source(open_checkpoint(str(copy)))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(EngramdError, match="truncated while it was being read"):
        pack(plan, str(tmp_path / "t"))
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_interrupted_by_the_keyboard(engramd: Engramd, source: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    for _ in range(20):
        process = subprocess.Popen(
            [*PACK, str(source), str(table), "--sync-interval", "0"], stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and durable_chunks(table) < 2:
            time.sleep(0.0005)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        if process.returncode:
            break
        shutil.rmtree(table)
    assert process.returncode == 1
    assert stderr == "engramd: interrupted; the same command goes on where it stopped\n"
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stderr
    assert engramd("verify", table, "--against", source).returncode == 0


@pytest.mark.parametrize("verb", ["pack", "verify"])
def test_memory_is_bounded(source: Path, packed: Path, tmp_path: Path, verb: str) -> None:
    """Under 512 MiB at their peak; the buffers are the same for any size of table."""
    arguments = [str(source), str(tmp_path / "t")] if verb == "pack" else [str(packed), "--against", str(source)]
    # Through a small process: a child's peak begins with that of the process it was made from, pytest's own here.
    measured = subprocess.run(
        [sys.executable, "-c", PEAK_OF_CHILD, *PACK[:-1], verb, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert measured.returncode == 0
    assert int(measured.stdout.splitlines()[-1]) < 512 << 10


@pytest.mark.parametrize("interval", ["-1", "nan", "x", "inf"])
def test_a_wrong_interval(engramd: Engramd, source: Path, tmp_path: Path, interval: str) -> None:
    done = engramd("pack", source, tmp_path / "t", f"--sync-interval={interval}")
    assert done.returncode == 2
    assert not (tmp_path / "t").exists()


# Full disks


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one generation of `packed` and half of the next."""
    mount = tmp_path / "drive"
    mount.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=190m none {mount} 2>/dev/null") != 0:
        pytest.skip("cannot mount a file system here")
    yield mount
    assert os.system(f"umount {mount}") == 0


def test_a_full_disk_is_seen_before_anything_is_written(engramd: Engramd, source: Path, small_drive: Path) -> None:
    table = small_drive / "t"
    assert engramd("pack", source, table).returncode == 0
    before = {name: (table / name).stat().st_mtime_ns for name in os.listdir(table)}
    done = engramd("pack", source, table)
    assert done.returncode == 1
    assert "not enough space" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {name: (table / name).stat().st_mtime_ns for name in os.listdir(table)} == before
    done = engramd("pack", source, small_drive / "other")
    assert done.returncode == 1
    assert not (small_drive / "other").exists()


def test_a_disk_that_fills_up_midway(engramd: Engramd, source: Path, small_drive: Path, packed: Path) -> None:
    """Real ENOSPC from a real file system: somebody else's file takes the room while the pack runs."""
    table, balloon = small_drive / "t", small_drive / "balloon"

    class Filling(Files):
        writes = 0

        def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            self.writes += len(data) > 1 << 20
            if self.writes == 4 and not balloon.exists():
                with open(balloon, "wb") as file:
                    found = os.statvfs(small_drive)
                    os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (5 << 20))
            return super().pwrite(fd, data, offset)

    plan = table_source(open_checkpoint(str(source)))
    with pytest.raises(EngramdError, match="no space left on the drive") as caught:
        pack(plan, str(table), files=Filling(), sync_interval_s=1000)
    assert "run the same command again to go on" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(table) == [".partial"]
    kept = durable_chunks(table)
    assert kept >= 3  # finished chunks are made durable on the way out
    # Still no room: said before anything is written, with what is there taken into account.
    assert "not enough space" in engramd("pack", source, table).stderr
    assert durable_chunks(table) == kept
    balloon.unlink()
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert f"{kept} of 8 chunks are there" in done.stderr
    assert manifests.load(table).identity == manifests.load(packed).identity


def test_a_limit_on_file_sizes(engramd: Engramd, source: Path, tiny: Path, tmp_path: Path) -> None:
    """The real command, refused by the kernel midway (RLIMIT_FSIZE), with an older generation there."""
    table = tmp_path / "t"
    assert engramd("pack", tiny, table).returncode == 0
    old = manifests.load(table)
    done = subprocess.run(
        [*PACK, str(source), str(table)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 20, 40 << 20)),
    )
    assert done.returncode == 1
    assert "larger than the file system or the process's limit allows" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert manifests.load(table) == old
    assert engramd("verify", table).returncode == 0
    done = engramd("pack", source, table)
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stderr
    assert manifests.load(table).generation == 2
