"""The steps of an engine's plug-in into device memory, against the doubles and a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engram_client.cuda import GpuError
from engram_client.cuda.driver import open_driver
from engram_engines.core import DeviceTarget, StepStager

from .conftest import VALUE_BYTES, DeviceMemory, Double, end_stream, new_stream

LAYERS = (1, 14)
COLUMNS = 24
SCALE_BYTES = 8


class Places:
    """Device memory for one layer's values and scales of a step."""

    def __init__(self, device_memory: Callable[..., DeviceMemory], driver: Any, max_tokens: int) -> None:
        self.values = device_memory(driver, max_tokens * COLUMNS * VALUE_BYTES)
        self.scales = device_memory(driver, max_tokens * COLUMNS * SCALE_BYTES)

    def place(self, first_token: int, tokens: int) -> tuple[int, int]:
        first = first_token * COLUMNS
        return self.values.address + first * VALUE_BYTES, self.scales.address + first * SCALE_BYTES

    def read(self, tokens: int, stream: int) -> Any:
        rows = tokens * COLUMNS
        values = self.values.read(stream)[: rows * VALUE_BYTES].reshape(tokens, COLUMNS, VALUE_BYTES)
        scales = self.scales.read(stream)[: rows * SCALE_BYTES].reshape(tokens, COLUMNS, SCALE_BYTES)
        return np.concatenate([values, scales], axis=-1)


@pytest.mark.parametrize("delay_us", [0, 3000])
def test_steps(
    gpu: Double,
    delay_us: int,
    start_daemon: Any,
    connect: Any,
    device_memory: Callable[..., DeviceMemory],
    rows: dict[int, Any],
) -> None:
    """Small steps and some of several replies, whose copies hold the arena (1 MiB) while the next part needs room."""
    client = connect(start_daemon(arena="1MiB"))
    driver = open_driver(f"{gpu.kind}:0")
    stream = new_stream(driver)
    max_tokens = 150
    places = [Places(device_memory, driver, max_tokens) for _ in LAYERS]
    targets = [
        DeviceTarget(
            client.table(layer=layer), f"{gpu.kind}:0", client.max_ticket_rows, where.place, stream=lambda: stream
        )
        for layer, where in zip(LAYERS, places, strict=True)
    ]
    stager = StepStager(targets, (0, 1), COLUMNS)
    gpu.option("delay_us", delay_us)
    generator = np.random.default_rng(1)
    most = min(len(whole) for whole in rows.values())
    for tokens in (1, 3, max_tokens, 40, 100, 1, max_tokens):
        ids = generator.integers(0, most, (tokens, len(LAYERS), COLUMNS)).astype(np.int32)
        with stager.begin(ids) as step:
            step.finish(0)
            step.finish(1)
        for position, layer in enumerate(LAYERS):
            assert (places[position].read(tokens, stream) == rows[layer][ids[:, position]]).all()
    end_stream(driver, stream)


def test_a_refused_copy_fails_the_step(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: Callable[..., DeviceMemory], rows: dict[int, Any]
) -> None:
    client = connect(start_daemon())
    driver = open_driver("cuda:0")
    stream = new_stream(driver)
    where = Places(device_memory, driver, 4)
    target = DeviceTarget(client.table(layer=1), "cuda:0", 500, where.place, stream=lambda: stream)
    stager = StepStager([target], (0,), COLUMNS)
    ids = np.arange(4 * COLUMNS, dtype=np.int32).reshape(4, 1, COLUMNS)
    cuda.fail(cuda.copy_function, 719)
    step = stager.begin(ids)
    with pytest.raises(GpuError):
        step.finish(0)
    assert stager.counters.failed_steps == 1
    cuda.fail(cuda.copy_function, 0)
    with stager.begin(ids) as again:
        again.finish(0)
    assert (where.read(4, stream) == rows[1][ids[:, 0]]).all()
    end_stream(driver, stream)
