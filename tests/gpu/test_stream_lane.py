"""Stream mode: a stream that fetches by itself, eagerly and in replayed graphs, and what ends its waits."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.cuda import DeviceTable, GpuError
from numpy.typing import NDArray

from tests.waiting import eventually

from .conftest import ROW_BYTES, VALUE_BYTES, DeviceMemory, Double, end_stream, new_stream

BATCHES = int(os.environ.get("ENGRAM_N") or 150)
SEED = int(os.environ.get("ENGRAM_SEED") or 1)
ROWS = 48
MakeMemory = Callable[..., DeviceMemory]


class Step:
    """A lane with its buffers and its stream, and a graph of one use of it."""

    def __init__(
        self, double: Double, device: DeviceTable, memory: MakeMemory, rows: int = ROWS, **options: Any
    ) -> None:
        self.double = double
        self.table = device.table
        self.driver = device.driver
        self.rows = rows
        self.stream = new_stream(self.driver)
        self.ids = memory(self.driver, rows * 4)
        self.outs = [memory(self.driver, rows * size_bytes) for size_bytes in device._piece_bytes]
        out: Any = self.outs[0] if device.layout == "packed" else tuple(self.outs)
        self.lane = device.stream_lane(rows, out, **options)

    def capture(self) -> int:
        graph = ctypes.c_uint64()
        entered = self.driver.enter()
        library = self.double.library
        assert library.cuStreamBeginCapture_v2(ctypes.c_uint64(self.stream), 0) == 0
        self.lane.enqueue(self.ids.address, self.stream)
        assert library.cuStreamEndCapture(ctypes.c_uint64(self.stream), ctypes.byref(graph)) == 0
        self.driver.leave(entered)
        return graph.value

    def launch(self, graph: int, code: int = 0) -> None:
        """One replay; `code`: what the driver's call must return."""
        entered = self.driver.enter()
        assert self.double.library.cuGraphLaunch(ctypes.c_uint64(graph), ctypes.c_uint64(self.stream)) == code
        self.driver.leave(entered)

    def write_ids(self, ids: NDArray[np.int64]) -> None:
        self.ids.write(ids.astype(np.int32), self.stream)

    def rows_on_device(self) -> NDArray[np.uint8]:
        parts = [out.read(self.stream).reshape(self.rows, -1) for out in self.outs]
        return np.concatenate(parts, axis=1)

    def expect(self, ids: NDArray[np.int64]) -> None:
        self.lane.result(self.stream)
        assert np.array_equal(self.rows_on_device(), self.table.fetch(ids))


@pytest.fixture
def device(cuda: Double, start_daemon: Any, connect: Any) -> Iterator[DeviceTable]:
    with DeviceTable(connect(start_daemon()).table(layer=1), 0) as table:
        yield table


def random_ids(table: Any, generator: np.random.Generator, rows: int = ROWS) -> NDArray[np.int64]:
    ids = generator.integers(0, table.num_rows, rows)
    ids[generator.random(rows) < 0.1] = -1
    return ids


def test_a_stream_fetches_by_itself(cuda: Double, device: DeviceTable, device_memory: MakeMemory) -> None:
    step = Step(cuda, device, device_memory)
    generator = np.random.default_rng(1)
    cuda.option("delay_us", 300)
    for _ in range(5):
        ids = random_ids(device.table, generator)
        step.write_ids(ids)
        before = cuda.copies()
        step.lane.enqueue(step.ids.address, step.stream)
        assert cuda.copies() == before + 1
        step.expect(ids)
    step.lane.close()
    assert device._registration is not None
    end_stream(step.driver, step.stream)


def test_a_graph_is_right_on_every_replay(cuda: Double, device: DeviceTable, device_memory: MakeMemory) -> None:
    """Each replay starts from 0 in both words, and has other ids and other rows than the one before."""
    step = Step(cuda, device, device_memory)
    generator = np.random.default_rng(2)
    cuda.option("delay_us", 300)
    graph = step.capture()
    for _ in range(8):
        ids = random_ids(device.table, generator)
        step.write_ids(ids)
        step.launch(graph)
        step.expect(ids)
    # Ids that the stream itself changes between two replays, with no look in between.
    first, second = random_ids(device.table, generator), random_ids(device.table, generator)
    step.write_ids(first)
    step.launch(graph)
    expected = device.table.fetch(second)
    wait_for_stream(step)
    step.write_ids(second)
    step.launch(graph)
    step.lane.result(step.stream)
    assert np.array_equal(step.rows_on_device(), expected)


