"""One offender at a time: what it broke is named in one line of the log, and others do not notice."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import engram_client
import numpy as np
import pytest

DEADLINE_S = 60.0


def load_scribbler() -> ModuleType:
    specification = importlib.util.spec_from_file_location("scribbler", Path(__file__).parent / "scribbler.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["scribbler"] = module
    specification.loader.exec_module(module)
    return module


scribbler = load_scribbler()


def moved_tail(ring: Any) -> None:
    ring.set_tail(ring.slot_count + 1)


def slot_out_of_range(ring: Any) -> None:
    ring.submit_slot(ring.slot_count)


def slot_in_use(ring: Any) -> None:
    ring.request(0, [1, 1, 200, 8, 0, 0, 0, 0, 0, 1, 200, 0])
    for number in range(200):
        ring.put(ring.ids + 8 * number, "=q", number * 100)
    ring.submit_slot(0)
    ring.submit_slot(0)


def stream_doorbell_of_two(ring: Any) -> None:
    ring.arm(0, 10_000)
    ring.ring_stream(ring.slot_count, 2)


def stream_doorbell_in_use(ring: Any) -> None:
    """Rung again as soon as it is taken: soon enough the rows of a use are still being read."""
    ring.arm(0, 10_000)
    ring.knock()
    slot = ring.slot_count + 1
    ring.request(slot, [1, 1, 200, 8, 0, 0, 0, 0, 0, 1, 200, 0])
    for number in range(200):
        ring.put(ring.ids + 8 * number, "=q", number * 100)
    end = time.monotonic() + DEADLINE_S
    while not ring.ended() and time.monotonic() < end:
        if ring.rings(slot) == 0:
            ring.ring_stream(slot)


def second_hello(ring: Any) -> None:
    ring.socket.send(scribbler.message(scribbler.HELLO, bytes(80)))


def unknown_message(ring: Any) -> None:
    ring.socket.send(scribbler.message(99))


@pytest.mark.parametrize(
    "offence",
    [
        moved_tail,
        slot_out_of_range,
        slot_in_use,
        stream_doorbell_of_two,
        stream_doorbell_in_use,
        second_hello,
        unknown_message,
    ],
)
def test_an_offender_is_dropped_with_one_line(
    start_daemon: Any, level: Any, rows: dict[int, Any], offence: Callable[[Any], None]
) -> None:
    daemon = start_daemon(dram="0", arena="1MiB")
    with engram_client.connect(daemon.socket) as client:
        table = client.table(layer=1)
        ids = np.arange(0, 5000, 50)
        assert np.array_equal(table.fetch(ids), rows[1][ids])
        held = level(daemon)
        descriptors = held.descriptors()
        ring = scribbler.Ring(daemon.socket, 1 << 18, scribbler.STREAM_SLOTS)
        offence(ring)
        ring.knock()
        end = time.monotonic() + DEADLINE_S
        while not ring.ended():
            assert time.monotonic() < end, "the offender is still there"
            time.sleep(0.01)
        ring.close()
        assert np.array_equal(table.fetch(ids), rows[1][ids])
        held.wait_for(arenas=1, descriptors=descriptors)
    lines = [line for line in daemon.log.splitlines() if "WARNING" in line and "'scribbler'" in line]
    assert len(lines) == 1, daemon.log
    assert f"pid {os.getpid()}" in lines[0]


def test_nobody_can_punch_holes_into_a_ring_in_use(start_daemon: Any) -> None:
    """A hole would make the daemon fault, again and again. Before the ring is mapped nobody serves it; afterwards it is
    sealed, and the mapping that stays writable cannot do it either."""
    daemon = start_daemon(dram="0", arena="1MiB")
    ring = scribbler.Ring(daemon.socket)
    daemon.wait_for_log("session 1")
    with pytest.raises(OSError, match="fallocate"):
        scribbler.Scribbler.punch(ring.fds[0])
    address = ctypes.addressof(ctypes.c_char.from_buffer(ring.ring))
    failed = scribbler.LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.MADV_REMOVE)
    assert failed != 0
    assert not ring.ended()
