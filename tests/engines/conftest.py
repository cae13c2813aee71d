"""What the tests of the engines' plug-ins share: clients of a real daemon, and the checkpoint's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> dict[str, Any]:
    """The text_config of the checkpoint behind the `table` fixture."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("text_config", config))
