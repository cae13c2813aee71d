"""Control groups' memory limits. The groups are files in a folder here: a double, since making real ones is not every
machine's to allow."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engramd.daemon.memory_limit import OWN_BYTES, check_budget, memory_limit
from engramd.errors import EngramdError

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
