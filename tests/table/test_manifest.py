"""Manifests: what a good one gives, and every way in which a bad one is refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engramd.errors import EngramdError
from engramd.table import manifest as manifests

Body = dict[str, Any]


def signed(body: Body) -> bytes:
    """The body with a right sha256, by the words of the format."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def body(table: Path) -> Body:
    return dict(json.loads((table / "manifest.json").read_text()))


def test_a_manifest_written_by_hand_is_read(body: Body) -> None:
    manifest = manifests.parse(signed(body), "/srv/t")
    assert manifest.directory == "/srv/t"
    assert manifest.layers[0].files[0].path == "/srv/t/layer-1.g000001.pages"
    assert manifest.layer(14).rows == body["layers"][1]["rows"]
    assert manifest.logical_bytes == sum(layer["rows"] for layer in body["layers"]) * 264
    with pytest.raises(EngramdError, match="no layer 2"):
        manifest.layer(2)


def test_what_is_written_reads_back(table: Path) -> None:
    manifest = manifests.load(table)
    assert manifests.parse(manifests.serialize(manifest), str(table)) == manifest
    assert (table / "manifest.json").read_bytes() == manifests.serialize(manifest)


def at(*path: str | int, to: Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def without(*path: str | int) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def twice(body: Body) -> None:
    body["layers"].append(copy.deepcopy(body["layers"][0]))


def same_file(body: Body) -> None:
    body["layers"][1]["files"][0]["path"] = body["layers"][0]["files"][0]["path"]


def two_files(body: Body) -> None:
    body["layers"][0]["files"].append({"path": "more.pages", "bytes": 4096})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (at("format", to="other"), "format"),
        (at("version", to=2), "version"),
        (at("version", to=True), "version"),
        (at("version", to=1.0), "version"),
        (at("extra", to=1), "unknown field 'extra'"),
        (at("table_id", to="00"), "table_id"),
        (at("table_id", to="A" * 32), "table_id"),
        (at("generation", to=0), "generation"),
        (at("generation", to=2**32), "generation"),
        (at("generation", to=True), "generation"),
        (at("generation", to="1"), "generation"),
        (at("identity", to="0" * 63), "identity"),
        (at("row_bytes", to=15), "row_bytes"),
        (at("row_bytes", to=65537), "row_bytes"),
        (at("row_bytes", to=265), "must be"),
        (at("row_layout", to="split"), "row_layout"),
        (at("page_bytes", to=8192), "page_bytes"),
        (at("rows_per_page", to=14), "rows_per_page"),
        (at("stripe_pages", to=0), "stripe_pages"),
        (at("parts", to=[]), "parts"),
        (at("parts", 0, "bytes", to=255), "sum of parts"),
        (at("parts", 0, "bytes", to=0), r"parts\[0\].bytes"),
        (at("parts", 0, "name", to="scale"), r"parts\[0\].name"),
        (at("parts", 1, "dtype", to="f8"), r"parts\[1\].dtype"),
        (at("parts", 0, to=5), "not an object"),
        (at("layers", to=[]), "layers"),
        (at("layers", to={}), "layers"),
        (at("layers", 0, to=None), "not an object"),
        (twice, "layer 1 occurs twice"),
        (at("layers", 0, "layer", to=-1), r"layers\[0\].layer"),
        (at("layers", 0, "layer", to=2**31), r"layers\[0\].layer"),
        (at("layers", 0, "rows", to=0), "rows"),
        (at("layers", 0, "rows", to=2**40 + 1), "rows"),
        (at("layers", 0, "pages", to=1), "pages"),
        (at("layers", 0, "head_sizes", to=[1]), "sum of"),
        (at("layers", 0, "head_sizes", 0, to=-5), "head_sizes"),
        (at("layers", 0, "head_sizes", to=[1] * 4097), "head_sizes"),
        (at("layers", 0, "files", to=[]), "files"),
        (two_files, "bytes"),
        (same_file, "occurs twice"),
        (at("layers", 0, "files", 0, "bytes", to=4096), "bytes"),
        (at("layers", 0, "files", 0, "path", to="../x"), "path"),
        (at("layers", 0, "files", 0, "path", to="a/b"), "path"),
        (at("layers", 0, "files", 0, "path", to="/srv/../etc/passwd"), "path"),
        (at("layers", 0, "files", 0, "path", to="//srv/x"), "path"),
        (at("layers", 0, "files", 0, "path", to="/srv//x"), "path"),
        (at("layers", 0, "files", 0, "path", to="/srv/./x"), "path"),
        (at("layers", 0, "files", 0, "path", to="/"), "path"),
        (at("layers", 0, "files", 0, "path", to=""), "path"),
        (at("layers", 0, "files", 0, "path", to="."), "path"),
        (at("layers", 0, "files", 0, "path", to="a\nb"), "path"),
        (at("layers", 0, "files", 0, "path", to="a\0b"), "path"),
        (at("layers", 0, "files", 0, "path", to="a\\b"), "path"),
        (at("layers", 0, "files", 0, "path", to="\ud800"), "path"),
        (at("layers", 0, "files", 0, "path", to="x" * 256), "path"),
        (at("layers", 0, "files", 0, "path", to=5), "path"),
        (at("hash", to=[]), "hash"),
        (at("hash", to={"other": 1}), "'other'"),
        (at("hash", "engram_n_heads", to=1.5), "engram_n_heads"),
        (at("hash", "engram_n_heads", to=2**63), "engram_n_heads"),
        (at("hash", "engram_num_embeddings", to=[1, 2]), "engram_num_embeddings of layer 1"),
        (at("hash", "engram_layer_ids", to=[1, 15]), "engram_num_embeddings of layer 14"),
        (at("hash", "engram_layer_ids", to=1), "do not go together"),
        (at("sparse", to="all"), "sparse"),
        (at("sparse", to=False), "sparse"),
        (at("source", to=None), "source"),
        (at("source", "path", to=1), "source.path"),
        (at("source", "revision", to=1), "source.revision"),
        (at("created", to="yesterday"), "created"),
        *((without(key), "missing") for key in ("format", "table_id", "layers", "hash", "sparse", "source", "sha256")),
    ],
)
def test_a_wrong_field(body: Body, change: Callable[[Body], None], text: str) -> None:
    body = copy.deepcopy(body)
    change(body)
    data = signed(body) if "sha256" in body else json.dumps(body).encode()
    with pytest.raises(EngramdError, match=text) as caught:
        manifests.parse(data, "/srv/t")
    assert str(caught.value).startswith("/srv/t/manifest.json: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"format": "engramd table", "format": "engramd table"}', "occurs twice"),
        (b'{"format": NaN}', "NaN"),
        (b'{"format": 1' + b"0" * 5000 + b"}", "digits"),
        (b" " * ((16 << 20) + 1), "larger than"),
    ],
)
def test_what_is_no_manifest(data: bytes, text: str) -> None:
    with pytest.raises(EngramdError, match=text):
        manifests.parse(data, "/srv/t")


