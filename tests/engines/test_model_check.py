"""The check of the daemon's table against the model: each difference refuses, and names both sides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import pytest
from engram_engines.core import ModelMismatch, open_layers

COMMIT = "a" * 40


def test_the_models_own_table(start_daemon: Any, connect: Callable[..., Any], model_config: dict[str, Any]) -> None:
    client = connect(start_daemon())
    tables = open_layers(client, model_config, head_dim=256)
    assert [table.layer for table in tables] == model_config["engram_layer_ids"]
    assert [table.num_rows for table in tables] == model_config["engram_num_embeddings"]
    # Of one pipeline stage.
    assert [
        table.layer for table in open_layers(client, {"text_config": model_config}, head_dim=256, layer_ids=[14])
    ] == [14]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("engram_pad_token_id", 3, "engram_pad_token_id is 2, the model's 3"),
        ("engram_compressed_vocab_size", 77, "engram_compressed_vocab_size is 99092, the model's 77"),
    ],
)
def test_another_hash(
    start_daemon: Any, connect: Callable[..., Any], model_config: dict[str, Any], field: str, value: Any, text: str
) -> None:
    with pytest.raises(ModelMismatch, match=text):
        open_layers(connect(start_daemon()), model_config | {field: value}, head_dim=256)


def test_another_geometry(
    start_daemon: Any, connect: Callable[..., Any], tmp_path: Path, engramd: Any, model_config: dict[str, Any]
) -> None:
    assert engramd("synth", tmp_path / "source", "--vocab-size", "300").returncode == 0
    assert engramd("pack", tmp_path / "source", tmp_path / "other").returncode == 0
    client = connect(start_daemon(tmp_path / "other"))
    with pytest.raises(
        ModelMismatch, match=r"table 'other'.*its engram_vocab_size is 300, the model's 2000.*layer 1 has \d+ rows"
    ):
        open_layers(client, model_config, head_dim=256)
    with pytest.raises(ModelMismatch, match="264 bytes a row, the model 132"):
        open_layers(connect(start_daemon()), model_config, head_dim=128)


def test_another_revision(
    start_daemon: Any,
    connect: Callable[..., Any],
    checkpoint: Path,
    tmp_path: Path,
    engramd: Any,
    model_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots = tmp_path / "models--org--name" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / COMMIT).symlink_to(checkpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = engramd("pack", "org/name", tmp_path / "demo", "--revision", COMMIT)
    assert done.returncode == 0, done.stderr
    client = connect(start_daemon(tmp_path / "demo"))
    with pytest.raises(ModelMismatch, match=f"revision {COMMIT}, the model is of revision {'b' * 40}"):
        open_layers(client, model_config, head_dim=256, revision="b" * 40)
    for revision in (COMMIT, None, "main"):
        assert len(open_layers(client, model_config, head_dim=256, revision=revision)) == 2


def test_which_table(
    start_daemon: Any, connect: Callable[..., Any], table: Path, tmp_path: Path, model_config: dict[str, Any]
) -> None:
    shutil.copytree(table, tmp_path / "second")
    client = connect(start_daemon(table, tmp_path / "second"))
    with pytest.raises(engram_client.UnknownTable, match=r"several tables.*demo, second: name one with ENGRAMD_TABLE"):
        open_layers(client, model_config, head_dim=256)
    assert open_layers(client, model_config, head_dim=256, table="second")[0].name == "second"
    with pytest.raises(engram_client.UnknownTable, match="no table 'third'"):
        open_layers(client, model_config, head_dim=256, table="third")


def test_reload_of_other_content_fails_the_next_request(
    start_daemon: Any, connect: Callable[..., Any], tmp_path: Path, engramd: Any
) -> None:
    for seed in ("1", "2"):
        assert engramd("synth", tmp_path / seed, "--vocab-size", "300", "--seed", seed).returncode == 0
    assert engramd("pack", tmp_path / "1", tmp_path / "table").returncode == 0
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    daemon = start_daemon(tmp_path / "table")
    (first, _) = open_layers(connect(daemon), config, head_dim=256)
    first.fetch([0])
    assert engramd("pack", tmp_path / "2", tmp_path / "table").returncode == 0
    done = engramd("reload", "table", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    with pytest.raises(engram_client.TableMismatch):
        first.fetch([0])
