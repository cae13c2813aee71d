"""Tickets of the ring: what they hold, when they give it back, and who waits for whom.

A daemon that is stopped by SIGSTOP completes nothing: a stuck daemon, and the way to hold requests in flight.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from engram_client import Busy, EngramError, RequestTimeout

from tests.waiting import eventually


def usage(client: Any) -> tuple[int, int]:
    """(open, zombie) tickets."""
    held = client.session.usage()
    return held["open_tickets"], held["zombie_tickets"]


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    return start_daemon(arena="2MiB")


@pytest.fixture
def client(daemon: Any, connect: Any) -> Any:
    return connect(daemon)


@pytest.fixture
def handle(client: Any) -> Any:
    return client.table(layer=1)


def test_views_are_read_only_for_good(handle: Any, rows_of: Any) -> None:
    with handle.submit(np.arange(6).reshape(2, 3)) as ticket:
        view = ticket.wait(timeout=10.0)
        assert view.shape == (2, 3, 264)
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
        assert (ticket.wait() == view).all()


def test_release_is_idempotent(handle: Any, client: Any) -> None:
    ticket = handle.submit([1, 2])
    assert usage(client) == (1, 0)
    ticket.wait()
    ticket.release()
    ticket.release()
    assert usage(client) == (0, 0)
    with pytest.raises(EngramError, match="released"):
        ticket.wait()
    with handle.submit([]) as empty:
        assert empty.wait().shape == (0, 264)
        assert usage(client) == (0, 0)


def test_ids_may_change_after_submit(handle: Any, daemon: Any, rows_of: Any) -> None:
    daemon.freeze()
    ids = np.arange(10)
    ticket = handle.submit(ids)
    ids[:] = -1
    daemon.signal(signal.SIGCONT)
    assert (ticket.wait(30) == rows_of(np.arange(10), 1)).all()
    ticket.release()


def test_dropped_tickets_leave_nothing_behind(handle: Any, client: Any) -> None:
    handle.submit([1])
    handle.submit([2]).wait()
    cycle: list[Any] = [handle.submit([3])]
    cycle.append(cycle)
    del cycle
    gc.collect()
    eventually(lambda: usage(client) == (0, 0))


def test_views_outlive_a_dropped_ticket(handle: Any, client: Any, rows_of: Any) -> None:
    ids = np.arange(40)
    view = handle.submit(ids).wait()
    assert usage(client) == (1, 0)
    part = view[3:5, 10:20]
    values, scales = handle.submit(ids, layout="split").wait()
    for seed in range(200):  # other tickets never take its place
        with handle.submit(np.random.default_rng(seed).integers(0, handle.num_rows, 40)) as ticket:
            ticket.wait()
    assert (view == rows_of(ids, 1)).all()
    assert (values == view[:, :256]).all()
    assert (scales == view[:, 256:]).all()
    del view
    gc.collect()
    assert (part == rows_of(ids, 1)[3:5, 10:20]).all()
    assert usage(client) == (2, 0)
    del part, values
    assert usage(client) == (1, 0)
    del scales
    assert usage(client) == (0, 0)


def test_views_outlive_client_and_daemon(daemon: Any, connect: Any, rows_of: Any) -> None:
    client = connect(daemon)
    view = client.table(layer=14).submit(np.arange(30)).wait()
    client.close()
    del client
    daemon.kill()
    gc.collect()
    assert (view == rows_of(np.arange(30), 14)).all()


def test_timeout_of_a_stuck_daemon(handle: Any, daemon: Any, client: Any, rows_of: Any) -> None:
    daemon.freeze()
    ticket = handle.submit([1, 2, 3])
    for timeout in (0, 0.001, 0.15):
        started = time.monotonic()
        with pytest.raises(RequestTimeout, match="demo layer 1"):
            ticket.wait(timeout=timeout)
        assert time.monotonic() - started >= timeout
    with pytest.raises(RequestTimeout):
        handle.fetch([1], timeout=0.05)
    with pytest.raises(RequestTimeout):
        handle.prefetch([1], timeout=0.05)
    assert usage(client) == (1, 2)
    daemon.signal(signal.SIGCONT)
    assert (ticket.wait(30) == rows_of([1, 2, 3], 1)).all()


def test_a_dropped_request_in_flight_keeps_its_place(handle: Any, daemon: Any, client: Any, rows_of: Any) -> None:
    daemon.freeze()
    dropped = handle.submit(np.arange(100))
    dropped.release()
    ids = np.arange(100, 200)
    ticket = handle.submit(ids)
    assert usage(client) == (1, 1)
    assert client.session.usage()["arena_bytes"] >= 2 * 100 * 264
    daemon.signal(signal.SIGCONT)
    assert (ticket.wait(30) == rows_of(ids, 1)).all()
    eventually(lambda: usage(client) == (1, 0))
    ticket.release()
    assert client.session.usage() == {"open_tickets": 0, "zombie_tickets": 0, "arena_bytes": 0, "ids_bytes": 0}


def fill(handle: Any) -> list[Any]:
    """Takes all room there is."""
    tickets = []
    try:
        while True:
            tickets.append(handle.submit(np.arange(1000), on_full="busy"))
    except Busy:
        pass
    try:
        while True:
            tickets.append(handle.submit([1], on_full="busy"))
    except Busy:
        return tickets


def test_room_held_by_oneself_is_busy_at_once(handle: Any) -> None:
    tickets = fill(handle)
    for ticket in tickets:
        ticket.wait(30)
    with pytest.raises(Busy, match="unreleased tickets"):
        handle.submit(np.arange(1000))
    with pytest.raises(Busy, match="unreleased tickets"):
        handle.fetch(np.arange(1000))
    tickets.pop().release()
    handle.submit([1]).release()


def test_waiting_for_another_thread(handle: Any, rows_of: Any) -> None:
    tickets = fill(handle)
    with pytest.raises(ValueError, match="on_full"):
        handle.submit([1], on_full="maybe")
    outcome: list[Any] = []

    def work() -> None:
        with pytest.raises(RequestTimeout):
            handle.submit(np.arange(1000), timeout=0.05)
        with handle.submit(np.arange(1000)) as ticket:
            outcome.append(ticket.wait(30).copy())

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    assert not outcome
    for ticket in tickets:
        ticket.release()
    thread.join()
    assert (outcome[0] == rows_of(np.arange(1000), 1)).all()


def test_threads_that_wait_for_each_other(handle: Any, client: Any) -> None:
    room = len(tickets := fill(handle))
    for ticket in tickets:
        ticket.release()
    del tickets, ticket
    eventually(lambda: usage(client) == (0, 0))
    barrier = threading.Barrier(2)
    outcome: list[str] = []

    def work() -> None:
        held = [handle.submit([1], on_full="wait") for _ in range(8)]
        barrier.wait()
        try:
            while True:
                held.append(handle.submit(np.arange(1000), timeout=60))
        except Busy:
            outcome.append("busy")
        for ticket in held:
            ticket.release()

    assert room > 2
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome == ["busy", "busy"]


def test_signals_end_a_wait(handle: Any, daemon: Any, client: Any) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupt

    tickets = fill(handle)[:1]
    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        gc.collect()
        # A frozen daemon would never give back the room of what was dropped before it was answered.
        eventually(lambda: usage(client) == (len(tickets), 0))
        daemon.freeze()
        ticket = handle.submit([1])
        many = np.zeros(3 * client.max_ticket_rows, np.int32)
        for call in (ticket.wait, lambda: handle.fetch([1, 2]), lambda: handle.fetch(many)):
            timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
            timer.start()
            with pytest.raises(Interrupt):
                call()
            timer.join()
        daemon.signal(signal.SIGCONT)
        ticket.wait(30)
        ticket.release()
        eventually(lambda: usage(client) == (len(tickets), 0))
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_ticket_changes_hands(handle: Any, rows_of: Any) -> None:
    tickets: list[Any] = []
    thread = threading.Thread(target=lambda: tickets.extend(handle.submit([n]) for n in range(5)))
    thread.start()
    thread.join()
    for number, ticket in enumerate(tickets):
        assert (ticket.wait(30) == rows_of([number], 1)).all()
        ticket.release()
