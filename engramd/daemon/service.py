"""The daemon: start-up in order, one event loop, an orderly end.

Threads: this module's loop runs on the main thread and owns all sockets; the engine has its workers, libzmq its I/O
thread, and a small pool waits for control requests. Nothing in start-up depends on the size of a table.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from engramd import listen_fds, numa
from engramd.config import Flags, Settings
from engramd.daemon import checks, log, notify, sockets
from engramd.daemon.tables import open_tables
from engramd.errors import EngramdError
from engramd.sizes import format_size

if TYPE_CHECKING:
    from engramd.daemon.administration import Administration
    from engramd.daemon.control import ControlEndpoint
    from engramd.daemon.http_endpoint import Health
    from engramd.daemon.reconfigure import Change, Done
    from engramd.daemon.session_quota import SessionQuota
    from engramd.daemon.stats import Statistics
    from engramd.daemon.tcp_keys import CurveGate

START_TIMEOUT_S = 60.0  # for opening tables whose storage is slow; nothing else in start-up waits
LONGEST_TURN_S = 5.0  # of the loop, where somebody asks whether it is alive
DRAIN_TIMEOUT_S = 10.0
DRAIN_SLICE_MS = 50
POOL_THREADS = 4
POOL_QUEUE_LIMIT = 256
_LOG = logging.getLogger("engramd")


def serve(settings: Settings, flags: Flags) -> int:
    """Serves until a signal or the shutdown verb, drains, stops. Returns the exit status; raises EngramdError.

    flags: where the settings come from; SIGHUP and `engramd reload --config` read them again.
    """
    log.set_up(settings.log_level, settings.log_format)
    with ExitStack() as cleanup:
        return Service(settings, flags, cleanup).run()


class Service:
    """One daemon. What it opens is closed by `cleanup`, in the reverse order."""

    def __init__(self, settings: Settings, flags: Flags, cleanup: ExitStack) -> None:
        self._stop_reason: str | None = None
        self._settings = settings
        self._flags = flags
        self._reload_wanted = False
        self._watchdog = notify.Watchdog()
        self._health: Health | None = None
        notify.extend_timeout(START_TIMEOUT_S)
        # Signals first, so that one during start-up ends in an orderly way too.
        self._wakeup = _signal_wakeup(cleanup, self._on_signal)
        passed = listen_fds.take()
        self._sockets = cleanup.enter_context(sockets.open_pair(settings.socket, passed))
        tables = open_tables(settings.tables)
        for table in tables:
            cleanup.callback(table.close)
        checks.check_memory(settings, tables)
        placement = checks.numa_placement(settings, tables)
        _LOG.info("NUMA: %s", placement.text)
        self._tcp_keys = checks.tcp_keys(settings)
        # Native code is loaded only now: a wrong table or a taken socket is told without waiting for it.
        from engramd.daemon import engine, events, ring_listener
        from engramd.daemon.catalogue import Catalogue
        from engramd.daemon.heat_keeper import HeatKeeper, state_directory
        from engramd.daemon.kept_memory import KeptMemory
        from engramd.daemon.process import raise_limits
        from engramd.daemon.sampling import Sampling
        from engramd.daemon.scrub import Scrubber
        from engramd.daemon.session_quota import SessionQuota

        raise_limits()
        numa.apply(placement)
        self._engine = engine.Engine(settings, tables, kept=KeptMemory(passed))
        cleanup.callback(self._engine.destroy)
        if engine.injected_faults() is not None:
            _LOG.warning(
                "this is a fault build, made for tests: it injects the disk faults of ENGRAMD_FAULTS=%s",
                os.environ.get("ENGRAMD_FAULTS", ""),
            )
        if settings.miss_curve == "on":
            Sampling(self._engine).start_curve()
        for table in tables:
            table.close()
        self._catalogue = Catalogue(self._engine.layers)
        cleanup.callback(lambda: self._catalogue.close())
        self._selector = cleanup.enter_context(selectors.DefaultSelector())
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._drain_wakeup)
        quota = SessionQuota(settings)
        self._ring = ring_listener.RingListener(
            self._sockets.ring, self._engine, self._catalogue, quota, self._selector
        )
        cleanup.callback(self._ring.close)
        self._events = events.EventLog(self._engine, self._ring)
        self._selector.register(self._engine.event_descriptor, selectors.EVENT_READ, self._events.process)
        self._endpoints: list[ControlEndpoint | CurveGate] = []
        self._turn(0.0)  # a client that waits already gets its memory made while libzmq is loaded
        self._heat = HeatKeeper(self._engine, state_directory(settings.state))
        cleanup.callback(self._heat.close)
        self._scrubber = Scrubber(self._engine, settings.scrub_bytes, state_directory(settings.state))
        cleanup.callback(self._scrubber.close)
        self._start_control(quota, cleanup)
        self._tables = tables
        self._heat.start()
        self._scrubber.start()

    def _start_control(self, quota: SessionQuota, cleanup: ExitStack) -> None:
        import zmq

        from engramd.daemon.administration import Administration
        from engramd.daemon.administrators import Administrators
        from engramd.daemon.control import ControlEndpoint, Verbs
        from engramd.daemon.reconfigure import Reconfigure
        from engramd.daemon.stats import Statistics
        from engramd.daemon.tcp_keys import CurveGate
        from engramd.daemon.worker_pool import WorkerPool

        self._pool = WorkerPool("control", POOL_THREADS, POOL_QUEUE_LIMIT)
        cleanup.callback(self._pool.close)
        self._selector.register(self._pool.descriptor, selectors.EVENT_READ, self._pool.collect)
        context = zmq.Context(1)
        cleanup.callback(context.term)
        administration = Administration(self._engine, self._settings, self._heat, self._publish)
        cleanup.callback(administration.close)
        self._selector.register(administration.pool.descriptor, selectors.EVENT_READ, administration.pool.collect)
        self._reconfigure = Reconfigure(
            self._flags, self._settings, run_time_changes(quota, administration), self._engine.budget_bytes
        )
        statistics = Statistics(self._engine, self._scrubber, self._reconfigure, self._ring.name_of)
        verbs = Verbs(
            self._engine,
            self._pool,
            statistics,
            administration,
            self._reconfigure,
            self._scrubber,
            Administrators(self._settings.admin_group),
            self.stop,
        )
        self._verbs = verbs
        self._selector.register(verbs.fetches.descriptor, selectors.EVENT_READ, verbs.fetches.collect)
        local = ControlEndpoint(context, verbs, knows_peers=True)
        cleanup.callback(local.close)
        local.bind_listener(self._sockets.path, self._sockets.control.detach())
        self._endpoints.append(local)
        if self._settings.tcp is not None and self._tcp_keys is not None:
            gate = CurveGate(context, *self._tcp_keys)
            cleanup.callback(gate.close)
            remote = ControlEndpoint(context, verbs, knows_peers=False)
            cleanup.callback(remote.close)
            gate.secure(remote.socket)
            try:
                remote.bind_tcp(self._settings.tcp)
            except zmq.ZMQError as error:
                raise EngramdError(f"tcp {self._settings.tcp}: cannot be bound: {error.strerror}") from None
            self._endpoints += [gate, remote]
        for endpoint in self._endpoints:
            self._selector.register(endpoint.descriptor, selectors.EVENT_READ, lambda: None)
        if self._settings.metrics is not None:
            self._start_http(self._settings.metrics, statistics, cleanup)

    def _start_http(self, address: str, statistics: Statistics, cleanup: ExitStack) -> None:
        from engramd.daemon.http_endpoint import Health, HttpEndpoint
        from engramd.metrics.exposition import CONTENT_TYPE, exposition

        self._health = Health()
        endpoint = HttpEndpoint(address, lambda: exposition(statistics(histograms=True)), CONTENT_TYPE, self._health)
        cleanup.callback(endpoint.close)

    def _publish(self) -> None:
        """Shows the layers that are served now to clients that ask from here on."""
        from engramd.daemon.catalogue import Catalogue

        old = self._catalogue
        self._catalogue = Catalogue(self._engine.layers, old.epoch + 1)
        self._ring.set_catalogue(self._catalogue)
        old.close()
        self._verbs.fetches.refresh()

    def run(self) -> int:
        """The event loop; returns the exit status once everything has drained."""
        _LOG.info("%s", self._ready_line())
        if self._health is not None:
            self._health.is_ready = True  # before anybody is told: a probe may come at once
        notify.notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS={checks.describe_tables(self._tables)}")
        while self._stop_reason is None:
            self._turn(LONGEST_TURN_S if self._health is not None else None)
            if self._reload_wanted:
                self._reload_wanted = False
                self._reload()
        from engramd.daemon.kept_memory import keep

        _LOG.info("stopping: %s", self._stop_reason)
        if self._health is not None:
            self._health.is_ready = False
        notify.notify("STOPPING=1")
        notify.extend_timeout(2 * DRAIN_TIMEOUT_S)
        self._drain()
        keep(self._engine)
        return 0

    def stop(self, reason: str) -> None:
        """Ends the loop after this turn."""
        if self._stop_reason is None:
            self._stop_reason = reason

    def _reload(self) -> None:
        """Reads the configuration again and tells the service manager when all of it is done."""
        notify.reloading()

        def done(outcome: object) -> None:
            notify.notify("READY=1")

        self._reconfigure(done)

    def _turn(self, longest_s: float | None) -> None:
        """Serves what is there, then waits for the next thing, at most `longest_s`."""
        more = False
        for endpoint in self._endpoints:
            more |= endpoint.process()
        now = time.monotonic()
        self._ring.expire(now)
        if self._endpoints:
            self._verbs.budget.expire()
            self._verbs.fetches.expire()
        if self._health is not None:
            self._health.turned_at = now
        next_sign_of_life_s = self._watchdog.feed(now)
        deadlines = [self._ring.next_deadline()]
        if self._endpoints:
            deadlines += [self._verbs.budget.next_deadline(), self._verbs.fetches.next_deadline()]
        waits = [longest_s] if longest_s is not None else []
        if next_sign_of_life_s is not None:
            waits.append(next_sign_of_life_s)
        waits += [max(0.0, deadline - now) for deadline in deadlines if deadline is not None]
        if more or self._stop_reason is not None:
            waits.append(0.0)
        for key, _ in self._selector.select(min(waits, default=None)):
            handler: Callable[[], None] = key.data
            handler()

    def _drain(self) -> None:
        """Lets running requests finish: new ones are refused, nothing is waited for longer than DRAIN_TIMEOUT_S. A
        second signal cuts it short."""
        self._sockets.unlink()
        self._ring.stop_accepting()
        first_reason, self._stop_reason = self._stop_reason, None
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        drained = False
        while not (drained and self._is_idle()):
            if time.monotonic() >= deadline or self._stop_reason is not None:
                _LOG.warning("not all requests finished after %s; stopping anyway", self._stop_reason or first_reason)
                break
            drained = self._engine.drain(DRAIN_SLICE_MS)
            self._turn(0.0 if drained and self._is_idle() else 0.001)
        else:
            _LOG.info("drained")

    def _is_idle(self) -> bool:
        """Whether every control request has been answered."""
        return self._pool.is_idle and self._verbs.fetches.is_idle

    def _ready_line(self) -> str:
        from engramd.daemon.engine import READER_NAMES, TIER_NAMES
        from engramd.daemon.process import page_size_note

        counters = self._engine.counters()
        cached = {TIER_NAMES[layer["tier"]] == "cached" for layer in self._engine.layer_counters().values()}
        how = "some layers until they are resident, the others through a row cache"
        if len(cached) == 1:
            how = "through a row cache" if cached.pop() else "until all of it is resident"
        huge = counters["hugetlb_bytes"]
        pages = f"{format_size(huge)} of reserved huge pages" if huge else page_size_note()
        return (
            f"serving {checks.describe_tables(self._tables)} from NVMe {how}; "
            f"reader {READER_NAMES.get(counters['reader'], 'none')}, {counters['workers']} worker(s); "
            f"DRAM budget {format_size(self._settings.dram_bytes)}, {pages}; socket {self._sockets.path}"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload_wanted = True
        else:
            self.stop(signal.Signals(number).name)

    def _drain_wakeup(self) -> None:
        while True:
            try:
                if len(os.read(self._wakeup, 4096)) < 4096:
                    return
            except BlockingIOError:
                return


def run_time_changes(quota: SessionQuota, administration: Administration) -> dict[str, Change]:
    """What puts an option's new value into force, for those that need no restart (`at_run_time` in engramd.options)."""

    def place(wanted: Settings, done: Done) -> None:
        # Both at once, whichever has changed: a new tier may fit under the new budget alone.
        policies = {table.name: table.policy for table in wanted.tables}
        administration.set_budget(wanted.dram_bytes, lambda fields, refusal: done(refusal), policies)

    def set_share(wanted: Settings, done: Done) -> None:
        quota.set_share(wanted.uid_share)
        done(None)

    def set_log(wanted: Settings, done: Done) -> None:
        log.set_up(wanted.log_level, wanted.log_format)
        done(None)

    return {"dram": place, "tier": place, "uid_share": set_share, "log_level": set_log, "log_format": set_log}


def _signal_wakeup(cleanup: ExitStack, handler: Callable[[int, FrameType | None], None]) -> int:
    """Installs handlers for SIGTERM, SIGINT and SIGHUP; returns a descriptor that turns readable with each."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    cleanup.callback(os.close, reader)
    cleanup.callback(os.close, writer)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    cleanup.callback(signal.set_wakeup_fd, previous)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        before = signal.signal(number, handler)
        cleanup.callback(signal.signal, number, before)
    return reader
