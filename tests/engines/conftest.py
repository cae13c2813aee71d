"""What the tests of the engines' plug-ins share: clients of a real daemon, and the checkpoint's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engram_client
import pytest


@pytest.fixture
def connect() -> Iterator[Callable[..., engram_client.Client]]:
    """`connect(daemon, **options)`: a client that is closed at the end."""
    clients: list[engram_client.Client] = []

    def open_client(daemon: Any, **options: Any) -> engram_client.Client:
        clients.append(engram_client.connect(daemon.socket, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def model_config(checkpoint: Path) -> dict[str, Any]:
    """The text_config of the checkpoint behind the `table` fixture."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return dict(config.get("text_config", config))
