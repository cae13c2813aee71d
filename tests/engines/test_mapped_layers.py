"""Mapped or staged: one decision for all layers, at the start, and nothing left mapped where it is staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engram_client
import pytest
from engram_engines.core import EngineSettings, map_layers


@pytest.fixture
def tables(start_daemon: Any, connect: Callable[..., Any]) -> list[engram_client.Table]:
    """Both layers of a table that is resident, or soon will be."""
    client = connect(start_daemon(dram="256MiB"))
    return [client.table(layer=layer) for layer in (1, 14)]


def settings(rows: str, wait_s: float = 60.0) -> EngineSettings:
    return EngineSettings("/not/used.sock", rows=rows, wait_s=wait_s)


def test_mapped(tables: list[Any], rows: dict[int, Any]) -> None:
    maps = map_layers(tables, settings("mapped"), lambda table: table.map())
    assert maps is not None
    for one, layer in zip(maps, (1, 14), strict=True):
        assert (one.rows == rows[layer]).all()
        one.close()
    assert map_layers(tables, settings("staged"), lambda table: table.map()) is None
    again = map_layers(tables, settings("auto"), lambda table: table.map())
    assert again is not None
    for one in again:
        one.close()


def test_one_layer_that_cannot_be_mapped(tables: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    opened: list[Any] = []

    def open_first(table: Any) -> Any:
        if table.layer == 14:
            raise engram_client.EngramError("no room for layer 14")
        opened.append(table.map())
        return opened[-1]

    caplog.set_level("INFO")
    for one in map_layers(tables, settings("mapped"), lambda table: table.map()) or ():
        one.close()  # the layers are resident from here on
    assert map_layers(tables, settings("auto"), open_first) is None
    assert "staged for each step, since the layers cannot be mapped: no room for layer 14" in caplog.text
    with pytest.raises(engram_client.EngramError, match="no room for layer 14"):
        map_layers(tables, settings("mapped"), open_first)
    assert len(opened) == 2
    assert not any(one.is_open for one in opened)


def test_layers_that_are_not_resident(start_daemon: Any, connect: Callable[..., Any]) -> None:
    client = connect(start_daemon(dram="256KiB"))
    cached = [client.table(layer=1)]
    assert map_layers(cached, settings("auto"), lambda table: table.map()) is None
    with pytest.raises(engram_client.Busy):
        map_layers(cached, settings("mapped", wait_s=0.3), lambda table: table.map())
