"""Synthetic checkpoints and sparse tables: every row computed anew by numpy from the words of docs/table_format.md."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engramd.errors import EngramdError
from engramd.synth.packed import SparseLayer, write_sparse
from engramd.table import manifest as manifests
from engramd.table.manifest import Part

Engramd = Callable[..., CompletedProcess[str]]
Words = npt.NDArray[np.uint64]
G = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def oracle(seed: int, layer: int, rows: npt.ArrayLike, value_bytes: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Synthetic rows, uint8 [rows, row_bytes]."""
    one = np.array([seed], np.uint64)
    base = mix(
        mix(mix(one + np.uint64(G)) + np.uint64((layer + G) & MASK)) + np.asarray(rows, np.uint64) + np.uint64(G)
    )
    words = np.arange(1, -(-row_bytes // 8) + 1, dtype=np.uint64) * np.uint64(G)
    raw = mix(base[:, None] + words[None, :]).astype("<u8").view(np.uint8)[:, :row_bytes]
    values, scales = raw[:, :value_bytes].copy(), raw[:, value_bytes:]
    values[(values == 0x7F) | (values == 0xFF)] &= 0xBF
    return np.concatenate([values, 107 + scales % 21], axis=1)


def shard(path: Path) -> tuple[dict[str, Any], int, bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), 8 + length, raw


def primes_from(start: int, count: int, used: set[int]) -> list[int]:
    found: list[int] = []
    candidate = start - 1
    while len(found) < count:
        candidate += 1
        if candidate > 1 and candidate not in used and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
            used.add(candidate)
    return found


@pytest.fixture(scope="module")
def rows_of() -> dict[int, list[int]]:
    """Head sizes of layers 1 and 14 for vocab size 2000, found by trial division."""
    used: set[int] = set()
    return {layer: [p for _ in range(3) for p in primes_from(2000, 8, used)] for layer in (1, 14)}


def test_the_files_are_those_of_the_real_model(checkpoint: Path, rows_of: dict[int, list[int]]) -> None:
    names = [f"model-{number:05}-of-000048.safetensors" for number in range(1, 49)]
    assert sorted(os.listdir(checkpoint)) == sorted([*names, "config.json", "model.safetensors.index.json"])
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    total = 0
    seen = {}
    for name in names:
        header, start, raw = shard(checkpoint / name)
        header.pop("__metadata__")
        end = 0
        for tensor, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            assert entry["data_offsets"][0] == end, "the format allows no holes"
            end = entry["data_offsets"][1]
            seen[tensor] = name
        assert start + end == len(raw)
        total += end
    assert seen == index["weight_map"]
    assert index["metadata"]["total_size"] == total
    for layer, number in ((1, 47), (14, 48)):
        header, start, _ = shard(checkpoint / names[number - 1])
        weight, scale = (header[f"layers.{layer}.engram.embed.{kind}"] for kind in ("weight", "scale"))
        rows = sum(rows_of[layer])
        assert (weight["dtype"], weight["shape"]) == ("F8_E4M3", [rows, 256])
        assert (scale["dtype"], scale["shape"]) == ("F8_E8M0", [rows, 8])
        assert (start + weight["data_offsets"][0]) % 512, "weight data begins unaligned"
        assert (start + scale["data_offsets"][0]) % 512, "scale data begins unaligned"
        assert scale["data_offsets"][0] > weight["data_offsets"][1], "something lies between them"
        assert len(header) > 3, "small tensors in the same shard"


def test_the_config_is_that_of_the_real_model(checkpoint: Path, rows_of: dict[int, list[int]]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV41ForCausalLM"]
    assert config["model_type"] == "deepseek_v41"
    text = config["text_config"]
    assert (text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]) == (40, 5120, 129280)
    assert {key: value for key, value in text.items() if key.startswith("engram_")} == {
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [sum(rows_of[1]), sum(rows_of[14])],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 2000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    }


def test_every_row_is_the_formulas(checkpoint: Path) -> None:
    for layer, number in ((1, 47), (14, 48)):
        header, start, raw = shard(checkpoint / f"model-{number:05}-of-000048.safetensors")
        parts = []
        for kind in ("weight", "scale"):
            entry = header[f"layers.{layer}.engram.embed.{kind}"]
            begin, end = entry["data_offsets"]
            parts.append(np.frombuffer(raw[start + begin : start + end], np.uint8).reshape(entry["shape"]))
        expected = oracle(7, layer, np.arange(len(parts[0])), 256, 264)
        assert np.array_equal(np.concatenate(parts, axis=1), expected)


def test_the_safetensors_package_agrees(checkpoint: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(checkpoint / "model-00047-of-000048.safetensors", framework="numpy") as file:
        assert "layers.1.engram.embed.weight" in set(file.keys())
        assert file.get_slice("layers.1.engram.embed.weight").get_shape()[1] == 256


def test_a_known_row() -> None:
    """Fixed bytes, so that a change of formula and oracle together is noticed."""
    row = oracle(0, 1, [0], 256, 264)[0].tobytes()
    assert hashlib.sha256(row).hexdigest() == KNOWN_ROW_SHA256


KNOWN_ROW_SHA256 = "fd6b6e2e93b4accc4a059151db9871886d4d5b9d3c66c4e4b40a6aefb2f044bc"


def test_an_earlier_checkpoint_is_replaced_and_nothing_else_is(engramd: Engramd, tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert engramd("synth", path, "--vocab-size", "20", "--seed", "1").returncode == 0
    first = (path / "model-00047-of-000048.safetensors").read_bytes()
    assert engramd("synth", path, "--vocab-size", "20", "--seed", "2").returncode == 0
    assert (path / "model-00047-of-000048.safetensors").read_bytes() != first
    assert not [name for name in os.listdir(path) if name.endswith(".new")]
    (path / "config.json").unlink()  # as an interrupted run leaves it
    assert engramd("synth", path, "--vocab-size", "20", "--seed", "1").returncode == 0
    assert (path / "model-00047-of-000048.safetensors").read_bytes() == first
    (path / "notes.txt").write_text("mine")
    done = engramd("synth", path, "--vocab-size", "20")
    assert done.returncode == 1
    assert "notes.txt" in done.stderr
    (path / "notes.txt").unlink()
    (path / "config.json").write_text("{}")
    done = engramd("synth", path, "--vocab-size", "20")
    assert done.returncode == 1
    assert "not an earlier synthetic checkpoint" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((), 2),
        (("c", "--packed", "t"), 2),
        (("--packed", "t"), 2),
        (("c", "--rows", "heads"), 2),
        (("--packed", "t", "--rows", "all"), 2),
        (("c", "--vocab-size", "x"), 2),
        (("c", "--vocab-size", "0"), 1),
        (("c", "--vocab-size", "-5"), 1),
        (("c", "--vocab-size", str(2**70)), 1),
        (("c", "--seed", "-1"), 1),
        (("c", "--seed", str(2**64)), 1),
        (("a/b/c",), 1),
    ],
)
def test_wrong_usage(
    engramd: Engramd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    done = engramd("synth", *arguments)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def stored_row(manifest: manifests.Manifest, layer: manifests.Layer, row: int) -> tuple[bytes, bytes]:
    """(row, its page) as they lie in the file, by the words of the format."""
    with open(layer.files[0].path, "rb") as file:
        file.seek(row // manifest.rows_per_page * manifest.page_bytes)
        page = file.read(manifest.page_bytes)
    at = row % manifest.rows_per_page * manifest.row_bytes
    return page[at : at + manifest.row_bytes], page


def test_the_sparse_table_of_the_real_geometry(engramd: Engramd, tmp_path: Path) -> None:
    table = tmp_path / "t"
    done = engramd("synth", "--packed", table, "--vocab-size", "16000000", "--rows", "heads", "--seed", "9")
    assert done.returncode == 0, done.stderr
    manifest = manifests.load(table)
    assert [layer.rows for layer in manifest.layers] == [384006168, 384016682]
    assert manifest.rows == 768022850
    assert manifest.file_bytes > 195 << 30
    assert sum(os.stat(file.path).st_blocks * 512 for layer in manifest.layers for file in layer.files) < 8 << 20
    for layer in manifest.layers:
        ends = np.cumsum(layer.head_sizes)
        rows = sorted({*(ends - np.array(layer.head_sizes)).tolist(), *(ends - 1).tolist()})
        expected = oracle(9, layer.layer, rows, 256, 264)
        assert [stored_row(manifest, layer, row)[0] for row in rows] == [row.tobytes() for row in expected]
    hole = stored_row(manifest, manifest.layers[0], 10_000_000)
    assert hole[1] == bytes(4096)
    assert engramd("verify", table).returncode == 0
    again = engramd("synth", "--packed", table, "--vocab-size", "16000000", "--rows", "heads", "--seed", "9")
    assert again.returncode == 0
    assert manifests.load(table).generation == 2
    assert manifests.load(table).identity == manifest.identity


def test_rows_of_16_bytes_beyond_2_to_the_31(engramd: Engramd, tmp_path: Path) -> None:
    table = tmp_path / "t"
    heads = (2**31 - 7, 2**31 + 5, 3)
    manifest = write_sparse(str(table), [SparseLayer(4, heads)], [Part("value", 16, "U8")], 5)
    (layer,) = manifest.layers
    assert layer.rows == 2**32 + 1
    rows = [0, 2**31 - 8, 2**31 - 7, 2**32 - 3, 2**32 - 2, 2**32]
    expected = oracle(5, 4, rows, 16, 16)
    assert [stored_row(manifest, layer, row)[0] for row in rows] == [row.tobytes() for row in expected]
    assert engramd("verify", table).returncode == 0


@pytest.mark.parametrize("row_bytes", [15, 65537])
def test_rows_that_the_format_does_not_hold(tmp_path: Path, row_bytes: int) -> None:
    with pytest.raises(EngramdError, match=f"rows of {row_bytes} bytes"):
        write_sparse(str(tmp_path / "t"), [SparseLayer(0, (5,))], [Part("value", row_bytes, "U8")], 0)


def test_damage_in_a_sparse_table_is_found(engramd: Engramd, tmp_path: Path) -> None:
    table = tmp_path / "t"
    assert engramd("synth", "--packed", table, "--vocab-size", "100000", "--rows", "heads").returncode == 0
    layer = manifests.load(table).layers[1]
    row = layer.rows - 1
    with open(layer.files[0].path, "r+b") as file:
        file.seek(row // 15 * 4096)
        file.write(bytes(4096))  # a block that was trimmed
    done = engramd("verify", table)
    assert done.returncode == 1
    assert f"layer 14 page {row // 15} row {row // 15 * 15}: " in done.stderr


@pytest.mark.parametrize("size", ["0", "-1", "100000000000", "100000000"])
def test_what_is_refused_leaves_nothing(engramd: Engramd, tmp_path: Path, size: str) -> None:
    """Outside the range, or larger than the drive."""
    (tmp_path / "drive").mkdir()
    found = os.statvfs(tmp_path)
    if size == "100000000" and found.f_bavail * found.f_frsize > 2 * 24 * 264 * 100_000_000:
        pytest.skip("the drive here has room for more than a terabyte")
    done = engramd("synth", tmp_path / "new", "--vocab-size", size)
    assert done.returncode == 1
    assert "from 1 to 40000000000" in done.stderr or "not enough space" in done.stderr
    assert not (tmp_path / "new").exists()
    done = engramd("synth", "--packed", tmp_path / "new", "--rows", "heads", "--vocab-size", "0")
    assert done.returncode == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["synth", "pack"])
def test_a_drive_that_is_not_ours(engramd: Engramd, checkpoint: Path, verb: str) -> None:
    """/sys takes no directories from anybody."""
    path = "/sys/new"
    done = engramd("synth", path) if verb == "synth" else engramd("pack", checkpoint, path)
    assert done.returncode == 1
    assert done.stderr.count(path) == 1
    assert "right to it" in done.stderr
    for wrong in ("make room", "generation"):
        assert wrong not in done.stderr
