"""Rows of resident layers where the daemon holds them, read by vLLM's own look-up, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engram_client
import numpy as np
import pytest

COLUMNS = 24


def mapped_rows(daemon: Any, connect: Callable[..., Any], rows: str = "mapped", wait_s: float = 60.0) -> Any:
    import torch
    from engram_engines.core import EngineSettings, map_layers
    from engram_engines.vllm.mapped import MappedRows

    client = connect(daemon)
    tables = [client.table(layer=layer) for layer in (1, 14)]
    settings = EngineSettings(daemon.socket, rows=rows, wait_s=wait_s)
    return map_layers(tables, settings, lambda table: MappedRows(table, torch.device("cpu")))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_ranks_rows(
    ranks: int,
    resident: Any,
    connect: Callable[..., Any],
    as_rank: Callable[..., None],
    native_table: Callable[..., Any],
    make_layers: Callable[[type], list[Any]],
    stats: Callable[[Any], dict[str, Any]],
) -> None:
    import torch
    from engram_engines.vllm.mapped import over_maps

    daemon = resident()
    kind = over_maps(mapped_rows(daemon, connect), torch.device("cpu"))
    generator = np.random.default_rng(ranks)
    for rank in range(ranks):
        as_rank(rank, ranks)
        for index, layer in enumerate(make_layers(kind)):
            table = native_table(index)
            # Ids of each column's own range, as the hash gives them, and one of no rank's.
            sizes = connect(daemon).table(layer=(1, 14)[index]).head_sizes
            ids = generator.integers(0, sizes, (11, COLUMNS)) + np.cumsum(sizes) - sizes
            ids[3] = -1
            hash_ids = torch.from_numpy(ids.astype(np.int32))
            for width, dtype in ((264, torch.uint8), (256, torch.bfloat16)):
                outs = [torch.full((11, COLUMNS // ranks, width), 77, dtype=dtype) for _ in range(2)]
                table.lookup(hash_ids, outs[0])
                layer.embed_tokens.lookup(hash_ids, outs[1])
                assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8))
            layer.prepare_embeddings(hash_ids)
            assert torch.equal(layer.staged_rows[:11].view(torch.uint8), outs[0].view(torch.uint8))
            assert not list(layer.embed_tokens.parameters())
    assert sum(layer["requests"] for layer in stats(daemon)["tables"][0]["layers"]) == 0


def test_rows_outlive_the_daemon(
    resident: Any,
    connect: Callable[..., Any],
    native_table: Callable[..., Any],
    make_layers: Callable[[type], list[Any]],
) -> None:
    import torch
    from engram_engines.vllm.mapped import over_maps

    daemon = resident()
    (layer, _) = make_layers(over_maps(mapped_rows(daemon, connect), torch.device("cpu")))
    daemon.kill()
    ids = torch.arange(COLUMNS, dtype=torch.int32)[None]
    outs = [torch.empty(1, COLUMNS, 256, dtype=torch.bfloat16) for _ in range(2)]
    layer.embed_tokens.lookup(ids, outs[0])
    native_table(0).lookup(ids, outs[1])
    assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8))


def test_what_cannot_be_mapped(resident: Any, start_daemon: Any, connect: Callable[..., Any]) -> None:
    cached = start_daemon(dram="256KiB")
    assert mapped_rows(cached, connect, rows="auto") is None
    assert mapped_rows(cached, connect, rows="staged") is None
    with pytest.raises(engram_client.Busy):
        mapped_rows(cached, connect, wait_s=0.3)
    packed = resident("packed")
    with pytest.raises(engram_client.EngramError, match=r"packed layout.*resident_layout"):
        mapped_rows(packed, connect)
    assert mapped_rows(packed, connect, rows="auto") is None
