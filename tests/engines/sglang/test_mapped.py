"""Rows of resident layers where the daemon holds them, read by SGLang's own kernel, bit for bit; and what is staged.

Memory and daemon are real. The registration with a GPU is a double, whose device addresses are the host's; the kernel
is interpreted, and SGLang's launcher around it, which asks for a GPU, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda import GpuError

COLUMNS = 24


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    """Mapped layers have device addresses, and the kernel runs over them."""
    import torch
    from engram_engines.sglang import mapped_rows
    from sglang.kernels.ops.embeddings import engram_gather
    from sglang.srt.layers import engram

    class Registered:
        def __init__(self, table: engram_client.Table, device: torch.device) -> None:
            self.map = table.map()

        @property
        def values_pointer(self) -> int:
            return int(self.map.values.ctypes.data)

        @property
        def scales_pointer(self) -> int:
            return int(self.map.scales.ctypes.data)

        def close(self) -> None:
            self.map.close()

    def launch(values: int, scales: int, ids: Any, out: Any, dim: int, block: int, row_hi: int, sort_ids: bool) -> None:
        engram_gather._engram_gather_kernel[(len(ids),)](
            values, scales, ids, ids, out, 0, row_hi, DIM=dim, BLK=block, E8M0_ZERO=2.0**-127, HAS_DST=False
        )

    monkeypatch.setattr(mapped_rows, "MappedTable", Registered)
    monkeypatch.setattr(mapped_rows, "engram_gather", launch)
    monkeypatch.setattr(engram, "_sorted_host_reads", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def start(
    make_model: Callable[[], Any], own_hasher: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """`start(daemon, rows, wait_s=60)`: a model whose layers were connected as SGLang does it, with ENGRAMD_ROWS and
    ENGRAMD_WAIT_S of these values."""
    made: list[Any] = []

    def connect(daemon: Any, rows: str, wait_s: float = 60) -> Any:
        import torch
        from sglang.srt.layers import engram_staging

        monkeypatch.setenv("ENGRAMD_SOCKET", daemon.socket)
        monkeypatch.setenv("ENGRAMD_ROWS", rows)
        monkeypatch.setenv("ENGRAMD_WAIT_S", str(wait_s))
        model = make_model()
        made.append(engram_staging.EngramRowStager.from_model(model, own_hasher, torch.device("cpu")))
        return model

    yield connect
    for stager in made:
        stager.close()


def requests(stats: Callable[[Any], dict[str, Any]], daemon: Any) -> int:
    return sum(layer["requests"] for layer in stats(daemon)["tables"][0]["layers"])


def look_up_all(native_model: Any, model: Any) -> None:
    """Rows of both layers, as a forward asks for them outside of prompts, against SGLang's own table."""
    import torch

    generator = np.random.default_rng(10)
    for own, ours in zip(native_model.layers, model.layers, strict=True):
        ids = torch.from_numpy(generator.integers(0, own.embed.rows, (5, COLUMNS)))
        expected = own.embed(ids)
        assert expected.any()
        assert torch.equal(ours.embed(ids).view(torch.int16), expected.view(torch.int16))


def test_mapped(native_model: Any, registered: None, resident: Any, start: Any, stats: Any) -> None:
    daemon = resident()
    model = start(daemon, "mapped")  # waits until the layers are resident
    look_up_all(native_model, model)
    look_up_all(native_model, start(daemon, "auto"))
    assert requests(stats, daemon) == 0
    daemon.kill()
    look_up_all(native_model, model)


def test_staged_where_that_is_asked_for(
    native_model: Any, registered: None, resident: Any, start: Any, stats: Any
) -> None:
    daemon = resident()
    look_up_all(native_model, start(daemon, "staged"))
    assert requests(stats, daemon) == 2


@pytest.mark.parametrize("setting", ["auto", "mapped"])
def test_layers_that_cannot_be_mapped(
    setting: str,
    native_model: Any,
    registered: None,
    resident: Any,
    start_daemon: Any,
    start: Any,
) -> None:
    for daemon, wait_s, error, text in (
        (start_daemon(dram="256KiB"), 0.3, engram_client.Busy, "cannot be mapped"),
        (resident("packed"), 60, engram_client.EngramError, "resident_layout"),
    ):
        if setting == "auto":
            look_up_all(native_model, start(daemon, setting))
        else:
            with pytest.raises(error, match=text):
                start(daemon, setting, wait_s)


def test_a_model_in_host_memory_is_staged(native_model: Any, installed: None, resident: Any, start: Any) -> None:
    """Without the double: there is no GPU that could read over the bus."""
    daemon = resident()
    look_up_all(native_model, start(daemon, "auto"))
    with pytest.raises(GpuError, match="layer 1 cannot be registered: device must be"):
        start(daemon, "mapped")
