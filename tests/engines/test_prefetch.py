"""Prefetch at arrival against a real daemon: what is asked for, in which order, and what is not asked for any more."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engram_client
import numpy as np
import pytest
from engram_client.engram_config import EngramConfig
from engram_client.hasher import NgramHasher
from engram_engines import prefetch
from engram_engines.prefetch import ArrivalPrefetcher, piece_row_ids, prefetch_prompt
from prometheus_client import REGISTRY

from tests.waiting import eventually

VOCAB = 500
LAYERS = (1, 14)
COLUMNS = 24


@pytest.fixture(scope="module")
def hasher(checkpoint: Path) -> NgramHasher:
    """For the test table; its tokens are their own compressed ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    config = {**config.get("text_config", config), "engram_compressed_vocab_size": VOCAB}
    return NgramHasher(EngramConfig.from_dict(config), np.arange(VOCAB))


def prompt_of(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def hits_of(target: str, hasher: NgramHasher, tokens: list[int], start: int = 0) -> tuple[int, int]:
    """Rows of tokens[start:] that a demand finds in DRAM, and their number."""
    with engram_client.connect(target) as client:
        ids = hasher.row_ids(tokens)[start:]
        before = client.stats()
        for index, layer in enumerate(LAYERS):
            client.table(layer=layer).fetch(ids[:, index])
        after = client.stats()
    difference = {key: total(after, key) - total(before, key) for key in ("dram_hits", "rows")}
    return difference["dram_hits"], difference["rows"]


def total(stats: dict[str, Any], key: str) -> int:
    return sum(layer[key] for table in stats["tables"] for layer in table["layers"])


def wait_until_read(target: str) -> None:
    with engram_client.connect(target) as client:
        eventually(lambda: client.stats()["reader"]["prefetch_queued_rows"] == 0)


@pytest.fixture
def daemon(start_daemon: Any) -> Any:
    """A daemon whose budget holds a part of the table: all of it would become resident by itself."""
    return start_daemon(dram="8MiB")


@pytest.fixture
def prefetcher(daemon: Any, hasher: NgramHasher) -> Iterator[ArrivalPrefetcher]:
    with ArrivalPrefetcher(daemon.socket, hasher, window_tokens=64, piece_tokens=16) as made:
        yield made


class Recorded:
    """Stands between a prefetcher and its tables: what is asked for, by layer, in order; `gate` holds it back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[Any] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        send = prefetch._send

        def record(tables: Any, ids: Any) -> None:
            self.entered.release()
            assert self.gate.acquire(timeout=20)
            self.ids.append(ids)
            send(tables, ids)

        monkeypatch.setattr(prefetch, "_send", record)


def test_rows_of_a_waiting_prompt_are_in_dram(daemon: Any, prefetcher: ArrivalPrefetcher, hasher: NgramHasher) -> None:
    tokens = prompt_of(64)
    other = prompt_of(64, seed=2)
    prefetcher.arrived("a", tokens)
    eventually(lambda: prefetcher.counters()["rows_sent"] == 64 * len(LAYERS) * COLUMNS)
    wait_until_read(daemon.socket)
    hits, rows = hits_of(daemon.socket, hasher, tokens)
    assert hits == rows == 64 * len(LAYERS) * COLUMNS
    hits, rows = hits_of(daemon.socket, hasher, other)
    assert hits < rows // 2, "rows of a prompt that never arrived are there too: the test shows nothing"


def test_what_was_sent_is_in_the_engines_metrics(prefetcher: ArrivalPrefetcher) -> None:
    def counted() -> list[float]:
        names = ("prompts", "rows_sent", "failures")
        return [REGISTRY.get_sample_value(f"engramd_prefetch_{name}_total") or 0.0 for name in names]

    before = counted()
    prefetcher.arrived("a", prompt_of(64))
    expected = [1, 64 * len(LAYERS) * COLUMNS, 0]
    eventually(lambda: [after - one for after, one in zip(counted(), before, strict=True)] == expected)


def test_the_window_moves_with_the_prompt(daemon: Any, prefetcher: ArrivalPrefetcher, hasher: NgramHasher) -> None:
    tokens = prompt_of(200)
    per_token = len(LAYERS) * COLUMNS
    prefetcher.arrived("a", tokens)
    eventually(lambda: prefetcher.counters()["rows_sent"] == 64 * per_token)
    prefetcher.reached("a", 100)
    eventually(lambda: prefetcher.counters()["rows_sent"] == (64 + 64) * per_token)
    wait_until_read(daemon.socket)
    hits, rows = hits_of(daemon.socket, hasher, tokens[:164], start=100)
    assert hits == rows
    prefetcher.reached("a", 200)
    prefetcher.arrived("b", [7])
    eventually(lambda: prefetcher.counters()["rows_sent"] == 129 * per_token)


def test_cancelled_prompts_are_not_sent(
    daemon: Any, prefetcher: ArrivalPrefetcher, hasher: NgramHasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    first, cancelled, last = prompt_of(16, seed=3), prompt_of(64, seed=4), prompt_of(16, seed=5)
    prefetcher.arrived("first", first)
    assert recorded.entered.acquire(timeout=20)
    prefetcher.arrived("cancelled", cancelled)
    prefetcher.arrived("last", last)
    prefetcher.ended("cancelled")
    recorded.gate.release(10)
    eventually(lambda: len(recorded.ids) == 2)
    np.testing.assert_array_equal(recorded.ids[0], hasher.row_ids(first))
    np.testing.assert_array_equal(recorded.ids[1], hasher.row_ids(last))
    eventually(lambda: prefetcher.counters()["rows_sent"] == 32 * len(LAYERS) * COLUMNS)
    assert prefetcher.counters()["tokens_cancelled"] == 64


def test_a_prompt_cancelled_half_way_loses_the_rest(
    prefetcher: ArrivalPrefetcher, hasher: NgramHasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    prefetcher.arrived("a", prompt_of(64))
    assert recorded.entered.acquire(timeout=20)
    prefetcher.ended("a")
    recorded.gate.release(10)
    prefetcher.arrived("b", prompt_of(16, seed=9))
    eventually(lambda: len(recorded.ids) == 2)
    assert [len(ids) for ids in recorded.ids] == [16, 16]
    assert prefetcher.counters()["tokens_cancelled"] == 48


def test_prompts_that_are_being_processed_come_first(
    prefetcher: ArrivalPrefetcher, hasher: NgramHasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    running, waiting = prompt_of(100, seed=6), prompt_of(64, seed=7)
    prefetcher.arrived("running", running)
    assert recorded.entered.acquire(timeout=20)
    prefetcher.arrived("waiting", waiting)
    prefetcher.reached("running", 80)
    recorded.gate.release(20)
    eventually(lambda: len(recorded.ids) == 7)
    ids = hasher.row_ids(running)
    np.testing.assert_array_equal(recorded.ids[0], ids[:16])
    np.testing.assert_array_equal(recorded.ids[1], ids[80:96])
    np.testing.assert_array_equal(recorded.ids[2], ids[96:])
    np.testing.assert_array_equal(np.concatenate(recorded.ids[3:]), hasher.row_ids(waiting))


def test_prompts_beyond_the_bound_are_refused(daemon: Any, hasher: NgramHasher) -> None:
    with ArrivalPrefetcher(daemon.socket, hasher, max_prompts=2) as prefetcher:
        for name in "abc":
            prefetcher.arrived(name, prompt_of(4))
        assert prefetcher.counters()["prompts_refused"] == 1
        prefetcher.ended("a")
        prefetcher.arrived("c", prompt_of(4))
        assert prefetcher.counters()["prompts"] == 3


def test_the_daemons_queue_is_not_overfilled(daemon: Any, hasher: NgramHasher, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the daemon says that its queue is full nothing more is sent. Its figure is put on here: a real queue drains
    before anyone could look."""
    piece_rows = 16 * len(LAYERS) * COLUMNS
    said = {"queued": piece_rows + 1}
    asked = []
    with ArrivalPrefetcher(daemon.socket, hasher, piece_tokens=16, queued_rows=2 * piece_rows) as prefetcher:

        def stats() -> dict[str, Any]:
            asked.append(1)
            return {"reader": {"prefetch_queued_rows": said["queued"]}}

        monkeypatch.setattr(prefetcher._client, "stats", stats)
        prefetcher.arrived("a", prompt_of(160))
        eventually(lambda: len(asked) >= 3)
        assert prefetcher.counters()["rows_sent"] == 0
        said["queued"] = 0
        eventually(lambda: prefetcher.counters()["rows_sent"] == 10 * piece_rows)


def test_a_dead_daemon_harms_nobody_and_is_found_again(start_daemon: Any, hasher: NgramHasher) -> None:
    first = start_daemon(dram="8MiB")
    with ArrivalPrefetcher(first.socket, hasher) as prefetcher:
        first.kill()
        prefetcher.arrived("a", prompt_of(16))
        eventually(lambda: prefetcher.counters()["failures"] >= 1)
        prefetcher.reached("a", 8)
        prefetcher.ended("a")
        start_daemon(dram="8MiB", socket=first.socket)
        deadline = time.monotonic() + 20
        number = 0
        while prefetcher.counters()["rows_sent"] == 0:
            assert time.monotonic() < deadline, "nothing is prefetched from the daemon that came back"
            prefetcher.arrived(number, prompt_of(4))
            number += 1
            time.sleep(0.2)


def test_wrong_tokens_cost_their_own_prompt_only(prefetcher: ArrivalPrefetcher, hasher: NgramHasher) -> None:
    wrong: Any = ["no token"] * 8
    prefetcher.arrived("wrong", wrong)
    prefetcher.arrived("right", prompt_of(8))
    eventually(lambda: prefetcher.counters()["rows_sent"] == 8 * len(LAYERS) * COLUMNS)
    assert prefetcher.counters()["failures"] == 1


def test_pieces_hash_as_the_whole_prompt_does(hasher: NgramHasher) -> None:
    tokens = prompt_of(50)
    tokens[20], tokens[21] = VOCAB + 1_000_000, 7
    whole = np.array(tokens)
    dead = (whole >= VOCAB) | (whole == 7)
    expected = hasher.row_ids(np.where(dead, 0, whole), dead)
    pieces = [piece_row_ids(hasher, tokens, start, min(50, start + 9), {7}) for start in range(0, 50, 9)]
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


@pytest.mark.parametrize("option", ["window_tokens", "piece_tokens", "queued_rows", "max_prompts"])
def test_bounds_below_one_are_refused(option: str, hasher: NgramHasher) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, not 0"):
        ArrivalPrefetcher("/nowhere", hasher, **{option: 0})  # type: ignore[arg-type]


def test_a_router_asks_for_a_prompt_at_once(daemon: Any, hasher: NgramHasher) -> None:
    tokens = prompt_of(600)
    with engram_client.connect(daemon.socket) as client:
        tables = [client.table(layer=layer) for layer in LAYERS]
        assert prefetch_prompt(tables, hasher, tokens, start=100, max_tokens=30) == 30 * len(LAYERS) * COLUMNS
    wait_until_read(daemon.socket)
    hits, rows = hits_of(daemon.socket, hasher, tokens[:130], start=100)
    assert hits == rows


def test_the_command_answers_each_line(
    daemon: Any, hasher: NgramHasher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefetch, "_load_hasher", lambda model: hasher)
    monkeypatch.setattr(sys, "stdin", io.StringIO("[1, 2, 3]\n[]\n"))
    assert prefetch.main(["model", "--socket", daemon.socket]) == 0
    assert capsys.readouterr().out.split() == [str(3 * len(LAYERS) * COLUMNS), "0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO('[1]\n{"tokens": [1]}\n'))
    assert prefetch.main(["model", "--socket", daemon.socket]) == 1
    assert "line 2 must be a list of token ids" in capsys.readouterr().err


def test_the_command_runs_by_its_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engram_engines.prefetch", "/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
