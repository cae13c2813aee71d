"""Rows as vLLM's layers see them, bit for bit those of vLLM's own table, and steps that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client import NgramHasher

COLUMNS = 24
TEXT_LENGTH = 60
IMAGE_TOKEN = 129_264


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    generator = np.random.default_rng(5)
    made = {name: generator.integers(0, 129_000, TEXT_LENGTH) for name in "ab"}
    made["a"][22:26] = IMAGE_TOKEN
    return made


def looked_up(table: Any, ids: Any, *, packed: bool = False) -> Any:
    """What vLLM's own table gives for ids [tokens, columns]: bfloat16, or uint8 with values before scales."""
    import torch

    width, dtype = (264, torch.uint8) if packed else (256, torch.bfloat16)
    # Not written by rows: whatever the look-up leaves out would show.
    out = torch.full((ids.shape[0], table.part_n_hash_cols, width), 77, dtype=dtype)
    table.lookup(torch.from_numpy(np.ascontiguousarray(ids)), out)
    return out


def same_bits(left: Any, right: Any) -> bool:
    import torch

    if left.shape != right.shape:
        return False
    return bool(torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)))


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_ranks_rows(
    ranks: int,
    packed: bool,
    as_rank: Callable[..., None],
    native_table: Callable[..., Any],
    make_rank: Callable[..., Any],
    hasher: NgramHasher,
    texts: dict[str, Any],
) -> None:
    import torch

    ids = hasher.row_ids(texts["a"])[:20]
    for rank in range(ranks):
        as_rank(rank, ranks)
        own = make_rank(texts)
        own.prepare([("a", 0, 20)], padding=3)
        for index, layer in enumerate(own.layers):
            table = native_table(index)
            expected = looked_up(table, ids[:, index], packed=packed)
            out = torch.full((20, *expected.shape[1:]), 55, dtype=expected.dtype)
            layer.embed_tokens.lookup(torch.zeros(20, COLUMNS, dtype=torch.int32), out)
            assert same_bits(out, expected)
            assert (out.view(torch.uint8) != 0).any()
            assert same_bits(layer.staged_rows[:20], looked_up(table, ids[:, index]))
            assert not layer.staged_rows[20:23].any(), "padding is zero"


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_gathered_rows_are_in_the_order_of_the_columns(
    ranks: int,
    strided: bool,
    as_rank: Callable[..., None],
    native_table: Callable[..., Any],
    make_rank: Callable[..., Any],
    hasher: NgramHasher,
    texts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from vllm.models.deepseek_v41.common import engram

    expected = [looked_up(native_table(index), hasher.row_ids(texts["b"])[:9, index]) for index in range(2)]
    by_rank = []
    for rank in range(ranks):
        as_rank(rank, ranks)
        own = make_rank(texts, strided=strided)
        own.prepare([("b", 0, 9)])
        by_rank.append(own.layers)
    for index in range(2):
        staged = [layers[index].staged_rows[:9] for layers in by_rank]
        monkeypatch.setattr(engram, "tensor_model_parallel_all_gather", lambda rows, dim, s=staged: torch.cat(s, dim))
        for layers in by_rank:
            assert same_bits(layers[index].embed(torch.zeros(9, COLUMNS, dtype=torch.int32)), expected[index])


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("seed", range(3))
def test_steps(
    seed: int,
    is_graph: bool,
    native_table: Callable[..., Any],
    make_rank: Callable[..., Any],
    hasher: NgramHasher,
    texts: dict[str, Any],
) -> None:
    """Chunked prefill of two requests, one of which has an image, is preempted and computed again from its start; steps
    larger than one reply (the arena of 1 MiB holds some 40 tokens of a layer)."""
    import torch

    generator = np.random.default_rng(seed)
    expected = {name: hasher.row_ids(text, dead=text == IMAGE_TOKEN) for name, text in texts.items()}
    tables = [native_table(index) for index in range(2)]
    rank = make_rank(texts, is_graph=is_graph)
    layers = rank.layers
    position = {"a": 0, "b": 17}
    preempted = False
    steps = 0
    while any(first < TEXT_LENGTH for first in position.values()):
        if not preempted and position["a"] > 20:
            position["a"], preempted = 0, True
        chunks = [
            (name, first, min(TEXT_LENGTH - first, int(generator.choice([1, 4, 45]))))
            for name, first in position.items()
            if first < TEXT_LENGTH
        ]
        padding = int(generator.integers(0, 4))
        rank.prepare(chunks, padding)
        steps += 1
        tokens = sum(count for _, _, count in chunks)
        ids = np.concatenate([expected[name][first : first + count] for name, first, count in chunks])
        assert [layer.embed_tokens.complete is None for layer in layers] == [True, is_graph]
        for index, layer in enumerate(layers):
            layer.prepare_embeddings(torch.zeros(tokens + padding, COLUMNS, dtype=torch.int32))
            rows = layer.embed(torch.zeros(tokens + padding, COLUMNS, dtype=torch.int32))
            assert same_bits(rows[:tokens], looked_up(tables[index], ids[:, index]))
            assert not rows[tokens:].any()
        for name, first, count in chunks:
            position[name] = first + count
    assert preempted
    assert rank.rows.counters.steps == steps
    assert rank.rows.counters.rows == 48 * rank.rows.counters.tokens


def test_the_whole_layer(
    native_table: Callable[..., Any],
    make_layers: Callable[[type], list[Any]],
    make_rank: Callable[..., Any],
    hasher: NgramHasher,
    texts: dict[str, Any],
) -> None:
    """What both layers add to the residual stream, with the plug-in and with vLLM's own tables."""
    import torch
    from vllm.models.deepseek_v41.common.engram import Engram

    generator = torch.Generator().manual_seed(1)
    rank = make_rank(texts)
    rank.prepare([("a", 15, 20)], padding=2)
    layers = rank.layers
    ids = np.zeros((22, 2, COLUMNS), np.int32)
    ids[:20] = hasher.row_ids(texts["a"], dead=texts["a"] == IMAGE_TOKEN)[15:35]
    hash_ids = torch.from_numpy(ids)
    keep = torch.from_numpy(np.append(texts["a"][15:35] != IMAGE_TOKEN, [True, True]))
    for index, native in enumerate(make_layers(Engram)):
        native_table(index, native.embed_tokens)
        for name in ("wkv.weight", "q_weight", "k_weight"):
            native.get_parameter(name).data.normal_(generator=generator)
            layers[index].get_parameter(name).data.copy_(native.get_parameter(name).data)
        hidden = torch.randn(22, 2, 128, generator=generator).to(torch.bfloat16)
        outputs = []
        for layer in (native, layers[index]):
            layer.prepare_embeddings(hash_ids[:, index])
            outputs.append(layer(hidden, hash_ids[:, index], keep))
        assert same_bits(outputs[1][:20], outputs[0][:20])
        changed = (outputs[0][:20] != hidden[:20]).flatten(1).any(1)
        assert changed.tolist() == keep[:20].tolist(), "images pass through, everything else gets its rows"


def test_dummy_steps_ask_for_nothing(
    start_daemon: Any,
    make_rank: Callable[..., Any],
    texts: dict[str, Any],
    stats: Callable[[Any], dict[str, Any]],
) -> None:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    daemon = start_daemon()
    rank = make_rank(texts, daemon)
    dummy = InputBatch.make_dummy(2, 12, InputBuffers(8, 96, torch.device("cpu")))
    rank.state.prepare_inputs(dummy, rank.runner.req_states)
    assert sum(layer["requests"] for layer in stats(daemon)["tables"][0]["layers"]) == 0
    # It may run the layers, which read whatever lies there.
    rank.layers[0].prepare_embeddings(torch.zeros(12, COLUMNS, dtype=torch.int32))
    # Padding is not asked for either.
    rank.prepare([("a", 0, 5)], padding=7)
    assert [layer["rows"] for layer in stats(daemon)["tables"][0]["layers"]] == [5 * COLUMNS, 5 * COLUMNS]


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_a_dead_daemon_fails_the_step(
    is_graph: bool,
    start_daemon: Any,
    native_table: Callable[..., Any],
    make_rank: Callable[..., Any],
    hasher: NgramHasher,
    texts: dict[str, Any],
) -> None:
    daemon = start_daemon()
    rank = make_rank(texts, daemon, is_graph=is_graph)
    rank.prepare([("a", 0, 5)])
    daemon.kill()
    with pytest.raises(engram_client.DaemonLost):
        rank.prepare([("a", 5, 5)])
    start_daemon(socket=daemon.socket)
    rank.prepare([("a", 5, 5)])
    expected = looked_up(native_table(0), hasher.row_ids(texts["a"])[5:10, 0])
    assert same_bits(rank.layers[0].staged_rows[:5], expected)


def test_a_step_that_was_not_staged_is_refused(
    make_rank: Callable[..., Any],
    texts: dict[str, Any],
) -> None:
    import torch

    rank = make_rank(texts)
    rank.prepare([("a", 0, 5)])
    with pytest.raises(RuntimeError, match="asks for rows of 4 tokens, but those of 5 were staged"):
        rank.layers[0].prepare_embeddings(torch.zeros(4, COLUMNS, dtype=torch.int32))


def test_the_waits_are_in_vllms_own_metrics(make_rank: Callable[..., Any], texts: dict[str, Any]) -> None:
    """In the registry that vLLM's /metrics is made from."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    def found() -> list[float]:
        registry = get_prometheus_registry()
        labels = {"kind": "step", "rank": "0"}
        return [
            registry.get_sample_value("engramd_steps_total", labels) or 0.0,
            registry.get_sample_value("engramd_step_rows_total", labels) or 0.0,
            registry.get_sample_value("engramd_step_ids_wait_seconds_total", labels) or 0.0,
            registry.get_sample_value("engramd_step_rows_wait_seconds_total", labels | {"layer": "14"}) or 0.0,
        ]

    rank = make_rank(texts)
    before = found()
    rank.prepare([("a", 0, 5)])
    rank.rows._metrics.hand_on()
    steps, rows, ids_wait_s, rows_wait_s = np.subtract(found(), before)
    assert (steps, rows) == (1, 5 * 2 * COLUMNS)
    assert ids_wait_s > 0
    assert rows_wait_s > 0


def test_no_table_is_allocated(staged_layers: Callable[..., list[Any]], layout: Any) -> None:
    for layer in staged_layers():
        assert not list(layer.embed_tokens.parameters())
        assert not layer.embed_tokens.state_dict()
        bytes_held = sum(buffer.nbytes for buffer in layer.embed_tokens.buffers())
        assert bytes_held == 96 * COLUMNS * (256 + 8 + 4)