def test_any_changed_byte_is_noticed(table: Path) -> None:
    data = (table / "manifest.json").read_bytes().rstrip(b"\n")
    good = manifests.parse(data, "/srv/t")
    for position in range(len(data)):
        for flip in (1, 32, 128):
            changed = data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]
            with contextlib.suppress(EngramdError):
                assert manifests.parse(changed, "/srv/t") == good  # white space, or the case of a \u escape


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_refused_cleanly(value: Any) -> None:
    with pytest.raises(EngramdError):
        manifests.parse(json.dumps(value).encode(), "/srv/t")


@given(
    st.sampled_from(
        ["row_bytes", "parts", "layers", "hash", "source", "generation", "stripe_pages", "sparse", "created"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    ),
)
def test_any_field_is_refused_cleanly_or_read(body: Body, key: str, value: Any) -> None:
    changed = {**body, key: value}
    try:
        manifest = manifests.parse(signed(changed), "/srv/t")
    except EngramdError:
        return
    assert json.loads(manifests.serialize(manifest)) == json.loads(signed(changed))


def test_files_are_checked_when_a_table_is_loaded(copy: Path) -> None:
    path = copy / "layer-14.g000001.pages"
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(EngramdError, match="layer 14"):
        manifests.load(copy)
    assert manifests.load(copy, check_files=False).generation == 1
    path.unlink()
    with pytest.raises(EngramdError, match="cannot be opened"):
        manifests.load(copy)
    path.mkdir()
    with pytest.raises(EngramdError, match="not a regular file"):
        manifests.load(copy)


def test_a_manifest_that_is_replaced_while_it_is_read(monkeypatch: pytest.MonkeyPatch, copy: Path) -> None:
    """The file of the old generation is gone when it is looked for; the manifest is then read again, once."""
    old = (copy / "manifest.json").read_bytes()
    new = old.replace(b"layer-1.g000001", b"layer-1.g000002").replace(b"layer-14.g000001", b"layer-14.g000002")
    new = signed(json.loads(new))
    for layer in (1, 14):
        (copy / f"layer-{layer}.g000001.pages").rename(copy / f"layer-{layer}.g000002.pages")
    check, reads = manifests.check_data_files, []

    def publish_meanwhile(manifest: manifests.Manifest) -> None:
        reads.append(manifest.layers[0].files[0].name)
        (copy / "manifest.json").write_bytes(new)
        check(manifest)

    monkeypatch.setattr(manifests, "check_data_files", publish_meanwhile)
    assert manifests.load(copy).layers[1].files[0].name == "layer-14.g000002.pages"
    assert reads == ["layer-1.g000001.pages", "layer-1.g000002.pages"]


def test_a_relative_path_is_made_absolute(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table.parent)
    manifest = manifests.load("demo")
    assert manifest.directory == str(table)
    assert os.path.isabs(manifest.layers[0].files[0].path)
