"""DeviceTable in host wait: rows, copies, errors and lifetimes, against the doubles and a real daemon."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda import DeviceTable, GpuError, rank_columns
from numpy.typing import NDArray

from tests.waiting import eventually

from .conftest import ROW_BYTES, VALUE_BYTES, DeviceMemory, Double, end_stream, new_stream

BATCHES = int(os.environ.get("ENGRAM_N") or 150)
SEED = int(os.environ.get("ENGRAM_SEED") or 1)
MakeMemory = Callable[..., DeviceMemory]


def random_ids(
    table: Any, generator: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.int64
) -> NDArray[Any]:
    ids = generator.integers(0, table.num_rows, shape).astype(dtype)
    ids[generator.random(shape) < 0.1] = -1
    return ids


def test_rows_arrive_with_one_copy(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    table = client.table(layer=1)
    generator = np.random.default_rng(1)
    with DeviceTable(table, f"{gpu.kind}:0", max_rows=400) as device:
        stream = new_stream(device.driver)
        gpu.option("delay_us", 200)
        for count in (1, 48, 400):
            ids = random_ids(table, generator, (count,), np.int32)
            out = device_memory(device.driver, count * ROW_BYTES)
            before = gpu.copies()
            assert device.fetch(ids, out, stream) is out
            assert gpu.copies() == before + 1
            assert np.array_equal(out.read(stream).reshape(-1, ROW_BYTES), table.fetch(ids))
        assert device.timing.batches == 3
        end_stream(device.driver, stream)


def test_split_rows_arrive_with_two_copies(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    table = client.table(layer=14)
    ids = random_ids(table, np.random.default_rng(2), (5, 24))
    with DeviceTable(table, f"{gpu.kind}:0", layout="split") as device:
        out = (device_memory(device.driver, ids.size * VALUE_BYTES), device_memory(device.driver, ids.size * 8))
        device.fetch(ids, out, 0)
        assert gpu.copies() == 2
        values, scales = table.fetch(ids, layout="split")
        assert np.array_equal(out[0].read(0).reshape(values.shape), values)
        assert np.array_equal(out[1].read(0).reshape(scales.shape), scales)


@pytest.mark.parametrize("strided", [False, True])
def test_each_rank_gets_its_columns(cuda: Double, client: Any, device_memory: MakeMemory, strided: bool) -> None:
    table = client.table(layer=1)
    ids = random_ids(table, np.random.default_rng(3), (7, 24))
    whole = table.fetch(ids)
    for rank in range(4):
        columns = rank_columns(24, rank, 4, strided=strided)
        with DeviceTable(table, 0, columns=columns) as device:
            out = device_memory(device.driver, 7 * 6 * ROW_BYTES)
            device.fetch(ids, out, 0)
            assert np.array_equal(out.read(0).reshape(7, 6, ROW_BYTES), whole[:, columns])
    with pytest.raises(ValueError, match="24 columns"):
        rank_columns(24, 0, 5)


def test_ids_may_lie_in_device_memory(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    """They are read in the order of the stream: what was enqueued before has changed them by then."""
    table = client.table(layer=1)
    generator = np.random.default_rng(4)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        stream = new_stream(device.driver)
        gpu.option("delay_us", 3000)
        for dtype in (np.int32, np.int64):
            typestr = np.dtype(dtype).str
            ids = random_ids(table, generator, (6, 8), dtype)
            device_ids = device_memory(device.driver, ids.nbytes, ids.shape, typestr)
            out = device_memory(device.driver, ids.size * ROW_BYTES)
            device_ids.write(ids, stream)
            device.fetch(device_ids, out, stream)
            assert np.array_equal(out.read(stream).reshape(*ids.shape, ROW_BYTES), table.fetch(ids))
            # By address, which tells neither shape nor type.
            device.fetch(device_ids.address, out, stream, ids_shape=ids.shape, ids_dtype=dtype)
            assert np.array_equal(out.read(stream).reshape(*ids.shape, ROW_BYTES), table.fetch(ids))
        assert device.timing.ids_wait_s > 0
        end_stream(device.driver, stream)


def test_host_ids_may_be_changed_after_submit(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    table = client.table(layer=1)
    ids = random_ids(table, np.random.default_rng(5), (64,))
    expected = table.fetch(ids)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        out = device_memory(device.driver, 64 * ROW_BYTES)
        ticket = device.submit(ids, out, 0)
        ids[:] = -1
        ticket.wait()
        assert np.array_equal(out.read(0).reshape(-1, ROW_BYTES), expected)


def test_a_reply_stays_until_its_copy_is_done(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    """Late copies, and arenas that are written again at once by whoever gets the room: the rows are still right."""
    table = client.table(layer=1)
    generator = np.random.default_rng(6)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        stream = new_stream(device.driver)
        gpu.option("delay_us", 4000)
        batches = []
        for _ in range(6):
            ids = random_ids(table, generator, (100,))
            out = device_memory(device.driver, 100 * ROW_BYTES)
            device.fetch(ids, out, stream)
            table.fetch(random_ids(table, generator, (100,)))  # takes the lowest free room of the arena
            batches.append((ids, out))
        for ids, out in batches:
            assert np.array_equal(out.read(stream).reshape(-1, ROW_BYTES), table.fetch(ids))
        end_stream(device.driver, stream)
    assert client.session.usage()["open_tickets"] == 0


def test_a_copy_overlaps_the_next_gather(cuda: Double, client: Any, device_memory: MakeMemory) -> None:
    """fetch() returns while its copy still runs, `depth` times; then it waits for the oldest."""
    table = client.table(layer=1)
    ids = np.arange(10)
    with DeviceTable(table, 0, depth=2) as device:
        out = device_memory(device.driver, 10 * ROW_BYTES)
        cuda.option("delay_us", 20_000)
        device.fetch(ids, out, 0)
        device.fetch(ids, out, 0)
        assert cuda.calls("cuEventSynchronize") == 0
        device.fetch(ids, out, 0)
        assert cuda.calls("cuEventSynchronize") == 1


def test_one_registration_for_all_tables_of_a_client(gpu: Double, client: Any) -> None:
    tables = [DeviceTable(client.table(layer=layer), f"{gpu.kind}:{number}") for layer, number in ((1, 0), (14, 1))]
    assert gpu.counter("registered") == 1
    for table in tables:
        assert gpu.counter("registered") == 1
        table.close()
        table.close()
    gc.collect()
    assert gpu.counter("registered") == 0
    assert gpu.counter("events") == 0


def test_the_arena_is_registered_again_after_a_restart(
    gpu: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    first = start_daemon()
    client = connect(first)
    table = client.table(layer=1)
    ids = np.arange(20)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        out = device_memory(device.driver, 20 * ROW_BYTES)
        device.fetch(ids, out, 0)
        first.kill()
        with pytest.raises(engram_client.DaemonLost):
            device.fetch(ids, out, 0)
        start_daemon(socket=first.socket)
        device.fetch(ids, out, 0)
        assert np.array_equal(out.read(0).reshape(-1, ROW_BYTES), table.fetch(ids))
        device.synchronize()
        gc.collect()
        assert gpu.counter("registered") == 1


def test_devices_without_read_only_registration(
    gpu: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    gpu.option("no_read_only", 1)
    daemon = start_daemon()
    with pytest.raises(GpuError, match=r"writable_arena=True|hipErrorNotSupported"):
        DeviceTable(connect(daemon).table(layer=1), f"{gpu.kind}:0")
    table = connect(daemon, writable_arena=True).table(layer=1)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        out = device_memory(device.driver, 5 * ROW_BYTES)
        device.fetch(np.arange(5), out, 0)
        assert np.array_equal(out.read(0).reshape(-1, ROW_BYTES), table.fetch(np.arange(5)))


def test_errors_carry_the_drivers_name_and_text(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    table = client.table(layer=1)
    name = {"cuda": "CUDA_ERROR_ILLEGAL_ADDRESS", "hip": "hipErrorUnknown"}[gpu.kind]
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        out = device_memory(device.driver, 3 * ROW_BYTES)
        gpu.fail(gpu.copy_function, 700)
        with pytest.raises(GpuError, match=rf"{name} \(700\): the double says so") as caught:
            device.fetch(np.arange(3), out, 0)
        assert (caught.value.code, caught.value.name) == (700, name)
        device.fetch(np.arange(3), out, 0)
        assert np.array_equal(out.read(0).reshape(-1, ROW_BYTES), table.fetch(np.arange(3)))
        with pytest.raises(engram_client.RowIdError) as bad:
            device.fetch(np.array([0, table.num_rows]), 1, 0)
        assert bad.value.position == 1
    with pytest.raises(GpuError, match=r"INVALID_DEVICE|InvalidDevice"):
        DeviceTable(table, f"{gpu.kind}:7")
    with pytest.raises(engram_client.EngramError, match="closed"):
        device.fetch(np.arange(3), out, 0)


def test_what_is_wrong_is_refused_by_name(
    cuda: Double, client: Any, device_memory: MakeMemory, start_daemon: Any
) -> None:
    table = client.table(layer=1)
    with pytest.raises(ValueError, match="max_rows"):
        DeviceTable(table, 0, max_rows=client.max_ticket_rows + 1)
    with pytest.raises(ValueError, match="device"):
        DeviceTable(table, "cpu")
    with DeviceTable(table, 0, max_rows=10) as device:
        out = device_memory(device.driver, 10 * ROW_BYTES)
        with pytest.raises(ValueError, match="11 rows"):
            device.fetch(np.arange(11), out, 0)
        with pytest.raises(ValueError, match="2640 bytes, the rows have 2376"):
            device.fetch(np.arange(9), out, 0)
        with pytest.raises(ValueError, match="device memory"):
            device.fetch(np.arange(10), np.empty(2640, np.uint8), 0)
        with pytest.raises(TypeError, match="int32 or int64"):
            device.fetch(out, out, 0)
        with pytest.raises(GpuError, match="INVALID_VALUE"):
            device.fetch(np.arange(10), out.staging, 0)  # a host address for a device's
        assert device.fetch(np.array([], np.int64), 12345, 0) == 12345
        assert cuda.calls("cuMemcpyHtoDAsync_v2") == 1


def test_capture_is_refused_in_host_wait(cuda: Double, client: Any, device_memory: MakeMemory) -> None:
    with DeviceTable(client.table(layer=1), 0) as device:
        out = device_memory(device.driver, ROW_BYTES)
        stream = new_stream(device.driver)
        entered = device.driver.enter()
        assert cuda.library.cuStreamBeginCapture_v2(stream, 0) == 0
        device.driver.leave(entered)
        with pytest.raises(GpuError, match="captured"):
            device.fetch(np.array([1]), out, stream)


class FakeTensor:
    """The part of a torch tensor that is looked at."""

    def __init__(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: str, is_cuda: bool = True) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = f"torch.{dtype}"
        self.is_cuda = is_cuda
        self.device = "cuda:0" if is_cuda else "cpu"
        self.item_bytes: int = 1 if dtype == "uint8" else np.dtype(dtype).itemsize

    def data_ptr(self) -> int:
        return int(self.memory.address)

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def element_size(self) -> int:
        return int(self.item_bytes)

    def is_contiguous(self) -> bool:
        return True


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_tensors_and_streams_by_duck_typing(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    table = client.table(layer=1)
    ids = random_ids(table, np.random.default_rng(7), (4, 6), np.int32)
    with DeviceTable(table, f"{gpu.kind}:0") as device:
        stream = new_stream(device.driver)
        memory = device_memory(device.driver, ids.size * ROW_BYTES)
        device_ids = device_memory(device.driver, ids.nbytes)
        device_ids.write(ids, stream)
        out = FakeTensor(memory, (4, 6, ROW_BYTES), "uint8")
        device.fetch(FakeTensor(device_ids, ids.shape, "int32"), out, FakeStream(stream))
        assert np.array_equal(memory.read(stream).reshape(4, 6, ROW_BYTES), table.fetch(ids))
        with pytest.raises(ValueError, match="cpu"):
            device.fetch(ids, FakeTensor(memory, (4, 6, ROW_BYTES), "uint8", is_cuda=False), 0)


def test_the_tables_of_several_threads(gpu: Double, client: Any, device_memory: MakeMemory) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            table = client.table(layer=1)
            generator = np.random.default_rng(seed)
            with DeviceTable(table, f"{gpu.kind}:0") as device:
                stream = new_stream(device.driver)
                for _ in range(20):
                    ids = random_ids(table, generator, (int(generator.integers(1, 300)),))
                    out = DeviceMemory(device.driver, ids.size * ROW_BYTES)
                    device.fetch(ids, out, stream)
                    assert np.array_equal(out.read(stream).reshape(-1, ROW_BYTES), table.fetch(ids))
                    out.free()
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    assert gpu.counter("registered") == 0


@pytest.mark.parametrize("mode", ["packed", "split", "columns", "device-ids", "submit"])
def test_random_batches_with_injected_errors(gpu: Double, client: Any, device_memory: MakeMemory, mode: str) -> None:
    """ENGRAM_N batches (10,000 in `make gpu-soak`): each is exact, with one copy a piece, or an error."""
    table = client.table(layer=1)
    generator = np.random.default_rng([SEED, BATCHES])
    prefix = "cu" if gpu.kind == "cuda" else "hip"
    suffix = "_v2" if gpu.kind == "cuda" else ""
    injectable = [gpu.copy_function, f"{prefix}EventRecord", f"{prefix}StreamIsCapturing"]
    if mode == "device-ids":
        injectable.append(f"{prefix}MemcpyDtoHAsync{suffix}")
    layout: Any = "split" if mode == "split" else "packed"
    columns = slice(1, None, 3) if mode == "columns" else None
    failed = 0
    refused: list[tuple[type[Exception], bool]] = []
    with DeviceTable(table, f"{gpu.kind}:0", max_rows=600, layout=layout, columns=columns) as device:
        driver = device.driver
        stream = new_stream(driver)
        room = device_memory(driver, 600 * ROW_BYTES)
        scales_room = device_memory(driver, 600 * 8)
        ids_room = device_memory(driver, 600 * 8)
        for _ in range(BATCHES):
            shape = (int(generator.integers(1, 25)), 24) if mode == "columns" else (int(generator.integers(1, 600)),)
            dtype = np.int32 if generator.random() < 0.5 else np.int64
            ids = random_ids(table, generator, shape, dtype)
            bad = generator.random() < 0.05
            if bad:
                ids.reshape(-1)[-1 if mode != "columns" else 1] = table.num_rows
            selected = ids if columns is None else ids[:, columns]
            out: Any = room.address if layout == "packed" else (room.address, scales_room.address)
            gpu.option("delay_us", int(generator.integers(0, 200)) if generator.random() < 0.2 else 0)
            function = ""
            extra: dict[str, Any] = {}
            source: Any = ids
            if mode == "device-ids":
                ids_room.write(ids, stream)
                source, extra = ids_room.address, {"ids_shape": ids.shape, "ids_dtype": dtype}
            if generator.random() < 0.1:
                function = str(generator.choice(injectable))
                gpu.fail(function, 700)
            before = gpu.copies()
            try:
                if mode == "submit":
                    tickets = [device.submit(source, out, stream) for _ in range(2)]
                    for ticket in tickets:
                        ticket.wait()
                else:
                    device.fetch(source, out, stream, **extra)
            except (GpuError, engram_client.RowIdError) as error:
                failed += 1
                assert function or bad
                refused.append((type(error), bad))
                gpu.fail(function or gpu.copy_function, 0)
                continue
            assert not bad
            assert not function
            pieces = {"split": 2, "submit": 2}.get(mode, 1)
            assert gpu.copies() == before + pieces
            rows = room.read(stream)
            if layout == "split":
                values = rows[: ids.size * VALUE_BYTES].reshape(-1, VALUE_BYTES)
                scales = scales_room.read(stream)[: ids.size * 8].reshape(-1, 8)
                got = np.concatenate([values, scales], axis=1)
            else:
                got = rows[: selected.size * ROW_BYTES].reshape(-1, ROW_BYTES)
            assert np.array_equal(got, table.fetch(selected.reshape(-1)))
        end_stream(driver, stream)
    assert failed > 0 or BATCHES < 50
    assert all(bad or error is GpuError for error, bad in refused)
    # Nothing was lost on the way of all those errors.
    gc.collect()
    eventually(lambda: client.session.usage()["open_tickets"] == 0)