def test_overlapping_steps_check_without_a_use_of_their_own(
    cuda: Double, device: DeviceTable, device_memory: MakeMemory
) -> None:
    """A check may see a later step's use; that step's own check then sees none, and no failure either."""
    step = Step(cuda, device, device_memory)
    graph = step.capture()
    for _ in range(2):
        step.write_ids(random_ids(device.table, np.random.default_rng(3)))
        step.launch(graph)
    assert step.lane.check(step.stream) == 2
    assert step.lane.check(step.stream) == 0
    with pytest.raises(engram_client.EngramError, match="no use of the lane has run"):
        step.lane.result(step.stream)
    step.write_ids(np.full(ROWS, device.table.num_rows))
    step.launch(graph)
    with pytest.raises(engram_client.RowIdError):
        step.lane.check(step.stream)
    assert step.lane.check(step.stream) == 0


def test_each_replay_waits_for_its_own_reply(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    """A daemon that answers late: the rows of the replay before are still in place, and must not pass for the new."""
    daemon = start_daemon()
    with DeviceTable(connect(daemon).table(layer=1), 0) as device:
        step = Step(cuda, device, device_memory)
        graph = step.capture()
        expected = {start: device.table.fetch(np.arange(start, start + ROWS)) for start in (0, 100, 200)}
        for start, rows in expected.items():
            step.write_ids(np.arange(start, start + ROWS))
            wait_for_stream(step)
            daemon.freeze()
            step.launch(graph)
            time.sleep(0.1)
            daemon.signal(signal.SIGCONT)
            step.lane.result(step.stream)
            assert np.array_equal(step.rows_on_device(), rows)


def wait_for_stream(step: Step) -> None:
    entered = step.driver.enter()
    step.driver.synchronize_stream(step.stream)
    step.driver.leave(entered)


def test_lanes_of_two_streams_and_two_layouts(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    client = connect(start_daemon())
    with (
        DeviceTable(client.table(layer=1), 0) as packed,
        DeviceTable(client.table(layer=14), 0, layout="split") as split,
    ):
        steps = [Step(cuda, packed, device_memory), Step(cuda, split, device_memory, rows=96)]
        generator = np.random.default_rng(3)
        for _ in range(4):
            batches = [random_ids(step.table, generator, step.rows) for step in steps]
            for step, ids in zip(steps, batches, strict=True):
                step.write_ids(ids)
                step.lane.enqueue(step.ids.address, step.stream)
            for step, ids in zip(steps, batches, strict=True):
                step.expect(ids)
        assert steps[1].rows_on_device().shape == (96, VALUE_BYTES + 8)


def test_errors_of_a_use_are_told_and_the_lane_goes_on(
    cuda: Double, device: DeviceTable, device_memory: MakeMemory
) -> None:
    step = Step(cuda, device, device_memory)
    good = np.arange(ROWS)
    bad = good.copy()
    bad[5] = device.table.num_rows
    step.write_ids(bad)
    step.lane.enqueue(step.ids.address, step.stream)
    with pytest.raises(engram_client.RowIdError) as caught:
        step.lane.result(step.stream)
    assert (caught.value.position, caught.value.row_id) == (5, device.table.num_rows)
    # A failure in between is not hidden by the success behind it.
    step.lane.enqueue(step.ids.address, step.stream)
    wait_for_stream(step)
    step.write_ids(good)
    step.lane.enqueue(step.ids.address, step.stream)
    with pytest.raises(engram_client.EngramError, match="1 of the lane's last 2 uses failed"):
        step.lane.result(step.stream)
    with pytest.raises(engram_client.EngramError, match="no use"):
        step.lane.result(step.stream)
    step.lane.enqueue(step.ids.address, step.stream)
    step.expect(good)


@pytest.mark.parametrize("how", ["killed", "session ended"])
def test_a_dead_daemon_does_not_hang_the_stream(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory, how: str
) -> None:
    """Killed in the middle of a wait: the watchdog releases the stream, also while the interpreter is busy."""
    daemon = start_daemon()
    client = connect(daemon)
    with DeviceTable(client.table(layer=1), 0) as device:
        step = Step(cuda, device, device_memory, deadline_s=60)
        ids = np.arange(ROWS)
        step.write_ids(ids)
        step.lane.enqueue(step.ids.address, step.stream)
        step.expect(ids)
        graph = step.capture()
        daemon.freeze()
        step.launch(graph)
        end = threading.Timer(0.2, daemon.kill if how == "killed" else client.close)
        end.start()
        started = time.monotonic()
        with pytest.raises(engram_client.DaemonLost, match="new lane"):
            step.lane.result(step.stream)
        assert time.monotonic() - started < 10
        # Replays that were queued meanwhile pass too, and are known to be worthless.
        step.launch(graph)
        step.launch(graph)
        with pytest.raises(engram_client.DaemonLost):
            step.lane.result(step.stream)
        end.join()  # the stream is released before the dead process has given its sockets back
        if how == "killed":
            start_daemon(socket=daemon.socket)
            again = Step(cuda, device, device_memory)
            again.write_ids(ids)
            again.lane.enqueue(again.ids.address, again.stream)
            again.expect(ids)
        else:
            daemon.kill()


def test_a_stuck_daemon_ends_at_the_deadline_for_good(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    """Its late completion must not pass for the next use's."""
    daemon = start_daemon()
    with DeviceTable(connect(daemon).table(layer=1), 0) as device:
        step = Step(cuda, device, device_memory, deadline_s=0.2)
        step.write_ids(np.arange(ROWS))
        daemon.freeze()
        step.lane.enqueue(step.ids.address, step.stream)
        with pytest.raises(engram_client.RequestTimeout, match=r"0\.2 s"):
            step.lane.result(step.stream)
        daemon.signal(signal.SIGCONT)
        for _ in range(3):
            step.lane.enqueue(step.ids.address, step.stream)
            with pytest.raises(engram_client.RequestTimeout):
                step.lane.result(step.stream)
        again = Step(cuda, device, device_memory)
        again.write_ids(np.arange(ROWS))
        again.lane.enqueue(again.ids.address, again.stream)
        again.expect(np.arange(ROWS))


# What a replay does, one after the other: work of the double and how many such pieces come before it.
@pytest.mark.parametrize(
    ("work", "before"),
    [
        pytest.param("copy_any", 0, id="ids"),
        pytest.param("memory_operations", 0, id="doorbell and wait"),
        pytest.param("copy_any", 1, id="status"),
        pytest.param("copy_to_device", 0, id="rows"),
        pytest.param("memory_operations", 1, id="reset"),
    ],
)
def test_a_device_that_fails_inside_a_replay(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory, work: str, before: int
) -> None:
    """The step has no rows, whatever of it had run; a new client goes on once the device is there again."""
    daemon = start_daemon()
    client = connect(daemon)
    ids = np.arange(ROWS)
    device = DeviceTable(client.table(layer=1), 0)
    step = Step(cuda, device, device_memory, deadline_s=0.5)
    graph = step.capture()
    for _ in range(2):
        step.write_ids(ids)
        step.launch(graph)
        step.expect(ids)
    cuda.fail_in_stream(work, 700, before)
    step.launch(graph)
    with pytest.raises(GpuError, match=r"ILLEGAL_ADDRESS \(700\)"):
        step.lane.result(step.stream)
    with pytest.raises(GpuError, match="700"):
        device.fetch(ids, 1, step.stream)
    with pytest.raises(GpuError, match="700"):
        step.lane.close()
    with pytest.raises(GpuError, match="700"):
        device.close()
    cuda.reset()
    with DeviceTable(connect(daemon).table(layer=1), 0) as again:
        step = Step(cuda, again, device_memory)
        graph = step.capture()
        step.write_ids(ids + 5)
        step.launch(graph)
        step.expect(ids + 5)
        step.lane.close()


def test_what_lanes_refuse(
    cuda: Double, doubles: dict[str, Double], start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    client = connect(start_daemon())
    table = client.table(layer=1)
    doubles["hip"].reset()
    with DeviceTable(table, "hip:0") as device, pytest.raises(GpuError, match="cannot wait"):
        device.stream_lane(1, 1)
    with DeviceTable(table, 0, max_rows=100) as device:
        out = device_memory(device.driver, ROW_BYTES)
        with pytest.raises(ValueError, match=r"1 \.\. 100"):
            device.stream_lane(101, out)
        with pytest.raises(ValueError, match="264 bytes"):
            device.stream_lane(2, out)
        with pytest.raises(TypeError, match="float32"):
            device.stream_lane(1, out, ids_dtype=np.float32)
        lanes = [device.stream_lane(1, out) for _ in range(32)]
        with pytest.raises(engram_client.Busy, match="32 stream slots"):
            device.stream_lane(1, out)
        lanes.pop().close()
        lanes.append(device.stream_lane(1, out))
        with pytest.raises(TypeError, match="the lane's ids are int32, not uint8"):
            lanes[0].enqueue(out, 0)
        with pytest.raises(ValueError, match="264 bytes, the lane's 1 ids 4"):
            lanes[0].enqueue(device_memory(device.driver, ROW_BYTES, (66,), "<i4"), 0)
        for lane in lanes:
            lane.close()
        with pytest.raises(engram_client.EngramError, match="closed"):
            lanes[0].enqueue(out, 0)


def test_an_idle_lane_costs_the_daemon_little(
    cuda: Double, start_daemon: Any, connect: Any, device_memory: MakeMemory
) -> None:
    """No bound on speed: a daemon that spun on the doorbells would use a whole CPU, ten times the budget."""
    daemon = start_daemon(poll_budget="0.05")
    with DeviceTable(connect(daemon).table(layer=1), 0) as device:
        step = Step(cuda, device, device_memory)
        step.write_ids(np.arange(ROWS))
        step.lane.enqueue(step.ids.address, step.stream)
        step.expect(np.arange(ROWS))
        before = cpu_seconds(daemon.pid)
        time.sleep(1.0)
        assert cpu_seconds(daemon.pid) - before < 0.5


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_random_batches_with_injected_errors(
    cuda: Double, device: DeviceTable, device_memory: MakeMemory, mode: str
) -> None:
    """ENGRAM_N uses (10,000 in `make gpu-soak`): each is exact, with one copy of rows, or an error."""
    table = device.table
    generator = np.random.default_rng([SEED, BATCHES])
    step = Step(cuda, device, device_memory)
    graph = step.capture() if mode == "graph" else 0
    failed = 0
    for _ in range(BATCHES):
        ids = random_ids(table, generator)
        is_bad = bool(generator.random() < 0.05)
        if is_bad:
            ids[ROWS // 2] = table.num_rows
        step.write_ids(ids)
        cuda.option("delay_us", int(generator.integers(0, 200)) if generator.random() < 0.2 else 0)
        refused = generator.random() < 0.05
        if refused and mode == "graph":
            # Nothing of the replay has run: the rows of the one before it must not pass for this one's.
            cuda.fail("cuGraphLaunch", 700)
            step.launch(graph, code=700)
            with pytest.raises(engram_client.EngramError, match="no use"):
                step.lane.result(step.stream)
            failed += 1
            continue
        if refused:
            # Before anything of the use is in the stream: what follows a refused call is the program's own affair.
            cuda.fail("cuMemcpyAsync", 700)
            with pytest.raises(GpuError, match="700"):
                step.lane.enqueue(step.ids.address, step.stream)
            failed += 1
            continue
        before = cuda.copies()
        if mode == "graph":
            step.launch(graph)
        else:
            step.lane.enqueue(step.ids.address, step.stream)
            assert cuda.copies() == before + 1
        if is_bad:
            failed += 1
            with pytest.raises(engram_client.RowIdError):
                step.lane.result(step.stream)
        else:
            step.expect(ids)
    assert failed > 0 or BATCHES < 50
    step.lane.close()
    session = table._client.connected()
    eventually(lambda: session.usage()["arena_bytes"] == 0)
