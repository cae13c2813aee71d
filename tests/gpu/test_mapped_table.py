"""MappedTable: a resident layer registered read-only and reached by its device address. The drivers are doubles."""

from __future__ import annotations

import os
import time
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda import GpuError, MappedTable

from tests.waiting import eventually

from .conftest import ROW_BYTES, VALUE_BYTES, Double, end_stream, new_stream

BATCHES = int(os.environ.get("ENGRAM_N") or 150)
SEED = int(os.environ.get("ENGRAM_SEED") or 1)
DEADLINE_S = 60.0
GATHERED = 8


@pytest.fixture
def split_client(resident: Any, connect: Any) -> engram_client.Client:
    """Of a daemon whose resident layers lie in split layout."""
    made: engram_client.Client = connect(resident("split"))
    return made


def mapped_when_resident(table: Any, device: str) -> MappedTable:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return MappedTable(table, device)
        except engram_client.Busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_rows_are_read_by_device_address(cuda: Double, client: Any, device_memory: Any) -> None:
    table = client.table(layer=1)
    with mapped_when_resident(table, "cuda:0") as mapped:
        assert cuda.counter("registered") == 1
        out = device_memory(mapped.driver, 5 * ROW_BYTES)
        entered = mapped.driver.enter()
        mapped.driver.copy_any(out.address, mapped.rows_pointer + 1000 * ROW_BYTES, 5 * ROW_BYTES, 0)
        mapped.driver.leave(entered)
        rows = out.read(0).reshape(5, ROW_BYTES)
        assert np.array_equal(rows, table.fetch(np.arange(1000, 1005)))
        with pytest.raises(engram_client.EngramError, match="packed layout"):
            _ = mapped.values_pointer
    assert cuda.counter("registered") == 0
    mapped.close()


def test_split_rows(gpu: Double, split_client: Any, device_memory: Any) -> None:
    served = split_client.table(layer=14)
    last = served.num_rows - 1
    with mapped_when_resident(served, f"{gpu.kind}:0") as mapped:
        values = device_memory(mapped.driver, VALUE_BYTES)
        scales = device_memory(mapped.driver, ROW_BYTES - VALUE_BYTES)
        host = mapped.map.whole.ctypes.data
        entered = mapped.driver.enter()
        mapped.driver.copy_to_device(values.address, host + last * VALUE_BYTES, VALUE_BYTES, 0)
        offset = mapped.map.scales_offset + last * 8
        mapped.driver.copy_to_device(scales.address, host + offset, 8, 0)
        mapped.driver.leave(entered)
        expected = served.fetch([last], layout="split")
        assert np.array_equal(values.read(0), expected[0][0])
        assert np.array_equal(scales.read(0), expected[1][0])
        assert mapped.scales_pointer - mapped.values_pointer == mapped.map.scales_offset


def test_devices_that_register_no_read_only_memory(gpu: Double, client: Any, stats: Any) -> None:
    table = client.table(layer=1)
    with mapped_when_resident(table, f"{gpu.kind}:0"):
        pass
    gpu.option("no_read_only", 1)
    with pytest.raises(GpuError, match=r"never mapped writable|hipErrorNotSupported"):
        MappedTable(table, f"{gpu.kind}:0")
    assert gpu.counter("registered") == 0
    with table.map() as mapped:  # the refused one has let go
        assert mapped.rows.shape == (table.num_rows, ROW_BYTES)


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_random_batches_with_injected_errors(
    cuda: Double, layout: str, request: pytest.FixtureRequest, device_memory: Any
) -> None:
    """ENGRAM_N gathers by device address (10,000 in `make gpu-soak`), a copy in the place of each of a kernel's reads:
    exact rows or a driver's error. Maps are made and closed in between, and now and then the driver refuses one."""
    client = request.getfixturevalue("client" if layout == "packed" else "split_client")
    table = client.table(layer=1)
    mapped = mapped_when_resident(table, "cuda:0")
    stream = new_stream(mapped.driver)
    generator = np.random.default_rng([SEED, BATCHES])
    packed_out = device_memory(mapped.driver, GATHERED * ROW_BYTES)
    pieces = [(ROW_BYTES, 0)] if layout == "packed" else [(VALUE_BYTES, 0), (ROW_BYTES - VALUE_BYTES, VALUE_BYTES)]
    failed = 0
    for _ in range(BATCHES):
        if generator.random() < 0.1:
            mapped.close()
            assert cuda.counter("registered") == 0
            if generator.random() < 0.5:
                cuda.fail(str(generator.choice(["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])), 2)
                with pytest.raises(GpuError, match="OUT_OF_MEMORY"):
                    MappedTable(table, "cuda:0")
                assert cuda.counter("registered") == 0
                failed += 1
            mapped = MappedTable(table, "cuda:0")
        ids = generator.integers(0, table.num_rows, GATHERED)
        sources = [mapped.rows_pointer] if layout == "packed" else [mapped.values_pointer, mapped.scales_pointer]
        copies = [
            (packed_out.address + place * ROW_BYTES + offset, source + int(row) * width, width)
            for place, row in enumerate(ids)
            for source, (width, offset) in zip(sources, pieces, strict=True)
        ]
        is_refused = generator.random() < 0.05
        if is_refused:
            cuda.fail("cuMemcpyAsync", 700, int(generator.integers(0, len(copies))))
        entered = mapped.driver.enter()
        try:
            for target, source, width in copies:
                mapped.driver.copy_any(target, source, width, stream)
        except GpuError:
            assert is_refused
            failed += 1
            mapped.driver.synchronize_stream(stream)  # those before it still read the map
            continue
        finally:
            mapped.driver.leave(entered)
        assert not is_refused
        assert np.array_equal(packed_out.read(stream).reshape(GATHERED, ROW_BYTES), table.fetch(ids))
    assert failed > 0 or BATCHES < 50
    end_stream(mapped.driver, stream)
    mapped.close()
    eventually(lambda: maps_of(client) == 0)


def maps_of(client: Any) -> int:
    return sum(layer["maps"] for table in client.stats()["tables"] for layer in table["layers"])
