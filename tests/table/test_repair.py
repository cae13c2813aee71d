"""engramd repair: exactly the bad pages are rewritten, from the right checkpoint alone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.damage import flip_bit

Engramd = Callable[..., CompletedProcess[str]]
PAGE = 4096


def contents(table: Path) -> dict[str, bytes]:
    return {name: (table / name).read_bytes() for name in os.listdir(table)}


def damage(path: Path, chosen: random.Random) -> set[int]:
    """Damages some pages in all the ways there are; returns which."""
    pages = path.stat().st_size // PAGE
    bad = set(chosen.sample(range(pages), 12))
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        for number, page in enumerate(sorted(bad)):
            file.seek(page * PAGE)
            old = whole[page * PAGE : (page + 1) * PAGE]
            other = (page + 1) % pages
            new = [
                bytes(PAGE),
                os.urandom(PAGE),
                whole[other * PAGE : (other + 1) * PAGE],
                old[:2048] + bytes(2048),
                bytes([old[0] ^ 1]) + old[1:],
                old[:-1] + bytes([old[-1] ^ 0x80]),
                old[:3970] + b"\1" + old[3971:],
            ][number % 7]
            file.write(new)
    return bad


def test_exactly_the_bad_pages_are_rewritten(engramd: Engramd, checkpoint: Path, table: Path, copy: Path) -> None:
    chosen = random.Random(4)
    good = contents(table)
    bad = {layer: damage(copy / f"layer-{layer}.g000001.pages", chosen) for layer in (1, 14)}
    assert engramd("verify", copy).returncode == 1
    done = engramd("repair", copy, "--from", checkpoint)
    assert done.returncode == 0, done.stderr
    assert f"{sum(map(len, bad.values()))} rewritten" in done.stdout
    assert contents(copy) == good
    assert engramd("verify", copy, "--against", checkpoint).returncode == 0
    again = engramd("repair", copy, "--from", checkpoint)
    assert again.returncode == 0
    assert " 0 rewritten" in again.stdout


def test_nothing_else_is_written(checkpoint: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes themselves, counted at the file layer."""
    from engramd.checkpoint.index import open_checkpoint
    from engramd.checkpoint.mapping import table_source
    from engramd.table import manifest as manifests
    from engramd.table.files import Files
    from engramd.table.repair import repair

    written: list[tuple[int, int]] = []

    class Watched(Files):
        def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            written.append((offset, len(data)))
            return super().pwrite(fd, data, offset)

    file = copy / "layer-1.g000001.pages"
    bad = damage(file, random.Random(9))
    source = table_source(open_checkpoint(str(checkpoint), None))
    report = repair(manifests.load(copy), source, Watched())
    assert [page for _, page in report.bad] == sorted(bad)
    assert sorted(written) == [(page * PAGE, PAGE) for page in sorted(bad)]


def test_a_file_that_was_cut_is_made_whole(engramd: Engramd, checkpoint: Path, table: Path, copy: Path) -> None:
    whole = (copy / "layer-14.g000001.pages").stat().st_size
    os.truncate(copy / "layer-14.g000001.pages", whole - 200 * PAGE + 17)
    done = engramd("repair", copy, "--from", checkpoint)
    assert done.returncode == 0, done.stderr
    assert contents(copy) == contents(table)


def test_another_checkpoint_is_refused_before_anything_is_written(engramd: Engramd, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert engramd("synth", other, "--vocab-size", "2000", "--seed", "8").returncode == 0
    damage(copy / "layer-1.g000001.pages", random.Random(1))
    before = contents(copy)
    done = engramd("repair", copy, "--from", other)
    assert done.returncode == 1
    assert "nothing was written" in done.stderr
    assert contents(copy) == before


def test_a_checkpoint_of_one_other_byte_is_refused(
    engramd: Engramd, checkpoint: Path, copy: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    largest = max(changed.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip_bit(largest, -1000)
    before = contents(copy)
    done = engramd("repair", copy, "--from", changed)
    assert done.returncode == 1
    assert "identity" in done.stderr
    assert contents(copy) == before


def test_refusals(engramd: Engramd, checkpoint: Path, copy: Path, tmp_path: Path) -> None:
    import fcntl

    assert engramd("repair", copy).returncode == 2
    descriptor = os.open(copy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    busy = engramd("repair", copy, "--from", checkpoint)
    os.close(descriptor)
    assert busy.returncode == 1
    assert "a pack is at work" in busy.stderr
    os.unlink(copy / "layer-1.g000001.pages")
    gone = engramd("repair", copy, "--from", checkpoint)
    assert gone.returncode == 1
    assert "pack again" in gone.stderr
    sparse: Any = tmp_path / "sparse"
    assert engramd("synth", "--packed", sparse, "--vocab-size", "2000", "--rows", "heads").returncode == 0
    assert "sparse" in engramd("repair", sparse, "--from", checkpoint).stderr
