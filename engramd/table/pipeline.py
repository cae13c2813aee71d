"""Two threads beside the caller's: one reads ahead, one writes behind. Buffers go round; an error of either reaches the
caller, and leaving early stops both."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Slot = TypeVar("Slot")


def read_ahead(
    items: Iterable[Item], slots: Sequence[Slot], fill: Callable[[Slot, Item], None]
) -> Generator[tuple[Item, Slot], None, None]:
    """Yields (item, slot) in order, each slot filled by `fill(slot, item)` on a thread of its own.

    A slot is the consumer's until it asks for the next one. Close the generator (contextlib.closing) to stop early.
    """
    free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Item, Slot] | BaseException | None] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def run() -> None:
        try:
            for item in items:
                slot = free.get()
                if slot is None:
                    return
                fill(slot, item)
                ready.put((item, slot))
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            ready.put(error)

    thread = threading.Thread(target=run, name="read-ahead", daemon=True)
    thread.start()
    try:
        while (got := ready.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got
            free.put(got[1])
    finally:
        # The thread may be about to take a slot that was free already: each is followed by the order to stop.
        while True:
            try:
                free.get_nowait()
            except queue.Empty:
                break
        free.put(None)
        thread.join()


class WriteBehind(Generic[Slot]):
    """Runs `write(slot)` for slots in the order they were given, on a thread of its own.

    `take` waits for a free slot, `give` hands a filled one over, `finish` waits for all of them. Each raises what the
    writing thread raised. As a context manager it drops what is not yet begun when left by an exception.
    """

    def __init__(self, slots: Sequence[Slot], write: Callable[[Slot], None]) -> None:
        self._write = write
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stop = False
        for slot in slots:
            self._free.put(slot)
        self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)

    def _run(self) -> None:
        try:
            while (slot := self._filled.get()) is not None and not self._stop:
                self._write(slot)
                self._free.put(slot)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
            self._error = error
            self._free.put(None)

    def take(self) -> Slot:
        slot = self._free.get()
        self._check()
        assert slot is not None
        return slot

    def give(self, slot: Slot) -> None:
        self._check()
        self._filled.put(slot)

    def finish(self) -> None:
        self._filled.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> WriteBehind[Slot]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._filled.put(None)
        self._thread.join()
