"""`engramd verify` on real tables with real damage: what is wrong is found, counted and named."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from tests.damage import flip_bit

Engramd = Callable[..., CompletedProcess[str]]
PAGE = 4096


def data(table: Path, layer: int = 1) -> Path:
    (path,) = table.glob(f"layer-{layer}.g*.pages")
    return path


def test_a_good_table(engramd: Engramd, table: Path) -> None:
    done = engramd("verify", table)
    assert done.returncode == 0
    assert "0 bad" in done.stdout
    pages = sum(os.path.getsize(data(table, layer)) for layer in (1, 14)) // PAGE
    assert f"{pages} pages" in done.stdout


def test_single_bits(engramd: Engramd, copy: Path) -> None:
    """One flipped bit in each of 20 random pages: all are found, each by its page and, inside a row, its row."""
    path = data(copy, 14)
    chosen = random.Random(4)
    pages = sorted(chosen.sample(range(path.stat().st_size // PAGE), 20))
    expected = []
    for page in pages:
        bit = chosen.randrange(PAGE * 8)
        byte = bit // 8
        flip_bit(path, page * PAGE + byte, bit % 8)
        if byte < 15 * 264:
            expected.append(f"layer 14 page {page} row {page * 15 + byte // 264}: ")
        elif 15 * 264 + 12 <= byte < PAGE - 64:
            expected.append(f"layer 14 page {page} row {page * 15 + (byte - 15 * 264 - 12) // 4}: ")
        else:
            expected.append(f"layer 14 page {page}: ")
    done = engramd("verify", copy)
    assert done.returncode == 1
    found = [line.split(": ", 1)[1] for line in done.stderr.splitlines() if ": layer " in line]
    assert len(found) == 20
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)
    assert "20 bad" in done.stdout
    assert "Traceback" not in done.stderr


def test_many_bad_pages_are_counted_and_the_first_ones_shown(engramd: Engramd, copy: Path) -> None:
    with open(data(copy), "r+b") as file:
        file.write(bytes(100 * PAGE))
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert "100 bad" in done.stdout
    assert "... and 80 more" in done.stderr
    assert sum(": layer 1 page " in line for line in done.stderr.splitlines()) == 20


def test_swapped_pages(engramd: Engramd, copy: Path) -> None:
    with open(data(copy), "r+b") as file:
        raw = file.read(2 * PAGE)
        file.seek(0)
        file.write(raw[PAGE:] + raw[:PAGE])
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert "layer 1 page 0 row 0: " in done.stderr
    assert "layer 1 page 1 row 15: " in done.stderr
    assert "2 bad" in done.stdout


def test_a_page_of_the_other_layer(engramd: Engramd, copy: Path) -> None:
    raw = data(copy, 14).read_bytes()[7 * PAGE : 8 * PAGE]
    with open(data(copy), "r+b") as file:
        file.seek(7 * PAGE)
        file.write(raw)
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert "layer 1 page 7 row 105: " in done.stderr
    assert "1 bad" in done.stdout


def test_a_page_of_the_generation_before(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    assert engramd("pack", tiny, table).returncode == 0
    old = data(table).read_bytes()
    assert engramd("pack", tiny, table).returncode == 0
    with open(data(table), "r+b") as file:
        file.seek(3 * PAGE)
        file.write(old[3 * PAGE : 4 * PAGE])
    done = engramd("verify", table)
    assert done.returncode == 1
    assert "layer 1 page 3 row 45: " in done.stderr
    assert "1 bad" in done.stdout


def test_against_another_checkpoint(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    """A table with all checksums right, of a checkpoint that differs in one byte of a scale."""
    table = tmp_path / "t"
    assert engramd("pack", tiny, table).returncode == 0
    shard = tiny / "model-00047-of-000048.safetensors"
    flip_bit(shard, -9, bit=2)  # of the last byte of the last row but one
    assert engramd("verify", table).returncode == 0
    done = engramd("verify", table, "--against", tiny)
    assert done.returncode == 1
    assert "differs from the checkpoint" in done.stderr
    import json

    rows = json.loads((table / "manifest.json").read_text())["layers"][0]["rows"]
    assert f"layer 1 page {(rows - 2) // 15} row {rows - 2}: " in done.stderr
    assert "1 bad" in done.stdout


def test_against_a_checkpoint_of_other_geometry(engramd: Engramd, table: Path, tiny: Path) -> None:
    done = engramd("verify", table, "--against", tiny)
    assert done.returncode == 1
    assert "but the checkpoint has" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_cut_missing_or_no_files(engramd: Engramd, copy: Path) -> None:
    path = data(copy)
    size = path.stat().st_size
    os.truncate(path, size - PAGE)
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert f"{size - PAGE} bytes, but {size} are needed" in done.stderr
    path.unlink()
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert "cannot be opened" in done.stderr
    os.mkfifo(path)
    done = engramd("verify", copy)
    assert done.returncode == 1
    assert "not a regular file" in done.stderr


def test_no_table(engramd: Engramd, tmp_path: Path) -> None:
    done = engramd("verify", tmp_path / "nothing")
    assert done.returncode == 1
    assert "no packed table" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_options_that_need_a_checkpoint(engramd: Engramd, table: Path) -> None:
    done = engramd("verify", table, "--revision", "main")
    assert done.returncode == 1
    assert "--against" in done.stderr
