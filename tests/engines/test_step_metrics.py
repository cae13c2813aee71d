"""What steps have cost, as Prometheus and the log see it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_engines.core import ArenaTarget, StepMetrics, StepStager, step_metrics
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

LAYERS = (1, 14)
COLUMNS = 24

# A rank's process: so many steps of five tokens, with a second's wait for ids that is made up.
RANK = """
import sys
import engram_client, numpy as np
from engram_engines.core import ArenaTarget, StepMetrics, StepStager

socket, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with engram_client.connect(socket) as client:
    tables = [client.table(layer=layer) for layer in (1, 14)]
    stager = StepStager([ArenaTarget(table, client.max_ticket_rows) for table in tables], (0, 1), 24)
    metrics = StepMetrics("step", rank, [(stager.counters, (1, 14))])
    for _ in range(steps):
        with stager.begin(np.zeros((5, 2, 24), np.int32)) as step:
            step.finish(0)
            step.finish(1)
        stager.counters.ids_wait_s += 1.0
        metrics.tick()
    metrics.hand_on()
    print(sum(stager.counters.store_wait_s))
"""


def run_rank(socket: str, rank: int, steps: int, program: str = RANK, **environment: str) -> float:
    """The seconds that the rank says it has waited for rows."""
    done = subprocess.run(
        [sys.executable, "-c", program, socket, str(rank), str(steps)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_all_ranks_in_the_engines_metrics(start_daemon: Any, tmp_path: Path) -> None:
    """Processes write into the folder that they share, and whoever is scraped reads them all, also those that ended."""
    daemon = start_daemon()
    waited_s = [
        run_rank(daemon.socket, rank, steps, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) for rank, steps in ((0, 3), (1, 7))
    ]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    for rank, steps in ((0, 3), (1, 7)):
        labels = {"kind": "step", "rank": str(rank)}
        assert registry.get_sample_value("engramd_steps_total", labels) == steps
        assert registry.get_sample_value("engramd_step_rows_total", labels) == steps * 5 * 2 * COLUMNS
        assert registry.get_sample_value("engramd_step_ids_wait_seconds_total", labels) == steps
        found = [
            registry.get_sample_value("engramd_step_rows_wait_seconds_total", {**labels, "layer": str(layer)})
            for layer in LAYERS
        ]
        assert all(found)
        assert sum(one or 0 for one in found) == pytest.approx(waited_s[rank])


def test_steps_without_prometheus_client(start_daemon: Any) -> None:
    program = "import sys\nsys.modules['prometheus_client'] = None\n" + RANK
    assert run_rank(start_daemon().socket, 0, 2, program) > 0


@pytest.fixture
def stager(start_daemon: Any, connect: Callable[..., Any]) -> StepStager:
    client: engram_client.Client = connect(start_daemon())
    targets = [ArenaTarget(client.table(layer=layer), client.max_ticket_rows) for layer in LAYERS]
    return StepStager(targets, (0, 1), COLUMNS)


def run_steps(stager: StepStager, steps: int) -> None:
    for _ in range(steps):
        with stager.begin(np.zeros((5, 2, COLUMNS), np.int32)) as step:
            step.finish(0)
            step.finish(1)


def test_sums_are_handed_on_once_in_a_while(stager: StepStager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step between two turns changes nothing, and is counted at the next."""
    monkeypatch.setattr(step_metrics, "HAND_ON_S", 1000.0)
    metrics = StepMetrics("lookup", 7, [(stager.counters, LAYERS)])
    for expected, is_due in ((1, True), (1, False), (1, False), (4, True)):
        if is_due:
            monkeypatch.setattr(metrics, "_due", 0.0)
        run_steps(stager, 1)
        metrics.tick()
        assert REGISTRY.get_sample_value("engramd_steps_total", {"kind": "lookup", "rank": "7"}) == expected


def test_the_log_tells_what_a_step_waited_for(
    stager: StepStager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    metrics = StepMetrics("prompt", 8, [(stager.counters, LAYERS)])
    monkeypatch.setattr(metrics, "_log_due", 0.0)
    run_steps(stager, 4)
    stager.counters.ids_wait_s += 0.002
    metrics.tick()
    assert "engramd, prompt: 4 steps, 960 rows; one waited 0.500 ms for ids (earlier device work), " in caplog.text
