"""Packing real checkpoints with the real command: content, names, generations, resuming, and what is refused."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engramd.table import manifest as manifests

Engramd = Callable[..., CompletedProcess[str]]


def shard(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05}-of-000048.safetensors"


def source_rows(directory: Path, layer: int) -> bytes:
    """All rows of a layer of a synthetic checkpoint, read by the words of the safetensors format alone."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    parts = []
    for kind in ("weight", "scale"):
        name = f"layers.{layer}.engram.embed.{kind}"
        raw = (directory / index[name]).read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        entry = json.loads(raw[8 : 8 + length])[name]
        begin, end = entry["data_offsets"]
        rows, columns = entry["shape"]
        data = raw[8 + length + begin : 8 + length + end]
        parts.append([data[row * columns : (row + 1) * columns] for row in range(rows)])
    return b"".join(value + scale for value, scale in zip(*parts, strict=True))


def packed_rows(table: Path, layer: int) -> bytes:
    """All rows of a layer of a packed table of 264-byte rows, cut out by the words of the format alone."""
    manifest = json.loads((table / "manifest.json").read_text())
    (entry,) = [entry for entry in manifest["layers"] if entry["layer"] == layer]
    (file,) = entry["files"]
    raw = (table / file["path"]).read_bytes()
    return b"".join(raw[at : at + 15 * 264] for at in range(0, len(raw), 4096))[: entry["rows"] * 264]


