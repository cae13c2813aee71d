"""What happens when vLLM starts: registration, settings, refusals, class shapes, and tensors that are not read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def cuda_platform() -> SimpleNamespace:
    return SimpleNamespace(is_cuda=lambda: True, device_name="cuda")


def configuration(**changes: Any) -> SimpleNamespace:
    """The fields of VllmConfig that are looked at; the real one cannot be made for this model without a GPU."""
    fields: dict[str, Any] = {
        "use_v2_model_runner": True,
        "additional_config": {},
        "tensor_parallel_size": 4,
        "prefill_context_parallel_size": 1,
        "enable_elastic_ep": False,
        "enable_prompt_embeds": False,
        "enable_sleep_mode": False,
        "load_format": "auto",
        "model_loader_extra_config": {},
        "safetensors_load_strategy": None,
    } | changes
    whole = SimpleNamespace(**fields)
    hf_config = SimpleNamespace(engram_max_ngram_size=4, engram_n_heads=8)
    return SimpleNamespace(
        use_v2_model_runner=whole.use_v2_model_runner,
        additional_config=whole.additional_config,
        model_config=SimpleNamespace(hf_config=hf_config, **fields),
        parallel_config=whole,
        load_config=whole,
    )


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.delenv("ENGRAMD_SOCKET", raising=False)
    return ModelRegistry


def test_the_entry_point_is_found_by_vllm(clean_registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import plugins

    monkeypatch.setenv("VLLM_PLUGINS", "engramd")
    loaded = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)
    assert set(loaded) == {"engramd"}
    for _ in range(2):
        loaded["engramd"]()
    model = clean_registry.models["DeepseekV41ForCausalLM"].load_model_cls()
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM

    assert model.__module__ == "engram_engines.vllm.model"
    assert issubclass(model, DeepseekV41ForCausalLM)
    assert model._processor_factory is DeepseekV41ForCausalLM._processor_factory


def test_another_vllm(clean_registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from engram_engines.core import EngineMismatch
    from engram_engines.vllm import plugin

    own = clean_registry.models["DeepseekV41ForCausalLM"]
    monkeypatch.setattr(plugin, "version", lambda _: "0.34.1")
    plugin.install()
    assert clean_registry.models["DeepseekV41ForCausalLM"] is own
    assert "knows vLLM 0.33.x, this is 0.34.1" in caplog.text
    monkeypatch.setenv("ENGRAMD_SOCKET", "/run/a.sock")
    with pytest.raises(EngineMismatch, match=r"knows vLLM 0\.33\.x, this is 0\.34\.1"):
        plugin.install()


def test_settings(clean_registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_engines.vllm.settings import settings_of

    assert settings_of(configuration()) is None
    found = settings_of(configuration(additional_config={"engramd": {"socket": "/run/a.sock", "table": "flash"}}))
    assert found is not None
    assert (found.socket, found.table) == ("/run/a.sock", "flash")
    monkeypatch.setenv("ENGRAMD_SOCKET", "/run/b.sock")
    found = settings_of(configuration())
    assert found is not None
    assert found.socket == "/run/b.sock"


def test_no_refusal() -> None:
    from engram_engines.vllm.refusals import refuse_unsupported

    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        refuse_unsupported(configuration(tensor_parallel_size=ranks), cuda_platform())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_v2_model_runner": False}, "V1 model runner"),
        ({"tensor_parallel_size": 5}, "24 hash columns cannot be split over tensor_parallel_size=5"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"load_format": "fastsafetensors"}, "load_format=fastsafetensors"),
        ({"model_loader_extra_config": {"enable_multithread_load": True}}, "enable_multithread_load"),
        ({"safetensors_load_strategy": "eager"}, "safetensors_load_strategy=eager"),
    ],
)
def test_refusals(changes: dict[str, Any], text: str) -> None:
    from engram_engines.vllm.refusals import refuse_unsupported

    with pytest.raises(ValueError, match=text):
        refuse_unsupported(configuration(**changes), cuda_platform())


def test_rocm_is_refused() -> None:
    from engram_engines.vllm.refusals import refuse_unsupported

    with pytest.raises(ValueError, match="the platform is rocm"):
        refuse_unsupported(configuration(), SimpleNamespace(is_cuda=lambda: False, device_name="rocm"))


def test_the_fields_of_the_real_configuration() -> None:
    """Every field that the refusals look at exists in vLLM's own classes."""
    from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    for kind, names in (
        (ModelConfig, ("enable_prompt_embeds", "enable_sleep_mode", "hf_config", "revision")),
        (ParallelConfig, ("tensor_parallel_size", "prefill_context_parallel_size", "enable_elastic_ep", "rank")),
        (LoadConfig, ("load_format", "model_loader_extra_config", "safetensors_load_strategy")),
        (VllmConfig, ("additional_config", "engram_config", "scheduler_config")),
    ):
        assert set(names) <= set(kind.__dataclass_fields__)
    assert isinstance(VllmConfig.use_v2_model_runner, property)


