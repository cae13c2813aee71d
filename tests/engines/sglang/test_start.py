"""What happens at start: which SGLang is taken, what is refused and how, and that no table is allocated or loaded."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import engram_client
import pytest

PLUGIN = "engram_engines.sglang.plugin"


def test_it_stays_out_of_the_way_without_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.sglang import plugin
    from sglang.srt.layers import engram

    monkeypatch.delenv("ENGRAMD_SOCKET", raising=False)
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.6.0")
    plugin.install()
    assert engram.EngramEmbedding.__module__ == "sglang.srt.layers.engram"


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.sglang import plugin

    monkeypatch.setenv("ENGRAMD_SOCKET", "/nowhere")
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.6.0")
    with pytest.raises(SystemExit, match=r"knows SGLang 0\.5\.23, this is 0\.6\.0"):
        plugin.install()


def test_a_refusal_gets_past_sglangs_own_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs what plug-ins raise and goes on, which would load the tables after all."""
    from engram_engines.sglang import plugin
    from sglang.srt import plugins

    point = EntryPoint("engramd", f"{PLUGIN}:install", plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("ENGRAMD_SOCKET", "/nowhere")
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.6.0")
    with pytest.raises(SystemExit):
        plugins.load_plugins()


def test_the_entry_point_is_declared_for_both_distributions() -> None:
    import tomllib

    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP

    root = Path(__file__).parents[3]
    for path in (root / "pyproject.toml", root / "client" / "pyproject.toml"):
        points = tomllib.loads(path.read_text())["project"]["entry-points"]
        assert points[GENERAL_PLUGINS_GROUP] == {"engramd": f"{PLUGIN}:install"}


def test_the_interface_that_the_gpu_script_uses() -> None:
    """bench/engine_gpu.py cannot run here, but what it calls exists. Read, not imported: the engine needs kernels."""
    import ast

    import sglang
    from sglang.srt.server_args import ServerArgs

    assert {"model_path", "tp_size", "random_seed", "enable_deterministic_inference"} <= {*ServerArgs.__struct_fields__}
    source = Path(sglang.__file__).parent / "srt" / "entrypoints" / "engine.py"
    (engine,) = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Engine"
    )
    methods = {node.name: node for node in engine.body if isinstance(node, ast.FunctionDef)}
    parameters = {argument.arg for argument in methods["generate"].args.args}
    assert {"input_ids", "sampling_params", "return_logprob", "top_logprobs_num"} <= parameters
    assert {"flush_cache", "shutdown"} <= set(methods)


def every_function() -> list[tuple[str, str, str]]:
    from engram_engines.sglang.shapes import SHAPES

    return [(shape.module, shape.name, function) for shape in SHAPES for function in shape.functions]