def refused(done: CompletedProcess[str]) -> str:
    """The one line of a clean failure."""
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("engramd: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def identity(table: Path) -> str:
    return manifests.load(table).identity


def test_the_packed_rows_are_the_checkpoints(engramd: Engramd, checkpoint: Path, table: Path) -> None:
    for layer in (1, 14):
        assert packed_rows(table, layer) == source_rows(checkpoint, layer)
    done = engramd("verify", table, "--against", checkpoint)
    assert done.returncode == 0, done.stderr
    assert "0 bad" in done.stdout


def test_the_manifest_says_what_was_packed(checkpoint: Path, table: Path) -> None:
    manifest = manifests.load(table)
    config = json.loads((checkpoint / "config.json").read_text())["text_config"]
    fields = {key: value for key, value in config.items() if key.startswith("engram_")}
    assert manifest.hash == fields
    assert [layer.layer for layer in manifest.layers] == [1, 14]
    assert [layer.rows for layer in manifest.layers] == fields["engram_num_embeddings"]
    assert all(sum(layer.head_sizes) == layer.rows and len(layer.head_sizes) == 24 for layer in manifest.layers)
    assert manifest.generation == 1
    assert (manifest.row_bytes, manifest.value_bytes, manifest.scale_bytes) == (264, 256, 8)
    names = sorted(os.listdir(table))
    assert names == ["layer-1.g000001.pages", "layer-14.g000001.pages", "manifest.json"]


def test_the_identity_is_the_documents(checkpoint: Path, table: Path) -> None:
    manifest = json.loads((table / "manifest.json").read_text())
    geometry = {
        "format": "engramd identity 1",
        "row_bytes": 264,
        "parts": [["value", 256, "F8_E4M3"], ["scale", 8, "F8_E8M0"]],
        "layers": [[entry["layer"], entry["rows"]] for entry in manifest["layers"]],
    }
    digest = hashlib.sha256(json.dumps(geometry, sort_keys=True, separators=(",", ":")).encode())
    for entry in manifest["layers"]:
        raw = source_rows(checkpoint, entry["layer"])
        rows = [raw[at : at + 264] for at in range(0, len(raw), 264)]
        for first in range(0, len(rows), 15 * 4096):
            chunk = rows[first : first + 15 * 4096]
            content = b"".join(row[:256] for row in chunk) + b"".join(row[256:] for row in chunk)
            digest.update(hashlib.sha256(content).digest())
    assert manifest["identity"] == digest.hexdigest()


def test_a_second_pack_is_the_next_generation_with_the_same_identity(
    engramd: Engramd, tiny: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert engramd("pack", tiny, table).returncode == 0
    first = manifests.load(table)
    assert engramd("pack", tiny, table).returncode == 0
    second = manifests.load(table)
    assert (first.generation, second.generation) == (1, 2)
    assert first.identity == second.identity
    assert first.table_id == second.table_id
    assert sorted(os.listdir(table)) == ["layer-1.g000002.pages", "layer-14.g000002.pages", "manifest.json"]
    assert engramd("verify", table, "--against", tiny).returncode == 0
    other = tmp_path / "other"
    assert engramd("pack", tiny, other).returncode == 0
    assert identity(other) == first.identity
    assert manifests.load(other).table_id != first.table_id


def test_an_index_file_a_prefix_and_other_names_of_the_scale(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    assert engramd("pack", tiny / "model.safetensors.index.json", tmp_path / "a").returncode == 0
    index_path = tiny / "model.safetensors.index.json"
    text = index_path.read_text()
    for path, name in ((shard(tiny, 47), "weight_scale"), (shard(tiny, 48), "weight_scale_inv")):
        raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        layer = 1 if "00047" in path.name else 14
        header = raw[8 : 8 + length].decode().rstrip()
        for old, new in (
            (f"layers.{layer}.engram.embed.scale", f"model.layers.{layer}.engram.embed.{name}"),
            (f'"layers.{layer}.engram.embed.weight', f'"model.layers.{layer}.engram.embed.weight'),
        ):
            assert old in header
            header = header.replace(old, new)
            text = text.replace(old, new)
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + raw[8 + length :])
    index_path.write_text(text)
    done = engramd("pack", tiny, tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert identity(tmp_path / "a") == identity(tmp_path / "b")


def test_engram_fields_at_the_top_of_the_config(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= config.pop("text_config")
    (tiny / "config.json").write_text(json.dumps(config))
    assert engramd("pack", tiny, tmp_path / "t").returncode == 0
    assert manifests.load(tmp_path / "t").layers[0].head_sizes


def test_without_a_config_layers_are_found_by_name(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    (tiny / "config.json").unlink()
    assert engramd("pack", tiny, tmp_path / "t").returncode == 0
    manifest = manifests.load(tmp_path / "t")
    assert [layer.layer for layer in manifest.layers] == [1, 14]
    assert manifest.hash is None
    assert all(layer.head_sizes == () for layer in manifest.layers)
    assert engramd("verify", tmp_path / "t", "--against", tiny).returncode == 0


def test_the_hugging_face_cache(engramd: Engramd, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, older = "a" * 40, "b" * 40
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs" / "pr").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit + "\n")
    (repo / "refs" / "pr" / "1").write_text(older)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(tiny.iterdir())):
        blob = repo / "blobs" / f"{number:064x}"
        shutil.move(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    shutil.copytree(snapshot, repo / "snapshots" / older, symlinks=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = engramd("pack", "org/name", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert manifests.load(tmp_path / "t").source.revision == commit
    assert engramd("pack", "org/name", tmp_path / "t", "--revision", "pr/1").returncode == 0
    assert manifests.load(tmp_path / "t").source.revision == older
    assert engramd("pack", "org/name", tmp_path / "t", "--revision", older).returncode == 0
    assert "is not in the cache" in refused(engramd("pack", "org/name", tmp_path / "t", "--revision", "v2"))
    assert "is not a revision" in refused(engramd("pack", "org/name", tmp_path / "t", "--revision", "../main"))
    assert "org/other" in refused(engramd("pack", "org/other", tmp_path / "t"))
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert engramd("pack", "org/name", tmp_path / "t").returncode == 0


def test_stripes(engramd: Engramd, checkpoint: Path, table: Path, tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("one", "two", "three")]
    for drive in drives:
        drive.mkdir()
    option = ["--stripe", ",".join(map(str, drives))]
    striped = tmp_path / "striped"
    done = engramd("pack", checkpoint, striped, *option)
    assert done.returncode == 0, done.stderr
    manifest = manifests.load(striped)
    assert manifest.identity == identity(table)
    assert [len(layer.files) for layer in manifest.layers] == [3, 3]
    assert {os.path.dirname(file.path) for layer in manifest.layers for file in layer.files} == set(map(str, drives))
    assert os.listdir(striped) == ["manifest.json"]
    assert engramd("verify", striped, "--against", checkpoint).returncode == 0
    # The next generation takes the old one's files away, wherever it lies itself.
    assert engramd("pack", checkpoint, striped).returncode == 0
    assert [os.listdir(drive) for drive in drives] == [[], [], []]
    assert "named twice" in refused(engramd("pack", checkpoint, striped, "--stripe", f"{drives[0]},{drives[0]}"))
    assert "not a directory" in refused(engramd("pack", checkpoint, striped, "--stripe", "/nowhere"))


def test_two_packs_at_once(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    table.mkdir()
    fd = os.open(table, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        line = refused(engramd("pack", tiny, table))
        assert "another pack is at work" in line
        assert str(table) in line
    finally:
        os.close(fd)
    assert engramd("pack", tiny, table).returncode == 0


def test_a_directory_that_is_no_table_is_left_alone(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tiny))
    assert "not a packed table" in refused(engramd("pack", tiny, tiny))
    assert sorted(os.listdir(tiny)) == before
    (tmp_path / "file").write_text("x")
    assert "not a directory" in refused(engramd("pack", tiny, tmp_path / "file"))
    assert "is not a directory" in refused(engramd("pack", tiny, tmp_path / "a" / "b"))


def test_a_damaged_manifest_is_not_packed_over(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    table = tmp_path / "t"
    assert engramd("pack", tiny, table).returncode == 0
    text = (table / "manifest.json").read_text()
    (table / "manifest.json").write_text(text.replace('"generation":1', '"generation":7'))
    assert "sha256" in refused(engramd("pack", tiny, table))
    assert (table / "layer-1.g000001.pages").exists()


def test_old_files_outside_the_table_are_only_removed_by_their_own_names(
    engramd: Engramd, tiny: Path, tmp_path: Path
) -> None:
    """A manifest that names a stranger's file as its data must not make pack delete it."""
    table = tmp_path / "t"
    assert engramd("pack", tiny, table).returncode == 0
    precious = tmp_path / "precious.pages"
    shutil.copy(table / "layer-1.g000001.pages", precious)
    body = json.loads((table / "manifest.json").read_text())
    body["layers"][0]["files"][0]["path"] = str(precious)
    del body["sha256"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (table / "manifest.json").write_text(json.dumps(body))
    assert engramd("pack", tiny, table).returncode == 0
    assert precious.exists()
    assert manifests.load(table).generation == 2


def random_source(directory: Path, layers: dict[int, tuple[int, int, int]], seed: int, pieces: int = 1) -> None:
    """A checkpoint of U8 tensors {layer: (rows, value bytes, scale bytes)}, each value cut into `pieces` tensors, and a
    tensors.toml beside it."""
    random_bytes = random.Random(seed).randbytes
    directory.mkdir()
    header: dict[str, object] = {"filler": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}
    data = bytearray(5)

    def add(name: str, rows: int, columns: int) -> None:
        header[name] = {
            "dtype": "U8",
            "shape": [rows, columns],
            "data_offsets": [len(data), len(data) + rows * columns],
        }
        data.extend(random_bytes(rows * columns))

    toml = ""
    for layer, (rows, value_bytes, scale_bytes) in layers.items():
        toml += f"[[layers]]\nlayer = {layer}\n"
        cuts = [rows * piece // pieces for piece in range(pieces + 1)]
        for piece in range(pieces):
            add(f"t.{layer}.{piece}.w", cuts[piece + 1] - cuts[piece], value_bytes)
        toml += f'value = "t.{layer}.{{0..{pieces - 1}}}.w"\n'
        if scale_bytes:
            add(f"t.{layer}.s", rows, scale_bytes)
            toml += f'scale = ["t.{layer}.s"]\n'
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "tensors.toml").write_text(toml)


@pytest.mark.parametrize(
    ("layers", "pieces"),
    [
        ({0: (1, 16, 0)}, 1),
        ({0: (201 * 4096 + 5, 15, 1), 5: (3, 15, 1)}, 1),  # two chunks
        ({3: (1000, 160, 0), 2: (77, 160, 0)}, 7),
        ({7: (70_000, 250, 22)}, 128),  # two chunks, cut anywhere
        ({1: (9, 4028, 0)}, 1),
        ({1: (9, 4029, 0)}, 2),
        ({1: (300, 65000, 536)}, 3),  # chunks of 240 pages
        ({2**31 - 1: (20, 1, 65535)}, 1),
    ],
)
def test_any_rows(engramd: Engramd, tmp_path: Path, layers: dict[int, tuple[int, int, int]], pieces: int) -> None:
    source, table = tmp_path / "source", tmp_path / "t"
    random_source(source, layers, 1, pieces)
    done = engramd("pack", source, table, "--tensors", source / "tensors.toml")
    assert done.returncode == 0, done.stderr
    manifest = manifests.load(table)
    assert [(layer.layer, layer.rows) for layer in manifest.layers] == [(n, rows) for n, (rows, _, _) in layers.items()]
    raw = (source / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for layer in manifest.layers:
        rows, value_bytes, scale_bytes = layers[layer.layer]
        entries = [header[f"t.{layer.layer}.{piece}.w"]["data_offsets"] for piece in range(pieces)]
        values = b"".join(data[begin:end] for begin, end in entries)
        begin = header[f"t.{layer.layer}.s"]["data_offsets"][0] if scale_bytes else 0
        pages = Path(layer.files[0].path).read_bytes()
        for row in {0, 1, rows // 2, rows - 1} & set(range(rows)):
            expected = values[row * value_bytes : (row + 1) * value_bytes]
            expected += data[begin + row * scale_bytes : begin + (row + 1) * scale_bytes]
            at = row // manifest.rows_per_page * manifest.page_bytes
            at += row % manifest.rows_per_page * manifest.row_bytes
            assert pages[at : at + manifest.row_bytes] == expected
    verified = engramd("verify", table, "--against", source, "--tensors", source / "tensors.toml")
    assert verified.returncode == 0, verified.stderr
    assert f"{sum(rows for rows, _, _ in layers.values())} rows" in verified.stdout


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("", "[[layers]]"),
        ("x = 1", "[[layers]]"),
        ("[[layers]]\nlayer = 1", "its keys"),
        ('[[layers]]\nlayer = 1\nvalue = "w"\nbias = "b"', "its keys"),
        ('[[layers]]\nlayer = -1\nvalue = "t.1.0.w"', "layer is '-1'"),
        ('[[layers]]\nlayer = true\nvalue = "t.1.0.w"', "layer is 'True'"),
        ('[[layers]]\nlayer = 1\nvalue = "nope"', "no tensor 'nope'"),
        ("[[layers]]\nlayer = 1\nvalue = []", "not a tensor name"),
        ("[[layers]]\nlayer = 1\nvalue = [1]", "not a tensor name"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.{5..1}.w"', "not a range"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.{0..99999999}.w"', "not a range"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.0.w"\nscale = "t.2.s"', "100 rows of values, but 50 rows of scales"),
        ('[[layers]]\nlayer = 1\nvalue = ["t.1.0.w", "t.1.s"]', "before it has rows"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.s"', "rows of 4 bytes"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.0.w"\n[[layers]]\nlayer = 1\nvalue = "t.1.0.w"', "occurs twice"),
        ('[[layers]]\nlayer = 1\nvalue = "t.1.0.w"\n[[layers]]\nlayer = 2\nvalue = "t.2.0.w"', "different rows"),
        ('[[layers]]\nlayer = 1\nvalue = "filler"', "shape [5]"),
        ("not toml", "not valid TOML"),
    ],
)
def test_bad_tensors_files(engramd: Engramd, tmp_path: Path, toml: str, text: str) -> None:
    random_source(tmp_path / "source", {1: (100, 60, 4), 2: (50, 124, 4)}, 2)
    (tmp_path / "bad.toml").write_text(toml)
    line = refused(engramd("pack", tmp_path / "source", tmp_path / "t", "--tensors", tmp_path / "bad.toml"))
    assert text in line
    assert not (tmp_path / "t").exists()


def test_a_file_system_without_o_direct(engramd: Engramd, tiny: Path, tmp_path: Path) -> None:
    """ramfs has no O_DIRECT on any kernel; needs root to mount."""
    mount = tmp_path / "ramfs"
    mount.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t ramfs none {mount} 2>/dev/null") != 0:
        pytest.skip("cannot mount a file system here")
    try:
        try:
            os.close(os.open(mount / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
            pytest.skip("this kernel's ramfs takes O_DIRECT")
        except OSError:
            pass
        finally:
            (mount / "probe").unlink(missing_ok=True)
        shutil.copytree(tiny, mount / "source")
        done = engramd("pack", mount / "source", tmp_path / "t")
        assert done.returncode == 0, done.stderr
        assert "refuses O_DIRECT" in done.stderr
        assert str(mount / "source") in done.stderr
        assert engramd("verify", tmp_path / "t", "--against", tiny).returncode == 0
    finally:
        assert os.system(f"umount {mount}") == 0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--stripe=", "names an empty directory"),
        ("--stripe=/tmp,,/var", "names an empty directory"),
        ("--sync-interval=4000", "not a number of seconds from 0 to 3600"),
    ],
)
def test_options_that_cannot_be(engramd: Engramd, tiny: Path, tmp_path: Path, option: str, words: str) -> None:
    done = engramd("pack", tiny, tmp_path / "t", option)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "t").exists()
