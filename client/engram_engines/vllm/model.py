"""vLLM's DeepSeek-V4.1 over a daemon's rows. Registered by plugin.py under the architecture's own name.

Without a daemon in the settings or the additional config, the class is vLLM's own in every respect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from engram_client import Client, Table
from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM
from vllm.platforms import current_platform

from ..core.class_shapes import check_shapes
from ..core.mapped_layers import map_layers
from ..core.model_check import open_layers
from ..core.settings import EngineSettings, connect_when_up
from .plugin import KNOWN_VERSIONS, vllm_version
from .refusals import refuse_unsupported
from .settings import engram_fields, settings_of
from .shapes import SHAPES


class EngramdDeepseekV41ForCausalLM(DeepseekV41ForCausalLM):  # type: ignore[misc]
    """See the module. `engramd` is the connection where rows come from a daemon, else None."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        settings = settings_of(vllm_config)
        # A model of this architecture need not have Engram layers.
        if settings is None or not engram_fields(vllm_config).get("engram_layer_ids"):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.engramd = None
            return
        refuse_unsupported(vllm_config, current_platform)
        check_shapes("vLLM", vllm_version(), " and ".join(f"{known}x" for known in KNOWN_VERSIONS), SHAPES)
        connection = Connection(settings, vllm_config)
        # Imported here, after the shapes were checked: their classes derive from vLLM's.
        from .embedding import StagedEngram, StridedEngram
        from .loading import skip_table_tensors
        from .mapped import MappedRows, over_maps

        skip_table_tensors()
        device = torch.device("cuda", torch.accelerator.current_device_index())
        mapped = map_layers(connection.tables, settings, lambda table: MappedRows(table, device))
        connection.is_mapped = mapped is not None
        if mapped is not None:
            layer: type = over_maps(mapped, device)
        else:
            layer = StridedEngram if settings.columns == "strided" else StagedEngram
        with engram_layers_of(layer, vllm_config, in_host_memory=connection.is_mapped):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Not a submodule, and not a parameter either.
        self.engramd = connection

    def get_model_state_cls(self) -> type:
        """vLLM's class for the state of a model between steps, with the staging of rows before each step."""
        state: type = super().get_model_state_cls()
        if self.engramd is None or self.engramd.is_mapped:
            return state
        from .model_state import staging

        return staging(state)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As in vLLM, without the tables' tensors where the daemon has them."""
        if self.engramd is not None:
            from .loading import without_table_tensors

            weights = without_table_tensors(weights)
        loaded: set[str] = super().load_weights(weights)
        return loaded


class Connection:
    """The daemon of one model: the client, and the model's layers in it. Opened before weights are loaded.

    Raises DaemonLost where nobody answers for settings.wait_s, ModelMismatch where the table is not the model's.
    """

    def __init__(self, settings: EngineSettings, vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        fields = engram_fields(vllm_config)
        self.settings = settings
        self.client: Client = connect_when_up(settings, name=f"vllm rank {vllm_config.parallel_config.rank}")
        #: In the order of the model's configuration.
        self.tables: list[Table] = open_layers(
            self.client,
            fields,
            head_dim=fields["engram_head_dim"],
            table=settings.table,
            revision=getattr(config, "_commit_hash", None) or vllm_config.model_config.revision,
        )
        #: Whether the layers' rows are mapped; else they are staged for each step.
        self.is_mapped = False


def engram_layers(model: Any) -> list[Any]:
    """This rank's Engram layers, in the order of the decoder. model: vLLM's DeepseekV4Model."""
    layers = islice(model.layers, model.start_layer, model.end_layer)
    return [layer.engram for layer in layers if getattr(layer, "engram", None) is not None]


@contextmanager
def engram_layers_of(layer: type, vllm_config: Any, *, in_host_memory: bool) -> Iterator[None]:
    """Models built inside have Engram layers of this class, and no table is allocated for them.

    in_host_memory: the layers look rows up in host memory, for which vLLM makes a stream.
    """
    from vllm.models.deepseek_v41.nvidia import model

    storage = vllm_config.engram_config
    storage.cpu_offload = in_host_memory
    # No memory shared between replicas, no page cache to drop.
    storage.dp_shared_memory = storage.use_thp = False
    native = model.Engram
    model.Engram = layer
    try:
        yield
    finally:
        model.Engram = native
