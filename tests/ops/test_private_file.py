"""Files that appear whole or not at all, for their owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engramd.private_file import replacing


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")
    path.chmod(0o644)
    with replacing(str(path)) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["x"]


def test_a_failure_leaves_all_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def write_half() -> None:
        with replacing(str(path)) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(FileNotFoundError), replacing(str(tmp_path / "missing" / "x")):
        raise AssertionError("there is no such folder")


def test_what_a_killed_process_left_is_not_written_to(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "other"
    other.write_text("somebody's")
    left = Path(f"{path}.partial-{os.getpid()}")
    left.symlink_to(other)
    with replacing(str(path)) as file:
        file.write(b"mine")
    assert (path.read_text(), other.read_text()) == ("mine", "somebody's")
    assert not path.is_symlink()
    assert not os.path.lexists(left)
