"""What SGLang's scheduler tells the plug-in, and the rows of captured graphs.

Graphs need a GPU: the lanes, whose real counterparts tests/gpu runs over doubles of the driver, are doubles here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engram_client import DaemonLost

from tests.engines.doubles import Prefetcher


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """SGLang's Scheduler with the plug-in's wrappers around methods that only note that they ran."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler import Scheduler

    told: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda self, *arguments, **options: told.append(name)

    for name in ("_add_request_to_queue", "_release_aborted_request", "process_batch_result"):
        monkeypatch.setattr(Scheduler, name, note(name))
    request.getfixturevalue("installed")
    from engram_engines.sglang.stager import DaemonRowStager

    stager = object.__new__(DaemonRowStager)
    told_of: Any = Prefetcher()
    stager.prefetcher = told_of
    stager.lanes = []
    stager._metrics = []
    made = object.__new__(Scheduler)
    made.disaggregation_mode = DisaggregationMode.NULL
    made.ngram_embedding_manager = SimpleNamespace(engram_stager=stager)
    made.told = told
    return made


def request_of(tokens: list[int], output: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(rid="a", origin_input_ids=array("q", tokens), output_ids=array("q", output))


def test_requests_are_told_on_arrival_and_when_they_are_given_up(scheduler: Any) -> None:
    prefetcher = scheduler.ngram_embedding_manager.engram_stager.prefetcher
    req = request_of([1, 2, 3])
    scheduler._add_request_to_queue(req)
    scheduler._add_request_to_queue(request_of([1, 2, 3], (4, 5)), is_retracted=True)
    scheduler._release_aborted_request(req)
    assert prefetcher.told == [
        ("arrived", "a", array("q", [1, 2, 3])),
        ("arrived", "a", [1, 2, 3, 4, 5]),
        ("ended", "a"),
    ]
    assert scheduler.told == ["_add_request_to_queue"] * 2 + ["_release_aborted_request"]


def test_a_decode_server_prefetches_no_prompts(scheduler: Any) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    scheduler._add_request_to_queue(request_of([1]))
    assert scheduler.ngram_embedding_manager.engram_stager.prefetcher.told == []
    assert scheduler.told == ["_add_request_to_queue"]


def test_schedulers_of_other_models_are_left_alone(scheduler: Any) -> None:
    scheduler.ngram_embedding_manager = SimpleNamespace(engram_stager=None)
    scheduler._add_request_to_queue(request_of([1]))
    scheduler.process_batch_result(None, None)
    assert scheduler.told == ["_add_request_to_queue", "process_batch_result"]


def test_staging_tells_how_far_a_prompt_has_got(stager: Any, batch_of: Callable[..., Any]) -> None:
    stager.prefetcher.close()
    stager.prefetcher = told = Prefetcher()
    stager.stage(batch_of([([1, 2, 3, 4], 1, 2), ([5], 0, 1)]))
    assert told.told == [("reached", "r0", 3), ("reached", "r1", 1)]


def test_waiting_prompts_are_prefetched_end_to_end(stager: Any, batch_of: Callable[..., Any]) -> None:
    """A real prefetcher over the hash that SGLang's own tokenizer gives: a wrong row id would leave misses."""
    import time

    import engram_client
    import numpy as np

    tokens = [int(token) for token in np.random.default_rng(3).integers(0, 129_280, 100)]
    stager.prefetcher.arrived("r0", array("q", tokens))
    deadline = time.monotonic() + 20
    with engram_client.connect(stager.daemon.socket) as client:
        while stager.prefetcher.counters()["rows_sent"] < 4800 or client.stats()["reader"]["prefetch_queued_rows"]:
            assert time.monotonic() < deadline, stager.prefetcher.counters()
            time.sleep(0.01)
        stager.stage(batch_of([(tokens, 0, 100)]))
        layers = [layer for table in client.stats()["tables"] for layer in table["layers"]]
    assert sum(layer["rows"] for layer in layers) == 4800
    assert sum(layer["dram_misses"] for layer in layers) == 0


class Lane:
    """Double of a StreamLane: notes its uses and says what it is told to."""

    def __init__(self, rows: int, out: Any, ids_dtype: Any, deadline_s: float) -> None:
        self.rows = rows
        self.out = out
        self.seen: list[Any] = []
        self.failure: Exception | None = None
        self.checked: list[Any] = []

    def enqueue(self, ids: Any) -> None:
        self.seen.append(ids.clone())

    def check(self, after: Any) -> int:
        self.checked.append(after)
        if self.failure is not None:
            raise self.failure
        return 1


class DeviceRows:
    """Double of a DeviceTable, which makes doubles of lanes."""

    def __init__(self) -> None:
        self.table = SimpleNamespace(value_bytes=256, row_bytes=264)
        self.lanes: list[Lane] = []

    def stream_lane(self, rows: int, out: Any, *, ids_dtype: Any, deadline_s: float) -> Lane:
        self.lanes.append(Lane(rows, out, ids_dtype, deadline_s))
        return self.lanes[-1]


@pytest.fixture
def graph_lanes() -> Any:
    import torch
    from engram_engines.sglang.graph_lanes import GraphLanes

    return GraphLanes(DeviceRows(), 24, torch.device("cpu"), 1.0)  # type: ignore[arg-type]


def test_graphs_share_lanes_of_powers_of_two(graph_lanes: Any) -> None:
    import torch

    for tokens in (5, 8, 1, 6):
        graph_lanes.prepare(tokens)
    rows = graph_lanes._rows
    assert [lane.rows for lane in rows.lanes] == [8 * 24, 24]
    first = torch.arange(8 * 24).view(8, 24)
    graph_lanes.enqueue(first)
    values, scales = graph_lanes.enqueue(first[:5] + 1000)
    assert values.shape == (5 * 24, 256)
    assert scales.shape == (5 * 24, 8)
    assert values.data_ptr() == rows.lanes[0].out[0].data_ptr()
    whole, part = rows.lanes[0].seen
    assert torch.equal(whole, first)
    assert torch.equal(part[:5], first[:5] + 1000)
    assert (part[5:] == -1).all(), "ids of the larger graph are asked for again"


def test_lanes_are_made_in_the_runs_before_a_capture(
    stager: Any, graph_lanes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from engram_engines.sglang import embedding

    embed = stager.model.layers[0].embed
    embed.connect(embed._lookup, graph_lanes)
    ids = torch.zeros((3, 24), dtype=torch.int64)

    def batch(is_prompt: bool) -> Any:
        return SimpleNamespace(forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: is_prompt))

    embed(ids, batch(False))
    monkeypatch.setattr(embedding, "get_is_capture_mode", lambda: True)
    embed(ids, batch(True))
    embed(ids)
    assert graph_lanes._rows.lanes == []
    embed(ids, batch(False))
    assert [lane.rows for lane in graph_lanes._rows.lanes] == [4 * 24]


def test_a_graph_that_was_not_run_before_is_refused(graph_lanes: Any) -> None:
    import torch

    with pytest.raises(RuntimeError, match=r"of 3 tokens is captured .* without a run before it"):
        graph_lanes.enqueue(torch.zeros((3, 24), dtype=torch.int64))


def test_results_leave_only_after_the_graphs_verdict(scheduler: Any, graph_lanes: Any) -> None:
    stager = scheduler.ngram_embedding_manager.engram_stager
    stager.lanes = [graph_lanes]
    graph_lanes.prepare(4)
    (lane,) = graph_lanes._rows.lanes
    copied = object()
    scheduler.process_batch_result(None, SimpleNamespace(copy_done=copied))
    assert lane.checked == [copied]
    assert scheduler.told == ["process_batch_result"]
    lane.failure = DaemonLost("gone")
    with pytest.raises(DaemonLost) as caught:
        scheduler.process_batch_result(None, SimpleNamespace(copy_done=copied))
    assert "given up" in caught.value.__notes__[0]
    assert scheduler.told == ["process_batch_result"], "tokens left before the verdict"


def test_each_batch_tells_the_metrics(scheduler: Any) -> None:
    told: list[str] = []
    scheduler.ngram_embedding_manager.engram_stager._metrics = [SimpleNamespace(tick=lambda: told.append("tick"))]
    scheduler.process_batch_result(None, SimpleNamespace(copy_done=object()))
    assert told == ["tick"]


def test_prompts_and_lookups_are_counted_apart(stager: Any, batch_of: Callable[..., Any]) -> None:
    import torch

    stager.stage(batch_of([([1, 2, 3], 0, 3)]))
    for layer in stager.model.layers:
        layer.embed(torch.zeros((2, 24), dtype=torch.int64))
    prompts, lookups = stager._metrics
    assert (prompts._kind, prompts._steps(), prompts._rows()) == ("prompt", 1, 3 * 2 * 24)
    assert (lookups._kind, lookups._steps(), lookups._rows()) == ("lookup", 1, 2 * 2 * 24)
    assert prompts._ids_wait_s() == 0
    assert lookups._ids_wait_s() > 0
    assert prompts._rows_wait_s() > 0
    assert lookups._rows_wait_s() > 0