@pytest.mark.parametrize(("module", "owner", "function"), every_function())
def test_a_lost_function_is_refused(module: str, owner: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.sglang import plugin

    monkeypatch.setenv("ENGRAMD_SOCKET", "/nowhere")
    changed = importlib.import_module(module)
    if owner:
        changed = getattr(changed, owner)
    if function == "__init__":
        monkeypatch.setattr(changed, function, lambda self, other: None)
    else:
        monkeypatch.setattr(changed, function, lambda other, arguments: None)
    with pytest.raises(SystemExit, match=rf"this SGLang 0\.5\.23 differs: .*{function}"):
        plugin.install()


def test_a_modified_copy_of_sglang_is_refused(tmp_path: Path) -> None:
    """A copy of one of SGLang's modules in which a method has another name, loaded in the place of the original."""
    import sglang

    staging = Path(sglang.__file__).parent / "srt" / "layers" / "engram_staging.py"
    renamed = staging.read_text().replace("def _windows(", "def _build_windows(")
    assert renamed != staging.read_text()
    (tmp_path / "renamed.py").write_text(renamed)
    program = (
        "import importlib.util, sys\n"
        f"path = {str(tmp_path / 'renamed.py')!r}\n"
        "spec = importlib.util.spec_from_file_location('sglang.srt.layers.engram_staging', path)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules[spec.name] = module\n"
        "spec.loader.exec_module(module)\n"
        "import sglang.srt.layers\n"
        "sglang.srt.layers.engram_staging = module\n"
        f"from {PLUGIN} import install\n"
        "install()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ENGRAMD_SOCKET": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "EngramRowStager has no _windows()" in done.stderr
    assert "0.5.23" in done.stderr


def test_another_table_is_refused(
    installed: None, make_model: Any, own_hasher: Any, start_daemon: Any, tmp_path: Path, engramd: Any, monkeypatch: Any
) -> None:
    import torch
    from engram_engines.core import ModelMismatch
    from sglang.srt.layers import engram_staging

    for command in (
        ("synth", tmp_path / "source", "--vocab-size", "1500"),
        ("pack", tmp_path / "source", tmp_path / "t"),
    ):
        done = engramd(*command, timeout_s=120)
        assert done.returncode == 0, done.stderr
    daemon = start_daemon(tmp_path / "t", dram="8MiB")
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    with pytest.raises(ModelMismatch, match="is not the model's"):
        engram_staging.EngramRowStager.from_model(make_model(), own_hasher, torch.device("cpu"))


def test_a_daemon_that_never_comes_ends_the_start(
    installed: None, make_model: Any, own_hasher: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    import torch
    from sglang.srt.layers import engram_staging

    monkeypatch.setenv("ENGRAMD_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("ENGRAMD_WAIT_S", "0.2")
    with pytest.raises(engram_client.DaemonLost, match="ENGRAMD_WAIT_S"):
        engram_staging.EngramRowStager.from_model(make_model(), own_hasher, torch.device("cpu"))


def test_models_without_engram_need_no_daemon(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang.srt.layers import engram_staging

    monkeypatch.setenv("ENGRAMD_SOCKET", "/nowhere")
    assert engram_staging.EngramRowStager.from_model(torch.nn.Linear(1, 1), None, torch.device("cpu")) is None


def test_no_table_is_allocated(installed: None) -> None:
    from sglang.srt.layers import engram

    embed = engram.EngramEmbedding(384_006_168, 256, 1, (0, 384_006_168))
    assert not list(embed.parameters())
    assert not list(embed.buffers())
    embed.finish_load("layer 1")


def test_a_forward_before_the_daemon_is_known_fails(installed: None) -> None:
    import torch
    from sglang.srt.layers import engram

    embed = engram.EngramEmbedding(1000, 256, 1, (0, 1000))
    with pytest.raises(RuntimeError, match="before the engramd plug-in has connected"):
        embed(torch.zeros((1, 24), dtype=torch.int64))


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("weight_loader_disable_mmap", True, "--weight-loader-disable-mmap"),
        ("weight_loader_prefetch_checkpoints", True, "--weight-loader-prefetch-checkpoints"),
        ("load_format", "fastsafetensors", "--load-format fastsafetensors"),
    ],
)
def test_loaders_that_read_whole_shards_are_refused(
    option: str, value: Any, text: str, installed: None, server: Any
) -> None:
    from sglang.srt.layers import engram

    with (
        server.model.override(**{option: value}),
        pytest.raises(ValueError, match=f"cannot serve this SGLang configuration: {text}"),
    ):
        engram.EngramEmbedding(1000, 256, 1, (0, 1000))


def test_split_sequences_are_refused(installed: None, server: Any) -> None:
    from sglang.srt.layers import engram

    widths = {"tp_size": 2, "attn_tp_size": 1, "attn_cp_size": 2, "moe_tp_size": 2}
    with (
        server.parallel.override(**widths),
        pytest.raises(ValueError, match="attn_cp_size=2 splits sequences over ranks"),
    ):
        engram.EngramEmbedding(1000, 256, 1, (0, 1000))


def test_the_loader_skips_the_tables(
    checkpoint: Path, server: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """SGLang's own reader of a real checkpoint's shards, into load_weights: what arrives there."""
    from sglang.srt.model_loader.weight_utils import (
        buffered_multi_thread_safetensors_weights_iterator,
        safetensors_weights_iterator,
    )
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    loaded: list[str] = []
    monkeypatch.setattr(
        DeepseekV4ForCausalLM,
        "load_weights",
        lambda self, weights, is_nextn=False: loaded.extend(name for name, _ in weights),
    )
    request.getfixturevalue("installed")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    tables = {name for name in index if ".engram.embed." in name}
    assert len(tables) == 4
    files = sorted({str(checkpoint / index[name]) for name in tables})
    in_files = {name for name, file in index.items() if str(checkpoint / file) in files}
    for iterator in (
        safetensors_weights_iterator(files),
        buffered_multi_thread_safetensors_weights_iterator(files, max_workers=2),
    ):
        loaded.clear()
        DeepseekV4ForCausalLM.load_weights(object(), iterator)
        assert set(loaded) == in_files - tables
        assert loaded


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("layers.1.engram.embed.weight", True),
        ("model.layers.14.engram.embed.scale", True),
        ("layers.1.engram.embed.weight_scale_inv", True),
        ("layers.1.engram.wkv.weight", False),
        ("layers.1.engram.q_weight", False),
        ("embed.weight", False),
        ("layers.1.engram.embed.weight_other", False),
    ],
)
def test_names_of_table_tensors(name: str, is_table: bool) -> None:
    from engram_engines.core.table_tensors import is_table_tensor

    assert is_table_tensor(name) is is_table
