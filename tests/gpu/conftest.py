"""What the GPU tests share: the doubles of the drivers, built from tests/fake_gpu, and clients of a real daemon.

There is no GPU here: libcuda.so.1 and libamdhip64.so are doubles (see fake_gpu.h). Daemon, sockets, shared memory and
the client are the real ones. A double is loaded by its full path first, so that the client's own dlopen by name finds
it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fake_gpu.build import SONAMES, build_double

VALUE_BYTES, SCALE_BYTES, ROW_BYTES = 256, 8, 264


class Double:
    """One double: its switches and counters, and the few driver calls that tests need themselves."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library.fake_gpu_calls.restype = ctypes.c_uint64
        self.library.fake_gpu_counter.restype = ctypes.c_uint64

    def option(self, name: str, value: int) -> None:
        self.library.fake_gpu_set_option(name.encode(), ctypes.c_int64(value))

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """The call of `function` after `after` more returns `code`; 0 takes the order back."""
        self.library.fake_gpu_fail(function.encode(), code, ctypes.c_uint64(after))

    def fail_in_stream(self, work: str, code: int, after: int = 0) -> None:
        """Such work (a method of the double) fails when it runs, after `after` more. The context is lost then."""
        self.library.fake_gpu_fail_in_stream(work.encode(), code, ctypes.c_uint64(after))

    def calls(self, function: str) -> int:
        return int(self.library.fake_gpu_calls(function.encode()))

    def counter(self, name: str) -> int:
        return int(self.library.fake_gpu_counter(name.encode()))

    @property
    def copy_function(self) -> str:
        return {"cuda": "cuMemcpyHtoDAsync_v2", "hip": "hipMemcpyHtoDAsync"}[self.kind]

    def copies(self) -> int:
        """Copies from host to device that were asked for."""
        return self.calls(self.copy_function)

    def reset(self) -> None:
        for name in ("zero_cost", "delay_us", "no_read_only", "no_memory"):
            self.option(name, 0)
        self.library.fake_gpu_forget_calls()


class DeviceMemory:
    """Device memory of a test. Offers what CuPy arrays do."""

    def __init__(
        self, driver: Any, size_bytes: int, shape: tuple[int, ...] | None = None, typestr: str = "|u1"
    ) -> None:
        self.driver = driver
        self.nbytes = size_bytes
        entered = driver.enter()
        self.address = driver.allocate(max(size_bytes, 1))
        self.staging = driver.allocate_host(max(size_bytes, 1))
        driver.leave(entered)
        self.__cuda_array_interface__ = {
            "shape": shape if shape is not None else (size_bytes,),
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
        }

    def _staged(self) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(self.nbytes, 1)).from_address(self.staging))

    def write(self, array: NDArray[Any], stream: int) -> None:
        """In the order of the stream."""
        entered = self.driver.enter()
        self._staged()[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.driver.copy_to_device(self.address, self.staging, array.nbytes, stream)
        self.driver.leave(entered)

    def read(self, stream: int) -> NDArray[np.uint8]:
        """In the order of the stream; waits for it."""
        entered = self.driver.enter()
        self.driver.copy_to_host(self.staging, self.address, self.nbytes, stream)
        self.driver.synchronize_stream(stream)
        self.driver.leave(entered)
        return self._staged()[: self.nbytes].copy()

    def free(self) -> None:
        entered = self.driver.enter()
        self.driver.free(self.address)
        self.driver.free_host(self.staging)
        self.driver.leave(entered)


@pytest.fixture(scope="session")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Double]:
    """Each double, loaded. Tests that run other tests hand their own on in ENGRAM_TEST_DRIVERS."""
    built = os.environ.get("ENGRAM_TEST_DRIVERS")
    if built is not None:
        return {kind: Double(kind, Path(built) / name) for kind, name in SONAMES.items()}
    folder = tmp_path_factory.mktemp("drivers")
    return {kind: Double(kind, build_double(kind, folder)) for kind in SONAMES}


def used(double: Double) -> Iterator[Double]:
    """The double for one test, as new before and after it."""
    double.reset()
    yield double
    assert double.counter("pageable_copies") == 0, "memory was copied that is not registered"
    double.reset()


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest, doubles: dict[str, Double]) -> Iterator[Double]:
    """The double of each driver in turn."""
    yield from used(doubles[request.param])


@pytest.fixture
def cuda(doubles: dict[str, Double]) -> Iterator[Double]:
    """CUDA's double, for what ROCm does not have."""
    yield from used(doubles["cuda"])


@pytest.fixture
def client(start_daemon: Any, connect: Any) -> engram_client.Client:
    """A client of a fresh daemon."""
    made: engram_client.Client = connect(start_daemon())
    return made


@pytest.fixture
def device_memory() -> Iterator[Callable[..., DeviceMemory]]:
    """`device_memory(driver, size_bytes, shape, typestr)`."""
    made: list[DeviceMemory] = []

    def make(*arguments: Any) -> DeviceMemory:
        made.append(DeviceMemory(*arguments))
        return made[-1]

    yield make
    for memory in made:
        memory.free()


def new_stream(driver: Any) -> int:
    """A stream of the device, from a thread that has no current context."""
    entered = driver.enter()
    stream: int = driver.create_stream()
    driver.leave(entered)
    return stream


def end_stream(driver: Any, stream: int) -> None:
    entered = driver.enter()
    driver.destroy_stream(stream)
    driver.leave(entered)
