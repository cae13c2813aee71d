"""The plug-in for vLLM. `register` is its entry point; the other modules import vLLM and are loaded by vLLM's own
processes only, when they build the model.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, before a model is built."""
    from .plugin import install

    install()
