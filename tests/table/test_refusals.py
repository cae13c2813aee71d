"""Checkpoints that are wrong: the real `engramd pack` gives one clear line, and the table that was there stays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

Engramd = Callable[..., CompletedProcess[str]]
Header = dict[str, Any]
EditHeader = Callable[[int, Callable[[Header], None]], None]
WEIGHT, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"


@pytest.fixture(scope="session")
def old_table(engramd: Engramd, tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old") / "t"
    assert engramd("pack", tiny_source, path).returncode == 0
    return path


def content(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in sorted(os.listdir(directory))}


@pytest.fixture
def check(engramd: Engramd, tiny: Path, old_table: Path, tmp_path: Path) -> Callable[..., str]:
    """Packs `tiny` over a copy of an older generation; returns the one line that it is refused with."""

    def pack(source: Path | None = None, *options: str) -> str:
        table = tmp_path / "table"
        shutil.copytree(old_table, table)
        before = content(table)
        done = engramd("pack", source or tiny, table, *options)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("engramd: ")
        assert content(table) == before
        assert engramd("verify", table).returncode == 0
        return lines[0]

    return pack


def shard(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05}-of-000048.safetensors"


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_nothing_there(check: Callable[..., str], tmp_path: Path) -> None:
    assert "no checkpoint at" in check(tmp_path / "nothing")


def test_an_empty_directory(check: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "model.safetensors.index.json" in check(tmp_path / "empty")


def test_a_revision_of_a_path(check: Callable[..., str]) -> None:
    assert "--revision v1" in check(None, "--revision", "v1")


@pytest.mark.parametrize("bytes_left", [0, 7, 8, 100, 700, 10_000])
def test_a_truncated_shard(check: Callable[..., str], tiny: Path, bytes_left: int) -> None:
    os.truncate(shard(tiny, 47), bytes_left)
    line = check()
    assert "truncated" in line
    assert "model-00047" in line


def test_a_shard_one_byte_short(check: Callable[..., str], tiny: Path) -> None:
    os.truncate(shard(tiny, 48), shard(tiny, 48).stat().st_size - 1)
    assert "truncated" in check()


def test_a_missing_shard(check: Callable[..., str], tiny: Path) -> None:
    shard(tiny, 48).unlink()
    line = check()
    assert "model.safetensors.index.json" in line
    assert "model-00048-of-000048.safetensors" in line


def test_a_shard_that_is_no_file(check: Callable[..., str], tiny: Path) -> None:
    shard(tiny, 47).unlink()
    os.mkfifo(shard(tiny, 47))
    assert "not a regular file" in check()


def test_a_tensor_missing_from_the_index(check: Callable[..., str], tiny: Path) -> None:
    edit_json(tiny / "model.safetensors.index.json", lambda index: index["weight_map"].pop(SCALE))
    assert SCALE in check()


def test_a_tensor_missing_from_its_shard(check: Callable[..., str], edit_header: EditHeader) -> None:
    edit_header(47, lambda header: header.pop(WEIGHT))
    line = check()
    assert WEIGHT in line
    assert "model-00047" in line


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        (WEIGHT, {"dtype": "U8"}, "is U8, not F8_E4M3"),
        (SCALE, {"dtype": "U8"}, "is U8, not F8_E8M0"),
        (WEIGHT, {"dtype": "F8_E9M9"}, "unknown dtype 'F8_E9M9'"),
        (WEIGHT, {"dtype": 8}, "unknown dtype '8'"),
        (WEIGHT, {"shape": [1, 256]}, "takes 256 bytes"),
        (WEIGHT, {"shape": [-1, 256]}, "bad shape"),
        (WEIGHT, {"shape": [True, 256]}, "bad shape"),
        (WEIGHT, {"shape": [2**62, 2**62]}, "takes"),
        (WEIGHT, {"shape": "256"}, "bad shape"),
        (WEIGHT, {"shape": [1] * 17}, "bad shape"),
        (WEIGHT, {"data_offsets": [0]}, "bad data_offsets"),
        (WEIGHT, {"data_offsets": [10, 5]}, "bad data_offsets"),
        (WEIGHT, {"data_offsets": [0, 2**63 - 1]}, "ends at byte"),
        (WEIGHT, {"data_offsets": [0.0, 1.5]}, "bad data_offsets"),
        (WEIGHT, {"more": 1}, "is not an object of dtype, shape and data_offsets"),
    ],
)
def test_a_wrong_entry(
    check: Callable[..., str], edit_header: EditHeader, name: str, entry: dict[str, Any], text: str
) -> None:
    edit_header(47, lambda header: header[name].update(entry))
    line = check()
    assert text in line
    assert name in line


def test_a_wrong_shape_of_the_right_size(check: Callable[..., str], edit_header: EditHeader) -> None:
    def change(header: Header) -> None:
        rows, columns = header[WEIGHT]["shape"]
        header[WEIGHT]["shape"] = [rows * 2, columns // 2]

    edit_header(47, change)
    assert "one scale for 32 columns" in check()


def test_a_tensor_of_one_dimension(check: Callable[..., str], edit_header: EditHeader) -> None:
    def change(header: Header) -> None:
        rows, columns = header[WEIGHT]["shape"]
        header[WEIGHT]["shape"] = [rows * columns]

    edit_header(47, change)
    assert "not [rows, columns]" in check()


@pytest.mark.parametrize("shift", [-1, 1])
def test_overlapping_tensors(check: Callable[..., str], edit_header: EditHeader, shift: int) -> None:
    def change(header: Header) -> None:
        small = header["layers.1.engram.gate.weight"]["data_offsets"]
        small[0] += shift
        small[1] += shift

    edit_header(47, change)
    assert "overlap" in check()


def raw_header(directory: Path, change: Callable[[bytes], bytes]) -> None:
    path = shard(directory, 47)
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = change(raw[8 : 8 + length].rstrip())
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b'{"', b'{"a":{},"a":{},"', "the key 'a' occurs twice"),
        (b'"dtype":"F8_E4M3"', b'"dtype":"F8_E4M3","dtype":"F8_E4M3"', "the key 'dtype' occurs twice"),
        (b'"data_offsets":[0', b'"data_offsets":[NaN', "NaN is not JSON"),
        (b'"data_offsets":[0', b'"data_offsets":[-Infinity', "-Infinity is not JSON"),
        (b'"data_offsets":[0', b'"data_offsets":[1e999', "out of range"),
        (b'"data_offsets":[0', b'"data_offsets":[' + b"9" * 5000, "5000 digits"),
        (b'"data_offsets":[0', b'"data_offsets":[' + b"[" * 100_000, "nested too deeply"),
        (b'{"', b'x{"', "not valid JSON"),
        (b'{"', b'\xff{"', "not UTF-8"),
        (b'{"', b'[{"', "not valid JSON"),
    ],
)
def test_a_header_that_is_not_clean_json(
    check: Callable[..., str], tiny: Path, old: bytes, new: bytes, text: str
) -> None:
    raw_header(tiny, lambda header: header.replace(old, new, 1))
    line = check()
    assert text in line
    assert "model-00047" in line
    assert len(line) < 600


def test_a_header_that_is_a_list(check: Callable[..., str], tiny: Path) -> None:
    raw_header(tiny, lambda header: b"[" + header + b"]")
    assert "not a JSON object" in check()


def test_a_header_of_over_100_mb(check: Callable[..., str], tiny: Path) -> None:
    with open(shard(tiny, 47), "r+b") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    assert "header of 100000001 bytes" in check()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x\n.safetensors", 5, None]
)
def test_an_index_with_strange_file_names(check: Callable[..., str], tiny: Path, name: Any) -> None:
    edit_json(tiny / "model.safetensors.index.json", lambda index: index["weight_map"].update({WEIGHT: name}))
    assert "not a plain file name" in check()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "no weight_map"),
        ("[]", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "occurs twice"),
        ('{"metadata": {"total_size": NaN}, "weight_map": {}}', "NaN"),
        ("", "not valid JSON"),
        ('{"weight_map": {}}', "no tensor"),
    ],
)
def test_an_index_that_is_none(check: Callable[..., str], tiny: Path, text: str, found: str) -> None:
    (tiny / "model.safetensors.index.json").write_text(text)
    assert found in check()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"engram_num_embeddings": [1, 2]}, "engram_num_embeddings says 1"),
        ({"engram_num_embeddings": [1]}, "1 entries for 2 engram_layer_ids"),
        ({"engram_num_embeddings": [1.5, 2]}, "engram_num_embeddings holds"),
        ({"engram_num_embeddings": "x"}, "engram_num_embeddings is not a list"),
        ({"engram_layer_ids": [1, 1]}, "names a layer twice"),
        ({"engram_layer_ids": [1, 2]}, "no tensor 'layers.2.engram.embed.weight'"),
        ({"engram_layer_ids": [-1, 2]}, "engram_layer_ids holds"),
        ({"engram_layer_ids": []}, "not a list of 1 to 256"),
        ({"engram_head_dim": 128}, "engram_head_dim is 128"),
        ({"engram_vocab_size": 60}, "add up to"),
        ({"engram_vocab_size": True}, "engram_vocab_size is True"),
        ({"engram_n_heads": 10**9}, "engram_n_heads is 1000000000"),
        ({"engram_max_ngram_size": 9}, "engram_max_ngram_size is 9"),
        ({"engram_max_ngram_size": None}, "engram_max_ngram_size is None"),
    ],
)
def test_a_config_that_does_not_fit(check: Callable[..., str], tiny: Path, change: dict[str, Any], text: str) -> None:
    edit_json(tiny / "config.json", lambda config: config["text_config"].update(change))
    line = check()
    assert text in line


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[1]", '{"a": NaN}', "{"])
def test_a_config_that_is_not_clean_json(check: Callable[..., str], tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    assert "config.json" in check()


def test_layers_of_other_widths_are_not_one_table(
    check: Callable[..., str], tiny: Path, edit_header: EditHeader
) -> None:
    (tiny / "config.json").unlink()

    def change(header: Header) -> None:
        for name in (WEIGHT, SCALE):
            rows, columns = header[name]["shape"]
            header[name]["shape"] = [rows * 2, columns // 2]

    edit_header(47, change)
    assert "different rows" in check()
