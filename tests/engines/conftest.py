"""What the tests of the engines' plug-ins share: clients of a real daemon, and the checkpoint's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> dict[str, Any]:
    """The text_config of the checkpoint behind the `table` fixture."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("text_config", config))


@pytest.fixture
def resident(start_daemon: Any, table: Path, tmp_path: Path) -> Callable[..., Any]:
    """`resident(layout="split")`: a daemon that holds the whole table in this layout."""

    def start(layout: str = "split") -> Any:
        config = tmp_path / f"{layout}.toml"
        config.write_text(f'dram = "64MiB"\n[[table]]\nname = "demo"\npath = "{table}"\nresident_layout = "{layout}"\n')
        return start_daemon(config=config, dram=None)

    return start
