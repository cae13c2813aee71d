"""MappedTable: a resident layer registered read-only and reached by its device address. The drivers are doubles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda import GpuError, MappedTable

from .conftest import ROW_BYTES, VALUE_BYTES, Double

DEADLINE_S = 60.0


@pytest.fixture
def client(start_daemon: Any, connect: Any) -> engram_client.Client:
    made: engram_client.Client = connect(start_daemon())
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


def test_split_rows(
    gpu: Double, start_daemon: Any, connect: Any, device_memory: Any, tmp_path: Path, table: Path
) -> None:
    config = tmp_path / "engramd.toml"
    config.write_text(f'dram = "64MiB"\n[[table]]\npath = "{table}"\nresident_layout = "split"\n')
    client = connect(start_daemon(config=str(config), dram=None))
    served = client.table(layer=14)
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
