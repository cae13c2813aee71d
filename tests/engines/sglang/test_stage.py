"""Rows of prompts and decoding steps: the plug-in's against SGLang's own, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import engram_client
import numpy as np
import pytest

LAYERS = (1, 14)
VOCAB = 129_280
IMAGE = 1_000_000 + (1 << 30)  # far above SGLang's MM_PAD_SHIFT_VALUE


class HostTorch:
    """Double of torch for SGLang's own stager: no pinned memory, no streams, events that mean nothing."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(
            stream=lambda stream: contextlib.nullcontext(), Event=lambda: SimpleNamespace(record=lambda: None)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *arguments: Any, pin_memory: bool, **options: Any) -> Any:
        return self._torch.empty(*arguments, **options)


@pytest.fixture
def own_stager(native_model: Any, own_hasher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own stager over its own tables."""
    import torch
    from sglang.srt.layers import engram_staging

    monkeypatch.setattr(engram_staging, "torch", HostTorch(torch))
    made = object.__new__(engram_staging.EngramRowStager)
    made.hasher = own_hasher
    made.tables = [
        (one.embed.weight.data.view(torch.uint8), one.embed.scale.data.view(torch.uint8)) for one in native_model.layers
    ]
    made.device = torch.device("cpu")
    made.pool = ThreadPoolExecutor(4)
    made.copy_stream = None
    return made


def some_tokens(rng: Any, count: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB, count)]


def assert_same(staged: Any, expected: Any) -> None:
    assert len(staged) == len(expected) == len(LAYERS)
    for (values, scales, copied), (own_values, own_scales, _) in zip(staged, expected, strict=True):
        np.testing.assert_array_equal(values.numpy(), own_values.numpy())
        np.testing.assert_array_equal(scales.numpy(), own_scales.numpy())
        assert copied is None


def test_prompts_in_random_chunks(own_stager: Any, stager: Any, batch_of: Callable[..., Any]) -> None:
    """Chunked prefill, prefix hits and batches of several requests are all the same: a prefix and an extend length."""
    rng = np.random.default_rng(4)
    for _ in range(12):
        requests = []
        for _ in range(int(rng.integers(1, 6))):
            tokens = some_tokens(rng, int(rng.integers(1, 60)))
            prefix = int(rng.integers(0, len(tokens)))
            requests.append((tokens, prefix, int(rng.integers(0, len(tokens) - prefix + 1))))
        batch = batch_of(requests)
        expected = own_stager.stage(batch)
        staged = stager.stage(batch)
        if expected is None:
            assert staged is None
        else:
            assert_same(staged, expected)


def test_images_are_blocked_as_in_sglang(
    own_stager: Any, stager: Any, batch_of: Callable[..., Any], own_hasher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_hasher, "image_token_id", 128_815)
    rng = np.random.default_rng(5)
    tokens = [*some_tokens(rng, 9), *[IMAGE] * 4, *some_tokens(rng, 9)]
    batch = batch_of([(tokens, 11, 11), (tokens, 0, 22)])
    assert_same(stager.stage(batch), own_stager.stage(batch))


def test_replayed_windows(own_stager: Any, stager: Any, batch_of: Callable[..., Any]) -> None:
    tokens = some_tokens(np.random.default_rng(6), 300)
    batch = batch_of([(tokens, 200, 60), (tokens, 40, 10)])
    batch.encoder_swa_reset = [True, False]
    assert_same(stager.stage(batch), own_stager.stage(batch))


def test_a_token_on_the_device_leaves_the_lookup_to_the_forward(stager: Any, batch_of: Callable[..., Any]) -> None:
    assert stager.stage(batch_of([([1, 2, 3], 2, 2)])) is None


def test_decoding_batches_are_left_to_the_forward(stager: Any, batch_of: Callable[..., Any]) -> None:
    batch = batch_of([([1, 2, 3], 0, 3)])
    batch.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: False)
    assert stager.stage(batch) is None


def forward_batch(staged: Any) -> Any:
    """A double of ForwardBatch: what the layers read of it for their rows."""
    return SimpleNamespace(
        engram_staged_rows=staged,
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: staged is not None),
    )


def test_layers_read_the_same_numbers(
    native_model: Any, stager: Any, own_hasher: Any, batch_of: Callable[..., Any]
) -> None:
    """SGLang's own layer over its own table, against the same layer over staged rows and over rows looked up."""
    import torch

    tokens = some_tokens(np.random.default_rng(7), 40)
    batch = batch_of([(tokens, 3, 37)])
    ids = own_hasher.hash_windows(*stager._windows(batch))[0]
    staged = stager.stage(batch)
    inputs = torch.zeros(37, dtype=torch.int64)
    x = torch.randn(37, 2, 32, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    for index, (own, ours) in enumerate(zip(native_model.layers, stager.model.layers, strict=True)):
        ours.wkv.load_state_dict(own.wkv.state_dict())
        for module in (own, ours):
            module.wkv.weight.data.normal_(generator=torch.Generator().manual_seed(2))
            module.wkv.to(torch.bfloat16)
        expected = own.embed_rows(ids[:, index], forward_batch(None), False)
        assert expected.any()
        for how in (staged, None):
            found = ours.embed_rows(ids[:, index], forward_batch(how), False)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        whole = own(x, ids[:, index], forward_batch(None), input_ids=inputs)
        assert torch.equal(ours(x, ids[:, index], forward_batch(staged), input_ids=inputs), whole)
        assert not torch.equal(whole, x)


def test_padded_tokens_of_a_graph_read_zeros(stager: Any, batch_of: Callable[..., Any]) -> None:
    import torch

    staged = stager.stage(batch_of([([1, 2, 3], 0, 3)]))
    found = stager.model.layers[0].embed.dequant_staged(*staged[0], torch.Size((5, 24)))
    assert found[:3].any()
    assert not found[3:].any()


def test_the_kernel_reads_staged_rows(native_model: Any, stager: Any, batch_of: Callable[..., Any]) -> None:
    """SGLang's kernel, which on a GPU stands between staged rows and the layer, over our rows and its own table."""
    import torch
    from sglang.kernels.ops.embeddings import engram_gather

    batch = batch_of([([5, 6, 7, 8], 0, 4)])
    ids = stager.hasher.hash_windows(*stager._windows(batch))[0][:, 0].reshape(-1).contiguous()
    values, scales, _ = stager.stage(batch)[0]
    embed = native_model.layers[0].embed

    def run(weight: Any, scale: Any, rows: Any, count: int) -> Any:
        out = torch.empty(len(rows), 256, dtype=torch.bfloat16)
        engram_gather._engram_gather_kernel[(len(rows),)](
            weight.data_ptr(),
            scale.data_ptr(),
            rows,
            rows,
            out,
            0,
            count,
            DIM=256,
            BLK=32,
            E8M0_ZERO=engram_gather._E8M0_ZERO,
            HAS_DST=False,
        )
        return out.view(torch.int16)

    ours = run(values, scales, torch.arange(len(ids), dtype=torch.int32), len(ids))
    assert torch.equal(ours, run(embed.weight.data, embed.scale.data, ids, embed.rows))
    assert ours.any()


def rank_of(rank: int, size: int) -> dict[str, int]:
    return {"tp_size": size, "attn_tp_size": size, "moe_tp_size": size, "tp_rank": rank, "attn_tp_rank": rank}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks(
    tp_size: int, server: Any, make_model: Any, rows: dict[int, Any], own_hasher: Any, request: pytest.FixtureRequest
) -> None:
    """SGLang's shards of a table, summed over the ranks, are what each rank gets from the daemon."""
    import torch

    shards = []
    for rank in range(tp_size):
        with server.parallel.override(**rank_of(rank, tp_size)):
            model = make_model()
        for layer, module in zip(LAYERS, model.layers, strict=True):
            embed = module.embed
            own = torch.from_numpy(np.ascontiguousarray(rows[layer][embed.row_start : embed.row_start + embed.rows]))
            embed.weight.data.view(torch.uint8).copy_(own[:, :256])
            embed.scale.data.view(torch.uint8).copy_(own[:, 256:])
        shards.append(model)
    stager = request.getfixturevalue("stager")
    ids = torch.from_numpy(np.random.default_rng(8).integers(0, min(len(one) for one in rows.values()), (7, 24)))
    for index in range(len(LAYERS)):
        parts = torch.stack([model.layers[index].embed._owned_rows(ids).float() for model in shards])
        expected = parts.sum(0).to(torch.bfloat16)
        for rank in range(tp_size):
            with server.parallel.override(**rank_of(rank, tp_size)):
                assert torch.equal(stager.model.layers[index].embed(ids), expected)


def test_long_prompts_go_in_parts(
    own_stager: Any,
    installed: None,
    make_model: Any,
    own_hasher: Any,
    start_daemon: Any,
    monkeypatch: pytest.MonkeyPatch,
    batch_of: Callable[..., Any],
) -> None:
    import torch
    from sglang.srt.layers import engram_staging

    daemon = start_daemon(dram="8MiB", arena="1MiB")
    monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
    stager = engram_staging.EngramRowStager.from_model(make_model(), own_hasher, torch.device("cpu"))
    batch = batch_of([(some_tokens(np.random.default_rng(9), 400), 100, 300)])
    assert_same(stager.stage(batch), own_stager.stage(batch))
    assert stager.counters.submissions > len(LAYERS)
    stager.close()


def test_a_dead_daemon_fails_the_step(stager: Any, batch_of: Callable[..., Any]) -> None:
    import torch

    batch = batch_of([([1, 2, 3], 0, 3)])
    stager.stage(batch)
    stager.daemon.kill()
    with pytest.raises(engram_client.DaemonLost):
        stager.stage(batch)
    with pytest.raises(engram_client.DaemonLost):
        stager.model.layers[0].embed(torch.zeros((2, 24), dtype=torch.int64))


def test_a_row_outside_the_table_fails_the_step(stager: Any) -> None:
    import torch

    with pytest.raises(engram_client.RowIdError):
        stager.model.layers[0].embed(torch.full((1, 24), 1 << 40))