def test_the_interface_that_the_gpu_script_uses() -> None:
    """bench/engine_gpu.py cannot run here, but what it calls exists."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    assert {"logprobs_mode", "max_logprobs", "seed", "tensor_parallel_size"} <= set(EngineArgs.__dataclass_fields__)
    assert all(hasattr(LLM, name) for name in ("generate", "get_tokenizer", "reset_prefix_cache"))
    assert SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20).logprobs == 20


def check() -> None:
    from engram_engines.core import check_shapes
    from engram_engines.vllm.shapes import SHAPES

    check_shapes("vLLM", "0.33.0", "0.33.x", SHAPES)


def test_the_shapes_of_this_vllm() -> None:
    check()


def modified(module_name: str, old: str, new: str) -> ModuleType:
    """A copy of a module of vLLM with a change in its source."""
    original = sys.modules[module_name]
    source = Path(str(original.__file__)).read_text(encoding="utf-8")
    changed, count = re.subn(old, new, source)
    assert count >= 1, f"{module_name} has no {old}"
    copy = ModuleType(module_name)
    vars(copy).update({key: value for key, value in vars(original).items() if key.startswith("__")})
    exec(compile(changed, str(original.__file__), "exec"), vars(copy))
    return copy


ENGRAM = "vllm.models.deepseek_v41.common.engram"
STATE = "vllm.models.deepseek_v41.nvidia.model_state"
LOADER = "vllm.model_executor.model_loader.weight_utils"


@pytest.mark.parametrize(
    ("module_name", "old", "new", "text"),
    [
        (ENGRAM, r"def _create_embedding\(", "def _make_embedding(", r"Engram has no _create_embedding\(\)"),
        (ENGRAM, r"def embed\(self, hash_ids", "def embed(self, ids", r"Engram\.embed takes \(self, ids\), not"),
        (ENGRAM, r"def prepare_embeddings\(self, hash_ids", "def prefetch(self, hash_ids", "prepare_embeddings"),
        (ENGRAM, r"def _init_staging\(", "def _stage(", "_init_staging"),
        (ENGRAM, r"def lookup\(", "def look_up(", r"ParallelEngramEmbedding has no lookup\(\)"),
        (ENGRAM, r"def _engram_lookup_kernel\(\n    weight,", "def _engram_lookup_kernel(\n    table,", "takes"),
        (ENGRAM, r"class NgramHashState\(", "class HashState(", r"no class .*NgramHashState"),
        (STATE, r"def prepare_inputs\(", "def prepare_model_inputs(", r"has no prepare_inputs\(\)"),
        (STATE, r"cudagraph_mode: CUDAGraphMode,\n        block_tables", "mode,\n        block_tables", "prepare_attn"),
        (LOADER, r"    should_skip_weight,\n\)", "    should_skip_weight as _skip,\n)", "should_skip_weight"),
    ],
)
def test_a_modified_vllm_is_refused(
    module_name: str, old: str, new: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_engines.core import EngineMismatch

    check()  # imports what is modified
    monkeypatch.setitem(sys.modules, module_name, modified(module_name, old, new))
    with pytest.raises(EngineMismatch, match=f"knows vLLM 0.33.x, but this vLLM 0.33.0 differs: .*{text}"):
        check()


@pytest.fixture
def asked_tensors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that vLLM reads from safetensors files, in order."""
    from vllm.model_executor.model_loader import weight_utils

    asked: list[str] = []
    real = weight_utils.safe_open

    class Recorder:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = real(*arguments, **options)

        def __enter__(self) -> Any:
            opened = self._file.__enter__()

            def get_tensor(name: str) -> Any:
                asked.append(name)
                return opened.get_tensor(name)

            return SimpleNamespace(keys=opened.keys, metadata=opened.metadata, get_tensor=get_tensor)

        def __exit__(self, *details: Any) -> Any:
            return self._file.__exit__(*details)

    monkeypatch.setattr(weight_utils, "safe_open", Recorder)
    monkeypatch.setattr(weight_utils, "should_skip_weight", weight_utils.should_skip_weight)
    return asked


