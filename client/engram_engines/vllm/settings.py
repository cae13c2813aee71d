"""What a vLLM configuration says about the daemon and about the model's Engram layers. Needs nothing of vLLM."""

from __future__ import annotations

from typing import Any

from ..core.settings import EngineSettings

#: The key of vLLM's --additional-config that holds our settings, a mapping.
ADDITIONAL_CONFIG_KEY = "engramd"


def settings_of(vllm_config: Any) -> EngineSettings | None:
    """The settings of the environment and of the additional config; None where neither names a daemon.

    Raises ValueError for settings that make no sense.
    """
    additional = vllm_config.additional_config
    options = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None
    return EngineSettings.find(options)


def engram_fields(vllm_config: Any) -> dict[str, Any]:
    """The fields of the model's configuration that are about Engram; none for other models."""
    config = vllm_config.model_config.hf_config
    return {name: getattr(config, name) for name in dir(config) if name.startswith("engram_")}
