"""A few threads for what would hold up the event loop: fetches into private memory, statistics, a session's memory.

The loop's thread submits tasks and collects their results; only it touches sockets. Threads and loop meet in a bounded
queue and an eventfd.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger("engramd")

Task = Callable[[], Callable[[], None]]  # runs on a thread; returns what the loop's thread shall do
_CLOSING_LOOK_S = 0.1


class WorkerPool:
    """`descriptor` turns readable when `collect` has something to do."""

    def __init__(self, name: str, threads: int, queue_limit: int) -> None:
        self._name = name
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tasks: queue.Queue[Task | None] = queue.Queue(queue_limit)
        self._done: deque[Callable[[], None]] = deque()
        self._steps: deque[Callable[[], None]] = deque()  # of running tasks
        self._is_closing = False
        self._limit = threads
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # submitted and not collected; the loop's thread alone

    @property
    def is_idle(self) -> bool:
        """Whether every submitted task has been collected."""
        return self._unfinished == 0

    def submit(self, task: Task) -> bool:
        """Queues a task; False where the queue is full. Threads start with the first tasks that need them."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        self._unfinished += 1
        if len(self._threads) < min(self._limit, self._unfinished):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return True

    def on_loop(self, step: Callable[[], None]) -> bool:
        """From within a task: returns once the loop's thread has done this step. False, with nothing done, where the
        pool is being closed."""
        over = threading.Event()

        def run() -> None:
            try:
                step()
            finally:
                over.set()

        self._steps.append(run)
        os.eventfd_write(self.descriptor, 1)
        while not over.wait(_CLOSING_LOOK_S):
            if self._is_closing:  # by the loop's thread, which therefore runs no step any more
                return False
        return True

    def collect(self) -> None:
        """Does what running and finished tasks left to the loop's thread."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return
        while self._steps and not self._is_closing:
            self._steps.popleft()()
        while self._done:
            self._unfinished -= 1
            self._done.popleft()()

    def close(self) -> None:
        """Ends the threads, after the tasks before this call; waits for them and collects what they did."""
        self._is_closing = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self.descriptor >= 0:
            self.collect()
            os.close(self.descriptor)
            self.descriptor = -1

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                finish = task()
            except Exception:  # noqa: BLE001 - a thread that dies would leave requests unanswered for ever
                _LOG.exception("a task of the %s pool failed", self._name)
                finish = _nothing
            self._done.append(finish)
            os.eventfd_write(self.descriptor, 1)


def _nothing() -> None:
    """What is left of a task that failed unexpectedly."""
