"""Control groups' memory limits. The groups are files in a folder here: a double, since making real ones is not every
machine's to allow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from engramd.daemon.memory_limit import OWN_BYTES, check_budget, machine_memory, memory_limit
from engramd.errors import EngramdError
from engramd.synth.packed import SparseLayer, write_sparse
from engramd.table.manifest import Part

MIB = 1 << 20


def make(folder: Path, files: dict[str, str], groups: str) -> tuple[str, str]:
    """(groups, mounts) of a made-up machine."""
    for name, text in files.items():
        (folder / "mounts" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mounts" / name).write_text(text)
    (folder / "groups").write_text(groups)
    return str(folder / "groups"), str(folder / "mounts")


@pytest.mark.parametrize(
    ("files", "groups", "limit"),
    [
        ({"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}, "0::/a/b\n", 1000),
        ({"a/b/memory.max": "500\n", "a/memory.max": "1000\n"}, "0::/a/b\n", 500),
        ({"a/b/memory.max": "max\n"}, "0::/a/b\n", None),
        ({"unified/a/memory.max": "700\n"}, "0::/a\n", 700),
        ({"memory/a/memory.limit_in_bytes": "800\n"}, "4:memory:/a\n0::/\n", 800),
        ({"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, "4:memory:/a\n", None),
        ({"memory/memory.limit_in_bytes": "900\n"}, "4:cpu,memory:/docker/not-visible\n", 900),
        ({"memory.max": "64\n"}, "0::/../../elsewhere\n", None),
        ({"a/memory.max": "nonsense\n"}, "0::/a\nnonsense\n::\n", None),
        ({}, "", None),
    ],
)
def test_the_tightest_limit(tmp_path: Path, files: dict[str, str], groups: str, limit: int | None) -> None:
    found = memory_limit(*make(tmp_path, files, groups))
    assert (None if found is None else found[0]) == limit
    if found is not None:
        assert Path(found[1]).exists()


def test_a_budget_that_cannot_fit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    limit = (1024 * MIB, "/sys/fs/cgroup/x/memory.max")
    with pytest.raises(EngramdError, match=r"budget of 1.0 GiB .*memory.max.*lower --dram to 928.0 MiB or less"):
        check_budget(1024 * MIB, 100 << 30, MIB, limit)
    check_budget(1024 * MIB - OWN_BYTES, 100 << 30, 0, limit)
    check_budget(100 << 30, 512 * MIB, 0, limit)  # no more than the tables
    with caplog.at_level(logging.WARNING, logger="engramd"):
        check_budget(512 * MIB, 100 << 30, 4096 * MIB, limit)
    logging.getLogger("engramd")


def test_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24633436 kB\nMemFree:        1 kB\n")
    assert machine_memory(str(tmp_path / "meminfo")) == (24633436 << 10, str(tmp_path / "meminfo"))
    assert machine_memory(str(tmp_path / "none")) is None
    (tmp_path / "meminfo").write_text("nonsense\n")
    assert machine_memory(str(tmp_path / "meminfo")) is None


def test_a_budget_above_the_machines_memory(start_daemon: Any, engramd: Any, tmp_path: Path) -> None:
    """Refused at start, by the check and while serving where the tables would fill it; harmless for small ones."""
    found = machine_memory()
    if found is None or found[0] >= 4 << 40:
        pytest.skip("this machine would hold the table")
    parts = (Part("value", 1 << 16, "U8"),)
    write_sparse(str(tmp_path / "t"), [SparseLayer(1, (1 << 26,))], parts, 0)  # 4 TiB
    for more in ((), ("--check-config",)):
        done = engramd("serve", tmp_path / "t", "--socket", tmp_path / "s", "--dram", "100TiB", *more)
        assert done.returncode == 1
        assert "a DRAM budget of 100.0 TiB needs" in done.stderr
        assert "lower --dram to" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    daemon = start_daemon(tmp_path / "t")
    done = engramd("budget", "100TiB", "--socket", daemon.socket)
    assert done.returncode == 1
    assert "lower --dram to" in done.stderr
    daemon = start_daemon(dram="900TiB")
    daemon.wait_for_log("layer 14 is resident")