def test_the_tables_are_not_read(checkpoint: Path, asked_tensors: list[str]) -> None:
    from engram_engines.vllm.loading import is_table_tensor, skip_table_tensors, without_table_tensors
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def load() -> list[str]:
        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        source = DefaultModelLoader.Source(str(checkpoint), revision=None)
        return [name for name, _ in loader._get_weights_iterator(source)]

    everything = load()
    tables = {f"layers.{layer}.engram.embed.{part}" for layer in (1, 14) for part in ("weight", "scale")}
    assert tables <= set(everything) == set(asked_tensors)
    assert len(everything) > len(tables), "the checkpoint has other tensors too"
    asked_tensors.clear()
    for _ in range(2):
        skip_table_tensors()
    assert set(load()) == set(asked_tensors) == set(everything) - tables
    assert [name for name, _ in without_table_tensors((name, None) for name in everything)] == [
        name for name in everything if not is_table_tensor(name)
    ]


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("layers.1.engram.embed.weight", True),
        ("model.layers.14.engram.embed.scale", True),
        ("language_model.model.layers.1.engram.embed_tokens.weight_scale_inv", True),
        ("layers.1.engram.wkv.weight", False),
        ("layers.1.engram.q_weight", False),
        ("embed.weight", False),
        ("layers.1.engram.embed.weights", False),
    ],
)
def test_names_of_table_tensors(name: str, is_table: bool) -> None:
    from engram_engines.vllm.loading import is_table_tensor

    assert is_table_tensor(name) is is_table


def test_layers_built_for_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the context vLLM's model builds our layers, and its own afterwards, also after a failure."""
    from engram_engines.vllm.embedding import StagedEngram
    from engram_engines.vllm.model import engram_layers_of
    from vllm.config.engram import EngramConfig
    from vllm.models.deepseek_v41.nvidia import model

    native = model.Engram
    config = SimpleNamespace(engram_config=EngramConfig(use_thp=True))
    for in_host_memory in (False, True):
        with engram_layers_of(StagedEngram, config, in_host_memory=in_host_memory):
            assert model.Engram is StagedEngram
            assert config.engram_config.cpu_offload is in_host_memory
            assert not config.engram_config.use_thp
        assert model.Engram is native

    def fail() -> None:
        with engram_layers_of(StagedEngram, config, in_host_memory=False):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.Engram is native


def test_the_connection(
    start_daemon: Any, model_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Any]
) -> None:
    """Opened before any weight is loaded, and refused there where the table is not the model's."""
    from engram_engines.core import EngineSettings, ModelMismatch
    from engram_engines.vllm.model import Connection

    daemon = start_daemon()
    settings = EngineSettings(daemon.socket)

    def vllm_config(**changes: Any) -> SimpleNamespace:
        hf_config = SimpleNamespace(**(model_config | changes))
        return SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config, revision=None), parallel_config=SimpleNamespace(rank=0)
        )

    connection = Connection(settings, vllm_config())
    try:
        assert [table.layer for table in connection.tables] == [1, 14]
    finally:
        connection.client.close()
    with pytest.raises(ModelMismatch, match="engram_pad_token_id is 2, the model's 7"):
        Connection(settings, vllm_config(engram_pad_token_id=7))


def test_the_model_from_its_configuration_to_its_state(
    start_daemon: Any, model_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What our class does around vLLM's constructor, for which a double stands in: the whole model needs a GPU."""
    import torch
    from engram_engines.vllm import model as own
    from engram_engines.vllm.embedding import StagedEngram, StridedEngram
    from torch import nn
    from vllm.config.engram import EngramConfig
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM
    from vllm.models.deepseek_v41.nvidia import model as native
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    built: list[type] = []

    def construct(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        built.append(native.Engram)
        self.language_model = SimpleNamespace(get_model_state_cls=lambda: DeepseekV41ModelState)

    monkeypatch.setattr(DeepseekV41ForCausalLM, "__init__", construct)
    monkeypatch.setattr(DeepseekV41ForCausalLM, "load_weights", lambda self, weights: {name for name, _ in weights})
    monkeypatch.setattr(own, "current_platform", cuda_platform())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.delenv("ENGRAMD_SOCKET", raising=False)
    daemon = start_daemon()
    original = native.Engram

    def make(options: dict[str, Any] | None, **changes: Any) -> Any:
        config = configuration(additional_config={} if options is None else {"engramd": options})
        config.engram_config = EngramConfig()
        config.parallel_config.rank = 0
        config.model_config.revision = None
        config.model_config.hf_config = SimpleNamespace(**(model_config | changes))
        return own.EngramdDeepseekV41ForCausalLM(vllm_config=config)

    names = [(name, None) for name in ("layers.1.engram.embed.weight", "layers.1.engram.q_weight")]
    for untouched in (make(None), make({"socket": daemon.socket}, engram_layer_ids=[])):
        assert built.pop() is original
        assert untouched.get_model_state_cls() is DeepseekV41ModelState
        assert len(untouched.load_weights(names)) == 2
    # "auto" without a GPU driver: nothing can be registered, so rows are staged.
    for columns, layer in (("strided", StridedEngram), ("contiguous", StagedEngram)):
        staged = make({"socket": daemon.socket, "columns": columns})
        assert built.pop() is layer
        assert native.Engram is original
        state = staged.get_model_state_cls()
        assert issubclass(state, DeepseekV41ModelState)
        assert state is not DeepseekV41ModelState
        assert staged.load_weights(names) == {"layers.1.engram.q_weight"}
        staged.engramd.client.close()
