"""The entry point `sglang.srt.plugins`: puts the plug-in's classes in the place of SGLang's, where a daemon is named.

SGLang runs this in each of its processes before models are loaded. It logs and forgets whatever error a plug-in raises,
and would then load 189 GiB of tables as if nothing had been asked for; so a refusal ends the process (SystemExit), and
the classes are put in place here and not by SGLang's hook registry, which forgets errors likewise.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from ..core.class_shapes import EngineMismatch, check_shapes
from ..core.settings import EngineSettings
from .shapes import SHAPES

logger = logging.getLogger(__name__)

#: Releases whose classes the plug-in was written for.
KNOWN_VERSIONS = ("0.5.23",)


def sglang_version() -> str:
    """The installed SGLang's version, "none" where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def install() -> None:
    """Checks this SGLang and replaces its classes where ENGRAMD_SOCKET is set; does nothing otherwise.

    Raises SystemExit, with a text that says what was found and expected, where the plug-in cannot serve.
    """
    try:
        if EngineSettings.find() is None:
            return
        check()
    except (EngineMismatch, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    replace()
    logger.info("engramd: Engram rows come from the daemon at ENGRAMD_SOCKET")


def check() -> None:
    """Raises EngineMismatch where this SGLang is not one that the plug-in knows."""
    found = sglang_version()
    known = " and ".join(KNOWN_VERSIONS)
    if found not in KNOWN_VERSIONS:
        raise EngineMismatch(
            f"the engramd plug-in knows SGLang {known}, this is {found}: install an engramd client for this SGLang, or "
            "unset ENGRAMD_SOCKET to let SGLang load the tables itself"
        )
    check_shapes("SGLang", found, known, SHAPES)


def replace() -> None:
    """Puts the plug-in's classes and functions in place. Calling it again is harmless."""
    from sglang.srt.layers import engram, engram_staging

    from . import arrival, loading
    from .embedding import DaemonEmbedding
    from .stager import DaemonRowStager

    engram.EngramEmbedding = DaemonEmbedding
    engram_staging.EngramRowStager = DaemonRowStager
    loading.skip_table_tensors()
    arrival.watch_requests()
