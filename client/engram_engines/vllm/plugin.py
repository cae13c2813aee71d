"""Registers the plug-in's model class with vLLM, under the name of vLLM's own.

vLLM lets a plug-in give another class for an architecture. Ours (model.py) is vLLM's own class, which takes its Engram
rows from a daemon where the settings or the engine's additional config name one, and is unchanged otherwise. The class
is named by a text, so that nothing of the model is imported before vLLM builds it.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from ..core.class_shapes import EngineMismatch
from ..core.settings import EngineSettings

logger = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV41ForCausalLM"
#: Releases whose classes model.py was written for.
KNOWN_VERSIONS = ("0.33.",)


def vllm_version() -> str:
    """The installed vLLM's version, "none" where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "none"


def install() -> None:
    """Registers the class. Calling it again is harmless.

    Another release of vLLM than those known is left alone with a warning, and refused with EngineMismatch where
    ENGRAMD_SOCKET asks for the plug-in. Raises ValueError for settings that make no sense.
    """
    found = vllm_version()
    if not found.startswith(KNOWN_VERSIONS):
        text = (
            f"the engramd plug-in knows vLLM {' and '.join(f'{known}x' for known in KNOWN_VERSIONS)}, this is {found}"
        )
        if EngineSettings.find() is not None:
            raise EngineMismatch(
                f"{text}: install an engramd client for this vLLM, or unset ENGRAMD_SOCKET to let vLLM load the tables "
                "itself"
            )
        logger.warning("%s; it stays out of the way, also where the additional config names a daemon", text)
        return
    EngineSettings.find()  # refused before anything is loaded
    from vllm import ModelRegistry

    from .arrival import watch_requests

    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.model:EngramdDeepseekV41ForCausalLM")
    watch_requests()
